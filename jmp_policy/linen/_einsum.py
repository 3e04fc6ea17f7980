"""`nn.Einsum`, whose product is no field, with a product of ours."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from ..quant._bilinear import Einsum, label_einsum


def equation_of(module: nn.Einsum, einsum_str: str | None) -> str | None:
    """The equation of a call; `None` where there is not just one, of which Flax says what is wrong."""
    written_twice = module.einsum_str is not None and einsum_str is not None
    return None if written_twice else module.einsum_str or einsum_str


def bias_shape(module: nn.Einsum, equation: str, inputs: jax.Array) -> tuple[int, ...] | None:
    """The shape of its bias: the axes of its kernel that are in the result; `None` without one."""
    labels = label_einsum(inputs.ndim, len(module.shape), Einsum(equation))
    lengths = dict(zip(labels.right, module.shape, strict=True))
    return tuple(lengths[label] for label in labels.out if label in lengths) if module.use_bias else None


def computed(
    module: nn.Einsum, equation: str, inputs: jax.Array, kernel: Any, promote: Callable, multiply: Callable
) -> jax.Array:
    """What the module computes.

    Args:
      module: bound, whose method is running.
      equation: of the call.
      inputs: floating.
      kernel: its parameter.
      promote: as the module's `promote_dtype`.
      multiply: as `jnp.einsum`.
    """
    shape, bias = bias_shape(module, equation, inputs), None
    if shape is not None:
        bias = module.param("bias", module.bias_init, list(shape), module.param_dtype)
    labels = label_einsum(inputs.ndim, len(module.shape), Einsum(equation))
    lengths = dict(zip(labels.right, module.shape, strict=True))
    inputs, kernel, bias = promote(inputs, kernel, bias, dtype=module.dtype)
    options = {"precision": module.precision, "preferred_element_type": module.preferred_element_type}
    out = multiply(equation, inputs, kernel, **options)
    return out if bias is None else out + bias.reshape([lengths.get(label, 1) for label in labels.out])
