"""Checks of the settings of loss scales. A value that is traced, or on other hosts, is not checked."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from .._base import quote, warn_user

SMALLEST = 2.0**-126  # the smallest normal float32 number; XLA may flush smaller ones to zero
LARGEST = float(np.finfo(np.float32).max)
NEVER = 2**31  # an int32 counter never completes a longer period


def check_scale(value: object) -> float | None:
    """Checks that a value can be a scale, and returns its number if it can be read."""
    number = _read_number(value)
    if number is None:  # a tracer, or a placeholder with which JAX rebuilds a tree
        is_array = hasattr(value, "shape") or type(value) is object
        _require(is_array, "loss_scale", value, "a positive number", "2.0**15")
    else:
        _check_normal(number, "loss_scale", value, "2.0**15")
    return number


def check_constant(value: object) -> float | None:
    """Like `check_scale`, but warns of zero."""
    if _read_number(value) != 0:
        return check_scale(value)
    warn_user(
        "loss_scale=0 makes every gradient 0 / 0, which is nan. For example: StaticLossScale(2.0**15), or "
        "NoOpLossScale(), which scales nothing."
    )
    return 0.0


def check_settings(
    period: int | float,
    factor: float,
    min_loss_scale: ArrayLike,
    backoff_factor: float | None,
    max_loss_scale: float,
    hysteresis: int | float,
) -> dict[str, Any]:
    """Checks the settings of a dynamic loss scale, and returns them as Python numbers."""
    _require(factor > 1, "factor", factor, "greater than one", "2")
    floor, ceiling, backoff = _read_floor(min_loss_scale), float(max_loss_scale), backoff_factor
    backoff = float(1 / factor if backoff is None else backoff)
    _require(0 < backoff < 1, "backoff_factor", backoff, "between zero and one", "0.5")
    _require(ceiling >= floor, "max_loss_scale", ceiling, f"at least min_loss_scale={floor}", "2.0**24")
    return {
        "period": _read_count(period, "period", "2000"),
        "factor": float(factor),
        "min_loss_scale": floor,
        "backoff_factor": backoff,
        "max_loss_scale": ceiling,
        "hysteresis": _read_count(hysteresis, "hysteresis", "2"),
    }


_OTHER_NAMES = {
    **dict.fromkeys(("init_scale", "initial_scale", "scale"), "loss_scale"),
    **dict.fromkeys(("growth_interval", "dynamic_growth_steps", "scale_window"), "period"),
    **dict.fromkeys(("growth_factor", "scale_factor"), "factor"),
    **dict.fromkeys(("minimum_scale", "min_scale"), "min_loss_scale"),
    "max_scale": "max_loss_scale",
    "fin_steps": "counter",
}
"""Argument names of PyTorch, Flax, Keras, Apex and DeepSpeed, with our names."""


def explain_argument(name: str) -> str:
    """Returns the error for an argument that `DynamicLossScale` does not have, with our name for another library's."""
    if name == "enabled":
        return "DynamicLossScale() has no argument 'enabled'. A loss scale that does nothing is NoOpLossScale()."
    if name in _OTHER_NAMES:
        return f"DynamicLossScale() has no argument {name!r}. Its name is: {_OTHER_NAMES[name]}."
    return f"DynamicLossScale() got an unexpected keyword argument {name!r}"


_SCALER_METHODS = {
    "step": "optim.step(tx, grads, opt_state, params)",
    "update": "adjust(grads_finite) of a loss scale, or optim.step, which updates it",
    "unscale_": "unscale(grads) of a loss scale; value_and_grad unscales by itself",
    "get_scale": "metrics(opt_state)['loss_scale']",
    "state_dict": "compat.torch.grad_scaler_state_dict(opt_state)",
    "load_state_dict": "compat.torch.loss_scale_from_state_dict(state_dict)",
}
"""Methods of PyTorch's `GradScaler`, with our names."""


def explain_attribute(kind: str, name: str) -> str:
    """Returns the error for an attribute that a loss scale does not have, with our name for a method of PyTorch."""
    ours = f" A GradScaler's {name} is here: {_SCALER_METHODS[name]}." if name in _SCALER_METHODS else ""
    return f"{kind} has no attribute {name!r}.{ours}"


def check_scalar(value: object, name: str) -> None:
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape:
        raise ValueError(f"{name} must be a scalar, got an array of shape {shape}. For example: {name}=0.")


def clamp(scale: Any, number: float | None, floor: float, ceiling: float) -> Any:
    """Returns a scale within its bounds. `number` is the value of the scale, if it is known."""
    if number is None:
        bounds = np.float32(floor), np.float32(min(ceiling, LARGEST))
        return lax.clamp(bounds[0], scale, bounds[1]) if isinstance(scale, jax.Array) else scale
    name, bound = ("min_loss_scale", floor) if number < floor else ("max_loss_scale", ceiling)
    if np.float32(floor) <= np.float32(number) <= np.float32(min(ceiling, LARGEST)):
        return scale
    warn_user(
        f"loss_scale={number} is {'below' if number < floor else 'above'} {name}={bound}, so the scale starts at "
        f"{bound}. For example: DynamicLossScale({number}, {name}={number})."
    )
    return jnp.asarray(bound, jnp.float32)


def warn_if_not_floating(value: object, name: str) -> None:
    """Warns of an integer scale, as DeepMind's `jmp` does."""
    dtype = np.dtype(np.int32) if isinstance(value, int) else getattr(value, "dtype", None)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        warn_user(f"Expected floating type for {name}, got {dtype}")


def _read_floor(value: Any) -> float:
    check_scalar(value, "min_loss_scale")
    number = float(value)
    if number == 0:
        warn_user(
            "min_loss_scale=0 would let the loss scale become zero, and gradients cannot be divided by zero. The floor "
            "is 2.0**-126, the smallest normal number of float32. For example: min_loss_scale=1.0."
        )
        return SMALLEST
    _check_normal(number, "min_loss_scale", number, "1.0")
    return number


def _read_count(value: Any, name: str, example: str) -> int:
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()  # DeepMind's jmp accepts these
    is_count = is_whole or hasattr(value, "__index__")
    _require(is_count and value >= 1, name, value, "a positive int", example)
    return int(value)


def _read_number(value: Any) -> float | None:
    """Returns the number in a value, or None if it cannot be read now."""
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    _require(not is_bool, "loss_scale", value, "a positive number", "2.0**15")
    check_scalar(value, "loss_scale")
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    if isinstance(value, jax.Array):
        if isinstance(value, Tracer) or not value.is_fully_addressable:
            return None
        value = jax.device_get(value)
    try:
        return float(value) if is_array or isinstance(value, int | float) else None
    except OverflowError:  # an int
        return math.inf


def _check_normal(number: float, name: str, value: object, example: str) -> None:
    _require(0 < number < math.inf, name, value, "a positive number", example)
    of_float32 = "a normal number of float32, from 2.0**-126 to 2.0**128"
    _require(SMALLEST <= number <= LARGEST, name, value, of_float32, example)


def _require(holds: object, name: str, value: object, must_be: str, example: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {must_be}, got {quote(value)}. For example: {name}={example}.")
