"""Quantized policies: weights in 8 and 4 bits, as explicit arrays, and training in float8 and in formats of blocks.

A trained model:

- `quantize` stores its weights in 8 or 4 bits.
- `calibrate` chooses from data where the inputs of its layers are clipped.
- `compare` says what each layer lost and saved: a `Comparison` of a `LayerComparison` for each.

Formats, which the strings of policies name:

- `Int8` and `Int4` for weights, `Float8` for products, with `DelayedScaling` or `CurrentScaling`.
- `MXFP8`, `MXFP4` and `NVFP4` for both: numbers of floating point in blocks that share a scale.

Weights and products:

- `QuantizedArray` is a weight; `quantize_array` makes one.
- `dot_general`, `einsum`, `conv_general_dilated` and `take` compute with it.
- `float8_state` is what a product in float8 remembers.
"""

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
from ._calibrate import calibrate as calibrate
from ._compare import Comparison as Comparison, LayerComparison as LayerComparison, compare as compare
from ._operations import (
    conv_general_dilated as conv_general_dilated,
    dot_general as dot_general,
    einsum as einsum,
    float8_state as float8_state,
    take as take,
)
from ._quantize import quantize as quantize
from ._weights import QuantizedArray as QuantizedArray, quantize_array as quantize_array
