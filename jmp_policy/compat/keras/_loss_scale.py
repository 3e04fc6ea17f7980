"""Loss scales as Keras and TensorFlow write them down."""

import numbers
from typing import Any

import jax

from ..._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from ..._messages import quote

_SCALES = {kind.__name__: kind for kind in (NoOpLossScale, StaticLossScale, DynamicLossScale)}
_TENSORFLOW = {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 2.0}


def make_dynamic_loss_scale(scale: Any, period: int, factor: float = 2.0) -> DynamicLossScale:
    """The loss scale of a library without our floor of 1 and ceiling of 2**24, which yield to where it starts."""
    if not isinstance(scale, float):  # an array, which may be traced, and cannot be compared with the bounds
        return DynamicLossScale(scale, 0, period, factor)
    return DynamicLossScale(scale, 0, period, factor, min(1.0, scale), max_loss_scale=max(2.0**24, scale))


def read_loss_scale(spec: Any) -> LossScale | None:
    """Reads `"dynamic"`, a number for a constant, a loss scale, `None`, or the config of one, TensorFlow's too.

    Raises:
      ValueError: `spec` is none of these.

    >>> saved = {"initial_loss_scale": 8.0, "increment_period": 100, "multiplier": 4.0}
    >>> scale = read_loss_scale({"class_name": "DynamicLossScale", "config": saved})
    >>> float(scale.loss_scale), scale.period, scale.factor, scale.backoff_factor
    (8.0, 100, 4.0, 0.25)
    """
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


def write_loss_scale(scale: LossScale | None) -> dict[str, Any] | None:
    """The config that `read_loss_scale` reads, for JSON."""
    if scale is None:
        return None
    plain = {name: x.item() if isinstance(x, jax.Array) else x for name, x in vars(scale).items()}
    arguments = {name: value for name, value in plain.items() if not name.startswith("_")}
    return {"class_name": type(scale).__name__, "config": arguments}


def _from_config(class_name: object, config: dict[str, Any]) -> LossScale | None:
    if class_name == "FixedLossScale" and config.keys() == {"loss_scale_value"}:
        return StaticLossScale(float(config["loss_scale_value"]))
    if class_name == "DynamicLossScale" and config.keys() <= _TENSORFLOW.keys():
        scale, period, factor = (_TENSORFLOW | config).values()
        return make_dynamic_loss_scale(float(scale), int(period), float(factor))
    try:
        return _SCALES[str(class_name)](**config)
    except (KeyError, TypeError):  # another class, or an argument that it does not have
        return None
