"""Rewrites each operation in its precision, with the tables of operations."""

from ._casting import CastingRule as CastingRule
from ._place import (
    COMPUTE_DTYPES as COMPUTE_DTYPES,
    EquationPlace as EquationPlace,
    Functions as Functions,
    Scopes as Scopes,
    check_policy as check_policy,
    explain_unused_functions as explain_unused_functions,
    root_policy as root_policy,
)
from ._precision import CastState as CastState, Level as Level
from ._rules import AutocastRules as AutocastRules, has_scopes as has_scopes
from ._tables import (
    CLEAR as CLEAR,
    FULL as FULL,
    FULL_IN_FLOAT16 as FULL_IN_FLOAT16,
    FUNCTIONS as FUNCTIONS,
    INFER as INFER,
    LOW as LOW,
    WIDE as WIDE,
)
