"""The mixed-precision names of Keras 3 and of `tf.keras.mixed_precision.experimental`.

>>> set_dtype_policy("mixed_bfloat16")
>>> dtype_policy(), jmp.default_policy().name
(<DTypePolicy "mixed_bfloat16">, 'mixed_bfloat16')
>>> set_dtype_policy("float32")
"""

from ..._loss_scale import LossScale as LossScale
from . import dtype_policies as dtype_policies
from ._dtype_policy import DTypePolicy as DTypePolicy, FloatDTypePolicy as FloatDTypePolicy
from ._dtype_policy_map import DTypePolicyMap as DTypePolicyMap
from ._global_policy import (
    dtype_policy as dtype_policy,
    global_policy as global_policy,
    set_dtype_policy as set_dtype_policy,
    set_global_policy as set_global_policy,
    set_policy as set_policy,
)
from ._int4_dtype_policy import Int4DTypePolicy as Int4DTypePolicy
from ._legacy_policy import Policy as Policy
from ._loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer
from ._quantized_dtype_policy import QuantizedDTypePolicy as QuantizedDTypePolicy
from ._quantized_float8_dtype_policy import QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy
