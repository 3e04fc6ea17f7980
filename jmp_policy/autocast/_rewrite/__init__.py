"""Rewrites each operation in its precision, with the tables of operations."""

from ._casting import CastingRule as CastingRule, make_casting_rule as make_casting_rule
from ._place import (
    AS_TRACED as AS_TRACED,
    EquationPlace as EquationPlace,
    Functions as Functions,
    check_policy as check_policy,
    explain_unused_functions as explain_unused_functions,
    root_policy as root_policy,
)
from ._rules import AutocastRules as AutocastRules
from ._tables import (
    FULL as FULL,
    FULL_IN_FLOAT16 as FULL_IN_FLOAT16,
    FUNCTIONS as FUNCTIONS,
    INFER as INFER,
    LOW as LOW,
    WIDE as WIDE,
)
from ._weights import (
    NO_WEIGHT as NO_WEIGHT,
    WHY_BACKWARD as WHY_BACKWARD,
    WeightFinder as WeightFinder,
    WeightUse as WeightUse,
)
