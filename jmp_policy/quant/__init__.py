"""Quantization: weights in 8 and 4 bits, and training in float8 and block-scaled formats.

- `quantize` stores the weights of a trained model in 8 or 4 bits; `calibrate` chooses clips for the inputs of its
  layers from data; `compare` returns a `Comparison` of error and size, with a `LayerComparison` for each layer.
- Formats, which policy strings name: `Int8`, `Int4`, `E4M3` and `NF4` for weights; `Float8`, with `DelayedScaling` or
  `CurrentScaling`, for matmuls; `MXFP8`, `MXFP4` and `NVFP4` for both.
- `QuantizedArray` is a quantized weight, which `quantize_array` makes. `dot_general`, `einsum`, `conv_general_dilated`
  and `embedding_lookup` compute with it. `float8_state` makes the state of a float8 matmul.
- `ragged_dot` and `dot_product_attention` multiply two operands in 8 bits, where neither is a stored weight.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily
from ..policy import (
    E4M3 as E4M3,
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    NF4 as NF4,
    NVFP4 as NVFP4,
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    Float8 as Float8,
    Int4 as Int4,
    Int8 as Int8,
)
from ._array import QuantizedArray as QuantizedArray, quantize_array as quantize_array
from ._attention import dot_product_attention as dot_product_attention
from ._calibrate import quantize as quantize
from ._operations import (
    conv_general_dilated as conv_general_dilated,
    dot_general as dot_general,
    einsum as einsum,
    embedding_lookup as embedding_lookup,
    float8_state as float8_state,
)
from ._ragged_dot import ragged_dot as ragged_dot

if _typing.TYPE_CHECKING:
    from ._calibrate import calibrate as calibrate
    from ._compare import Comparison as Comparison, LayerComparison as LayerComparison, compare as compare

    # for other packages of the library
    # isort: off
    # fmt: off
    from ._array import (  # noqa: F401
        ARRAYS, Misread, describe_arrays, is_quantized, list_arrays, register_weights_with_flax,
    )
    from ._attention import (  # noqa: F401
        CACHED, CacheSlot, SCALE, attend_to_slots, attention_format_of, explain_unused_cache, multiply_padded,
    )
    from ._bilinear import (  # noqa: F401
        Bilinear, Convolution, Dot, describe_convolution, describe_dot_general, is_matmul, label_convolution,
        label_dot, label_einsum,
    )
    from ._block_numbers import dequantize, pack, pad_axes, quantize_mx, quantize_nv  # noqa: F401
    from ._float8_product import (  # noqa: F401
        State, has_float8, needs_state, new_state, reason_not_float8, warn_of_odd_rows, why_sizes_wide, without_state,
    )
    from ._layer import (  # noqa: F401
        LayerFacts, LayerPlan, LayerProduct, Multiply, Promote, WeightedLayer, attend, find_accumulate_dtype,
        find_layer_row, has_fewer_bits, is_own, multiply_wide, plan_layer, spell_format,
    )
    from ._layout import (  # noqa: F401
        Layout, WHY_TABLES_WIDE, block_length, kernel_layout, reason_unquantized, stack_shape,
        table_layout, weight_layout,
    )
    from ._numbers import (  # noqa: F401
        NORMAL_FLOAT, Clip, Quantized, choose_best, choose_bounds, choose_peak, quantize_asymmetric, quantize_symmetric,
        to_numbers,
    )
    from ._operations import multiplies_8_bits  # noqa: F401
    from ._observe import Deferred, at_path, collect_deferred, defer, is_observing, observe_products  # noqa: F401
    from ._product import ROUNDING  # noqa: F401
    from ._quantizer import (  # noqa: F401
        FakeQuantized, Quantizer, WEIGHT_NAMES, apply_quantizer, fake_quantize, match_format, prepare_weight,
    )
    from ._ragged_dot import wide_ragged_dot  # noqa: F401
    from ._read_stored import find_structure, read_stored, trace_read  # noqa: F401
    from ._wide_product import wide_product  # noqa: F401
    # fmt: on
    # isort: on
else:  # layers of Flax need none of these
    _SOURCES = {
        "_calibrate": "calibrate",
        "_compare": "Comparison LayerComparison compare",
    }
    _INTERNAL = {
        "_array": "ARRAYS Misread describe_arrays is_quantized list_arrays register_weights_with_flax",
        "_attention": "CACHED CacheSlot SCALE attend_to_slots attention_format_of explain_unused_cache multiply_padded",
        "_bilinear": "Bilinear Convolution Dot describe_convolution describe_dot_general is_matmul "
        "label_convolution label_dot label_einsum",
        "_block_numbers": "dequantize pack pad_axes quantize_mx quantize_nv",
        "_float8_product": "State has_float8 needs_state new_state reason_not_float8 warn_of_odd_rows why_sizes_wide "
        "without_state",
        "_layer": "LayerFacts LayerPlan LayerProduct Multiply Promote WeightedLayer attend "
        "find_accumulate_dtype find_layer_row has_fewer_bits is_own multiply_wide plan_layer "
        "spell_format",
        "_layout": "Layout WHY_TABLES_WIDE block_length kernel_layout reason_unquantized stack_shape "
        "table_layout weight_layout",
        "_numbers": "NORMAL_FLOAT Clip Quantized choose_best choose_bounds choose_peak quantize_asymmetric "
        "quantize_symmetric to_numbers",
        "_operations": "multiplies_8_bits",
        "_observe": "Deferred at_path collect_deferred defer is_observing observe_products",
        "_product": "ROUNDING",
        "_quantizer": "FakeQuantized Quantizer WEIGHT_NAMES apply_quantizer fake_quantize match_format prepare_weight",
        "_ragged_dot": "wide_ragged_dot",
        "_read_stored": "find_structure read_stored trace_read",
        "_wide_product": "wide_product",
    }
    __getattr__, __dir__ = _load_lazily(
        __name__,
        _SOURCES,
        globals(),
        internal=_INTERNAL,
        unlisted="Comparison CurrentScaling DelayedScaling LayerComparison QuantizedArray",
        elsewhere={"awq": "contrib.awq", "gptq": "contrib.gptq"},
    )
