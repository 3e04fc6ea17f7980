"""Mesh axes, the axes of `shard_map` and `vmap`, and partition specs of trees."""

from ._axes import (
    check_axes as check_axes,
    check_divides as check_divides,
    check_explicit as check_explicit,
    is_explicit as is_explicit,
)
from ._mapped_axes import AxisName as AxisName, list_axes as list_axes, vary as vary, vary_everywhere as vary_everywhere
from ._specs import (
    Spec as Spec,
    Splits as Splits,
    complete_spec as complete_spec,
    find_splits as find_splits,
    spread_specs as spread_specs,
)
