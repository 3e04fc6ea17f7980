"""Quantization: int8 and int4 weights, and training in float8 and block-scaled formats.

- `quantize` stores the weights of a trained model in 8 or 4 bits; `calibrate` chooses clips for the inputs of its
  layers from data; `compare` returns a `Comparison` of error and size, with a `LayerComparison` for each layer.
- Formats, which policy strings name: `Int8` and `Int4` for weights; `Float8`, with `DelayedScaling` or
  `CurrentScaling`, for matmuls; `MXFP8`, `MXFP4` and `NVFP4` for both.
- `QuantizedArray` is a quantized weight, which `quantize_array` makes. `dot_general`, `einsum`, `conv_general_dilated`
  and `embedding_lookup` compute with it. `float8_state` makes the state of a float8 matmul.
- `ragged_dot` and `dot_product_attention` multiply two operands in 8 bits, where neither is a stored weight.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily
from ..policy import (
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    NVFP4 as NVFP4,
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    Float8 as Float8,
    Int4 as Int4,
    Int8 as Int8,
)
from ._attention import dot_product_attention as dot_product_attention
from ._operations import (
    conv_general_dilated as conv_general_dilated,
    dot_general as dot_general,
    einsum as einsum,
    embedding_lookup as embedding_lookup,
    float8_state as float8_state,
)
from ._quantize import quantize as quantize
from ._ragged_dot import ragged_dot as ragged_dot
from ._weights import QuantizedArray as QuantizedArray, quantize_array as quantize_array

if _typing.TYPE_CHECKING:
    from ._calibrate import calibrate as calibrate
    from ._compare import Comparison as Comparison, LayerComparison as LayerComparison, compare as compare
else:  # layers of Flax need none of these
    _SOURCES = {
        "_calibrate": "calibrate",
        "_compare": "Comparison LayerComparison compare",
    }
    __getattr__, __dir__ = _load_lazily(
        __name__,
        _SOURCES,
        globals(),
        unlisted="Comparison CurrentScaling DelayedScaling LayerComparison QuantizedArray",
        elsewhere={"awq": "contrib.awq", "gptq": "contrib.gptq"},
    )
