"""Weights of quantized layers: stored, or floating and rounded when they are used."""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.tree_util import KeyPath

from .._base import ROUNDING_SCOPE, PyTree, describe, did_you_mean, is_floating_dtype, list_paths_to, warn_user
from ..modules import find_adapter, is_flax_object
from ..policy import Int8, Policy, PolicyMap, StoredFormat, default_policy, match_policy, stored_format_of
from ._array import QuantizedArray, UncalibratedError, quantize_array, register_weights_with_flax
from ._layout import (
    Layout,
    choose_format,
    describe_whole,
    reason_unquantized,
    weight_layout,
)
from ._numbers import Clip, check_clip

WEIGHT_NAMES = ("kernel", "embedding")  # Flax's names of weights to quantize, if they have two or more axes


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["format", "layout"])
@dataclasses.dataclass(frozen=True)
class FakeQuantized:
    """Floating weight that computes like a quantized one: in training, and before `quant.quantize`."""

    array: Any
    format: StoredFormat
    layout: Layout

    ndim = property(lambda self: self.array.ndim)
    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def quantize(self) -> QuantizedArray:
        """Returns the weight as `quant.quantize` would."""
        return quantize_array(self.array, self.format, self.layout)


StoredWeight = QuantizedArray | FakeQuantized


def fake_quantize(weight: StoredWeight, dtype: Any = None) -> jax.Array:
    """Rounds a weight to the values that its quantized form represents, with a straight-through gradient.

    Source: Jacob et al., CVPR 2018, section 3 (fake quantization).
    """
    if isinstance(weight, QuantizedArray):
        return weight.dequantize(dtype)
    dtype = weight.dtype if dtype is None else dtype
    return _round_weight(weight.array, weight.format, weight.layout, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
@jax.named_scope(ROUNDING_SCOPE)
def _round_weight(array: jax.Array, format: StoredFormat, layout: Layout, dtype: Any) -> jax.Array:
    return quantize_array(array, format, layout).dequantize(dtype)


@_round_weight.defjvp
def _pass_tangent(
    format: StoredFormat, layout: Layout, dtype: Any, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    return _round_weight(primals[0], format, layout, dtype), tangents[0].astype(dtype)


def prepare_weight(array: Any, format: StoredFormat, layout: Layout, where: str = "") -> Any:
    """Prepares an array for a matmul: quantized, `FakeQuantized`, or unchanged if `reason_unquantized` has a reason."""
    if isinstance(array, QuantizedArray):
        return match_format(array, format, where)
    format = choose_format(format, layout)
    if reason_unquantized(array.shape, layout, format):
        return array
    if isinstance(format, Int8):  # only stored weights have a static scale of inputs
        format = dataclasses.replace(format, act_scale="dynamic")
    return FakeQuantized(array, format, layout.of(array.shape))


def match_format(array: QuantizedArray, format: StoredFormat, where: str = "") -> QuantizedArray:
    """Replaces the format of a quantized weight by a policy's; raises if the policy stores other values."""
    format = choose_format(format, array.layout)
    if type(array.format) is type(format):
        if isinstance(format, Int8) and format.act_scale == "static" and array.input_clip is None:
            raise UncalibratedError(format, where)
        stored_options = {"block_size", "scale_rounding", "square_weights"}  # the others say how to compute
        names = {field.name for field in dataclasses.fields(format)} - stored_options
        if dataclasses.replace(array.format, **{name: getattr(format, name) for name in names}) == format:
            return array if array.format == format else dataclasses.replace(array, format=format)
    raise ValueError(
        f"The weight{where} is stored as {str(array.format)!r}, and its policy says {str(format)!r}. Give the model "
        f"the policy it was quantized with, such as '{array.format}_from_mixed_bfloat16', or quantize it again from "
        "the original."
    )


_SHOWN = 5  # weights in an error


class Quantizer:
    """Quantizes each weight of a linen or nnx model; arguments as for `quantize`."""

    def __init__(
        self, given: Policy | PolicyMap, clip: Clip, input_clips: Mapping[str, Any], explanation: Any = None
    ) -> None:
        if not has_quantization(given):
            raise ValueError(
                f"Nothing to quantize: {_describe_policy(given)} stores no quantized weights. "
                "For example: 'int8_from_mixed_bfloat16'."
            )
        self.given = given
        # The layouts of the weights that the model multiplies by in its own code, by path.
        self.own: dict[str, Layout] = {}
        self._explained: dict[str, Policy | None] = {}  # the policies of these weights
        self._unfit: list[str] = []  # paths of weights without a layout
        if explanation is not None:
            self._read_explanation(explanation)
        self._clip = check_clip(clip)
        self._input_clips = {path: _parse_magnitude(path, value) for path, value in input_clips.items()}
        self._modules: set[str] = set()
        self._left: dict[str, str] = {}
        self._quantized = 0
        self._whole: dict[str, str] = {}  # reasons why weights are on each device whole, by path

    def _read_explanation(self, explanation: Any) -> None:
        rows = getattr(explanation, "rows", None)
        if rows is None or not all(hasattr(row, "is_weight") for row in rows):
            raise TypeError(
                f"explanation is the result of explain, got {describe(explanation)}. "
                "For example: quantize(model, policy, explanation=explain(with_policy(model, policy), x))."
            )
        for row in rows:
            if row.is_weight and row.layout is not None:
                self.own[row.path], self._explained[row.path] = row.layout, row.policy
            elif row.is_weight:
                self._unfit.append(row.path)

    def _check_explained(self, path: str, array: Any, policy: Policy) -> None:
        """Raises if an explanation is of another model or policy."""
        layout, explained = self.own[path], self._explained[path]
        fits = len(array.shape) >= len(layout.contracted) + layout.channels and layout.of(array.shape) == layout
        if fits and explained is not None and explained.quantization == policy.quantization:
            return
        raise ValueError(
            f"The explanation is of another model or policy: it says that matmuls by {path!r} sum over "
            f"{layout.contracted} under {explained and explained.name!r}, and the weight has the shape "
            f"{tuple(array.shape)} and the policy {policy.name!r}. For example: "
            "explanation=explain(with_policy(model, policy), x)."
        )

    def quantize_weight(
        self, module: str, name: str, array: Any, layout: Layout, policy: Policy, unfit: str | None = None
    ) -> QuantizedArray | None:
        """Quantizes a weight; returns None, and records the reason (or `unfit`), if it stays unchanged."""
        self._modules.add(module)
        path, stored = f"{module}/{name}".removeprefix("/"), stored_format_of(policy.quantization)
        if path in self.own:
            self._check_explained(path, array, policy)
        if stored is None:
            why = f"its policy {policy.name!r} stores no quantized weights"
        elif isinstance(array, QuantizedArray):
            why = unfit
        elif not is_floating_dtype(array.dtype):
            why = "it is not floating"
        else:
            why = reason_unquantized(array.shape, layout, stored) or unfit
        if why is not None:
            self._left[path] = why
            return None
        assert stored is not None
        self._quantized += 1
        format = choose_format(stored, layout)
        if not isinstance(array, QuantizedArray) and (whole := describe_whole(array, layout, format)):
            if AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types:  # JAX refuses to split it otherwise
                raise ValueError(f"The weight {path!r} cannot be quantized where it is: {whole}.")
            self._whole[path] = whole
        options: dict[str, Any] = {"clip": self._clip, "input_clip": self._input_clips.get(module)}
        return quantize_array(array, format, layout, **options, where=f" {path!r}")

    def check(self, unused: Collection[str]) -> None:
        """Raises if nothing was quantized, or `input_clips` names no weight.

        Warns of rules that are `unused`.
        """
        if not self._quantized:
            why = _join_first(
                [f"{path!r}: {why}" for path, why in self._left.items()], "; "
            ) or "there is no 'kernel' or 'embedding' of two or more axes" + "".join(
                f", and the explanation has no layout for {path!r}" for path in self._unfit[:_SHOWN]
            )
            also = "".join(f" The {message}." for message in unused)
            raise ValueError(f"Nothing to quantize under {_describe_policy(self.given)}: {why}.{also}")
        for path in self._input_clips:
            if path not in self._modules:
                known = did_you_mean(path, sorted(self._modules))
                raise ValueError(f"input_clips names {path!r}, which is not a module with a weight. {known}")
        for message in unused:
            warn_user(message)
        if self._whole:
            each = _join_first([f"{path!r}: {why}" for path, why in self._whole.items()], "; ")
            warn_user(f"Each device has quantized weights whole, of which it had a part: {each}.")


def has_quantization(given: Policy | PolicyMap) -> bool:
    """True if the policy, or any policy of a map, stores weights in a quantized format."""
    if isinstance(given, Policy):
        return stored_format_of(given.quantization) is not None
    default = default_policy() if given.default is None else given.default
    rules = any(stored_format_of(rule.policy.quantization) is not None for rule in given.rules)
    return rules or has_quantization(default)


def _parse_magnitude(path: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number > 0:
        return number
    raise ValueError(f"input_clips[{path!r}] is not a positive number, got {value!r}. For example: {{{path!r}: 6.0}}.")


def _join_first(parts: Sequence[str], separator: str) -> str:
    more = [f"and {len(parts) - _SHOWN} more"] * (len(parts) > _SHOWN)
    return separator.join([*parts[:_SHOWN], *more])


def _describe_policy(given: Policy | PolicyMap) -> str:
    return f"the policy {given.name!r}" if isinstance(given, Policy) else f"the map {given!r}"


def apply_quantizer(target: Any, quantizer: Quantizer, stacked: Collection[str]) -> Any:
    adapter = None if isinstance(target, type) else find_adapter(target)
    if adapter is not None and adapter.quantize is not None:
        if stacked:
            raise ValueError("stacked is for linen variables: the layers of an nnx model know their own axes.")
        quantized, unused = adapter.quantize(target, quantizer.given, quantizer.quantize_weight, quantizer.own)
        quantizer.check(unused)
        return quantized
    # A mapping may also be the state of an nnx model.
    if isinstance(target, Mapping) and not any(map(is_flax_object, jax.tree.leaves(target, is_leaf=is_flax_object))):
        return _quantize_variables(target, quantizer, stacked)
    given = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
    raise TypeError(
        f"quantize takes linen variables or an nnx model, got {given}. "
        "For example: quantize(model.init(key, x), 'int8_from_mixed_bfloat16')."
    )


def _quantize_variables(variables: Mapping[str, Any], quantizer: Quantizer, stacked: Collection[str]) -> Any:
    given = quantizer.given
    types = [rule.key for rule in given.rules if isinstance(rule.key, type)] if isinstance(given, PolicyMap) else []
    if types:
        name = types[0].__qualname__
        raise ValueError(
            f"A rule of the map is for the type {name}, and variables do not know the types of their modules. Use "
            "a pattern of paths as its key. For example: PolicyMap({r'block_\\d+/mlp': 'int8_from_float32'})."
        )
    register_weights_with_flax()
    params: PyTree = variables.get("params", variables)
    leaves = jax.tree.leaves_with_path(params, is_leaf=_is_whole)
    depths = _count_stacked_axes(stacked, [_split_path(path)[0] for path, leaf in leaves if _is_weight(path, leaf)])

    def quantize_leaf(path: KeyPath, value: Any) -> Any:
        (module, name), array = _split_path(path), _unbox(value)
        own = quantizer.own.get(f"{module}/{name}".lstrip("/"))
        if own is None and not _is_weight(path, value):
            return value
        siblings = params
        for key in filter(None, module.split("/")):
            siblings = siblings[key]
        bias = _unbox(siblings.get("bias"))
        shape = None if bias is None else np.shape(bias)
        layout = own or weight_layout(name, array.shape, shape, depths[module])
        new = quantizer.quantize_weight(module, name, array, layout, match_policy(given, module).policy)
        if new is None:
            return value
        return value.replace_boxed(new) if _is_boxed(value) else new

    new = jax.tree_util.tree_map_with_path(quantize_leaf, params, is_leaf=_is_whole)
    modules = {around for path, _ in leaves for around in list_paths_to(_split_path(path)[0])}
    quantizer.check([] if isinstance(given, Policy) else given.explain_unused(sorted(modules)))
    if "params" not in variables:
        return new
    make: Any = type(variables)
    return make({**variables, "params": new})


def _count_stacked_axes(patterns: Collection[str], modules: Collection[str]) -> dict[str, int]:
    """Counts the leading axes of layers in the weights of each module: the patterns that cover it, from outside too."""
    if isinstance(patterns, str):
        raise ValueError(f"stacked is a collection of patterns, got the string {patterns!r}; write [{patterns!r}].")
    depths = dict.fromkeys(modules, 0)
    for pattern in dict.fromkeys(patterns):
        try:
            covers = re.compile(pattern).fullmatch
        except re.error as error:
            raise ValueError(
                f"{pattern!r} of stacked is not a valid pattern: {error}. For example: stacked=['blocks']."
            ) from None
        covered = [module for module in depths if any(map(covers, list_paths_to(module)[1:] or [module]))]
        if not covered:
            known = ", ".join(map(repr, [*depths][:5])) or "none"
            raise ValueError(f"{pattern!r} of stacked covers no module with a weight. Such modules are {known}.")
        for module in covered:
            depths[module] += 1
    return depths


def _split_path(path: KeyPath) -> tuple[str, str]:
    """Returns the path of the module, and the name of the leaf in it."""
    module, _, name = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")
    return module, name


def _is_weight(path: KeyPath, value: Any) -> bool:
    return _split_path(path)[1] in WEIGHT_NAMES and np.ndim(_unbox(value)) >= 2


def _is_whole(node: Any) -> bool:
    return isinstance(node, QuantizedArray) or _is_boxed(node)


def _is_boxed(value: Any) -> bool:
    return hasattr(value, "replace_boxed")


def _unbox(value: Any) -> Any:
    return value.unbox() if _is_boxed(value) else value
