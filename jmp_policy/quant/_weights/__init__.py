"""Quantized weights: storage, layouts, and their rounding in training."""

from ._array import (
    ARRAYS as ARRAYS,
    Misread as Misread,
    QuantizedArray as QuantizedArray,
    describe_arrays as describe_arrays,
    is_quantized as is_quantized,
    list_arrays as list_arrays,
    quantize_array as quantize_array,
    register_weights_with_flax as register_weights_with_flax,
)
from ._layout import (
    WHY_TABLES_WIDE as WHY_TABLES_WIDE,
    Layout as Layout,
    block_length as block_length,
    choose_format as choose_format,
    describe_misfit as describe_misfit,
    describe_whole as describe_whole,
    fits_blocks as fits_blocks,
    kernel_layout as kernel_layout,
    layer_size as layer_size,
    reason_unquantized as reason_unquantized,
    stack_shape as stack_shape,
    table_layout as table_layout,
    weight_layout as weight_layout,
)
from ._quantizer import Quantizer as Quantizer, apply_quantizer as apply_quantizer
from ._weight import (
    WEIGHT_NAMES as WEIGHT_NAMES,
    FakeQuantized as FakeQuantized,
    StoredWeight as StoredWeight,
    fake_quantize as fake_quantize,
    match_format as match_format,
    prepare_weight as prepare_weight,
)
