"""Keras's dtype policy: a name with its compute and variable dtype."""

from collections.abc import Hashable
from typing import Any

from ..._base import DTypeLike, cast_floating, quote
from ...policy import Policy as JmpPolicy, default_policy, parse_policy


class DTypePolicy:
    """A dtype policy under Keras's name, with Keras's attributes.

    Immutable and hashable. `jmp_policy.get_policy` and `with_policy` accept it.

    Args:
      name: the name of a floating dtype, `"mixed_float16"`, `"mixed_bfloat16"`, or any other string that
        `jmp_policy.get_policy` reads and that quantizes nothing; `None` for the global policy's.

    Raises:
      TypeError: `name` is not a string.
      ValueError: `name` names no policy, or a quantized one, which is a `QuantizedDTypePolicy`.

    >>> import jmp_policy as jmp
    >>> from jmp_policy.compat import keras
    >>> policy = keras.DTypePolicy("mixed_float16")
    >>> policy, policy.compute_dtype, policy.variable_dtype
    (<DTypePolicy "mixed_float16">, 'float16', 'float32')
    >>> jmp.get_policy(policy).name
    'mixed_float16'
    """

    def __init__(self, name: str | None = None):
        self._name = default_jmp_policy().name if name is None else name
        self._policy = _parse_name(self._name)

    @property
    def name(self) -> str:
        """The given name."""
        return self._name

    @property
    def compute_dtype(self) -> str | None:
        """Name of the compute dtype; `None` if it is inferred from the first input."""
        dtype = self._policy.compute_dtype
        return None if dtype is None else str(dtype)

    @property
    def variable_dtype(self) -> str | None:
        """Name of the dtype of variables; `None` if it is inferred from the first input."""
        dtype = self._policy.param_dtype
        return None if dtype is None else str(dtype)

    @property
    def quantization_mode(self) -> str | None:
        """`None`, except for quantized policies."""
        return None

    def convert_input(self, x: Any, autocast: bool, dtype: DTypeLike) -> Any:
        """Casts the floating arrays of `x` to `dtype` if `autocast` is true."""
        return cast_floating(x, dtype) if autocast else x

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this policy, for JSON."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns the policy of a `get_config()`."""
        return cls(**config)

    def __jmp_policy__(self) -> Any:
        return self._policy

    def __jmp_key__(self) -> Hashable:
        return type(self), repr(self.get_config())

    def __eq__(self, other: object) -> bool:
        return _family(self) is _family(other) and self.get_config() == other.get_config()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f'<{_family(self).__name__} "{self.name}">'


class FloatDTypePolicy(DTypePolicy):
    """Keras's other name for `DTypePolicy`; the two are equal.

    >>> from jmp_policy.compat import keras
    >>> keras.FloatDTypePolicy("bfloat16") == keras.DTypePolicy("bfloat16")
    True
    """


def default_jmp_policy() -> JmpPolicy:
    """Returns the global policy, or the default of a global map."""
    policy = default_policy()
    default = policy if isinstance(policy, JmpPolicy) else policy.default
    return default  # pyright: ignore[reportReturnType] # get_policy closes a map before it is set


def _parse_name(name: object) -> JmpPolicy:
    if not isinstance(name, str):
        raise TypeError(
            f"'name' must be a string, such as 'mixed_float16'. Received: name={quote(name)} (of type {type(name)})"
        )
    try:
        policy = parse_policy(name)
        if policy.quantization is not None:
            raise ValueError("It is quantized. For example: QuantizedDTypePolicy('int8', 'mixed_bfloat16').")
    except ValueError as error:
        raise ValueError(
            f"Cannot convert {quote(name)} to a mixed precision DTypePolicy. Valid policies include 'mixed_float16', "
            f"'mixed_bfloat16', and the name of any float dtype such as 'float32'. {error}"
        ) from None
    return policy


def _family(policy: object) -> type:
    return DTypePolicy if type(policy) is FloatDTypePolicy else type(policy)
