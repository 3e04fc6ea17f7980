"""The mixed-precision names of Keras 3 and of `tf.keras.mixed_precision.experimental`.

>>> import jmp_policy as jmp
>>> from jmp_policy.compat import keras
>>> keras.set_dtype_policy("mixed_bfloat16")
>>> keras.dtype_policy(), jmp.default_policy().name
(<DTypePolicy "mixed_bfloat16">, 'mixed_bfloat16')
>>> keras.set_dtype_policy("float32")

They are Keras's in name, attributes, errors and files, which `dtype_policies.serialize` writes and `deserialize` reads.
The reference page of `compat` lists the differences.
"""

import typing as _typing

from ..._base import load_lazily as _load_lazily
from ...loss_scale import LossScale as LossScale
from . import dtype_policies as dtype_policies
from ._dtype_policy import DTypePolicy as DTypePolicy, FloatDTypePolicy as FloatDTypePolicy
from ._dtype_policy_map import (
    DTypePolicyMap as DTypePolicyMap,
    dtype_policy as dtype_policy,
    global_policy as global_policy,
    set_dtype_policy as set_dtype_policy,
    set_global_policy as set_global_policy,
    set_policy as set_policy,
)
from ._loss_scale import LossScaleOptimizer as LossScaleOptimizer, Policy as Policy
from ._quantized_dtype_policy import (
    AWQDTypePolicy as AWQDTypePolicy,
    GPTQDTypePolicy as GPTQDTypePolicy,
    Int4DTypePolicy as Int4DTypePolicy,
    QuantizedDTypePolicy as QuantizedDTypePolicy,
    QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy,
)

if not _typing.TYPE_CHECKING:  # pyright knows it by this name alone
    _ELSEWHERE = {"mixed_precision": "compat.keras.set_global_policy", "config": "compat.keras.set_dtype_policy"}
    __getattr__ = _load_lazily(__name__, {}, {}, elsewhere=_ELSEWHERE)[0]
