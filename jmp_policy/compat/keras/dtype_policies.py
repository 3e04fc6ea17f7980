"""`keras.dtype_policies`: finds, serializes and deserializes dtype policies.

>>> import jax.numpy as jnp
>>> from jmp_policy.compat.keras import dtype_policies
>>> dtype_policies.get("int8_from_mixed_bfloat16"), dtype_policies.get(jnp.bfloat16)
(<QuantizedDTypePolicy "int8_from_mixed_bfloat16">, <DTypePolicy "bfloat16">)
"""

from collections.abc import Mapping
from typing import Any

from ._dtype_policy import DTypePolicy as DTypePolicy, FloatDTypePolicy as FloatDTypePolicy
from ._dtype_policy_map import DTypePolicyMap as DTypePolicyMap, dtype_policy
from ._find_dtype_policy import call_from_config, deserialize_policy, find_dtype_policy, serialize as serialize
from ._quantized_dtype_policy import (
    AWQDTypePolicy as AWQDTypePolicy,
    GPTQDTypePolicy as GPTQDTypePolicy,
    Int4DTypePolicy as Int4DTypePolicy,
    QuantizedDTypePolicy as QuantizedDTypePolicy,
    QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy,
)


def get(identifier: Any) -> DTypePolicy:
    """Returns the dtype policy of an identifier.

    Args:
      identifier: a dtype policy or map (returned unchanged), a policy name, a dtype, a policy of `jmp_policy`, a result
        of `serialize`, or `None` for the global policy.

    Raises:
      ValueError: `identifier` is none of these.

    >>> from jmp_policy.compat import keras
    >>> keras.dtype_policies.get({"class_name": "DTypePolicy", "config": {"name": "mixed_bfloat16"}})
    <DTypePolicy "mixed_bfloat16">
    """
    if identifier is None:
        return dtype_policy()
    if isinstance(identifier, DTypePolicyMap):
        return identifier
    if isinstance(identifier, dict) and "class_name" in identifier:
        return deserialize(identifier)
    return find_dtype_policy(identifier)


def deserialize(config: dict[str, Any], custom_objects: Mapping[str, type] | None = None) -> DTypePolicy:
    """Reads a dtype policy or map that this package, Keras 3 or TensorFlow 2 serialized.

    Args:
      config: a dictionary with the `class_name` and `config` of a policy.
      custom_objects: further classes, by name.

    Raises:
      ValueError: `config` is not such a dictionary, or its class does not exist here.

    >>> from jmp_policy.compat import keras
    >>> saved = keras.dtype_policies.serialize(keras.DTypePolicyMap("float32", {"head": "bfloat16"}))
    >>> keras.dtype_policies.deserialize(saved)["head"]
    <DTypePolicy "bfloat16">
    """
    if isinstance(config, dict) and config.get("class_name") == DTypePolicyMap.__name__ and "config" in config:
        return call_from_config(DTypePolicyMap.from_config, config, custom_objects)
    return deserialize_policy(config, custom_objects)
