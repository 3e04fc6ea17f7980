"""Rewriting the program of a function, equation by equation, through control flow and custom derivatives."""

from ._cost import (
    HALF as HALF,
    HALF_SUMS as HALF_SUMS,
    MOVING as MOVING,
    REMEDY as REMEDY,
    count_bytes as count_bytes,
    count_flops as count_flops,
    count_products as count_products,
    find_half_sum as find_half_sum,
)
from ._evaluate import (
    call as call,
    evaluate as evaluate,
    explain_tracing as explain_tracing,
    find_unrepeatable as find_unrepeatable,
    make_remat as make_remat,
    note_casting as note_casting,
    open_partials as open_partials,
    prepare_replay as prepare_replay,
    refuse_casting as refuse_casting,
    run as run,
    run_lifted as run_lifted,
    trace as trace,
)
from ._primitives import (
    CALLED as CALLED,
    DEVICE_SUMS as DEVICE_SUMS,
    MATMULS as MATMULS,
    PRIMITIVES as PRIMITIVES,
    Fact as Fact,
    having as having,
)
from ._program import (
    PRODUCT_SCOPE as PRODUCT_SCOPE,
    AbstractValue as AbstractValue,
    Atom as Atom,
    JaxprBuilder as JaxprBuilder,
    Pass as Pass,
    Program as Program,
    Step as Step,
    SubJaxpr as SubJaxpr,
    Value as Value,
    array_dtype as array_dtype,
    body_of as body_of,
    find_direction as find_direction,
    float_dtype as float_dtype,
    is_backward as is_backward,
    is_float as is_float,
    list_variables as list_variables,
    multiplies_only as multiplies_only,
    name_stack as name_stack,
    remember_by_jaxpr as remember_by_jaxpr,
    replace_variables as replace_variables,
    scan_parts as scan_parts,
    sub_jaxprs as sub_jaxprs,
    walk as walk,
    without_mesh as without_mesh,
)
from ._recorder import Order as Order, RecordedOp as RecordedOp, Recorder as Recorder, is_recorded as is_recorded
from ._records import record_program as record_program
from ._rewriter import WRITERS as WRITERS, Rewriter as Rewriter, Rewritten as Rewritten
from ._rule import Context as Context, Rule as Rule
from ._source import (
    AUTOCAST as AUTOCAST,
    LIST_WEIGHTS as LIST_WEIGHTS,
    RECORD as RECORD,
    ROUNDING_SCOPE as ROUNDING_SCOPE,
    ModulePaths as ModulePaths,
    Modules as Modules,
    Register as Register,
    choose_line as choose_line,
    find_calling_line as find_calling_line,
    find_line as find_line,
    find_origin as find_origin,
    find_raising_line as find_raising_line,
    find_running_line as find_running_line,
    is_called_by_library as is_called_by_library,
    is_called_by_loss as is_called_by_loss,
    is_traced_in_loss as is_traced_in_loss,
    list_functions as list_functions,
    split_line as split_line,
)
