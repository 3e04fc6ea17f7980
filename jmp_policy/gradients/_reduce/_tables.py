"""The operations between the sum that makes a gradient and the gradient, by the names of their primitives.

A gradient is linear in the cotangent of the loss. So what stands between is linear too: sums, products with what is no
cotangent, and moves of numbers from place to place. Any other operation is opaque.
"""

from jax.extend.core import JaxprEqn

from ..._jaxpr import MATMULS, Fact, having

PRODUCTS = MATMULS
"""Products of two tensors, which sum over what both have; a `scaled_dot` reads the scales of their blocks as well."""

SUMS = having(Fact.SUMS)
"""Sums over some axes of one tensor."""

SCATTERED_SUM = "scatter-add"
"""The sum of the rows of a table that were read several times: its operands are the table, the places and the rows."""

MULTIPLICATIONS = frozenset({"div", "mul"})
"""One number of a result for one of each operand, and linear in either; only one of them is a cotangent."""

MOVES = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS, Fact.DEVICE_SUMS, Fact.ADDS) | {
    "clamp", "convert_element_type", "max", "min", "neg", "reduce_precision", "scatter", "select_n",
}  # fmt: skip
"""Primitives that move elements, add those in the same place, or bound them; and the collectives of a `shard_map`.

All of them work in the dtype of their operands.
"""

CALLS = having(Fact.CALLS) - {"custom_jvp_call", "custom_vjp_call"}
"""What runs programs, which are looked into."""


def is_pairwise(eqn: JaxprEqn) -> bool:
    """Whether each result is of an operand of its own: of a barrier, or a `psum` of several values.

    >>> import jax
    >>> [is_pairwise(eqn) for eqn in jax.make_jaxpr(jax.lax.optimization_barrier)((1.0, 2.0)).eqns]
    [True]
    """
    return len(eqn.outvars) > 1 and len(eqn.outvars) == len(eqn.invars)
