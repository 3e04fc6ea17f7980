"""Matmuls and convolutions of quantized operands, and their derivatives."""

from ._bilinear import (
    Bilinear as Bilinear,
    Call as Call,
    Convolution as Convolution,
    Dot as Dot,
    RaggedDot as RaggedDot,
    Sharding as Sharding,
    describe_convolution as describe_convolution,
    describe_dot_general as describe_dot_general,
    describe_einsum as describe_einsum,
    is_matmul as is_matmul,
    label_convolution as label_convolution,
    label_dot as label_dot,
    label_einsum as label_einsum,
    label_ragged_dot as label_ragged_dot,
    make_ragged_dot as make_ragged_dot,
    vary_together as vary_together,
)
from ._float8_product import (
    State as State,
    float8_product as float8_product,
    has_float8 as has_float8,
    needs_state as needs_state,
    new_state as new_state,
    reason_not_float8 as reason_not_float8,
    warn_of_odd_rows as warn_of_odd_rows,
    why_sizes_wide as why_sizes_wide,
)
from ._product import (
    ROUNDING as ROUNDING,
    block_product as block_product,
    is_block_product as is_block_product,
    is_integer_product as is_integer_product,
    multiply_integers as multiply_integers,
    multiply_quantized as multiply_quantized,
    multiply_rows as multiply_rows,
    observe_product as observe_product,
    observe_products as observe_products,
)
from ._wide_product import wide_product as wide_product
