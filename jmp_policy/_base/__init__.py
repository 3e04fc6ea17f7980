"""Helpers that every package uses: error messages, memory, JAX contexts, dtypes, casts of trees, float8 state."""

from ._dtypes import (
    DTypeLike as DTypeLike,
    at_least_float32 as at_least_float32,
    did_you_mean as did_you_mean,
    dtype_names as dtype_names,
    half_dtype as half_dtype,
    is_floating_dtype as is_floating_dtype,
    parse_dtype as parse_dtype,
)
from ._float8_state import (
    OVERWRITE as OVERWRITE,
    explain_reuse as explain_reuse,
    is_prepared as is_prepared,
    join_state as join_state,
    map_parts as map_parts,
    name_state as name_state,
    next_state as next_state,
    prepare_leaf as prepare_leaf,
    prepare_state as prepare_state,
    read_leaf as read_leaf,
    read_state as read_state,
    split_state as split_state,
    write_leaf as write_leaf,
    zero_unused as zero_unused,
)
from ._lazy import load_lazily as load_lazily
from ._memory import (
    ACTIVE_POLICY as ACTIVE_POLICY,
    IN_FULL_PRECISION as IN_FULL_PRECISION,
    INFERRED as INFERRED,
    OBSERVING as OBSERVING,
    REDUCING as REDUCING,
    TRACING as TRACING,
    remember_on_class as remember_on_class,
    remember_weakly as remember_weakly,
)
from ._mesh import (
    AxisName as AxisName,
    Spec as Spec,
    Splits as Splits,
    check_axes as check_axes,
    check_divides as check_divides,
    check_explicit as check_explicit,
    complete_spec as complete_spec,
    find_splits as find_splits,
    is_explicit as is_explicit,
    list_axes as list_axes,
    spread_specs as spread_specs,
    vary as vary,
    vary_everywhere as vary_everywhere,
)
from ._messages import (
    describe as describe,
    escape_controls as escape_controls,
    forget_warnings as forget_warnings,
    quote as quote,
    shorten as shorten,
    warn_once as warn_once,
    warn_user as warn_user,
)
from ._rounding import (
    is_half as is_half,
    join_float32 as join_float32,
    round_as_float32 as round_as_float32,
    round_stochastically as round_stochastically,
    round_to_half as round_to_half,
    split_float32 as split_float32,
)
from ._trees import (
    Args as Args,
    Aux as Aux,
    Kwargs as Kwargs,
    Loss as Loss,
    P as P,
    PyTree as PyTree,
    R as R,
    Uncast as Uncast,
    cast_floating as cast_floating,
    cast_to_full as cast_to_full,
    cast_to_half as cast_to_half,
    first_floating_dtype as first_floating_dtype,
    floating_leaves as floating_leaves,
    is_array as is_array,
    is_floating as is_floating,
    list_paths_to as list_paths_to,
)
