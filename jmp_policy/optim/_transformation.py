"""The kinds of transformations of this package, the state of `loss_scaled`, and how transformations nest."""

import abc
import collections
from typing import Any, NamedTuple

import jax
import optax

from .._base import PyTree, describe
from ..loss_scale import LossScale, ScaledState, SkippingState, find_nodes, has_scaled_state, register_loss_scales

Transformation = optax.GradientTransformation | optax.MultiSteps


class ParameterUpdate(abc.ABC):
    """`update` of a transformation that can also make the new parameters itself, for `optim.step`.

    `loss_scaled` takes or skips update and application together, and a half-precision parameter with its own rounding
    cannot always be reached by adding an update.
    """

    overwrites = False  # true if it handles float8 state itself

    @abc.abstractmethod
    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        """Returns the updates and the next state. As in optax, `updates` are gradients."""

    @abc.abstractmethod
    def step(self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, Any]:
        """Returns the updated parameters and the next state."""


# Optax transformations that advance when a `loss_scaled` inside skips a step, by the type of their state, each with the
# form that goes inside of `loss_scaled`.
_NEVER_OUTSIDE: dict[type, str] = {
    optax.ApplyIfFiniteState: "optax.adamw(1e-3)",  # loss_scaled replaces it
    optax.LookaheadState: "optax.lookahead(optax.adamw(1e-3), 5, 0.5)",
    optax.contrib.MechanicState: "optax.contrib.mechanize(optax.adamw(1e-3))",
    optax.MultiStepsState: "optax.MultiSteps(optax.adamw(1e-3), 4)",
    optax.contrib.SAMState: "optax.contrib.sam(optax.adamw(1e-3), adv_optimizer)",
    optax.contrib.ScheduleFreeState: "optax.contrib.schedule_free(optax.adamw(1e-3), 1e-3)",
}
# These advance if their other parts have state. Their states are also plain containers (a tuple of the states of two
# optimizers), so only the code that applies the transformation can tell.
_NOT_OUTSIDE_IN_A_STEP: dict[type, str] = {
    tuple: "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))",
    collections.OrderedDict: "optax.named_chain(('clip', optax.clip(1.0)), ('adamw', optax.adamw(1e-3)))",
    optax.ConditionallyMaskState: "optax.conditionally_mask(optax.adamw(1e-3), should_transform_fn)",
    optax.ConditionallyTransformState: "optax.conditionally_transform(optax.adamw(1e-3), should_transform_fn)",
    optax.InjectStatefulHyperparamsState: "optax.inject_hyperparams(optax.adamw)(schedule)",
    optax.MaskedState: "optax.masked(optax.adamw(1e-3), mask)",
    optax.PartitionState: "optax.partition({'matrix': optax.adamw(1e-3), 'vector': optax.sgd(1e-2)}, labels)",
}


class _LossScaledFields(NamedTuple):
    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    updates_finite: jax.Array | None = None


