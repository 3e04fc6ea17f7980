"""State of `loss_scaled` that records the last skipped step and the origin of its infinities."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._base import PyTree, describe, vary
from ...loss_scale import LossScale, LossScaledState, find_nodes
from ...numerics._nonfinite import NOTHING, Provenance


class _FieldsWithProvenance(NamedTuple):
    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    steps: jax.Array
    nonfinite_step: jax.Array
    provenance: Provenance


class ProvenanceState(_FieldsWithProvenance, LossScaledState):  # pyright: ignore
    """State of `optim.loss_scaled` with `provenance=True`: a `LossScaledState` that records why it skipped.

    It is a type of its own, so that a state without provenance keeps its structure.

    Attributes:
      steps: the number of steps, skipped ones included, an int32 scalar.
      nonfinite_step: the number of the last skipped step, from 1; 0 if no step was skipped. An int32 scalar.
      provenance: the origin of its infinities, a `numerics.Provenance`.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.skip_nonfinite(optax.sgd(1.0), provenance=True).init({"w": jnp.ones(2)})
    >>> int(state.nonfinite_step), state.provenance.found
    (0, False)
    """

    __slots__ = ()
    loss_scale = LossScaledState.loss_scale  # pyright: ignore


def has_provenance(state: PyTree) -> bool:
    return bool(find_nodes(state, ProvenanceState))


def begin_provenance(state: LossScaledState) -> ProvenanceState:
    """Adds empty provenance to a fresh state. Its arrays are copies, so that the state may be donated."""
    empty = jax.tree.map(jnp.array, Provenance.empty())
    return ProvenanceState(*state, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), empty)


def carry_provenance(
    before: LossScaledState, after: LossScaledState, provenance: Provenance | None, axis_name: Any
) -> LossScaledState:
    """Adds to `after` the records of `before`, and `provenance` if the step was skipped.

    Along `axis_name` provenance may differ between devices; the first device that has one decides.
    """
    if provenance is None or not isinstance(before, ProvenanceState):
        return after
    if axis_name is not None:
        provenance = _share(provenance, axis_name)
    steps, kept = before.steps + 1, (before.nonfinite_step, before.provenance)
    noted = jax.tree.map(lambda new, old: lax.select(after.grads_finite, old, new), (steps, provenance), kept)
    return ProvenanceState(*after, steps, *noted)


def take_provenance(state: PyTree, extra: dict[str, Any]) -> tuple[Provenance | None, dict[str, Any]]:
    """Takes the provenance of a step, None if the state carries none, out of its extra arguments."""
    given = extra.get("provenance")
    if not has_provenance(state):
        if isinstance(given, Provenance):
            raise ValueError(_NOT_CARRIED.format(type(state).__name__))
        return None, extra
    if not isinstance(given, Provenance):
        raise TypeError(_MISSING.format("none" if given is None else describe(given)))
    return given, {name: value for name, value in extra.items() if name != "provenance"}


def _share(provenance: Provenance, axis_name: Any) -> Provenance:
    count, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    first = lax.pmin(vary(jnp.where(provenance.status == NOTHING, count, index), axis_name), axis_name)
    decides = index == jnp.minimum(first, count - 1)
    of_one = jax.tree.map(lambda x: vary(jnp.where(decides, x, jnp.zeros_like(x)), axis_name), provenance)
    return lax.psum(of_one, axis_name)


_MISSING = (
    "This optimizer carries the provenance of its steps, and got {}. Compose jmp_policy.numerics.first_nonfinite "
    "around the gradient, and pass its second result: (loss, grads), provenance = first_nonfinite(grad_fn)(params, "
    "batch), and params, opt_state = jmp_policy.optim.step(tx, grads, opt_state, params, provenance=provenance)."
)
_NOT_CARRIED = (
    "The step got a provenance, but its state, a {}, does not carry it. Make the optimizer with provenance: "
    "loss_scaled(optax.adamw(1e-3), policy.loss_scale(), provenance=True)."
)
