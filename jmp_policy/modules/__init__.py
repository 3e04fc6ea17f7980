"""Policies for functions and modules, and the protocol of the Flax adapters."""

from ._adapter import (
    WRITTEN as WRITTEN,
    Adapter as Adapter,
    Hook as Hook,
    Method as Method,
    ModelInfo as ModelInfo,
    ModuleCall as ModuleCall,
    ModuleInfo as ModuleInfo,
    check_batches as check_batches,
    describe_module as describe_module,
    describe_written_dtypes as describe_written_dtypes,
    find_adapter as find_adapter,
    find_by_name as find_by_name,
    find_lifting_adapter as find_lifting_adapter,
    find_loaded_adapters as find_loaded_adapters,
    find_other_dtype as find_other_dtype,
    is_flax_object as is_flax_object,
    make_subclass as make_subclass,
    pickle_by_recipe as pickle_by_recipe,
    require_adapter as require_adapter,
)
from ._boundary import (
    NO_TARGET as NO_TARGET,
    PolicyDecorator as PolicyDecorator,
    parse_target as parse_target,
    policy_of as policy_of,
    with_policy as with_policy,
)
from ._call_casts import (
    FULL_PRECISION as FULL_PRECISION,
    cast_arguments as cast_arguments,
    cast_result as cast_result,
    check_no_cast as check_no_cast,
    force_full_precision as force_full_precision,
    keep_carry_dtypes as keep_carry_dtypes,
    keep_wide_results as keep_wide_results,
    matmul_precision as matmul_precision,
    read_wide as read_wide,
    resolve_policy as resolve_policy,
    round_result as round_result,
    widen_policy as widen_policy,
)
from ._observation import (
    Observation as Observation,
    across_bridge as across_bridge,
    eval_shapes as eval_shapes,
    find_bridge as find_bridge,
    hide_constants as hide_constants,
    read_path as read_path,
    show_constants as show_constants,
)
