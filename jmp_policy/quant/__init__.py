"""Quantized policies: int8 and int4 weights, as explicit arrays, and training in float8."""

from .._formats import (
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    Float8 as Float8,
    Int4 as Int4,
    Int8 as Int8,
)
from ._array import QuantizedArray as QuantizedArray, quantize_array as quantize_array
from ._calibrate import calibrate as calibrate
from ._compare import compare as compare
from ._comparison import Comparison as Comparison, LayerComparison as LayerComparison
from ._operations import (
    conv_general_dilated as conv_general_dilated,
    dot_general as dot_general,
    einsum as einsum,
    float8_state as float8_state,
    take as take,
)
from ._quantize import quantize as quantize
