"""The memory of delayed scaling: the largest magnitudes of earlier steps, and the scale that they make."""

from collections.abc import Collection
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..._base import read_leaf, write_leaf
from ...policy import DelayedScaling, Float8, Quantization
from .._numbers import E4M3, E5M2, Scaled, compute_scale, measure_amax, saturate, select

DTYPES = {"input": E4M3, "kernel": E4M3, "output_grad": E5M2}
"""The operands that have a memory, and the format that each is cast to."""

State = dict[str, jax.Array]
"""`{name}_scale` of shape `(1,)` and `{name}_amax_history` of shape `(amax_history_length,)` for each name, float32,
as Flax's float8 operations keep them."""


def needs_state(format: Quantization | None) -> TypeGuard[Float8]:
    """Whether a format, `None` for none, scales by what it saw before, so that each of its products has state."""
    return isinstance(format, Float8) and isinstance(format.recipe, DelayedScaling)


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
      amax_history: float32 of shape `(amax_history_length,)`; in the order newest,
        oldest, ..., second newest.
    """

    scale: jax.Array
    amax_history: jax.Array


def read_memory(state: State, name: str) -> Memory:
    """Reads the memory of one operand out of a state."""
    return Memory(state[f"{name}_scale"], state[f"{name}_amax_history"])


def join_memories(memories: dict[str, Memory]) -> State:
    """Puts the memories of all operands together to a state."""
    state = {}
    for name, memory in memories.items():
        state[f"{name}_scale"], state[f"{name}_amax_history"] = memory
    return state


def scale_by_history(x: jax.Array, name: str, memory: Memory, format: Float8) -> Scaled:
    """Casts an array to 8 bits by the scale that its history makes.

    Args:
      x: floating.
      name: what it is, a key of `DTYPES`.
      memory: the memory of this operand before the step.
      format: with `DelayedScaling`.

    Source: `DelayedScaling` of NVIDIA's Transformer Engine; Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    used, _ = _compute_scales(name, memory, format)
    seen = select(jnp.isfinite(x), x, jnp.nan)  # clipping would hide an infinity
    return Scaled(saturate(seen, used, DTYPES[name]), used)


def scale_and_record(x: jax.Array, name: str, memory: Memory, format: Float8) -> tuple[Scaled, Memory]:
    """As `scale_by_history`; also returns the memory of the next step, with this array in it."""
    used, made = _compute_scales(name, memory, format)
    history = jnp.maximum(read_leaf(memory.amax_history), 0.0)
    history, is_finite = _record_amax(lax.stop_gradient(x), lax.stop_gradient(history))
    after = Memory(write_leaf(made[None], memory.scale), write_leaf(history, memory.amax_history))
    return Scaled(saturate(x, used, DTYPES[name]), select(is_finite, used, jnp.nan)), after


def _compute_scales(name: str, memory: Memory, format: Float8) -> tuple[jax.Array, jax.Array]:
    """The scale of this step, and the scale to store.

    The state of a layer that did not run is zero, if its gradient was not kept out. It is the least float where
    autodiff combined by max the gradients of a branch that was not taken.
    """
    recipe = format.recipe
    assert isinstance(recipe, DelayedScaling)
    stored, history = read_leaf(memory.scale)[0], read_leaf(memory.amax_history)
    stored = select(stored > 0, stored, 1.0)
    largest = jnp.max(history) if recipe.amax == "max" else history[0]
    made = compute_scale(largest, stored, DTYPES[name], format.margin)
    return (stored if recipe.delay == 2 else made), made


@custom_vmap
def _record_amax(x: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Puts the largest magnitude of an array into its history, and says whether it is finite.

    One that is not finite is left out: it would set the scale until the history forgets it.

    A history of more axes than one belongs to an ensemble, whose axes lead in the array as well.
    """
    members = history.shape[:-1]
    of_each = measure_amax(x, tuple(range(len(members), x.ndim))).reshape(members) if members else measure_amax(x)
    amax = take_maximum(of_each, varying_axes(x) - varying_axes(history))
    is_finite = jnp.isfinite(amax)
    newest = lax.expand_dims(select(is_finite, amax, 0.0), (len(members),))
    if history.shape[-1] == 1:
        return newest, is_finite
    return lax.concatenate([newest, history[..., 2:], history[..., :1]], len(members)), is_finite


@_record_amax.def_vmap
def _record_batch(size: int, batched: list[bool], x: jax.Array, history: jax.Array) -> Any:
    """Takes examples that share a history for one array; each member of an ensemble has a history of its own."""
    of_x, of_history = batched
    if of_history:
        return _record_amax(x if of_x else jnp.broadcast_to(x, (size, *x.shape)), history), (True, True)
    return _record_amax(jnp.moveaxis(x, 0, history.ndim - 1), history), (False, False)


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mapped axes along which one of these arrays differs; outside of `shard_map` it is empty."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def take_maximum(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """Takes the largest of an array's values over the devices of some axes."""
    return lax.pmax(x, tuple(axes)) if axes else x
