"""Rewriting the program of a function, equation by equation, through control flow and custom derivatives."""

from ._body import Body as Body
from ._jaxpr import multiplies_only as multiplies_only
from ._kind import Kind as Kind, Value as Value, float_dtype as float_dtype, is_float as is_float
from ._rewriter import Rewriter as Rewriter
from ._rule import Context as Context, Rule as Rule
from ._trace import Traced as Traced, run as run, trace as trace
from ._walk import Inside as Inside, Step as Step, bodies_of as bodies_of, name_stack as name_stack, walk as walk
