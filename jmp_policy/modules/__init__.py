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
    find_adapter as find_adapter,
    find_lifting_adapter as find_lifting_adapter,
    find_loaded_adapters as find_loaded_adapters,
    is_flax_object as is_flax_object,
    require_adapter as require_adapter,
)
from ._boundary import (
    NO_TARGET as NO_TARGET,
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
    is_in_full_precision as is_in_full_precision,
    keep_carry_dtypes as keep_carry_dtypes,
    matmul_precision as matmul_precision,
    resolve_policy as resolve_policy,
    widen_policy as widen_policy,
)
