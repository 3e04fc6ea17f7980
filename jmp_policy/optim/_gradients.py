"""Functions that combine, measure and clip gradients."""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._base import AxisName, PyTree, at_least_float32, join_state, list_axes, split_state, vary

T = TypeVar("T")


def accumulate(total: T, grads: PyTree) -> T:
    """Adds the gradients of a microbatch to the sum of earlier ones.

    This is `jax.tree.map(jnp.add, total, grads)`, but float8 state combines by maximum: the largest magnitude of all
    microbatches. Divide the loss by the number of microbatches, or the gradients inside the optimizer (`optax.scale`).
    Do not divide the sum: float8 state must not be divided.

    Args:
      total: gradients from `jmp_policy.value_and_grad`, or zeros like them.
      grads: the gradients of another microbatch, taken at the same parameters.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> first = {"w": jnp.float32(1), "_overwrite_with_gradient": {"input_scale": jnp.float32([3.0])}}
    >>> second = {"w": jnp.float32(2), "_overwrite_with_gradient": {"input_scale": jnp.float32([2.0])}}
    >>> total = jmp.optim.accumulate(first, second)
    >>> float(total["w"]), total["_overwrite_with_gradient"]["input_scale"].tolist()
    (3.0, [3.0])
    """
    (total, state), (grads, new_state) = split_state(total), split_state(grads)
    return join_state(jax.tree.map(jnp.add, total, grads), jax.tree.map(jnp.maximum, state, new_state))


def global_norm(grads: PyTree, axis_name: AxisName | None = None) -> jax.Array:
    """Returns the Euclidean norm of the gradients of all parameters, for logging.

    Like `optax.tree.norm`, but float8 state, which is not a gradient, does not count, and squares of half-precision
    gradients are summed in float32. To clip by it, chain `clip_by_global_norm` before the optimizer.

    Args:
      grads: gradients from `jmp_policy.value_and_grad`, also of nnx models; `float0` counts as zero.
      axis_name: the mapped axes along which gradients are sharded, as in `clip_by_global_norm`.

    Returns:
      A real scalar, float32 or wider; non-finite if a gradient is.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> grads = {"w": jnp.float16([300.0, 400.0]), "_overwrite_with_gradient": {"input_scale": jnp.float32([7.0])}}
    >>> float(jmp.optim.global_norm(grads))
    500.0
    """
    inexact = _list_inexact(split_state(grads)[0])
    if axis_name is None:
        return jnp.sqrt(_add_squares(map(_sum_of_squares, inexact)))
    total = _add_squares(_share_square(_sum_of_squares(leaf), leaf, axis_name) for leaf in inexact)
    return jnp.sqrt(lax.psum(vary(total, axis_name), axis_name))


def clip_by_global_norm(max_norm: float, axis_name: AxisName | None = None) -> optax.GradientTransformationExtraArgs:
    """Clips gradients by their global norm, also if each device has a shard of them.

    Like `optax.clip_by_global_norm`, but squares are summed and gradients are scaled in float32, and float8 state does
    not change. In `jax.shard_map` the norm is taken over all devices, with one `psum` of a scalar. An array that is
    replicated along an axis counts once there. With `check_vma=False`, and in `jax.vmap`, JAX does not know which
    arrays are replicated, and each counts as a shard.

    Args:
      max_norm: the largest norm that is not clipped.
      axis_name: the mapped axes along which gradients are sharded; `None` if each device has all gradients.

    Raises:
      ValueError: `max_norm` is not positive.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> clip = jmp.optim.clip_by_global_norm(1.0, axis_name="fsdp")
    >>> shards = {"w": jnp.float32([3, 4])}  # one element on each of two devices
    >>> clipped = jax.vmap(lambda grads: clip.update(grads, clip.init(grads))[0], axis_name="fsdp")(shards)
    >>> [round(float(x), 3) for x in clipped["w"]]
    [0.6, 0.8]
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm!r}. For example: clip_by_global_norm(1.0).")

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, PyTree]:
        del params, extra
        rest, float8_state = split_state(updates)
        norm = global_norm(rest, axis_name)
        return join_state(jax.tree.map(lambda grad: _scale_down(grad, norm, max_norm), rest), float8_state), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _share_square(square: jax.Array, grad: jax.Array, axis_name: AxisName) -> jax.Array:
    """Divides the square of an array by the number of devices that have a copy of it."""
    known = [axis for axis in list_axes(axis_name) if axis in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying]
    shared = [axis for axis in known if axis not in jax.typeof(grad).manual_axis_type.varying]
    return square / math.prod(lax.axis_size(axis) for axis in shared)


def _scale_down(grad: jax.Array, norm: jax.Array, max_norm: float) -> jax.Array:
    if not jnp.issubdtype(grad.dtype, jnp.inexact):
        return grad
    wide = grad.astype(jnp.promote_types(grad.dtype, at_least_float32(grad.real.dtype)))
    scaled = wide * (max_norm / norm).astype(wide.real.dtype)
    return jnp.where(norm < max_norm, grad, scaled.astype(grad.dtype))


def _list_inexact(grads: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(grads) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _add_squares(squares: Iterable[jax.Array]) -> jax.Array:
    listed = list(squares)
    widest = max((square.dtype for square in listed), key=lambda dtype: dtype.itemsize, default=jnp.float32)
    return sum((square.astype(widest) for square in listed), start=jnp.zeros((), widest))


def _sum_of_squares(grad: jax.Array) -> jax.Array:
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        return _sum_of_squares(grad.real) + _sum_of_squares(grad.imag)
    return jnp.sum(jnp.square(grad.astype(at_least_float32(grad.dtype))))
