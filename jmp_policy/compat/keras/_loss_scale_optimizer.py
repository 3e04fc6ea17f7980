"""Keras's loss-scaling optimizer, over optax."""

from typing import Any

import jax
import numpy as np
import optax

from ..._loss_scale import StaticLossScale
from ..._messages import quote
from ...optim import loss_scaled
from ._loss_scale import make_dynamic_loss_scale


def LossScaleOptimizer(
    inner_optimizer: optax.GradientTransformation,
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
    *,
    dynamic: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """`jmp_policy.optim.loss_scaled` with Keras's arguments and defaults.

    The scale doubles after `dynamic_growth_steps` finite steps in a row, and halves, down to 1, on each that is not;
    Keras 3 has neither that floor nor the ceiling of 2**24, and `tf.keras` the floor alone. A scale that starts beyond
    either moves it there.

    Args:
      inner_optimizer: the optax transformation to wrap.
      initial_scale: the scale to start from.
      dynamic_growth_steps: how many finite steps in a row make the scale grow.
      dynamic: whether the scale moves at all, as in `tf.keras`, where it is the second argument.

    Returns:
      An optax transformation; use it with `jmp_policy.value_and_grad` and `jmp_policy.optim.step`.

    Raises:
      TypeError: `initial_scale` is not a number (an array of one is), or `dynamic_growth_steps` is not an int.
      ValueError: either is not positive, or `initial_scale` not finite.

    Source: `keras.optimizers.LossScaleOptimizer` of Keras 3, and of `tf.keras` for `dynamic`.

    >>> state = LossScaleOptimizer(optax.sgd(0.1)).init({"w": jnp.ones(2)})
    >>> float(state.loss_scale.loss_scale), state.loss_scale.period
    (32768.0, 2000)
    """
    scale = _check_scale(initial_scale)
    if not dynamic:
        return loss_scaled(inner_optimizer, StaticLossScale(scale))
    return loss_scaled(inner_optimizer, make_dynamic_loss_scale(scale, _check_steps(dynamic_growth_steps)))


def _check_scale(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`initial_scale` must be a number, got {value}: `dynamic`, the second argument in tf.keras, is by keyword "
            f"here. For example: LossScaleOptimizer(inner, dynamic={value})."
        )
    if isinstance(value, jax.Array):
        return value
    received = f"got {quote(value)}. For example: LossScaleOptimizer(inner, 2.0**15)."
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(
            f"`initial_scale` must be a number, {received} "
            "A loss scale of another kind goes to jmp_policy.optim.loss_scaled(inner, loss_scale)."
        )
    if not 0 < value < float("inf"):
        raise ValueError(f"`initial_scale` must be positive and finite, {received}")
    return float(value)


def _check_steps(value: Any) -> int:
    received = f"got {quote(value)}. For example: LossScaleOptimizer(inner, dynamic_growth_steps=2000)."
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`dynamic_growth_steps` must be an int, {received}")
    if value < 1:
        raise ValueError(f"`dynamic_growth_steps` must be at least one, {received}")
    return int(value)
