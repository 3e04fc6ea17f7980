"""Tells the step of a recurrent cell from other calls."""

from typing import Any

from flax import nnx


def carry_given(base: type, method: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The carry that a call hands to a recurrent cell; `None` if the call is no step of one."""
    if not issubclass(base, nnx.RNNCellBase) or getattr(method, "__name__", "") != "__call__":
        return None
    return args[0] if args else kwargs.get("carry")
