"""Finds, serializes and deserializes Keras dtype policies."""

from collections.abc import Callable, Mapping
from typing import Any

from ..._base import did_you_mean, quote, shorten
from ...policy import FROM, Float8, Policy as JmpPolicy, PolicySpec, get_policy, is_policy_spec
from ._dtype_policy import DTypePolicy, FloatDTypePolicy, default_jmp_policy
from ._loss_scale import Policy
from ._quantized_dtype_policy import (
    FLOAT8,
    AWQDTypePolicy,
    GPTQDTypePolicy,
    Int4DTypePolicy,
    QuantizedDTypePolicy,
    QuantizedFloat8DTypePolicy,
    read_block_size,
)

_CALIBRATED = {"gptq": GPTQDTypePolicy, "awq": AWQDTypePolicy}
_QUANTIZED = (QuantizedDTypePolicy, QuantizedFloat8DTypePolicy, Int4DTypePolicy, *_CALIBRATED.values())
_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (DTypePolicy, FloatDTypePolicy, *_QUANTIZED, Policy)}
_CLASSES["PolicyV1"] = Policy  # in files of TensorFlow 2.4
_MODULES = {"DTypePolicy": "keras", "FloatDTypePolicy": "keras", "DTypePolicyMap": "keras.dtype_policies"}
_MODULES |= {kind.__name__: "keras.dtype_policies" for kind in _QUANTIZED}
_EXAMPLE = {"class_name": "DTypePolicy", "config": {"name": "mixed_bfloat16"}}


def find_dtype_policy(
    spec: PolicySpec, what: str = "`dtype` argument", custom_objects: Mapping[str, type] | None = None
) -> DTypePolicy:
    """Converts a name, dtype, None, `jmp_policy` policy, or serialized policy to a Keras policy; maps are rejected."""
    if isinstance(spec, DTypePolicy) and isinstance(spec.__jmp_policy__(), JmpPolicy):
        return spec
    if isinstance(spec, dict) and "class_name" in spec:
        return deserialize_policy(spec, custom_objects)
    if spec is None or isinstance(spec, str):
        return parse_dtype_policy(spec)
    policy = get_policy(spec) if is_policy_spec(spec) else None
    if not isinstance(policy, JmpPolicy):
        raise ValueError(
            f"Cannot interpret {what} as a dtype policy. Received: {quote(spec)} of type {type(spec)}. "
            "For example: 'mixed_bfloat16'."
        )
    return convert_policy(policy)


def parse_dtype_policy(name: str | None) -> DTypePolicy:
    """Returns the Keras policy of a name; None stands for the global policy."""
    if name is None:
        return convert_policy(default_jmp_policy())
    if not isinstance(name, str) or FROM not in name.lower():
        return DTypePolicy(name)
    at = name.lower().index(FROM)
    mode, source_name = name[:at], name[at + len(FROM) :]
    if mode.strip().lower() == FLOAT8:
        return QuantizedFloat8DTypePolicy(FLOAT8, source_name)
    return _make_quantized(mode, source_name)


def convert_policy(policy: JmpPolicy) -> DTypePolicy:
    """Returns the Keras policy of a `jmp_policy.Policy`; raises for int8 with float16, which Keras rejects."""
    format, source_name = policy.quantization, policy.replace(quantization=None).name
    if format is None:
        return DTypePolicy(source_name)
    if isinstance(format, Float8):
        like_keras = QuantizedFloat8DTypePolicy(FLOAT8, source_name, format.amax_history_length)
        if like_keras.__jmp_policy__() is policy:
            return like_keras
    # The bare name means Keras's recipe, whose scales act one step later.
    mode = str(format) if str(format) != FLOAT8 else f"{FLOAT8}(recipe=delayed)"
    return _make_quantized(mode, source_name)


def _make_quantized(mode: str, source_name: str) -> QuantizedDTypePolicy:
    kind = QuantizedDTypePolicy if read_block_size(mode) is None else Int4DTypePolicy
    return _CALIBRATED.get(mode.partition("/")[0].strip().lower(), kind)(mode, source_name)


def serialize(dtype_policy: DTypePolicy) -> dict[str, Any]:
    """Returns a dtype policy or map as a dictionary for JSON, in the format of Keras's files.

    Keras 3 reads it if it knows the name: `"p=f32,c=bf16,o=f32"` or `"int8(activations=false)_from_bfloat16"` are
    errors there.

    Raises:
      TypeError: `dtype_policy` is not a dtype policy.

    >>> from jmp_policy.compat import keras
    >>> keras.dtype_policies.serialize(keras.Int4DTypePolicy("int4/64", "bfloat16"))["config"]
    {'mode': 'int4/64', 'source_name': 'bfloat16'}
    """
    if not isinstance(dtype_policy, DTypePolicy):
        raise TypeError(
            f"Expected a dtype policy, got {quote(dtype_policy)}. For example: DTypePolicy('mixed_bfloat16')."
        )
    name, config = type(dtype_policy).__name__, dtype_policy.get_config()
    # For an unknown class, Keras raises only if the module is missing.
    return {"module": _MODULES.get(name), "class_name": name, "config": config, "registered_name": None}


def deserialize_policy(config: dict[str, Any], custom_objects: Mapping[str, type] | None = None) -> Any:
    """Reads a policy from a dictionary that any version of Keras or TensorFlow wrote."""
    if not isinstance(config, dict) or not {"class_name", "config"} <= config.keys():
        raise ValueError(f"Expected a serialized dtype policy, got {quote(config)}. For example: {_EXAMPLE}.")
    classes = _CLASSES | dict(custom_objects or {})
    kind = classes.get(str(config["class_name"]))
    if kind is None:
        suggestion = did_you_mean(config["class_name"], classes)
        raise ValueError(f"Unknown class of dtype policies in {quote(config)}. {suggestion} For example: {_EXAMPLE}.")
    return call_from_config(kind.from_config, config)


def call_from_config(from_config: Callable[..., Any], config: dict[str, Any], *args: Any) -> Any:
    """Calls a `from_config` on a serialized policy or map; every error becomes a ValueError that quotes it."""
    try:
        return from_config(config["config"], *args)
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"Cannot read the serialized dtype policy {quote(config)}: {shorten(str(error))}. For example: {_EXAMPLE}."
        ) from error
