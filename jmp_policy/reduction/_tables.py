"""The operations between the sum that makes a gradient and the gradient, by the names of their primitives.

A gradient is linear in the cotangent of the loss. So what stands between is linear too: sums, products with what is no
cotangent, and moves of numbers from place to place. Any other operation is opaque.
"""

from jax.extend.core import JaxprEqn

PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general", "scaled_dot"})
"""Products of two tensors, which sum over what both have; a `scaled_dot` reads the scales of their blocks as well."""

SUMS = frozenset({"cumsum", "reduce_sum", "reduce_window_sum"})
"""Sums over some axes of one tensor."""

SCATTERED_SUM = "scatter-add"
"""The sum of the rows of a table that were read several times: its operands are the table, the places and the rows."""

MULTIPLICATIONS = frozenset({"div", "mul"})
"""One number of a result for one of each operand, and linear in either; only one of them is a cotangent."""

MOVES = frozenset({
    "add", "add_any", "all_gather", "all_gather_invariant", "all_to_all", "broadcast_in_dim", "clamp", "concatenate",
    "convert_element_type", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather",
    "layout_constraint", "max", "min", "name", "neg", "optimization_barrier", "pad", "pbroadcast", "ppermute", "psum",
    "psum2", "psum_invariant", "pvary", "reduce_precision", "reduce_scatter", "reshape", "reshard", "rev", "select_n",
    "sharding_constraint", "slice", "split", "squeeze", "stack", "sub", "tile", "transpose", "unstack",
})  # fmt: skip
"""What moves numbers, adds what stands in the same place, or bounds it; and the collectives of a `shard_map`.

All of them work in the dtype of their operands.
"""

CALLS = frozenset({
    "checkpoint", "closed_call", "cond", "eval_jaxpr", "jit", "pjit", "remat2", "scan", "shard_map", "while",
})  # fmt: skip
"""What runs programs, which are looked into."""


def is_pairwise(eqn: JaxprEqn) -> bool:
    """Whether each result is of an operand of its own: of a barrier, or a `psum` of several values.

    >>> import jax
    >>> [is_pairwise(eqn) for eqn in jax.make_jaxpr(jax.lax.optimization_barrier)((1.0, 2.0)).eqns]
    [True]
    """
    return len(eqn.outvars) > 1 and len(eqn.outvars) == len(eqn.invars)
