"""The programs that repeat a step for a verdict."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._base import PyTree, at_least_float32, is_array, is_floating, split_state
from ..loss_scale import NoOpLossScale, all_finite, list_skipping, stays_finite, strip_variables
from ._find_origin import Given, OriginFinder, unwrap
from ._skip_spikes import SpikeState
from ._skipping import SkippingUpdate, find_inner, find_inner_state
from ._step import MASKED, step


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
        if not is_array(x) or x.dtype == jax.dtypes.float0:
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
    return find_inner(finder.tx).init(find_trained(given.params, grads))


def hide_infinite_starts(finder: OriginFinder, given: Given, old: PyTree) -> PyTree:
    """Replaces the elements of a state that are not finite in a new one either, such as the best loss so far."""
    hide = lambda new, old: jnp.where(jnp.isfinite(new), old, jnp.zeros_like(old)) if is_floating(old) else old
    return jax.tree.map(hide, make_state(finder, given), old)


LARGE_PARAM = 10_000.0
"""An element of a parameter is suspicious if it is this many times as large as the median element."""


def clip_large_params(finder: OriginFinder, given: Given) -> tuple[PyTree, PyTree]:
    """Returns the parameters with zeros for infinite and far too large elements, and their number in each array."""

    def find(x: Any) -> jax.Array:
        size = jnp.abs(x).astype(at_least_float32(x.dtype))
        median = jnp.median(size)
        return jnp.isinf(size) | ((median > 0) & (size > LARGE_PARAM * median))

    clip = lambda x: jnp.where(find(x), jnp.zeros_like(x), x) if is_floating(x) and x.size else x
    count = lambda x: (jnp.sum(find(x), dtype=jnp.uint32), jnp.uint32(x.size)) if is_floating(x) and x.size else None
    return jax.tree.map(clip, given.params), jax.tree.map(count, strip_variables(split_state(given.params)[0]))


def take_step(finder: OriginFinder, given: Given, state: Any) -> tuple[jax.Array, jax.Array]:
    """Returns whether `skip_spikes` skips a step, and whether its update leaves finite parameters and state."""
    loss, grads, _ = replay(finder, given)
    params, grads = find_trained(given.params, grads), split_state(grads, MASKED)[0]
    old = params, find_inner_state(state)
    new = update(finder, given, grads, old[1], params, loss)
    decision = _without_axes(finder.tx).update.decide(grads, NoOpLossScale(), state, {"value": loss})
    before, after = list_skipping(state), list_skipping(decision.finish(new[1], None))
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if isinstance(x, SpikeState)]
    # Not `accepted`: of a state after the step, whose counters went on, this spike may be accepted.
    spiked = [y.consecutive_spikes > x.consecutive_spikes for x, y in pairs]
    return functools.reduce(jnp.logical_or, spiked, jnp.array(False)), stays_finite(old, new)


def _without_axes(tx: Any) -> Any:
    """Returns an optimizer that decides outside of `shard_map`, where arrays are whole."""
    if not isinstance(tx.update, SkippingUpdate):
        return tx
    update = copy.copy(tx.update)
    update.inner, update.axis_name = _without_axes(update.inner), None
    return tx._replace(update=update)


def update(
    finder: OriginFinder, given: Given, grads: PyTree, state: PyTree, params: PyTree, loss: Any
) -> tuple[PyTree, PyTree]:
    """Returns the new parameters and the new inner state of a step that is not skipped."""
    args, kwargs = unwrap(given.arguments)

    def value_fn(params: PyTree) -> Any:
        out = finder.loss_fn(params, *args, **kwargs)
        return out[0] if finder.has_aux else out

    # A chain does not tell which extra arguments it needs, and `optax.contrib.sam` takes no others.
    given_loss, grad_fn = {"value": loss}, lambda params, *_: jax.grad(value_fn)(params)
    search = given_loss | {"value_fn": value_fn, "grad": grads}
    errors: list[Exception] = []
    for extra in (given_loss, {}, search, {"obj_fn": value_fn}, {"grad_fn": grad_fn}):
        try:
            return step(find_inner(finder.tx), grads, state, params, **extra)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def find_trained(params: PyTree, grads: PyTree) -> PyTree:
    """Returns the parameters that have gradients, without float8 state: of an nnx model, its `nnx.Param`s."""
    stripped = strip_variables(params)
    if jax.tree.structure(stripped) != jax.tree.structure(grads):
        from flax import nnx

        stripped = strip_variables(nnx.state(params, nnx.Param))
    return split_state(stripped, MASKED)[0]
