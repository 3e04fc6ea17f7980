"""Amax histories of delayed scaling."""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..._base import read_leaf, vary, write_leaf
from ...policy import DelayedScaling, Float8, Quantization
from .._numbers import E4M3, E5M2, Scaled, compute_scale, measure_amax, saturate, select

DTYPES = {"input": E4M3, "kernel": E4M3, "output_grad": E5M2}  # of the operands with an amax history

State = dict[str, jax.Array]
"""`{name}_scale` of shape `(1,)` and `{name}_amax_history` of shape `(amax_history_length,)` for each operand, float32,
as in Flax's float8 ops. A history is in the order newest, oldest, ..., second newest."""


def needs_state(format: Quantization | None) -> TypeGuard[Float8]:
    """True for `Float8` with `DelayedScaling`."""
    return isinstance(format, Float8) and isinstance(format.recipe, DelayedScaling)


def new_state(format: Float8, stack: tuple[int, ...] = ()) -> State:
    """Returns the initial state of a layer, or of a stack of layers of shape `stack`."""
    state = {}
    for name in DTYPES:
        state[f"{name}_scale"] = jnp.ones((*stack, 1), jnp.float32)
        state[f"{name}_amax_history"] = jnp.zeros((*stack, format.amax_history_length), jnp.float32)
    return state


def scale_by_history(x: jax.Array, name: str, state: State, format: Float8) -> Scaled:
    """Casts an operand, a key of `DTYPES`, to float8 by the scale of its history.

    Source: `DelayedScaling` of NVIDIA's Transformer Engine; Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    used, _ = _compute_scales(name, state, format)
    seen = select(jnp.isfinite(x), x, jnp.nan)  # saturation would hide an infinity
    return Scaled(saturate(seen, used, DTYPES[name]), used)


def scale_and_record(x: jax.Array, name: str, state: State, format: Float8) -> Scaled:
    """Like `scale_by_history`, and updates the scale and history of the operand for the next step."""
    used, made = _compute_scales(name, state, format)
    scale, amax_history = state[f"{name}_scale"], state[f"{name}_amax_history"]
    history = jnp.maximum(read_leaf(amax_history), 0.0)
    history, is_finite = _record_amax(lax.stop_gradient(x), lax.stop_gradient(history))
    state[f"{name}_scale"] = write_leaf(made[None], scale)
    state[f"{name}_amax_history"] = write_leaf(history, amax_history)
    return Scaled(saturate(x, used, DTYPES[name]), select(is_finite, used, jnp.nan))


def _compute_scales(name: str, state: State, format: Float8) -> tuple[jax.Array, jax.Array]:
    """Returns the scale of this step, and the scale to store."""
    recipe = format.recipe
    assert isinstance(recipe, DelayedScaling)
    stored, history = read_leaf(state[f"{name}_scale"])[0], read_leaf(state[f"{name}_amax_history"])
    # The state of a layer that did not run may be zero, or the least float after a branch that was not taken.
    stored = select(stored > 0, stored, 1.0)
    largest = jnp.max(history) if recipe.amax == "max" else history[0]
    made = compute_scale(largest, stored, DTYPES[name], format.margin)
    return (stored if recipe.delay == 2 else made), made


@custom_vmap
def _record_amax(x: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds the largest magnitude of an array to its history if it is finite; returns the history and that condition."""
    members = history.shape[:-1]  # of an ensemble, whose axes lead in the array too
    of_each = measure_amax(x, tuple(range(len(members), x.ndim))).reshape(members) if members else measure_amax(x)
    shared = tuple(varying_axes(x) - varying_axes(history))
    amax = lax.pmax(of_each, shared) if shared else of_each
    is_finite = jnp.isfinite(amax)
    newest = lax.expand_dims(select(is_finite, amax, 0.0), (len(members),))
    if history.shape[-1] == 1:
        return newest, is_finite
    return lax.concatenate([newest, history[..., 2:], history[..., :1]], len(members)), is_finite


@_record_amax.def_vmap
def _record_batch(size: int, batched: list[bool], x: jax.Array, history: jax.Array) -> Any:
    """Reduces examples that share a history together; each member of an ensemble has its own history."""
    of_x, of_history = batched
    if of_history:
        return _record_amax(x if of_x else jnp.broadcast_to(x, (size, *x.shape)), history), (True, True)
    return _record_amax(jnp.moveaxis(x, 0, history.ndim - 1), history), (False, False)


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Returns the mapped axes along which any of the arrays varies; empty outside of `shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_together(*arrays: jax.Array) -> list[jax.Array]:
    """Marks arrays as varying over the axes of any of them: in `shard_map`, custom derivatives need that."""
    axes = tuple(varying_axes(*arrays))
    return [vary(x, axes) for x in arrays]  # JAX then sums the gradient of a replicated weight over devices
