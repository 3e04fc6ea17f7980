"""The state of a loss-scaled optimizer, and which transformations of optax may not stand around it."""

from typing import Any, NamedTuple, TypeVar

import jax

from .._base import PyTree
from ._loss_scale import LossScale, register_with_flax

T = TypeVar("T")

# What goes on where a `loss_scaled` inside of it skips a step: transformations of optax by the type of their state,
# by name because this module does without optax, and how each goes inside of `loss_scaled` instead.
NEVER_OUTSIDE = {
    "optax.ApplyIfFiniteState": "optax.adamw(1e-3)",  # which does what loss_scaled does, and gives in
    "optax.LookaheadState": "optax.lookahead(optax.adamw(1e-3), 5, 0.5)",
    "optax.MechanicState": "optax.contrib.mechanize(optax.adamw(1e-3))",
    "optax.MultiStepsState": "optax.MultiSteps(optax.adamw(1e-3), 4)",
    "optax.SAMState": "optax.contrib.sam(optax.adamw(1e-3), adv_optimizer)",
    "optax.ScheduleFreeState": "optax.contrib.schedule_free(optax.adamw(1e-3), 1e-3)",
}
# What does so unless its other parts happen to have no memory. These states are also mere containers (a tuple of the
# states of two optimizers), so that only who applies a transformation can tell.
_NOT_OUTSIDE_IN_A_STEP = {
    "builtins.tuple": "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))",
    "collections.OrderedDict": "optax.named_chain(('clip', optax.clip(1.0)), ('adamw', optax.adamw(1e-3)))",
    "optax.ConditionallyMaskState": "optax.conditionally_mask(optax.adamw(1e-3), should_transform_fn)",
    "optax.ConditionallyTransformState": "optax.conditionally_transform(optax.adamw(1e-3), should_transform_fn)",
    "optax.InjectStatefulHyperparamsState": "optax.inject_hyperparams(optax.adamw)(schedule)",
    "optax.MaskedState": "optax.masked(optax.adamw(1e-3), mask)",
    "optax.PartitionState": "optax.partition({'matrix': optax.adamw(1e-3), 'vector': optax.sgd(1e-2)}, labels)",
}


class _Fields(NamedTuple):
    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


class LossScaledState(_Fields):
    """The state of `optim.loss_scaled`, a `NamedTuple`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      loss_scale: the loss scale of the next step.
      grads_finite: whether the last step's gradients were finite, a boolean scalar; true before the first step.
      skipped_steps: how many steps were skipped, an int32 scalar.
      consecutive_skips: how many of them are the most recent ones in a row, an int32 scalar.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.skip_nonfinite(optax.sgd(1.0)).init({"w": jnp.ones(2)})
    >>> bool(state.grads_finite), int(state.skipped_steps)
    (True, 0)
    """

    __slots__ = ()

    @property
    def loss_scale(self) -> LossScale:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The loss scale of the next step."""
        # Flax's serialization reads a state by its fields, and may have been loaded after the state was made, or the
        # state in another process than it was made in: here it learns of loss scales before it meets one.
        register_with_flax()
        return self[1]


def has_scaled_state(state: PyTree) -> bool:
    """Whether a tree holds the state of `optim.loss_scaled`."""
    return bool(find_nodes(state, LossScaledState))


def check_outermost(state: PyTree) -> None:
    """Checks that `loss_scaled` is not inside the transformation of optax whose state this is.

    `optax.inject_hyperparams` of numbers may be outside: it has no memory but a count that nobody reads. Of a type
    that is not optax's nothing is known.

    Raises:
      ValueError: it is inside.
    """
    check_not_inside(NEVER_OUTSIDE | _NOT_OUTSIDE_IN_A_STEP, state)


def check_not_inside(right_nestings: dict[str, str], state: PyTree) -> None:
    def is_outside(node: Any) -> bool:
        return _type_name(node) in right_nestings and getattr(node, "hyperparams_states", None) != {}

    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaledState) or is_outside(node))
    for node in nodes:
        if is_outside(node) and has_scaled_state(node):
            raise ValueError(
                f"loss_scaled and skip_nonfinite go outermost, but one is inside of a transformation whose state is "
                f"{type(node).__name__}, and which goes on where they skip a step. For example: "
                f"loss_scaled({right_nestings[_type_name(node)]}, policy.loss_scale())."
            )


def _type_name(node: Any) -> str:
    return f"{type(node).__module__.partition('.')[0]}.{type(node).__name__}"


def find_nodes(tree: PyTree, kind: type[T]) -> list[T]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
