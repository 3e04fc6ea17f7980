"""Names of primitives that compute nothing, shared by the tables of several packages."""

MOVERS = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "reshape",
    "rev", "slice", "split", "squeeze", "stack", "tile", "transpose", "unstack",
})  # fmt: skip
"""Primitives whose results consist of elements of their operands, in other places."""

ANNOTATIONS = frozenset({
    "device_put", "inspect_sharding", "layout_constraint", "name", "optimization_barrier", "preduced", "pvary",
    "reduced_vary_cast", "reduced_vary_cast_p", "relayout", "reshard", "sharding_constraint", "stop_gradient", "tie",
    "vary_unreduced_cast", "vary_unreduced_cast_p",
})  # fmt: skip
"""Primitives that return their operands. JAX 0.12 dropped the ending `_p` of two names."""

TRANSFERS = frozenset({
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pbroadcast", "pbroadcast_dynamic",
    "ppermute", "ragged_all_to_all",
})  # fmt: skip
"""Collectives that move elements between devices, and combine none."""

DEVICE_SUMS = frozenset({
    "psum", "psum_invariant", "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter",
})  # fmt: skip
"""Collectives that sum over devices."""