class LossScaledState(_LossScaledFields, ScaledState):
    """State of `optim.loss_scaled`, a `NamedTuple`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      loss_scale: the loss scale of the next step.
      grads_finite: whether the last step's gradients were finite, a boolean scalar; true before the first step.
      skipped_steps: the number of steps that were skipped because they were not finite, an int32 scalar.
      consecutive_skips: the number of them since the last finite step, an int32 scalar.
      updates_finite: with `check="updates"` whether the last step would have left parameters and state finite, a
        boolean scalar; true if its gradients were not finite. `None` otherwise.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.skip_nonfinite(optax.sgd(1.0)).init({"w": jnp.ones(2)})
    >>> bool(state.grads_finite), int(state.skipped_steps)
    (True, 0)
    """

    __slots__ = ()

    @property
    def loss_scale(self) -> LossScale:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The loss scale of the next step."""
        register_loss_scales()  # Flax's serialization reads a state by its fields, and may have been loaded after it
        return self[1]

    @property
    def step_taken(self) -> jax.Array:
        """True if the last step was taken, as a boolean scalar."""
        taken, inner = self.grads_finite, self.inner_taken
        taken = taken if self.updates_finite is None else taken & self.updates_finite
        return taken if inner is True else taken & inner

    @staticmethod
    def _check_outermost(state: PyTree, *, in_step: bool) -> None:
        """Raises if a `LossScaledState` is inside of an optax transformation, as far as the state can tell."""
        right_nestings = _NEVER_OUTSIDE | _NOT_OUTSIDE_IN_A_STEP if in_step else _NEVER_OUTSIDE

        def is_outside(node: Any) -> bool:  # `inject_hyperparams` of numbers has only a count that nobody reads
            return type(node) in right_nestings and getattr(node, "hyperparams_states", None) != {}

        nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaledState) or is_outside(node))
        for node in filter(is_outside, nodes):
            inside = find_nodes(node, SkippingState)
            if any(isinstance(each, ScaledState) for each in inside):
                raise ValueError(
                    f"loss_scaled and skip_nonfinite go outermost, but one is inside of a transformation with the "
                    f"state {type(node).__name__}, which advances when they skip a step. For example: "
                    f"loss_scaled({right_nestings[type(node)]}, policy.loss_scale())."
                )
            if inside and not isinstance(getattr(node, "inner_opt_state", None), SkippingState):
                raise ValueError(
                    "skip_spikes goes outside of all but loss_scaled, skip_nonfinite and MultiSteps, but one is inside "
                    f"of a transformation with the state {type(node).__name__}: it would measure changed gradients, or "
                    "not skip the whole step. For example: "
                    f"loss_scaled(skip_spikes({right_nestings[type(node)]}), policy.loss_scale())."
                )


def with_extra_args(tx: Transformation) -> optax.GradientTransformationExtraArgs:
    """Like `optax.with_extra_args_support`, but passes extra arguments to `MultiSteps` too."""
    if isinstance(tx, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)  # pyright: ignore[reportArgumentType]
    return optax.with_extra_args_support(tx)


def is_transformation(tx: object) -> bool:
    """True for an optax transformation."""
    return callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))


def check_loss_first(loss_fn: object, tx: object, caller: str) -> None:
    """Raises a `TypeError` unless a loss function comes first and its optax transformation second."""
    if is_transformation(loss_fn):
        raise TypeError(f"{caller} takes the loss function, then the optimizer. For example: {caller}(loss_fn, tx).")
    check_transformation(tx, "tx")


def check_transformation(tx: object, name: str = "inner") -> None:
    """Raises a `TypeError` if an argument of this name is not an optax transformation."""
    if not is_transformation(tx):
        called = f"{getattr(tx, '__name__', 'optax.adamw')}(1e-3)" if callable(tx) else "optax.adamw(1e-3)"
        if is_transformation(getattr(tx, "tx", None)):
            called = "its field tx, as in optimizer.tx or state.tx"
        raise TypeError(f"{name} must be an optax transformation, got {describe(tx)}. For example: {called}.")


def check_not_loss_scaled(inner_state: PyTree, name: str) -> None:
    """Raises a `ValueError` if there is loss scaling inside the transformation `name`."""
    if has_scaled_state(inner_state):
        raise ValueError(
            f"loss_scaled and skip_nonfinite go outside of {name}, which would change parameters on a step that they "
            f"skip. For example: loss_scaled({name}(optax.adamw(1e-3)), policy.loss_scale())."
        )


def check_not_outermost(inner: Transformation, name: str) -> None:
    """Raises a `ValueError` if `inner` makes parameters itself, and so must not be inside the transformation `name`."""
    if isinstance(inner.update, ParameterUpdate):
        raise ValueError(
            f"{name} goes inside of loss_scaled, skip_spikes, master_weights, kahan and stochastic_rounding, and only "
            "one of the last three around an optimizer. For example: "
            "loss_scaled(kahan(optax.adamw(1e-3)), policy.loss_scale()), "
            "kahan(cast_state(optax.adamw(1e-3), mu_dtype='bfloat16'))."
        )
