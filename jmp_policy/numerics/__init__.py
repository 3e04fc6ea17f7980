"""Instruments for mixed precision: the dtype of each operation, and where it loses values.

- `audit` traces a function and returns an `AuditReport`. An `AuditRow` has the operations of one kind, a `Matmul` the
  matmuls of one line, and a `Finding` an operation that is likely to lose values or time. `FINDINGS` explains them.
- `collect` wraps a function so that it also returns `Stats`: statistics of its tensors and the effect of formats.
  A `Row` is one tensor, with `FormatShares` for each format. A `StatsHistory` keeps statistics by step.
- `first_nonfinite` wraps a function so that it also returns a `NonfiniteOrigin`: the op that made the first nan or inf.
- `Explanation` is the result of `jmp_policy.explain`.
- `collectives` returns the `Collectives` of a program on a mesh: a `Collective` for each kind, dtype and line.
- `predict` computes a `Prediction` from `Stats`: the scopes that a policy would break, each with a `Reason`, and the
  loss scale or float32 rules that fix it.
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
    from ._explain import Explanation as Explanation
    from ._nonfinite import NonfiniteOrigin as NonfiniteOrigin, first_nonfinite as first_nonfinite
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
        "_explain": "Explanation",
        "_nonfinite": "NonfiniteOrigin first_nonfinite",
        "_predict": "Prediction Reason predict",
        "_stats": "FormatShares Row Stats StatsHistory collect",
        "_traffic": "Collective Collectives collectives",
    }
    _MOVED = "Certificate Divergence OutputErrors ScopeErrors Worst certify diverge record"
    __getattr__, __dir__ = _load_lazily(
        __name__,
        _SOURCES,
        globals(),
        unlisted="AuditReport AuditRow Collective Collectives Explanation FINDINGS Finding FormatShares Matmul "
        "NonfiniteOrigin Prediction Reason Row Stats",
        elsewhere={name: f"contrib.{name}" for name in _MOVED.split()},
    )
