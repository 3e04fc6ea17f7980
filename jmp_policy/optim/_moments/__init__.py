"""Optimizer moments in other dtypes and in 8 bits."""

from ._cast_state import cast_state as cast_state
from ._moment_blocks import (
    MomentBlocks as MomentBlocks,
    Shape as Shape,
    choose_sides as choose_sides,
    dequantize_moment as dequantize_moment,
    quantize_moment as quantize_moment,
)
from ._moment_codes import (
    find_role as find_role,
    list_moments as list_moments,
    list_roles as list_roles,
    map_moments as map_moments,
)
from ._quantize_state import (
    CODES as CODES,
    is_embedding as is_embedding,
    quantize_state as quantize_state,
    show_path as show_path,
)
from ._quantized_update import QuantizedMomentsState as QuantizedMomentsState
