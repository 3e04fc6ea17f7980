"""State of `loss_scaled` that records the last skipped step and the origin of its infinities."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._base import PyTree, describe, vary
from ...loss_scale import LossScale, LossScaledState, find_nodes

if TYPE_CHECKING:
    from ...numerics import NonfiniteOrigin
else:
    NonfiniteOrigin = Any  # for `typing.get_type_hints`


class _FieldsWithOrigin(NamedTuple):
    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    steps: jax.Array
    nonfinite_step: jax.Array
    origin: "NonfiniteOrigin"


class NonfiniteOriginState(_FieldsWithOrigin, LossScaledState):  # pyright: ignore
    """State of `optim.loss_scaled` with `debug_nonfinite=True`: a `LossScaledState` that records why it skipped.

    It is a type of its own, so that a state without origins keeps its structure.

    Attributes:
      steps: the number of steps, skipped ones included, an int32 scalar.
      nonfinite_step: the number of the last skipped step, from 1; 0 if no step was skipped. An int32 scalar.
      origin: the origin of its infinities, a `numerics.NonfiniteOrigin`.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.skip_nonfinite(optax.sgd(1.0), debug_nonfinite=True).init({"w": jnp.ones(2)})
    >>> int(state.nonfinite_step), state.origin.found
    (0, False)
    """

    __slots__ = ()
    loss_scale = LossScaledState.loss_scale  # pyright: ignore


def records_origin(state: PyTree) -> bool:
    return bool(find_nodes(state, NonfiniteOriginState))


def add_origin(state: LossScaledState) -> NonfiniteOriginState:
    """Adds an empty origin to a fresh state. Its arrays are copies, so that the state may be donated."""
    from ...numerics import NonfiniteOrigin

    empty = jax.tree.map(jnp.array, NonfiniteOrigin.empty())
    return NonfiniteOriginState(*state, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), empty)


def carry_origin(
    before: LossScaledState, after: LossScaledState, origin: "NonfiniteOrigin | None", axis_name: Any
) -> LossScaledState:
    """Adds to `after` the records of `before`, and `origin` if the step was skipped."""
    if origin is None or not isinstance(before, NonfiniteOriginState):
        return after
    if axis_name is not None:  # the origin may differ between devices; the first one that has an origin decides
        origin = _share(origin, axis_name)
    steps, kept = before.steps + 1, (before.nonfinite_step, before.origin)
    noted = jax.tree.map(lambda new, old: lax.select(after.grads_finite, old, new), (steps, origin), kept)
    return NonfiniteOriginState(*after, steps, *noted)


def take_origin(state: PyTree, extra: dict[str, Any]) -> "tuple[NonfiniteOrigin | None, dict[str, Any]]":
    """Takes the origin of a step, None if the state carries none, out of its extra arguments."""
    given, is_recorded = extra.get("origin"), records_origin(state)
    if given is None and not is_recorded:
        return None, extra
    from ...numerics import NonfiniteOrigin  # loads most of the library

    if not is_recorded:
        if isinstance(given, NonfiniteOrigin):
            raise ValueError(
                f"The step got an origin, but its state, a {type(state).__name__}, does not record it. Make the "
                "optimizer with debug_nonfinite: loss_scaled(optax.adamw(1e-3), policy.loss_scale(), "
                "debug_nonfinite=True)."
            )
        return None, extra
    if not isinstance(given, NonfiniteOrigin):
        raise TypeError(
            "This optimizer records the origin of non-finite gradients, and got "
            f"{'none' if given is None else describe(given)}. Compose jmp_policy.numerics.first_nonfinite around the "
            "gradient, and pass its second result: (loss, grads), origin = first_nonfinite(grad_fn)(params, batch), "
            "and params, opt_state = jmp_policy.optim.step(tx, grads, opt_state, params, origin=origin)."
        )
    return given, {name: value for name, value in extra.items() if name != "origin"}


def _share(origin: "NonfiniteOrigin", axis_name: Any) -> "NonfiniteOrigin":
    from ...numerics._nonfinite import NOTHING

    count, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    first = lax.pmin(vary(jnp.where(origin.status == NOTHING, count, index), axis_name), axis_name)
    decides = index == jnp.minimum(first, count - 1)
    of_one = jax.tree.map(lambda x: vary(jnp.where(decides, x, jnp.zeros_like(x)), axis_name), origin)
    return lax.psum(of_one, axis_name)
