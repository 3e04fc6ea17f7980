"""Rewriting the program of a function, equation by equation, through control flow and custom derivatives."""

from ._evaluate import Traced as Traced, call as call, evaluate as evaluate, run as run, trace as trace
from ._lifted import explain_tracing as explain_tracing, open_partials as open_partials, run_lifted as run_lifted
from ._primitives import (
    ANNOTATIONS as ANNOTATIONS,
    DEVICE_SUMS as DEVICE_SUMS,
    MOVERS as MOVERS,
    TRANSFERS as TRANSFERS,
)
from ._program import (
    Inside as Inside,
    array_dtype as array_dtype,
    bodies_of as bodies_of,
    body_of as body_of,
    float_dtype as float_dtype,
    is_float as is_float,
    multiplies_only as multiplies_only,
    name_stack as name_stack,
    scan_parts as scan_parts,
    without_mesh as without_mesh,
)
from ._recorder import Line as Line, Order as Order, Recorder as Recorder, is_recorded as is_recorded
from ._records import Recorded as Recorded, record_program as record_program
from ._replay import find_unrepeatable as find_unrepeatable, prepare_replay as prepare_replay
from ._rewriter import Rewriter as Rewriter
from ._rule import Body as Body, Context as Context, Kind as Kind, Rule as Rule, Value as Value
from ._walk import Step as Step, walk as walk
