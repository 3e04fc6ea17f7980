"""Putting gradients together: true ones by sums and means, and float8 state, which is not a gradient, by max."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import at_least_float32
from .._float8_state import join_state, split_state
from .._mapped_axes import vary
from .._trees import PyTree

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
    half-precision gradients are summed in float32. To clip by it, chain `optax.clip_by_global_norm` before the
    optimizer, which never sees state: state that is clipped is state lost.

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
    squares = [_sum_of_squares(leaf) for leaf in jax.tree.leaves(rest) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    widest = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize, default=jnp.float32)
    return jnp.sqrt(sum((square.astype(widest) for square in squares), start=jnp.zeros((), widest)))


def _sum_of_squares(grad: jax.Array) -> jax.Array:
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        return _sum_of_squares(grad.real) + _sum_of_squares(grad.imag)
    return jnp.sum(jnp.square(grad.astype(at_least_float32(grad.dtype))))
