"""Keras's `LossScaleOptimizer` and loss scales in configs, and TensorFlow's experimental `Policy`."""

import dataclasses
import numbers
from typing import Any

import jax
import numpy as np
import optax

from ..._base import quote
from ...loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from ...optim import loss_scaled
from ._dtype_policy import DTypePolicy

_SCALES = {kind.__name__: kind for kind in (NoOpLossScale, StaticLossScale, DynamicLossScale)}
_TENSORFLOW = {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 2.0}


def LossScaleOptimizer(
    inner_optimizer: optax.GradientTransformation,
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
    *,
    dynamic: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """`jmp_policy.optim.loss_scaled` with Keras's arguments and defaults.

    The scale doubles after `dynamic_growth_steps` finite steps in a row, and halves on each non-finite step. It stays
    between 1 and 2**24; an initial scale beyond either bound replaces it.

    Args:
      inner_optimizer: the optax transformation to wrap.
      initial_scale: the scale to start from.
      dynamic_growth_steps: the number of finite steps in a row after which the scale grows.
      dynamic: whether the scale changes at all, as in `tf.keras`, where it is the second argument.

    Returns:
      An optax transformation; use it with `jmp_policy.value_and_grad` and `jmp_policy.optim.step`.

    Raises:
      TypeError: `initial_scale` is not a number (an array of one is), or `dynamic_growth_steps` is not an int.
      ValueError: either is not positive, or `initial_scale` not finite.

    >>> import jax.numpy as jnp, optax
    >>> from jmp_policy.compat import keras
    >>> state = keras.LossScaleOptimizer(optax.sgd(0.1)).init({"w": jnp.ones(2)})
    >>> float(state.loss_scale.loss_scale), state.loss_scale.period
    (32768.0, 2000)
    """
    scale: Any = initial_scale
    if not isinstance(initial_scale, jax.Array):
        _check_number(
            "initial_scale", initial_scale, int | float | np.integer | np.floating, "a positive finite number"
        )
        scale = float(initial_scale)
    if not dynamic:
        return loss_scaled(inner_optimizer, StaticLossScale(scale))
    _check_number("dynamic_growth_steps", dynamic_growth_steps, int | np.integer, "a positive int")
    return loss_scaled(inner_optimizer, make_dynamic_loss_scale(scale, int(dynamic_growth_steps)))


def _check_number(name: str, value: Any, kinds: Any, must_be: str) -> None:
    is_kind = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_kind or not 0 < value < float("inf"):
        raise (ValueError if is_kind else TypeError)(
            f"`{name}` must be {must_be}, got {quote(value)}. For example: "
            "LossScaleOptimizer(inner, 2.0**15, dynamic_growth_steps=2000, dynamic=True). A loss scale of another kind "
            "goes to jmp_policy.optim.loss_scaled(inner, loss_scale)."
        )


def make_dynamic_loss_scale(scale: Any, period: int, factor: float = 2.0) -> DynamicLossScale:
    """Makes a loss scale whose floor of 1 and ceiling of 2**24 are extended to its start."""
    if not isinstance(scale, float):  # a traced array cannot be compared with the bounds
        return DynamicLossScale(scale, 0, period, factor)
    return DynamicLossScale(scale, 0, period, factor, min(1.0, scale), max_loss_scale=max(2.0**24, scale))


def read_loss_scale(spec: Any) -> LossScale | None:
    """Reads `"dynamic"`, a number for a constant, a loss scale, None, or a config, also of TensorFlow."""
    if spec is None or isinstance(spec, LossScale):
        return spec
    if isinstance(spec, str) and spec == "dynamic":
        return DynamicLossScale()
    if isinstance(spec, numbers.Real) and not isinstance(spec, bool):
        return StaticLossScale(float(spec))
    if isinstance(spec, dict) and isinstance(spec.get("config"), dict):
        scale = _from_config(spec.get("class_name"), spec["config"])
        if scale is not None:
            return scale
    raise ValueError(
        f"Could not interpret loss scale identifier: {quote(spec)}. It is 'dynamic', a number, a LossScale or None, "
        "for example Policy('mixed_float16', loss_scale='dynamic')."
    )


def _from_config(class_name: object, config: dict[str, Any]) -> LossScale | None:
    if class_name == "FixedLossScale" and config.keys() == {"loss_scale_value"}:
        return StaticLossScale(float(config["loss_scale_value"]))
    if class_name == "DynamicLossScale" and config.keys() <= _TENSORFLOW.keys():
        scale, period, factor = (_TENSORFLOW | config).values()
        return make_dynamic_loss_scale(float(scale), int(period), float(factor))
    try:
        return _SCALES[str(class_name)](**config)
    except (KeyError, TypeError):  # an unknown class or argument
        return None


_ALIASES = {"infer_float32_vars": "infer_with_float32_vars", "float32_with_float32_vars": "float32"}


class Policy(DTypePolicy):
    """A dtype policy with a loss scale, as TensorFlow 2.0 to 2.4 had under `mixed_precision.experimental`.

    Args:
      name: as of `DTypePolicy`, and `"infer"`, `"infer_with_float32_vars"`, `"infer_float32_vars"` (dtypes come from
        the first input) and `"<dtype>_with_float32_vars"`.
      loss_scale: `"dynamic"`, a number for a constant scale, a `LossScale` or the config of one (also TensorFlow's), or
        `None` for no scaling. `"auto"` is dynamic for `"mixed_float16"` and `None` for any other name, as in Keras;
        `jmp_policy.Policy.loss_scale` looks at the compute dtype instead.

    Raises:
      TypeError: `name` is not a string.
      ValueError: `name` names no policy, or `loss_scale` none of these.

    >>> from jmp_policy.compat import keras
    >>> policy = keras.Policy("mixed_float16", loss_scale=1024)
    >>> policy, policy.should_cast_variables
    (<Policy "mixed_float16", loss_scale=StaticLossScale(loss_scale=1024.0)>, True)
    """

    def __init__(self, name: str, loss_scale: Any = "auto"):
        if name is None:  # the legacy class had no default
            raise TypeError("'name' must be a string, such as 'mixed_float16'. Received: name=None")
        super().__init__(_ALIASES.get(name, name) if isinstance(name, str) else name)
        self._is_default = isinstance(loss_scale, str) and loss_scale == "auto"
        if self._is_default:
            loss_scale = "dynamic" if self.name == "mixed_float16" else None
        self._loss_scale = read_loss_scale(loss_scale)

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale to train with, or `None`."""
        return self._loss_scale

    @property
    def should_cast_variables(self) -> bool:
        """True if variable and compute dtype differ."""
        return self.variable_dtype != self.compute_dtype

    def resolve(self, *inputs: Any) -> "Policy":
        """Returns this policy with inferred dtypes taken from the first floating input, as at a layer's first call."""
        if self.compute_dtype is not None:
            return self
        dtype = self._policy.resolve(*inputs).compute_dtype
        return Policy(f"{dtype}_with_float32_vars" if self.variable_dtype else str(dtype), self._loss_scale)

    def get_config(self) -> dict[str, Any]:
        """Like `DTypePolicy.get_config`, with the loss scale if it is not the default."""
        config, scale = super().get_config(), self._loss_scale
        if self._is_default or scale is None:
            return config if self._is_default else config | {"loss_scale": None}
        given: Any = scale
        fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}
        arguments = {name: x.item() if isinstance(x, jax.Array) else x for name, x in fields.items()}
        return config | {"loss_scale": {"class_name": type(scale).__name__, "config": arguments}}

    def __repr__(self) -> str:
        return f'<Policy "{self.name}", loss_scale={self.loss_scale}>'
