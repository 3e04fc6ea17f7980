"""`loss_scaled`, an optax transformation that carries a loss scale and skips non-finite steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._base import AxisName, PyTree, describe, split_state, vary
from ..loss_scale import (
    LossScale,
    NoOpLossScale,
    all_finite,
    has_scaled_state,
    register_loss_scales,
    select_tree,
    stays_finite,
)
from ._skipping import Decision, SkippingUpdate
from ._step import MASKED, warn_of_half_params
from ._transformation import LossScaledState, Transformation, check_transformation


class LossScaledUpdate(SkippingUpdate):
    """`update` of `loss_scaled`."""

    def __init__(self, inner: Transformation, axis_name: AxisName | None, checks_updates: bool):
        super().__init__(inner, self._check_updates if checks_updates else None)
        self.axis_name = axis_name

    def _decide(self, grads: PyTree, state: LossScaledState, extra: dict[str, Any]) -> Decision:
        if not isinstance(state, LossScaledState):
            raise TypeError(
                f"Expected the state of loss_scaled or skip_nonfinite, got {type(state).__name__}. It is made by "
                "opt_state = tx.init(params), and comes third: jmp_policy.optim.step(tx, grads, opt_state, params). A "
                "state that was saved without them goes inside: tx.init(params)._replace(inner_state=restored)."
            )
        finite = self._agree(all_finite(grads))

        def finish(inner_state: PyTree, updates_finite: jax.Array | None) -> LossScaledState:
            is_good = finite if updates_finite is None else finite & updates_finite
            skipped = (~is_good).astype(jnp.int32)
            new = LossScaledState(
                inner_state,
                state.loss_scale.adjust(finite),
                finite,
                state.skipped_steps + skipped,
                (state.consecutive_skips + skipped) * skipped,
                updates_finite,
            )
            if updates_finite is None and new.inner_taken is True:
                return new
            # A step that is skipped with finite gradients says nothing of the scale.
            scale = select_tree(~finite | new.step_taken, new.loss_scale, state.loss_scale)
            return new._replace(loss_scale=scale)

        return Decision(finite, finish)

    def _check_updates(self, old: PyTree, new: PyTree) -> jax.Array:
        return self._agree(stays_finite(old, new))

    def _agree(self, finite: jax.Array) -> jax.Array:
        """True if `finite` is true on all devices along the axes."""
        if self.axis_name is None:
            return finite
        return lax.pmin(vary(finite, self.axis_name).astype(jnp.int32), self.axis_name) == 1


if TYPE_CHECKING:

    class LossScaling(optax.GradientTransformationExtraArgs):
        """Transformation with a state type for type checkers."""

        init: Callable[[PyTree], LossScaledState]  # pyright: ignore[reportIncompatibleVariableOverride]
else:
    LossScaling = optax.GradientTransformationExtraArgs


Check = Literal["gradients", "updates"]


def loss_scaled(
    inner: Transformation,
    loss_scale: LossScale,
    *,
    axis_name: AxisName | None = None,
    check: Check = "gradients",
) -> LossScaling:
    """Carries a loss scale beside an optimizer's state, and skips steps with non-finite gradients.

    A skipped step changes only the loss scale and the skip counters. `optim.step` keeps every bit of the parameters and
    of the inner state. So does `update` followed by `optax.apply_updates`, except for subnormal parameters on backends
    that flush them. The decision is made on the device.

    It goes outermost, once: `loss_scaled(chain(clip, adamw))`, `loss_scaled(MultiSteps(adamw, k))`,
    `loss_scaled(partition({"a": adamw, "b": sgd}, f))`. Only `inject_hyperparams` of numbers may be outside. In any
    other position, part of the optimizer still advances on a skipped step, or hides the non-finite gradient. `init`,
    `optim.step` and `value_and_grad` raise an error if they can tell. Around `MultiSteps` it skips a non-finite
    microbatch, and its scale counts microbatches: PyTorch's `GradScaler` counts steps of k, so use `period=2000 * k`.

    `jmp_policy.convert_state` restores a state that was saved with another loss scale, or without `loss_scaled`. To
    change the scale of a running state, use `state._replace(loss_scale=policy.loss_scale())`, or in nnx
    `state._replace(loss_scale=jax.tree.map(nnx.OptArray, policy.loss_scale()))`.

    Args:
      inner: the transformation to wrap. It receives true gradients, from `jmp_policy.value_and_grad`.
      loss_scale: the initial loss scale, for example `policy.loss_scale()`.
      axis_name: a mapped axis, or several, along which gradients differ between devices: a step that overflows on one
        of them is skipped on all. Not needed if gradients are averaged before.
      check: `"updates"` also skips a step with finite gradients that would make an element of the parameters or of the
        inner state non-finite, at the cost of one more pass over them. Such a step leaves the loss scale alone.

    Returns:
      A transformation with a `LossScaledState` as its state. Its `update` passes extra arguments on.

    Raises:
      TypeError: `inner` is not an optax transformation, or `loss_scale` is not a loss scale.
      ValueError: `inner` is a `loss_scaled`, or holds one (`init` raises this); or `check` is something else.

    Warns:
      UserWarning: `init` gets half-precision parameters, and `inner` would lose small updates of them.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    >>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([jnp.inf, 1.0])}
    >>> params, opt_state = jmp.optim.step(tx, grads, tx.init(params), params)
    >>> params["w"].tolist(), int(opt_state.skipped_steps), float(opt_state.loss_scale.loss_scale)
    ([1.0, 1.0], 1, 2.0)
    """
    check_transformation(inner)
    if not isinstance(loss_scale, LossScale):
        given = describe(loss_scale)
        raise TypeError(f"loss_scale must be a LossScale, got {given}. For example: policy.loss_scale().")
    if isinstance(inner.update, LossScaledUpdate):
        raise ValueError(_WRAPPED_TWICE)
    if check not in get_args(Check):
        raise ValueError(
            f"check must be 'gradients' or 'updates', got {check!r}. For example: loss_scaled(optax.adamw(1e-3), "
            "policy.loss_scale(), check='updates')."
        )

    def init(params: PyTree) -> Any:
        register_loss_scales()
        params = split_state(params, MASKED)[0]
        inner_state = inner.init(params)
        if has_scaled_state(inner_state):
            raise ValueError(_WRAPPED_TWICE)
        LossScaledState._check_outermost(inner_state, in_step=True)
        warn_of_half_params(inner, params, inner_state)
        # Copies: the state may be donated, and the loss scale may initialize another one.
        own_scale = jax.tree.map(jnp.array, loss_scale)
        skipped_steps, consecutive_skips = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        updates_finite = jnp.array(True) if check == "updates" else None
        return LossScaledState(
            inner_state, own_scale, jnp.array(True), skipped_steps, consecutive_skips, updates_finite
        )

    return LossScaling(init, LossScaledUpdate(inner, axis_name, check == "updates"))


def skip_nonfinite(
    inner: Transformation, *, axis_name: AxisName | None = None, check: Check = "gradients"
) -> LossScaling:
    """Skips steps with non-finite gradients; `loss_scaled` without a scale, for bfloat16 and float32.

    Unlike `optax.apply_if_finite`, it never applies a non-finite step; `optim.raise_if_stuck` raises an error if it
    only skips. It has the arguments, state and errors of `loss_scaled`.

    It also serves a loop that keeps its own loss scales. Several losses can have a scale each and share a step, which
    is skipped if one of them overflows:

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx, losses = jmp.optim.skip_nonfinite(optax.sgd(0.5)), {"fit": lambda w: (w - 1.0) ** 2, "size": lambda w: w**2}
    >>> params, scales = jnp.float32(2.0), {"fit": jmp.DynamicLossScale(), "size": jmp.DynamicLossScale(2.0**8)}
    >>> grads = {name: jmp.grad(losses[name], loss_scale=scales[name])(params) for name in losses}
    >>> scales = {name: scale.adjust(jmp.all_finite(grads[name])) for name, scale in scales.items()}
    >>> params, opt_state = jmp.optim.step(tx, jax.tree.map(jnp.add, *grads.values()), tx.init(params), params)
    >>> float(params)
    -1.0

    Several optimizers (a GAN's) on one scale have a `skip_nonfinite` each, and skip independently. Adjust the scale
    once, after all of them: `scale.adjust(state.grads_finite & other_state.grads_finite)`.
    """
    return loss_scaled(inner, NoOpLossScale(), axis_name=axis_name, check=check)


_WRAPPED_TWICE = (
    "This optimizer is wrapped in loss_scaled or skip_nonfinite twice: an overflow would lower two scales. Wrap it "
    "once, outermost, for example: loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), scale)."
)
