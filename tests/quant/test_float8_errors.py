"""What a product in 8-bit floating point cannot be asked for."""

import jax.numpy as jnp
import pytest

from jmp_policy.quant import Int8, dot_general, einsum, float8_state, quantize_array

ROWS = (((1,), (0,)), ((), ()))
DELAYED, CURRENT = "float8/2(min_size=0)", "float8(recipe=current,min_size=0)"


def product(x, w, quantization, state=None):
    return dot_general(x, w, ROWS, quantization=quantization, state=state)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda x, state: product(x, x, DELAYED), ValueError,
         r"^'float8/2\(min_size=0\)' needs a state of earlier steps, but got none\. For example: state=float8"),
        (lambda x, state: product(x, x, CURRENT, state), ValueError,
         r"^'float8\(recipe=current,min_size=0\)' has no state, but got one\. For example: quantization='float8'\.$"),
        (lambda x, state: product(x, x, "int8", state), ValueError, r"^'int8' has no state, but got one\. For ex"),
        (lambda x, state: product(x, x, None, state), ValueError, r"^'None' has no state, but got one\. For ex"),
        (lambda x, state: float8_state(CURRENT), ValueError,
         r"^'float8\(recipe=current,min_size=0\)' has no state\. For example: float8_state\(Float8\(\)\)\.$"),
        (lambda x, state: float8_state(Int8()), ValueError, r"^'int8' has no state\. For example: float8_state\(Fl"),
        (lambda x, state: product(x, x.astype(int), CURRENT), TypeError,
         r"^A quantized matmul takes floating arrays, got int32\[16, 16\]\. For example: dot_general\("),
        (lambda x, state: product(x.astype(int), x, DELAYED, state), TypeError,
         r"^A quantized matmul takes floating arrays, got int32\[16, 16\]\. For example: dot_general\("),
        (lambda x, state: product(x, quantize_array(x, "int8"), CURRENT), ValueError,
         r"^The weight is quantized already, as 'int8', and cannot be as 'float8\(recipe=current,min_size=0\)'\. Lea"),
        (lambda x, state: einsum("ab,bc", x, x, quantization=CURRENT), ValueError,
         r"^The equation 'ab,bc' must have two operands and an output, without repeated labels\. For example: 'abc,cd"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make(jnp.ones((16, 16)), float8_state(DELAYED))
