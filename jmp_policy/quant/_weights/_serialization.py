"""Quantized weights in `flax.serialization`. Nothing else here needs Flax."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from ._array import ARRAYS, QuantizedArray


@functools.cache
def register_with_flax() -> None:
    """Registers quantized weights with Flax, once."""
    from flax import serialization

    serialization.register_serialization_state(QuantizedArray, _save_arrays, _restore_arrays)


def _save_arrays(weight: QuantizedArray) -> dict[str, Any]:
    """The arrays that there are; format and layout are not saved, and come from the target again."""
    return {name: array for name in ARRAYS if (array := getattr(weight, name)) is not None}


def _restore_arrays(target: QuantizedArray, state: Any) -> QuantizedArray:
    """The weight that was saved, as the target says; shapes and dtypes tell whether that is what it was.

    Raises:
      ValueError: what was saved is not of the target's format, sizes, or calibration.
    """
    wanted = _shapes(_save_arrays(target))
    found = _shapes(state) if isinstance(state, dict) and "values" in state else None
    if found != wanted:
        what = f"a weight that is not quantized: {_shape(state)}" if found is None else f"{found}"
        from flax import serialization

        path = serialization.current_path().removeprefix("./")
        raise ValueError(
            f"The target at {path!r} is {target!r}, of the arrays {wanted}; what was saved is {what}. Restore "
            "into what it was saved from: quantize the target with the policy of the checkpoint, or quantize what is "
            "restored into an unquantized one."
        )
    return dataclasses.replace(target, **{name: jnp.asarray(array) for name, array in state.items()})


def _shapes(arrays: dict[str, Any]) -> dict[str, str]:
    return {name: _shape(array) for name, array in sorted(arrays.items())}


def _shape(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
