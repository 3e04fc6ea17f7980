"""One array, gathered from the devices that have parts of it, with a backward pass that sums in another dtype."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import is_prepared, read_leaf, warn_once, write_leaf
from .._base.mesh import AxisName, Splits, vary
from ._dtypes import cast_leaf


class Gathering(NamedTuple):
    """How an array is gathered, and its cotangent summed.

    Attributes:
      splits: the dimensions that are gathered.
      reduce_axes: the axes along which devices have different cotangents, which are summed.
      compute_dtype: what moves in the forward pass, if it is narrower than the array.
      reduce_dtype: what moves in the backward pass; `None` for the dtype of the array.
      tiled: whether parts are joined along a dimension that there is.
      is_left_to_jax: whether JAX alone takes the gradients, so that products hand over sums in the compute dtype.
    """

    splits: Splits
    reduce_axes: tuple[AxisName, ...]
    compute_dtype: np.dtype | None
    reduce_dtype: np.dtype | None
    tiled: bool = True
    is_left_to_jax: bool = False

    def warn_of_overflow(self, dtype: np.dtype) -> None:
        """Warns where the cotangent of an array of a dtype may have overflowed before it gets the reduce dtype."""
        is_float16 = np.float16 in (self.compute_dtype, dtype)
        if self.is_left_to_jax and is_float16 and self.reduce_dtype not in (None, np.float16):
            warn_once(
                Gathering,
                f"The products that make gradients of gathered parameters sum in float16, which ends at 65504, before "
                f"these are reduced in {self.reduce_dtype}; take them by jmp_policy.value_and_grad, grad or "
                "optim.minimize, under which the products hand over their sums in the reduce dtype: "
                "jmp_policy.grad(loss_fn, loss_scale=scale).",
            )


def gather_leaf(x: jax.Array, how: Gathering) -> jax.Array:
    """Gathers one array, in its dtype; the cotangent of the result is summed over devices, and each gets its part.

    The cast back to the dtype of the array is exact, and leaves modules what they expect. Several uses of the result
    are then summed in that dtype, before one reduction for all of them. Integers and keys are gathered as they are.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _gather_exact(x, how)
    split_over = tuple(axis for _, axes in how.splits for axis in axes)
    x = vary(x, split_over)  # outside: where all devices had the same array, JAX sums its cotangent once more
    varying = jax.typeof(x).manual_axis_type.varying
    shared = tuple(axis for axis in how.reduce_axes if axis not in split_over and axis not in varying)
    return _gather(x, how._replace(reduce_axes=shared))


def share_state(state: jax.Array, axes: tuple[AxisName, ...]) -> jax.Array:
    """Hands on a leaf of float8 state, of which all devices have the same; its cotangent is the largest of theirs."""
    return _share(state, tuple(axis for axis in axes if axis not in jax.typeof(state).manual_axis_type.varying))


def take_maximum(state: jax.Array, axis_name: AxisName) -> jax.Array:
    """The largest of what all devices have of a leaf of float8 state."""
    largest = lax.pmax(vary(read_leaf(state), axis_name), axis_name)
    return write_leaf(largest, state) if is_prepared(state) else largest


def narrow(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """Casts an array to a dtype if that has fewer bytes; the cast back is exact."""
    return x if dtype is None or dtype.itemsize >= x.dtype.itemsize else cast_leaf(x, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, how: Gathering) -> jax.Array:
    whole = narrow(x, how.compute_dtype)
    for dimension, axes in how.splits:
        whole = lax.all_gather(whole, axes, axis=dimension, tiled=how.tiled)
    return cast_leaf(vary(whole, how.reduce_axes), x.dtype)


def _scatter(how: Gathering, residuals: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residuals
    how.warn_of_overflow(cotangent.dtype)
    part = cast_leaf(cotangent, how.reduce_dtype)
    for dimension, axes in reversed(how.splits):
        part = lax.psum_scatter(part, axes, scatter_dimension=dimension, tiled=how.tiled)
    if how.reduce_axes:
        part = lax.psum(part, how.reduce_axes)
    return (cast_leaf(part, cotangent.dtype),)


_gather.defvjp(lambda x, how: (_gather(x, how), None), _scatter)


def _gather_exact(x: jax.Array, how: Gathering) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    whole = jax.random.key_data(x) if is_key else x
    for dimension, axes in how.splits:
        whole = lax.all_gather(whole, axes, axis=dimension, tiled=how.tiled)
    return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(x)) if is_key else whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _share(state: jax.Array, axes: tuple[AxisName, ...]) -> jax.Array:
    return vary(state, axes)


_share.defvjp(
    lambda state, axes: (_share(state, axes), None),
    lambda axes, _, next_state: (take_maximum(next_state, axes) if axes else next_state,),
)
