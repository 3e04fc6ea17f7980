"""Post-training quantization of linen variables; adapters quantize nnx models."""

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.tree_util import KeyPath

from .._base import PyTree, list_paths_to, warn_user
from ..modules import find_adapter, is_flax_object, refuse_order
from ..policy import Policy, PolicyMap, PolicySpec, get_policy, is_policy_spec, match_policy
from ._numbers import Clip
from ._quantizer import Quantizer
from ._weights import WEIGHT_NAMES, QuantizedArray, register_with_flax, weight_layout

T = TypeVar("T")


@overload
def quantize(
    target: dict[str, Any],
    policy: PolicySpec,
    *,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
) -> dict[str, Any]: ...
@overload
def quantize(
    target: T,
    policy: PolicySpec,
    *,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
) -> T: ...
def quantize(
    target: Any,
    policy: "PolicySpec",
    *,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
) -> Any:
    """Quantizes the weights of a trained model, and returns the same kind of object.

    The result computes exactly the outputs of the floating model under the policy. `quantize` works under `jax.jit`
    too, and is abstract for the abstract arrays of `jax.eval_shape`.

    Args:
      target: linen variables or their `params`; or an nnx model, with or without a policy.
      policy: a policy or map with a quantization, in any spelling. Under a map, each module's weights get its own
        format; those whose policy has none stay unchanged. For linen variables, rules must be paths, because variables
        have no module types.
      clip: how the range of each weight is chosen, as for `quantize_array`.
      input_clips: magnitudes by module path to clip a layer's inputs to, from `calibrate`. They are ignored where
        inputs are not quantized.
      stacked: for variables: patterns of paths of modules whose weights have a leading axis of layers, as from
        `nn.scan` and `nn.vmap`. Each covers submodules too, and stands for one leading axis. Modules with a bias need
        no pattern.

    Returns:
      Variables whose `kernel` and `embedding` leaves of two or more axes are `QuantizedArray`s, for
      `with_policy(model, policy).apply`; or a model with the policy. Weights with fewer elements than the `min_size` of
      their format stay unchanged.

    Raises:
      ValueError: the policy has no quantization; there is nothing to quantize; a weight is quantized already or blocks
        do not divide it; a rule for variables has a type as its key; or `clip`, `input_clips` or `stacked` is not
        valid, or matches nothing.
      TypeError: `target` is neither.

    Warns:
      UserWarning: no module (for variables: none with parameters) gets its policy from a rule of the map.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}}
    >>> jmp.quant.quantize(params, "int8_from_float32")["dense"]["kernel"]
    QuantizedArray(int8, shape=(64, 64), dtype=float32)
    """
    if is_policy_spec(target) and not is_policy_spec(policy):
        refuse_order("quantize", target, policy)
    return apply_quantizer(target, Quantizer(get_policy(policy), clip, input_clips or {}), stacked)


def apply_quantizer(target: Any, quantizer: Quantizer, stacked: Collection[str]) -> Any:
    """Quantizes variables or an nnx model by a quantizer."""
    adapter = None if isinstance(target, type) else find_adapter(target)
    if adapter is not None and adapter.quantize is not None:
        if stacked:
            raise ValueError("stacked is for linen variables: the layers of an nnx model know their own axes.")
        quantized, unused = adapter.quantize(target, quantizer.given, quantizer.quantize_weight)
        quantizer.check(unused)
        for message in unused:
            warn_user(message)
        return quantized
    if isinstance(target, Mapping) and not _has_flax_objects(target):
        return quantize_variables(target, quantizer, stacked)
    raise TypeError(
        f"quantize takes linen variables or an nnx model, got {_name_kind(target)}. "
        "For example: quantize(model.init(key, x), 'int8_from_mixed_bfloat16')."
    )


def _has_flax_objects(tree: PyTree) -> bool:
    """True if a mapping is the state of an nnx model, or contains such a model."""
    return any(is_flax_object(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_flax_object))


