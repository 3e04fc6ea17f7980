"""The field of a linen layer that holds the function it multiplies with, in whose place a policy may write ours."""

import inspect
from collections.abc import Callable
from typing import Any

from flax import linen as nn
from jax import lax

from .._memory import remember_weakly
from ..quant._float8_layer import Float8Multiply
from ..quant._layer import Multiply, Promote

OPERATIONS: dict[str, Callable[..., Any]] = {
    "dot_general": lax.dot_general,
    "conv_general_dilated": lax.conv_general_dilated,
}
"""The names of such fields, and the functions that they hold by default."""


@remember_weakly
def operation_field(kind: type[nn.Module]) -> str | None:
    """The field of a class of layers; `None` if it has none, or is none of Flax's kind."""
    if not hasattr(kind, "promote_dtype"):
        return None
    return next((name for name in OPERATIONS if hasattr(kind, f"{name}_cls")), None)


def open_operation(module: nn.Module) -> str | None:
    """The field of a layer whose author left it at its default, if all places share the weight that it multiplies."""
    name = operation_field(type(module))
    if name is None or not getattr(module, "shared_weights", True):
        return None
    return name if all(is_default(module, field) for field in (name, f"{name}_cls")) else None


def is_default(module: nn.Module, name: str) -> bool:
    """Whether the author of a layer left a function in its fields as it was; what stands there may be ours."""
    value = getattr(module, name, None)
    is_ours = isinstance(value, Promote | Multiply | Float8Multiply)
    return value is None or is_ours or value is getattr(type(module), name, None)


def rewritten_by(module: nn.Module) -> str | None:
    """The method by which the author of a layer makes another weight of its parameter; `None` if there is none.

    That method takes and returns numbers, and is to have the same ones before and after the parameter is quantized.
    """
    if type(module).param is not nn.Module.param:
        return "param"
    is_table = isinstance(module, nn.Embed)
    return "setup" if is_table and inspect.unwrap(type(module).setup) is not inspect.unwrap(nn.Embed.setup) else None
