"""The memory of delayed scaling: the largest magnitudes of earlier steps, and the scale they make."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .._float8_format import DelayedScaling, Float8
from .._float8_state import is_prepared, read_leaf, write_leaf
from ._numbers import E4M3, E5M2, Scaled, amax_of, saturated, scale_of, select

DTYPES = {"input": E4M3, "kernel": E4M3, "output_grad": E5M2}
"""What there is a memory of, and the format that it is cast to."""

State = dict[str, jax.Array]
"""`{name}_scale` of shape `(1,)` and `{name}_amax_history` of shape `(amax_history_length,)` for each name, float32,
as Flax's float8 operations keep them."""


def new_state(format: Float8, stack: tuple[int, ...] = ()) -> State:
    """The state of a layer that was never called.

    Args:
      format: its format, with `DelayedScaling`.
      stack: the shape of a stack of layers.

    >>> {name: leaf.shape for name, leaf in new_state(Float8(amax_history_length=4)).items() if "input" in name}
    {'input_scale': (1,), 'input_amax_history': (4,)}
    """
    state = {}
    for name in DTYPES:
        state[f"{name}_scale"] = jnp.ones((*stack, 1), jnp.float32)
        state[f"{name}_amax_history"] = jnp.zeros((*stack, format.amax_history_length), jnp.float32)
    return state


class Memory(NamedTuple):
    """The memory of one operand of a product.

    Attributes:
      scale: float32 of shape `(1,)`.
      amax_history: float32 of shape `(amax_history_length,)`; the newest comes first, the others after it go from the
        oldest on.
    """

    scale: jax.Array
    amax_history: jax.Array


def memory_of(state: State, name: str) -> Memory:
    """The part of a state that one operand has."""
    return Memory(state[f"{name}_scale"], state[f"{name}_amax_history"])


def state_of(memories: dict[str, Memory]) -> State:
    """The state that consists of these parts."""
    state = {}
    for name, memory in memories.items():
        state[f"{name}_scale"], state[f"{name}_amax_history"] = memory
    return state


def scaled_by_history(x: jax.Array, name: str, memory: Memory, format: Float8) -> Scaled:
    """An array in 8 bits by the scale that its history makes.

    Args:
      x: floating.
      name: what it is, a key of `DTYPES`.
      memory: of the same, before.
      format: with `DelayedScaling`.

    Source: `DelayedScaling` of NVIDIA's Transformer Engine; Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    used, _ = _scales(name, memory, format)
    seen = select(jnp.isfinite(x), x, jnp.nan)  # as clipping would hide an infinity, and its amax is not needed
    return Scaled(saturated(seen, used, DTYPES[name]), used)


def scaled_and_recorded(x: jax.Array, name: str, memory: Memory, format: Float8) -> tuple[Scaled, Memory]:
    """As `scaled_by_history`, and the memory of the next step, with this array in it."""
    used, made = _scales(name, memory, format)
    history = jnp.maximum(_numbers(memory.amax_history), 0.0)
    history, is_finite = _recorded(lax.stop_gradient(x), lax.stop_gradient(history))
    after = Memory(write_leaf(made[None], memory.scale), write_leaf(history, memory.amax_history))
    return Scaled(saturated(x, used, DTYPES[name]), select(is_finite, used, jnp.nan)), after


def _scales(name: str, memory: Memory, format: Float8) -> tuple[jax.Array, jax.Array]:
    """The scale of this step, and that to be stored.

    State is zero of a layer that did not run, if its gradient was not kept out, and the least number there is where
    autodiff combined the gradients of a branch that was not taken by max.
    """
    recipe = format.recipe
    assert isinstance(recipe, DelayedScaling)
    stored, history = _numbers(memory.scale)[0], _numbers(memory.amax_history)
    stored = select(stored > 0, stored, 1.0)
    largest = jnp.max(history) if recipe.amax == "max" else history[0]
    made = scale_of(largest, stored, DTYPES[name], format.margin)
    return (stored if recipe.delay == 2 else made), made


def _numbers(leaf: jax.Array) -> jax.Array:
    """A leaf of state to compute with."""
    return read_leaf(leaf) if is_prepared(leaf) else leaf


@custom_vmap
def _recorded(x: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The history with the largest magnitude of an array, and whether that is finite; one that is not leaves no trace,
    for it would set the scale until it is forgotten.

    The axes of the history before its last are those of an ensemble, and lead in the array as well.
    """
    members = history.shape[:-1]
    of_each = amax_of(x, tuple(range(len(members), x.ndim))).reshape(members) if members else amax_of(x)
    amax = maximum_over(of_each, varying_axes(x) - varying_axes(history))
    is_finite = jnp.isfinite(amax)
    newest = lax.expand_dims(select(is_finite, amax, 0.0), (len(members),))
    if history.shape[-1] == 1:
        return newest, is_finite
    return lax.concatenate([newest, history[..., 2:], history[..., :1]], len(members)), is_finite


@_recorded.def_vmap
def _recorded_of_batch(size: int, batched: list[bool], x: jax.Array, history: jax.Array) -> Any:
    """Examples that share a history are one array; the members of an ensemble have one each."""
    of_x, of_history = batched
    if of_history:
        return _recorded(x if of_x else jnp.broadcast_to(x, (size, *x.shape)), history), (True, True)
    return _recorded(jnp.moveaxis(x, 0, history.ndim - 1), history), (False, False)


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mapped axes on which one of these arrays differs; none outside of `shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def varying_over(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """An array that counts as different on these axes; its derivative, if it was the same on them, is a sum."""
    missing = frozenset(axes) - varying_axes(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def maximum_over(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """The largest of an array's values over the devices of some axes."""
    return lax.pmax(x, tuple(axes)) if axes else x
