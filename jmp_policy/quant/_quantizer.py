"""Quantizes weights one by one, and records which ones stay unquantized."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._base import did_you_mean, is_floating_dtype, warn_user
from ..policy import Int4, Policy, PolicyMap, default_policy, stored_format_of
from ._numbers import Clip, check_clip
from ._weights import (
    Layout,
    QuantizedArray,
    choose_format,
    describe_misfit,
    fits_blocks,
    quantize_array,
    reason_unquantized,
)

_SHOWN = 5  # weights in an error


class Quantizer:
    """Quantizes each weight of a linen or nnx model; arguments as for `quantize`."""

    def __init__(self, given: Policy | PolicyMap, clip: Clip, input_clips: Mapping[str, Any]) -> None:
        if not has_quantization(given):
            raise ValueError(
                f"Nothing to quantize: {_describe_policy(given)} stores no quantized weights. "
                "For example: 'int8_from_mixed_bfloat16'."
            )
        self.given = given
        self._clip = check_clip(clip)
        self._input_clips = {path: _parse_magnitude(path, value) for path, value in input_clips.items()}
        self._modules: set[str] = set()
        self._left: dict[str, str] = {}
        self._quantized = 0
        self._lengths: dict[Int4, dict[tuple[str, str], int]] = {}  # inputs of the weights of each format

    def quantize_weight(
        self, module: str, name: str, array: Any, layout: Layout, policy: Policy, unfit: str | None = None
    ) -> QuantizedArray | None:
        """Quantizes a weight; returns None, and records the reason (or `unfit`), if it stays unchanged."""
        self._modules.add(module)
        why = why_unquantized(array, layout, policy) or unfit
        if why is not None:
            self._left[_join_path(module, name)] = why
            return None
        self._quantized += 1
        stored = stored_format_of(policy.quantization)
        assert stored is not None
        format, where = choose_format(stored, layout), f" {_join_path(module, name)!r}"
        if isinstance(format, Int4) and not isinstance(array, QuantizedArray):
            self._lengths.setdefault(format, {})[module, name] = layout.length
            if not fits_blocks(format, layout.length):
                return None  # `check` raises, when it knows all of them
        options: dict[str, Any] = {"clip": self._clip, "input_clip": self._input_clips.get(module)}
        return quantize_array(array, format, layout, **options, where=where)

    def check(self, unused: Collection[str]) -> None:
        """Raises if blocks do not divide a weight, nothing was quantized, or `input_clips` names no weight.

        Warns of rules that are `unused`.
        """
        for format, lengths in self._lengths.items():
            _check_lengths(format, lengths)
        if not self._quantized:
            why = (
                _join_first([f"{path!r}: {why}" for path, why in self._left.items()], "; ")
                or "there is no 'kernel' or 'embedding' of two or more axes"
            )
            also = "".join(f" The {message}." for message in unused)
            raise ValueError(f"Nothing to quantize under {_describe_policy(self.given)}: {why}.{also}")
        for path in self._input_clips:
            if path not in self._modules:
                known = did_you_mean(path, sorted(self._modules))
                raise ValueError(f"input_clips names {path!r}, which is not a module with a weight. {known}")
        for message in unused:
            warn_user(message)


def has_quantization(given: Policy | PolicyMap) -> bool:
    """True if the policy, or any policy of a map, stores weights in a quantized format."""
    if isinstance(given, Policy):
        return stored_format_of(given.quantization) is not None
    default = default_policy() if given.default is None else given.default
    rules = any(stored_format_of(rule.policy.quantization) is not None for rule in given.rules)
    return rules or has_quantization(default)


def why_unquantized(array: Any, layout: Layout, policy: Policy) -> str | None:
    """Returns the reason why a weight stays unchanged under a policy, or None."""
    format = stored_format_of(policy.quantization)
    if format is None:
        return f"its policy {policy.name!r} stores no quantized weights"
    if isinstance(array, QuantizedArray):
        return None
    if not is_floating_dtype(array.dtype):
        return "it is not floating"
    return reason_unquantized(array.shape, layout, format)


def _parse_magnitude(path: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number > 0:
        return number
    raise ValueError(f"input_clips[{path!r}] is not a positive number, got {value!r}. For example: {{{path!r}: 6.0}}.")


def _check_lengths(format: Int4, lengths: Mapping[tuple[str, str], int]) -> None:
    misfits = {key: length for key, length in lengths.items() if not fits_blocks(format, length)}
    if misfits:
        inputs = [f"the {length} inputs of the weight {_join_path(*key)!r}" for key, length in misfits.items()]
        rules = ", ".join(f"{module!r}: 'float32'" for module, _ in [*misfits][:_SHOWN])
        leave_out = f"the weight{'s' * (len(misfits) > 1)} out by a rule of a PolicyMap: {{{rules}}}."
        raise ValueError(describe_misfit(format, _join_first(inputs, ", "), lengths.values(), leave_out))


def _join_first(parts: Sequence[str], separator: str) -> str:
    more = [f"and {len(parts) - _SHOWN} more"] * (len(parts) > _SHOWN)
    return separator.join([*parts[:_SHOWN], *more])


def _describe_policy(given: Policy | PolicyMap) -> str:
    return f"the policy {given.name!r}" if isinstance(given, Policy) else f"the map {given!r}"


def _join_path(module: str, name: str) -> str:
    return f"{module}/{name}" if module else name
