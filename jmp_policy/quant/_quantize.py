"""Post-training quantization: of linen's variables here, of nnx models by their adapter."""

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


@overload  # whose leaves are not all arrays any more
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
    """Quantizes the weights of a trained model, and returns the same kind of thing.

    What is returned computes the very numbers that the model under the policy computes from its floating weights. It
    runs inside of `jax.jit` as well, and on abstract arrays, as `jax.eval_shape` makes them, it is abstract.

    Args:
      target: linen variables, or their `params` alone; or an nnx model, with a policy or without.
      policy: a policy or map with a quantization, in any spelling; of a map, each module's weights get its own, and
        those whose policy has none stay as they are. Variables know the paths of their modules and not the types.
      clip: how the range of each weight is chosen, as of `quantize_array`.
      input_clips: from `calibrate`: by module path, the magnitude to clip a layer's inputs to. Layers whose inputs are
        not quantized have no use for theirs.
      stacked: for variables: patterns of the paths of modules whose weights have a leading axis of layers, as
        `nn.scan` and `nn.vmap` make them; each covers the modules inside as well, and adds one axis. Those with biases
        are known by these.

    Returns:
      Variables, whose leaves `kernel` and `embedding` of two or more axes are `QuantizedArray`s, for
      `with_policy(model, policy).apply`; or a model with the policy, which runs as it is. A weight that has fewer
      elements than the `min_size` of its format stays as it is.

    Raises:
      ValueError: the policy has no quantization; nothing is there to quantize; something is quantized already;
        blocks do not divide a weight; a rule for a type is to decide for variables; or `clip`, `input_clips` or
        `stacked` is not of its kind, or names nothing.
      TypeError: `target` is neither.

    Warns:
      UserWarning: a rule of the map decides for no module; of variables, for none that has parameters.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}}
    >>> jmp.quant.quantize(params, "int8_from_float32")["dense"]["kernel"]
    QuantizedArray(int8, shape=(64, 64), dtype=float32)
    """
    if is_policy_spec(target) and not is_policy_spec(policy):
        refuse_order("quantize", target, policy)
    quantizer = Quantizer(get_policy(policy), clip, input_clips or {})
    adapter = None if isinstance(target, type) else find_adapter(target)
    if adapter is not None and adapter.quantize is not None:
        if stacked:
            raise ValueError("stacked is for linen's variables: the layers of an nnx model tell which axes are theirs.")
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
    """Whether a mapping is the state of an nnx model, or has such a model in it."""
    return any(is_flax_object(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_flax_object))


def _name_kind(target: Any) -> str:
    return f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"


def quantize_variables(variables: Mapping[str, Any], quantizer: Quantizer, stacked: Collection[str]) -> Any:
    """Quantizes the weights in a tree of variables; see `quantize`.

    Raises:
      ValueError: a rule of the map names a type, or a pattern of `stacked` is not valid or matches nothing.
    """
    given = quantizer.given
    _check_keys(given)
    if "flax.serialization" in sys.modules:  # the library loads no Flax by itself; whoever has may save what this makes
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
    """The patterns that say whose weights have leading axes of layers: as of a map, each covers what is inside."""

    def __init__(self, patterns: Collection[str]) -> None:
        if isinstance(patterns, str):
            raise ValueError(f"stacked is a collection of patterns, got the string {patterns!r}; write [{patterns!r}].")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} of stacked is no valid pattern: {error}. For example: stacked=['blocks']."
                ) from None
        self._unused = dict.fromkeys(patterns)
        self._patterns = tuple(self._unused)
        self._modules: list[str] = []

    def count_axes(self, module: str) -> int:
        """How many leading axes of layers the weights of a module have: one for each pattern that covers it."""
        self._modules.append(module)
        around = list_paths_to(module)[1:] or [module]
        covering = [p for p in self._patterns if any(re.fullmatch(p, path) for path in around)]
        for pattern in covering:
            self._unused.pop(pattern, None)
        return len(covering)

    def check(self) -> None:
        """Checks that each pattern covered a module with a weight."""
        for pattern in self._unused:
            known = ", ".join(map(repr, self._modules[:5])) or "none"
            raise ValueError(f"{pattern!r} of stacked covers no module with a weight. Such modules are {known}.")


def _check_keys(given: Policy | PolicyMap) -> None:
    """Checks that the variables alone tell which rule holds."""
    types = [rule.key for rule in given.rules if isinstance(rule.key, type)] if isinstance(given, PolicyMap) else []
    if types:
        name = types[0].__qualname__
        raise ValueError(
            f"A rule of the map is for the type {name}, and variables do not tell the types of their modules. Give the "
            "rule a pattern of paths. For example: PolicyMap({r'block_\\d+/mlp': 'int8_from_float32'})."
        )


def _find_bias(params: PyTree, path: KeyPath) -> PyTree:
    for name in _join_path(path).split("/")[:-1]:
        params = params[name]
    return params.get("bias")


def _list_modules(params: PyTree) -> list[str]:
    """Lists the paths of all modules with parameters, and of the modules around them."""
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
