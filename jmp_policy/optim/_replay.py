"""The programs that repeat a step for a verdict."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base import PyTree, at_least_float32, is_array, is_floating, split_state
from ..loss_scale import SkippingState, all_finite, stays_finite, strip_variables
from ._find_origin import Given, OriginFinder, unwrap
from ._skip_spikes import SpikeState
from ._skipping import find_inner, find_inner_state
from ._step import step


class Replay(NamedTuple):
    """Outputs of a repeated step."""

    loss: Any
    grads: PyTree  # without Variables
    finite: jax.Array


def replay(finder: OriginFinder, given: Given, transform: Callable[..., Any] | None = None) -> Replay:
    """Computes loss and true gradients. `transform` changes the function that does."""
    args, kwargs = unwrap(given.arguments)
    differentiated = finder.differentiate(given.params, given.scale)
    out, grads = (transform or (lambda fun: fun))(differentiated)(given.params, *args, **kwargs)
    loss, grads = out[0] if finder.has_aux else out, strip_variables(grads)
    return Replay(loss, grads, all_finite((loss, grads)))


def count_differences(finder: OriginFinder, one: Replay, other: Replay) -> PyTree:
    """Counts the elements of each array whose bits differ."""

    def count(x: Any, y: Any) -> Any:
        if not is_array(x):
            return None
        return jnp.sum(_read_bits(x) != _read_bits(y), dtype=jnp.uint32), jnp.uint32(x.size)

    named = lambda replay: {"loss": replay.loss, "gradients": replay.grads}
    return jax.tree.map(count, named(one), named(other))


def _read_bits(x: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_read_bits(x.real), _read_bits(x.imag)])
    words = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}
    word = words.get(jnp.finfo(x.dtype).bits) if is_floating(x) else None
    return x if word is None else jax.lax.bitcast_convert_type(x, word)


def make_state(finder: OriginFinder, given: Given) -> PyTree:
    """Returns a new state of the optimizer inside of all that skip steps."""
    grads = jax.eval_shape(lambda given: replay(finder, given).grads, given)
    return find_inner(finder.tx).init(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), grads))


def hide_infinite_starts(finder: OriginFinder, given: Given, old: PyTree) -> PyTree:
    """Replaces the elements of a state that are not finite in a new one either, such as the best loss so far."""
    hide = lambda new, old: jnp.where(jnp.isfinite(new), old, jnp.zeros_like(old)) if is_floating(old) else old
    return jax.tree.map(hide, make_state(finder, given), old)


LARGE_PARAM = 10_000.0
"""An element of a parameter is suspicious if it is this many times as large as the median element."""


def clip_large_params(finder: OriginFinder, given: Given) -> tuple[PyTree, PyTree]:
    """Returns the parameters with zeros for elements that are far too large, and their number in each array."""

    def find(x: Any) -> jax.Array:
        size = jnp.abs(x).astype(at_least_float32(x.dtype))
        median = jnp.median(size)
        return (median > 0) & (size > LARGE_PARAM * median)

    clip = lambda x: jnp.where(find(x), jnp.zeros_like(x), x) if is_floating(x) and x.size else x
    count = lambda x: (jnp.sum(find(x), dtype=jnp.uint32), jnp.uint32(x.size)) if is_floating(x) and x.size else None
    return jax.tree.map(clip, given.params), jax.tree.map(count, strip_variables(split_state(given.params)[0]))


def take_step(finder: OriginFinder, given: Given, state: Any) -> tuple[jax.Array, jax.Array]:
    """Returns whether `skip_spikes` skips a step, and whether its update leaves finite parameters and state."""
    loss, grads, _ = replay(finder, given)
    params = find_trained(given.params, grads)
    _, after = step(finder.tx, grads, state, params, value=loss)
    spiked = jnp.array(False)
    while isinstance(after, SkippingState):
        # Not `~after.accepted`: of a state after the step, whose counters went on, this spike may be accepted.
        spiked = spiked | (after.consecutive_spikes > 0) if isinstance(after, SpikeState) else spiked
        after = after.inner_state
    old = params, find_inner_state(state)
    return spiked, stays_finite(old, update(finder, grads, old[1], params, loss))


def update(finder: OriginFinder, grads: PyTree, state: PyTree, params: PyTree, loss: Any) -> PyTree:
    """Returns the new parameters and the new inner state of a step that is not skipped."""
    return step(find_inner(finder.tx), grads, state, params, value=loss)


def find_trained(params: PyTree, grads: PyTree) -> PyTree:
    """Returns the parameters that have gradients: of an nnx model, its `nnx.Param`s."""
    stripped = strip_variables(params)
    if jax.tree.structure(stripped) == jax.tree.structure(grads):
        return stripped
    from flax import nnx

    return strip_variables(nnx.state(params, nnx.Param))
