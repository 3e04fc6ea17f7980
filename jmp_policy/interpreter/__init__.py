"""Rewriting the program of a function, equation by equation, through control flow and custom derivatives."""

from ._evaluate import Traced as Traced, run as run, trace as trace
from ._program import (
    Inside as Inside,
    bodies_of as bodies_of,
    float_dtype as float_dtype,
    is_float as is_float,
    multiplies_only as multiplies_only,
    name_stack as name_stack,
)
from ._rewriter import Rewriter as Rewriter
from ._rule import Body as Body, Context as Context, Kind as Kind, Rule as Rule, Value as Value
from ._walk import Step as Step, walk as walk
