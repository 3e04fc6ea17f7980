"""The variables of a linen model with quantized weights."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from .._policy import Policy
from .._policy_map import PolicyMap
from ._array import QuantizedArray, quantize_array
from ._clip import Clip
from ._layer import WEIGHT_NAMES
from ._layout import kernel_layout, table_layout, why_left


def quantize_variables(
    variables: Mapping[str, Any],
    given: Policy | PolicyMap,
    clip: Clip,
    input_clips: Mapping[str, Any],
    stacked: Collection[str],
) -> Any:
    """The same tree, whose weights are quantized; see `quantize`."""
    params: Any = variables.get("params", variables)
    quantized: list[str] = []

    def leaf(path: tuple, value: Any) -> Any:
        names = [str(key.key) for key in path]
        module, name = "/".join(names[:-1]), names[-1]
        policy = given if isinstance(given, Policy) else given[module]
        array = value.unbox() if hasattr(value, "unbox") else value
        if name not in WEIGHT_NAMES or np.ndim(array) < 2 or policy.quantization is None:
            return value
        if name == "embedding":
            layout = table_layout(array.shape)
        else:
            bias = _sibling(params, names[:-1], "bias")
            depth = int(any(re.fullmatch(pattern, module) for pattern in stacked))
            layout = kernel_layout(array.shape, None if bias is None else bias.shape, depth)
        if why_left(array.shape, layout, policy.quantization):
            return value
        quantized.append(module)
        where = f" '{module}/{name}'"
        options = {"clip": clip, "input_clip": input_clips.get(module), "where": where}
        new = quantize_array(array, policy.quantization, layout, **options)
        return value.replace_boxed(new) if hasattr(value, "replace_boxed") else new

    new = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=_is_whole)
    if not quantized:
        raise ValueError(f"Nothing to quantize under {given}.")
    if "params" not in variables:
        return new
    make: Any = type(variables)
    return make({**variables, "params": new})


def _is_whole(node: Any) -> bool:
    return isinstance(node, QuantizedArray) or hasattr(node, "replace_boxed")


def _sibling(params: Any, names: list[str], name: str) -> Any:
    for key in names:
        params = params[key]
    found = params.get(name)
    return found.unbox() if hasattr(found, "unbox") else found
