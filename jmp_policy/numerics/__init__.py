"""Whether mixed precision worked: which operations run in which dtype, and where that loses numbers.

- `audit` traces a function, and returns an `AuditReport`.
- An `AuditRow` is the operations of one kind, a `Matmul` the products of one line.
- A `Finding` is what is likely to lose numbers or time; `FINDINGS` says what each kind of them means.
- `collect` makes a function return, beside its results, what its tensors look like: a `Stats`.
- `Stats` holds what tensors looked like at run time, and what formats would do to them; a `Row` is one tensor, and
  `FormatShares` what one format would do to it. A `StatsHistory` has them by step.
- `first_nonfinite` makes a function return, beside its results, what made one of them not finite: a `Provenance`.
- `collectives` tells what the devices of a mesh send each other in a program, and in which dtype: `Collectives`, with a
  `Collective` for each kind, dtype and line.
- `predict` tells from `Stats` what a policy would lose, and what would save it: a `Prediction`, which has a `Reason`
  for each scope that loses numbers.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily

if _typing.TYPE_CHECKING:
    from ._audit import (
        FINDINGS as FINDINGS,
        AuditReport as AuditReport,
        AuditRow as AuditRow,
        Finding as Finding,
        Matmul as Matmul,
        audit as audit,
    )
    from ._nonfinite import Provenance as Provenance, first_nonfinite as first_nonfinite
    from ._predict import Prediction as Prediction, Reason as Reason, predict as predict
    from ._stats import (
        FormatShares as FormatShares,
        Row as Row,
        Stats as Stats,
        StatsHistory as StatsHistory,
        collect as collect,
    )
    from ._traffic import Collective as Collective, Collectives as Collectives, collectives as collectives
else:  # `optim` uses one of these and should not load the others
    _SOURCES = {
        "_audit": "AuditReport AuditRow FINDINGS Finding Matmul audit",
        "_nonfinite": "Provenance first_nonfinite",
        "_predict": "Prediction Reason predict",
        "_stats": "FormatShares Row Stats StatsHistory collect",
        "_traffic": "Collective Collectives collectives",
    }
    __getattr__, __dir__ = _load_lazily(__name__, _SOURCES, globals())
