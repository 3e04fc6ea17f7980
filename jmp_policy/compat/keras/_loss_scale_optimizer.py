"""Keras's loss-scaling optimizer, over optax."""

import optax

from ..._loss_scale import DynamicLossScale, StaticLossScale
from ...optim import loss_scaled


def LossScaleOptimizer(
    inner_optimizer: optax.GradientTransformation,
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
    *,
    dynamic: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """`jmp_policy.optim.loss_scaled` with Keras's arguments and defaults.

    The scale doubles after `dynamic_growth_steps` finite steps in a row, and halves, down to 1, on each that is not;
    Keras's has neither that floor nor the ceiling of 2**24.

    Args:
      inner_optimizer: the optax transformation to wrap.
      initial_scale: the scale to start from.
      dynamic_growth_steps: how many finite steps in a row make the scale grow.
      dynamic: whether the scale moves at all, as in `tf.keras`.

    Returns:
      An optax transformation; use it with `jmp_policy.value_and_grad` and `jmp_policy.optim.step`.

    Source: `keras.optimizers.LossScaleOptimizer` of Keras 3, and of `tf.keras` for `dynamic`.

    >>> state = LossScaleOptimizer(optax.sgd(0.1)).init({"w": jnp.ones(2)})
    >>> float(state.loss_scale.loss_scale), state.loss_scale.period
    (32768.0, 2000)
    """
    scale = DynamicLossScale(initial_scale, period=dynamic_growth_steps) if dynamic else StaticLossScale(initial_scale)
    return loss_scaled(inner_optimizer, scale)
