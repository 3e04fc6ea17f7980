"""`diverge`: finds the scopes that make two functions of one model differ."""

from ._compare import diverge as diverge, record as record
from ._divergence import (
    Divergence as Divergence,
    OutputErrors as OutputErrors,
    ScopeErrors as ScopeErrors,
    format_number as format_number,
)
from ._measure import NOISE as NOISE, Worst as Worst
from ._positions import Positions as Positions, Target as Target, align_steps as align_steps
from ._recording import Recording as Recording, group_arrays as group_arrays
from ._steps import (
    ComparedSteps as ComparedSteps,
    ScopeFacts as ScopeFacts,
    Steps as Steps,
    diverge_from_steps as diverge_from_steps,
    record_steps as record_steps,
)
