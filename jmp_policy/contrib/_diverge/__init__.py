"""`diverge`: finds the scopes that make two functions of one model differ."""

from ._compare import diverge as diverge, record as record
from ._divergence import Divergence as Divergence, OutputErrors as OutputErrors, ScopeErrors as ScopeErrors
from ._measure import Worst as Worst
