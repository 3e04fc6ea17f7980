"""Rounding to integers, float8 and block-scaled formats."""

from ._block_numbers import (
    Blocks as Blocks,
    dequantize as dequantize,
    pack as pack,
    quantize_mx as quantize_mx,
    quantize_nv as quantize_nv,
    unpack as unpack,
)
from ._block_operands import mix_rows as mix_rows, pad_axis as pad_axis, round_operand as round_operand
from ._numbers import (
    E4M3 as E4M3,
    E5M2 as E5M2,
    Clip as Clip,
    Quantized as Quantized,
    Scaled as Scaled,
    check_clip as check_clip,
    choose_best as choose_best,
    choose_bounds as choose_bounds,
    choose_peak as choose_peak,
    compute_current_scale as compute_current_scale,
    compute_scale as compute_scale,
    measure_amax as measure_amax,
    quantize_asymmetric as quantize_asymmetric,
    quantize_symmetric as quantize_symmetric,
    saturate as saturate,
    select as select,
    to_numbers as to_numbers,
)
from ._platform_forms import (
    fence_on_cpu as fence_on_cpu,
    measure_row_amax as measure_row_amax,
    narrow_sums as narrow_sums,
)
