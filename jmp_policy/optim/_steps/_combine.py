"""Combines gradients, and sets apart those that no optimizer sees: float8 state and `float0`."""

import functools
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._base import AxisName, PyTree, at_least_float32, join_state, list_axes, next_state, split_state, vary
from ...loss_scale import find_scaled_state, has_scaled_state

HOLE = optax.MaskedNode()
"""What stands for state that no optimizer sees: transformations of optax pass over it."""


def fill_zeros(rest: PyTree, state: PyTree) -> PyTree:
    """Puts zeros where state was split from a tree: they make no update, and add nothing to the norm of a tree."""
    return join_state(rest, jax.tree.map(jnp.zeros_like, state))


def overwrite_state(state: PyTree, gradient: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Makes the state after a step of an optimizer: the next one, unless the step was skipped.

    Args:
      state: the state among parameters, as `split_state` gives it, or among the two of `optax.lookahead`, which share
        theirs; `None` if there is none.
      gradient: its gradient.
      before: the state of the optimizer. In the middle of `optax.MultiSteps`, the largest magnitudes of microbatches
        stand for one step.
      after: the next state of the optimizer.
    """
    if state is None:
        return None
    if isinstance(state, optax.LookaheadParams):
        return optax.LookaheadParams(*[overwrite_state(state.fast, gradient, before, after)] * 2)
    new = next_state(state, gradient, _is_first(before))
    if not has_scaled_state(after):
        return new
    finite = find_scaled_state(after).grads_finite
    return jax.tree.map(lambda new, old: lax.select(finite, new, old), new, state)


def _is_first(opt_state: PyTree) -> Any:
    """Whether no microbatch of the step was taken before; a step ends where all groups of parameters take theirs."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_multi_steps)
    found = [node.mini_step == 0 for node in nodes if _is_multi_steps(node)]
    return functools.reduce(jnp.logical_and, found) if found else True


def _is_multi_steps(node: object) -> bool:
    return isinstance(node, optax.MultiStepsState)


def has_float0(grads: PyTree) -> bool:
    """Whether some gradients are `float0`."""
    return any(map(_is_float0, jax.tree.leaves(grads)))


def zero_float0(grads: PyTree) -> PyTree:
    """The gradients with integer zeros for those that are `float0`."""
    return jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.int32) if _is_float0(g) else g, grads)


def restore_float0(grads: PyTree, tree: PyTree, otherwise: PyTree) -> PyTree:
    """The leaves of `tree`, and those of `otherwise` where the gradient is `float0`."""
    if not has_float0(grads):
        return tree
    return jax.tree.map(lambda g, x, y: y if _is_float0(g) else x, grads, tree, otherwise)


def _is_float0(grad: object) -> bool:
    return getattr(grad, "dtype", None) == jax.dtypes.float0


T = TypeVar("T")


def accumulate(total: T, grads: PyTree) -> T:
    """Adds the gradients of a microbatch to those before it.

    `jax.tree.map(jnp.add, total, grads)`, but for the state of float8 layers, of which it takes the maximum: the
    largest magnitude of all microbatches. Divide the loss by their number, or the gradients inside of the optimizer
    (`optax.scale`): state divided is state lost.

    Args:
      total: gradients, as `jmp_policy.value_and_grad` returns them, or zeros like them.
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


def pmean(grads: T, axis_name: Any) -> T:
    """Averages gradients over devices.

    `jax.lax.pmean`, but for the state of float8 layers, of which it takes the maximum. In `jax.shard_map` with its
    account of what varies, and with arrays that are sharded under `jax.jit`, JAX has done both already.

    Args:
      grads: gradients, as `jmp_policy.value_and_grad` returns them.
      axis_name: a mapped axis, or several.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> grads = {"w": jnp.float32([1, 3]), "_overwrite_with_gradient": {"input_scale": jnp.float32([[1], [3]])}}
    >>> mean = jax.vmap(lambda grads: jmp.optim.pmean(grads, "devices"), axis_name="devices")(grads)
    >>> mean["w"].tolist(), mean["_overwrite_with_gradient"]["input_scale"].tolist()
    ([2.0, 2.0], [[3.0], [3.0]])
    """
    rest, state = split_state(grads)
    mean = jax.tree.map(lambda x: lax.pmean(vary(x, axis_name), axis_name), rest)
    return join_state(mean, jax.tree.map(lambda x: lax.pmax(vary(x, axis_name), axis_name), state))


def global_norm(grads: PyTree) -> jax.Array:
    """The Euclidean norm of the gradients of parameters, to log it.

    As `optax.tree.norm`, but the state of float8 layers, which is not a gradient, does not count, and the squares of
    half-precision gradients are summed in float32. To clip by it, chain `clip_by_global_norm` before the optimizer.

    Args:
      grads: gradients, as `jmp_policy.value_and_grad` returns them, for nnx models too; `float0` counts as zero.

    Returns:
      A real scalar, float32 or wider; not finite where a gradient is not.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> grads = {"w": jnp.float16([300.0, 400.0]), "_overwrite_with_gradient": {"input_scale": jnp.float32([7.0])}}
    >>> float(jmp.optim.global_norm(grads))
    500.0
    """
    rest, _ = split_state(grads)
    return jnp.sqrt(_add_squares(map(_sum_of_squares, _list_inexact(rest))))


def clip_by_global_norm(max_norm: float, axis_name: AxisName | None = None) -> optax.GradientTransformationExtraArgs:
    """Clips gradients by their global norm, of which each device may have a part.

    `optax.clip_by_global_norm`, but squares are summed and gradients are scaled in float32, the state of float8 layers
    is left alone, and in `jax.shard_map` the norm is that of all devices: one `psum` of one number. There an array that
    is the same on all devices along an axis counts once. With `check_vma=False`, and in `jax.vmap`, JAX does not tell
    which arrays are: each counts as a part of its own.

    Args:
      max_norm: the largest norm that gradients keep.
      axis_name: the mapped axes along which devices have parts; `None` where each has all of the gradients.

    Raises:
      ValueError: `max_norm` is not positive.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> clip = jmp.optim.clip_by_global_norm(1.0, axis_name="fsdp")
    >>> parts = {"w": jnp.float32([3, 4])}  # one number of each of two devices
    >>> clipped = jax.vmap(lambda grads: clip.update(grads, clip.init(grads))[0], axis_name="fsdp")(parts)
    >>> [round(float(x), 3) for x in clipped["w"]]
    [0.6, 0.8]
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm!r}. For example: clip_by_global_norm(1.0).")

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, PyTree]:
        del params, extra
        rest, float8_state = split_state(updates)
        squares = [_share_square(_sum_of_squares(leaf), leaf, axis_name) for leaf in _list_inexact(rest)]
        total = _add_squares(squares)
        norm = jnp.sqrt(total if axis_name is None else lax.psum(vary(total, axis_name), axis_name))
        return join_state(jax.tree.map(lambda grad: _clip(grad, norm, max_norm), rest), float8_state), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _share_square(square: jax.Array, grad: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """What one device adds to a sum over devices: a part of the square of an array that several devices have."""
    axes = () if axis_name is None else list_axes(axis_name)
    known = [axis for axis in axes if axis in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying]
    shared = [axis for axis in known if axis not in jax.typeof(grad).manual_axis_type.varying]
    return square / math.prod(lax.axis_size(axis) for axis in shared)


def _clip(grad: jax.Array, norm: jax.Array, max_norm: float) -> jax.Array:
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
