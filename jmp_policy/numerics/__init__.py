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

from ..collectives._collective import Collective as Collective
from ..collectives._report import Collectives as Collectives
from ..origins._provenance import Provenance as Provenance
from ..prediction._prediction import Prediction as Prediction, Reason as Reason
from ..statistics._history import StatsHistory as StatsHistory
from ..statistics._row import FormatShares as FormatShares, Row as Row
from ..statistics._stats import Stats as Stats
from ._audit import audit as audit
from ._collect import collect as collect
from ._collectives import collectives as collectives
from ._first_nonfinite import first_nonfinite as first_nonfinite
from ._predict import predict as predict
from ._report import (
    FINDINGS as FINDINGS,
    AuditReport as AuditReport,
    AuditRow as AuditRow,
    Finding as Finding,
    Matmul as Matmul,
)
