"""Converts loss scales from and to PyTorch's `GradScaler`, so that a run can move between torch and JAX.

PyTorch is not required: `GradScaler.state_dict()` contains only numbers. The reference page of `compat` lists the
differences from torch.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .._base import PyTree, did_you_mean, load_lazily, quote
from ..loss_scale import DynamicLossScale, LossScale, NoOpLossScale, get_loss_scale

__all__ = ["grad_scaler_state_dict", "loss_scale_from_state_dict"]
__dir__ = lambda: __all__

if not TYPE_CHECKING:
    _ELSEWHERE = {"GradScaler": "DynamicLossScale, with value_and_grad and optim.loss_scaled", "autocast": "autocast"}
    __getattr__ = load_lazily(__name__, {}, {}, elsewhere=_ELSEWHERE)[0]

# Checks of the values, and their descriptions.
_ENTRIES: dict[str, tuple[Callable[[float], bool], str]] = {
    "scale": (lambda x: 0 < x < float("inf"), "a positive number"),
    "growth_factor": (lambda x: 1 < x < float("inf"), "a number above one"),
    "backoff_factor": (lambda x: 0 < x < 1, "a number between zero and one"),
    "growth_interval": (lambda x: x >= 1 and x.is_integer(), "a whole number of at least one"),
    "_growth_tracker": (lambda x: x >= 0 and x.is_integer(), "a whole number of at least zero"),
}
_LONGEST_INTERVAL = 2**31 - 1  # the count is int32, also in torch
_EXAMPLE = {
    "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0
}  # fmt: skip


def loss_scale_from_state_dict(state_dict: Mapping[str, Any]) -> LossScale:
    """Makes the loss scale that continues from a `torch.amp.GradScaler`.

    It grows on the `growth_interval`-th finite step in a row, of which `_growth_tracker` counts those so far, and backs
    off on every non-finite step. A saved scale beyond our floor or ceiling replaces it. With
    `loss_scaled(MultiSteps(tx, k))`, multiply `growth_interval` and `_growth_tracker` by k.

    Args:
      state_dict: the result of `GradScaler.state_dict()`, empty for a disabled scaler. Values are numbers, or arrays or
        tensors of shape `()`.

    Returns:
      A `DynamicLossScale`; a `NoOpLossScale` for an empty dict.

    Raises:
      TypeError: `state_dict` is not a mapping, or a value is not a number.
      ValueError: a key is missing or unknown, or a value is out of range.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9}
    >>> scale = jmp.compat.torch.loss_scale_from_state_dict(saved | {"_growth_tracker": 8})
    >>> float(scale.adjust(jnp.array(True)).loss_scale)
    2048.0
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected the state dict of a GradScaler, got {quote(state_dict)}. For example: {_EXAMPLE}.")
    if not state_dict:
        return NoOpLossScale()
    _check_keys(state_dict)
    numbers = {key: _number(key, state_dict[key]) for key in _ENTRIES}
    scale = numbers["scale"]
    return DynamicLossScale(
        scale,
        int(numbers["_growth_tracker"]),
        min(int(numbers["growth_interval"]), _LONGEST_INTERVAL),
        numbers["growth_factor"],
        min(1.0, scale),
        backoff_factor=numbers["backoff_factor"],
        max_loss_scale=max(2.0**24, scale),
    )


def grad_scaler_state_dict(state: PyTree) -> dict[str, Any]:
    """Makes the state dict for `scaler.load_state_dict(...)` of a `torch.amp.GradScaler`.

    Floor and ceiling are dropped, because torch has neither. The call waits for the device.

    Args:
      state: a loss scale, or any state with exactly one (an optax state, a TrainState, an nnx optimizer).

    Returns:
      A dict of Python numbers; an empty one for a `NoOpLossScale`, as for `GradScaler(enabled=False)`.

    Raises:
      ValueError: `state` has no loss scale, or several, or one that torch does not support: static, or with hysteresis.

    >>> import jmp_policy as jmp
    >>> jmp.compat.torch.grad_scaler_state_dict(jmp.DynamicLossScale(1024.0, counter=7))["_growth_tracker"]
    7
    """
    scale = get_loss_scale(state)
    if isinstance(scale, NoOpLossScale):
        return {}
    if not isinstance(scale, DynamicLossScale) or scale.hysteresis > 1:
        raise ValueError(
            f"torch's GradScaler has neither a static scale nor hysteresis, got {scale!r}. "
            "For example: DynamicLossScale(1024.0)."
        )
    return {
        "scale": float(scale.loss_scale),
        "growth_factor": scale.factor,
        "backoff_factor": scale.backoff_factor,
        "growth_interval": scale.period,
        "_growth_tracker": int(scale.counter),
    }


def _check_keys(state_dict: Mapping[str, Any]) -> None:
    for key in state_dict:
        if key not in _ENTRIES:
            parts = ((name, part) for name, part in state_dict.items() if isinstance(part, Mapping))
            whole = next((name for name, part in parts if _ENTRIES.keys() <= part.keys()), None)
            suggestion = did_you_mean(key, _ENTRIES) if whole is None else f"For example: checkpoint[{whole!r}]."
            raise ValueError(f"Unknown key {quote(key)} in the state dict of a GradScaler. {suggestion}")
    missing = [key for key in _ENTRIES if key not in state_dict]
    if missing:
        raise ValueError(
            f"The state dict of a GradScaler lacks {', '.join(map(repr, missing))}: it has "
            f"{quote(sorted(state_dict))}. For example: {_EXAMPLE}."
        )


def _number(key: str, value: Any) -> float:
    is_valid, description = _ENTRIES[key]
    message = f"{key!r} must be {description}, got {quote(value)}. For example: {_EXAMPLE[key]}."
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and getattr(value, "shape", None) != ():
        raise TypeError(message)
    if not is_valid(float(value)):
        raise ValueError(message)
    return float(value)