def _name_kind(target: Any) -> str:
    return f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"


def quantize_variables(variables: Mapping[str, Any], quantizer: Quantizer, stacked: Collection[str]) -> Any:
    given = quantizer.given
    _check_keys(given)
    if "flax.serialization" in sys.modules:  # only if Flax is loaded already
        register_with_flax()
    stacks = _Stacks(stacked)
    params: PyTree = variables.get("params", variables)

    def quantize_leaf(path: KeyPath, value: Any) -> Any:
        module, _, name = _join_path(path).rpartition("/")
        array = _unbox(value)
        if name not in WEIGHT_NAMES or np.ndim(array) < 2:
            return value
        bias, depth = _unbox(_find_bias(params, path)), stacks.count_axes(module)
        layout = weight_layout(name, array.shape, None if bias is None else np.shape(bias), depth)
        policy = match_policy(given, module).policy
        new = quantizer.quantize_weight(module, name, array, layout, policy)
        if new is None:
            return value
        return value.replace_boxed(new) if _is_boxed(value) else new

    new = jax.tree_util.tree_map_with_path(quantize_leaf, params, is_leaf=_is_whole)
    stacks.check()
    unused = [] if isinstance(given, Policy) else given.explain_unused(_list_modules(params))
    quantizer.check(unused)
    for message in unused:
        warn_user(message)
    if "params" not in variables:
        return new
    make: Any = type(variables)
    return make({**variables, "params": new})


class _Stacks:
    """Patterns of modules whose weights have leading axes of layers; each covers the modules inside."""

    def __init__(self, patterns: Collection[str]) -> None:
        if isinstance(patterns, str):
            raise ValueError(f"stacked is a collection of patterns, got the string {patterns!r}; write [{patterns!r}].")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} of stacked is not a valid pattern: {error}. For example: stacked=['blocks']."
                ) from None
        self._unused = dict.fromkeys(patterns)
        self._patterns = tuple(self._unused)
        self._modules: list[str] = []

    def count_axes(self, module: str) -> int:
        """Returns the number of patterns that cover a module."""
        self._modules.append(module)
        around = list_paths_to(module)[1:] or [module]
        covering = [p for p in self._patterns if any(re.fullmatch(p, path) for path in around)]
        for pattern in covering:
            self._unused.pop(pattern, None)
        return len(covering)

    def check(self) -> None:
        for pattern in self._unused:
            known = ", ".join(map(repr, self._modules[:5])) or "none"
            raise ValueError(f"{pattern!r} of stacked covers no module with a weight. Such modules are {known}.")


def _check_keys(given: Policy | PolicyMap) -> None:
    types = [rule.key for rule in given.rules if isinstance(rule.key, type)] if isinstance(given, PolicyMap) else []
    if types:
        name = types[0].__qualname__
        raise ValueError(
            f"A rule of the map is for the type {name}, and variables do not know the types of their modules. Use "
            "a pattern of paths as its key. For example: PolicyMap({r'block_\\d+/mlp': 'int8_from_float32'})."
        )


def _find_bias(params: PyTree, path: KeyPath) -> PyTree:
    for name in _join_path(path).split("/")[:-1]:
        params = params[name]
    return params.get("bias")


def _list_modules(params: PyTree) -> list[str]:
    """Lists the paths of modules with parameters, and of the modules around them."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=_is_whole)
    names = [_join_path(path).split("/")[:-1] for path, _ in leaves]
    return sorted({"/".join(some[:n]) for some in names for n in range(len(some) + 1)})


def _join_path(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_whole(node: Any) -> bool:
    return isinstance(node, QuantizedArray) or _is_boxed(node)


def _is_boxed(value: Any) -> bool:
    return hasattr(value, "replace_boxed")


def _unbox(value: Any) -> Any:
    return value.unbox() if _is_boxed(value) else value
