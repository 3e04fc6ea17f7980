"""`skip_spikes`, an optax transformation that skips steps with unusually large gradients or losses."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._base import AxisName, PyTree, describe, split_state, vary
from ..loss_scale import SkippingState
from ._gradients import global_norm
from ._skipping import Decision, SkippingUpdate
from ._step import MASKED
from ._transformation import LossScaledState, Transformation, check_not_loss_scaled, check_transformation

Statistic = Literal["grad_norm", "loss"]

_SMALLEST_DEVIATION = 1e-3
"""Relative to the mean. Where steps hardly differ, as for a linear loss, a rounding error is not a spike."""


class _SpikeFields(NamedTuple):
    inner_state: Any
    history: jax.Array
    accepted_steps: jax.Array
    accepted: jax.Array
    spike_steps: jax.Array
    consecutive_spikes: jax.Array
    forced_steps: jax.Array
    last_spike: jax.Array


class SpikeState(_SpikeFields, SkippingState):
    """State of `optim.skip_spikes`, a `NamedTuple`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      history: the statistic of the last `window` accepted steps, float32 of shape `(window,)`. The next one goes to
        index `accepted_steps % window`.
      accepted_steps: the number of accepted steps, an int32 scalar.
      accepted: whether the last step was accepted, a boolean scalar.
      spike_steps: the number of skipped steps, an int32 scalar.
      consecutive_spikes: the number of spikes since the last step that was none, an int32 scalar.
      forced_steps: the number of spikes that were accepted after `max_consecutive` others, an int32 scalar.
      last_spike: the statistic of the last spike, a float32 scalar; zero before the first.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.skip_spikes(optax.sgd(1.0), window=8).init({"w": jnp.ones(2)})
    >>> state.history.shape, int(state.spike_steps)
    ((8,), 0)
    """

    __slots__ = ()

    @property
    def step_taken(self) -> jax.Array:
        """True if the last step was taken, as a boolean scalar."""
        inner = self.inner_taken
        return self.accepted if inner is True else self.accepted & inner


class SpikeUpdate(SkippingUpdate):
    """`update` of `skip_spikes`."""

    def __init__(self, inner: Transformation, statistic: Statistic, settings: "_Settings", axis_name: AxisName | None):
        super().__init__(inner)
        self._statistic, self._settings, self.axis_name = statistic, settings, axis_name

    def _decide(self, grads: PyTree, state: SpikeState, extra: dict[str, Any]) -> Decision:
        if not isinstance(state, SpikeState):
            raise TypeError(
                f"Expected the state of skip_spikes, got {type(state).__name__}. For example: opt_state = "
                "tx.init(params), then jmp_policy.optim.step(tx, grads, opt_state, params)."
            )
        measured = lax.convert_element_type(self._measure(grads, extra), jnp.float32)
        limit, finite = _find_limit(state, self._settings), jnp.isfinite(measured)
        is_spike = ~finite | ((state.accepted_steps >= self._settings.warmup) & (measured > limit))
        forced = is_spike & finite & (state.consecutive_spikes >= self._settings.max_consecutive)
        accepted = ~is_spike | forced
        count = lambda steps, condition: steps + lax.convert_element_type(condition, jnp.int32)
        largest = jnp.finfo(jnp.float32).max  # the states of a logger and of `check="updates"` stay finite

        def finish(inner_state: PyTree, updates_finite: None) -> SpikeState:
            del updates_finite
            is_skipping = isinstance(inner_state, SkippingState)
            taken = accepted & inner_state.step_taken if is_skipping else accepted
            history = state.history.at[state.accepted_steps % state.history.size].set(measured)
            return SpikeState(
                inner_state,
                jnp.where(taken, history, state.history),
                count(state.accepted_steps, taken),
                accepted,
                count(state.spike_steps, ~accepted),
                jnp.where(is_spike, state.consecutive_spikes + 1, 0),
                count(state.forced_steps, forced),
                jnp.where(is_spike, jnp.nan_to_num(measured, nan=largest), state.last_spike),
            )

        return Decision(accepted, finish)

    def _measure(self, grads: PyTree, extra: dict[str, Any]) -> jax.Array:
        if self._statistic == "grad_norm":
            return global_norm(grads, self.axis_name)
        loss = extra.get("value")
        if loss is None or jnp.shape(loss) != ():
            raise ValueError(
                f"skip_spikes(of='loss') needs the loss, a scalar, as the extra argument value, got {describe(loss)}. "
                "optim.minimize passes it. For example: optim.step(tx, grads, opt_state, params, value=loss)."
            )
        loss = jnp.asarray(loss)
        return loss if self.axis_name is None else lax.pmean(vary(loss, self.axis_name), self.axis_name)


class _Settings(NamedTuple):
    factor: float
    window: int
    warmup: int
    max_consecutive: int


def _find_limit(state: SpikeState, settings: _Settings) -> jax.Array:
    """Returns the largest statistic that is not a spike."""
    is_seen = jnp.arange(settings.window, dtype=jnp.int32) < state.accepted_steps
    count = jnp.sum(is_seen, dtype=jnp.float32)
    average = lambda x: jnp.sum(x, where=is_seen) / jnp.maximum(count, 1.0)
    mean = average(state.history)
    deviation = jnp.sqrt(average(jnp.square(state.history - mean)))
    return mean + settings.factor * jnp.maximum(deviation, _SMALLEST_DEVIATION * jnp.abs(mean))


def skip_spikes(
    tx: Transformation,
    *,
    of: Statistic = "grad_norm",
    factor: float = 6.0,
    window: int = 128,
    warmup: int | None = None,
    max_consecutive: int = 10,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skips steps with a gradient norm or loss far above those of the last steps.

    A step is skipped if its statistic is above the mean plus `factor` standard deviations of the last `window` accepted
    steps, or is not finite. Like a non-finite step under `loss_scaled`, it keeps every bit of parameters and inner
    state, but it leaves the loss scale alone. After `max_consecutive` spikes in a row the level has changed: further
    ones are accepted until one is within the limit again, and `optim.raise_if_stuck` tells of it. A deviation below
    0.1 % of the mean counts as 0.1 %.

    It goes directly inside of `loss_scaled` or `skip_nonfinite`, where it measures true gradients:
    `loss_scaled(skip_spikes(chain(clip, adamw)), scale)`. Around `MultiSteps` it judges each microbatch, and inside,
    `loss_scaled(MultiSteps(skip_spikes(adamw), k), scale)`, the mean of their gradients, or the last of their losses.

    It decides in the step. So in nnx the batch statistics that the loss function wrote have advanced: select them by
    `optimizer.opt_state.step_taken`. `linen.TrainState` does.

    Args:
      tx: the transformation to wrap.
      of: the statistic: `"grad_norm"`, the norm of all gradients, or `"loss"`, the extra argument `value` of the step,
        which `optim.minimize` passes. To use both, wrap twice.
      factor: the number of standard deviations.
      window: the number of accepted steps to compare with.
      warmup: the number of accepted steps before the first that can be skipped as a spike; by default `window // 2`.
      max_consecutive: the number of spikes in a row that are skipped.
      axis_name: mapped axes along which gradients are sharded or differ, as in `jax.shard_map`: all devices decide
        alike. The norm is taken over all of them, the loss is averaged.

    Returns:
      A transformation with a `SpikeState`. `jmp_policy.metrics` reads `spike_steps` and `last_spike` from it.

    Raises:
      TypeError: `tx` is not an optax transformation.
      ValueError: a setting is out of its range; `tx` holds a `loss_scaled`, which goes outside (`init` raises this); or
        there is no loss at a step.

    Source: the rule of OLMo-core's `SkipStepOptimizer` and of levanter's `SkipStepConfig`. Their statistics include
    skipped steps; levanter's deviation is at least 1e-6.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.skip_nonfinite(jmp.optim.skip_spikes(optax.sgd(0.1), window=8, warmup=4))
    >>> params = jnp.zeros(2)
    >>> opt_state = tx.init(params)
    >>> for grad in (1.0, 1.1, 0.9, 1.0, 50.0, 1.0):
    ...     params, opt_state = jmp.optim.step(tx, jnp.full(2, grad), opt_state, params)
    >>> round(float(params[0]), 3), int(jmp.metrics(opt_state)["spike_steps"])
    (-0.5, 1)
    """
    check_transformation(tx, "tx")
    _check_settings(of, _Settings(factor, window, 1 if warmup is None else warmup, max_consecutive))
    settings = _Settings(factor, window, window // 2 if warmup is None else warmup, max_consecutive)

    def init(params: PyTree) -> SpikeState:
        inner_state = tx.init(split_state(params, MASKED)[0])
        check_not_loss_scaled(inner_state, "skip_spikes")
        LossScaledState._check_outermost(inner_state, in_step=True)
        steps, spikes, consecutive, forced = (jnp.zeros((), jnp.int32) for _ in range(4))  # each may be donated
        history, last_spike = jnp.zeros(window, jnp.float32), jnp.zeros((), jnp.float32)
        return SpikeState(inner_state, history, steps, jnp.array(True), spikes, consecutive, forced, last_spike)

    return optax.GradientTransformationExtraArgs(init, SpikeUpdate(tx, of, settings, axis_name))


def _check_settings(of: str, settings: _Settings) -> None:
    if of not in get_args(Statistic):
        raise ValueError(f"of must be 'grad_norm' or 'loss', got {of!r}. For example: skip_spikes(tx, of='grad_norm').")
    smallest = _Settings(factor=0, window=2, warmup=1, max_consecutive=1)
    for name, value, least in zip(settings._fields, settings, smallest, strict=True):
        is_factor = name == "factor"
        is_number = isinstance(value, int | float if is_factor else int) and not isinstance(value, bool)
        if not is_number or not value >= least or not value > 0:
            wanted = "a positive number" if is_factor else f"an integer of at least {least}"
            raise ValueError(
                f"{name} must be {wanted}, got {value!r}. "
                "For example: skip_spikes(tx, factor=6.0, window=128, warmup=64, max_consecutive=10)."
            )
