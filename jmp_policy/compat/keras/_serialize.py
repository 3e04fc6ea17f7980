"""Dtype policies as Keras writes them into its files."""

from collections.abc import Mapping
from typing import Any

from ..._dtypes import did_you_mean
from ..._messages import quote
from ._dtype_policy import DTypePolicy, FloatDTypePolicy
from ._int4_dtype_policy import Int4DTypePolicy
from ._legacy_policy import Policy
from ._quantized_dtype_policy import QuantizedDTypePolicy
from ._quantized_float8_dtype_policy import QuantizedFloat8DTypePolicy

_IN_KERAS = (DTypePolicy, FloatDTypePolicy)
_IN_DTYPE_POLICIES = (QuantizedDTypePolicy, QuantizedFloat8DTypePolicy, Int4DTypePolicy)
_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (*_IN_KERAS, *_IN_DTYPE_POLICIES, Policy)}
_CLASSES["PolicyV1"] = Policy  # as TensorFlow 2.4 calls it in its files
_MODULES = dict.fromkeys((kind.__name__ for kind in _IN_KERAS), "keras") | dict.fromkeys(
    ("DTypePolicyMap", *(kind.__name__ for kind in _IN_DTYPE_POLICIES)), "keras.dtype_policies"
)
_EXAMPLE = {"class_name": "DTypePolicy", "config": {"name": "mixed_bfloat16"}}


def serialize_policy(policy: DTypePolicy) -> dict[str, Any]:
    """The dictionary that stands for a dtype policy in Keras's files, with the module in which Keras has its class.

    >>> serialize_policy(DTypePolicy("mixed_bfloat16"))
    {'module': 'keras', 'class_name': 'DTypePolicy', 'config': {'name': 'mixed_bfloat16'}, 'registered_name': None}
    """
    name = type(policy).__name__
    # Without a module Keras raises for a class that it does not have; with one it returns the name, silently.
    return {
        "module": _MODULES.get(name),
        "class_name": name,
        "config": policy.get_config(),
        "registered_name": None,
    }


def deserialize_policy(config: dict[str, Any], custom_objects: Mapping[str, type] | None = None) -> Any:
    """The dtype policy that a dictionary stands for, whichever of Keras's and TensorFlow's versions wrote it.

    Args:
      config: what `serialize_policy` makes; the class and its config are enough.
      custom_objects: further classes, by name.

    Raises:
      ValueError: `config` is not such a dictionary, or names an unknown class.
    """
    if not isinstance(config, dict) or not {"class_name", "config"} <= config.keys():
        raise ValueError(f"Expected a serialized dtype policy, got {quote(config)}. For example: {_EXAMPLE}.")
    classes = _CLASSES | dict(custom_objects or {})
    kind = classes.get(str(config["class_name"]))
    if kind is None:
        remedy = did_you_mean(config["class_name"], classes)
        raise ValueError(f"Unknown class of dtype policies in {quote(config)}. {remedy} For example: {_EXAMPLE}.")
    return kind.from_config(config["config"])
