"""What a product in 8 or 4 bits cannot be asked for."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jmp_policy.quant import NVFP4, Int8, dot_general, einsum, float8_state, quantize_array

ROWS = (((1,), (0,)), ((), ()))
DELAYED, CURRENT = "float8/2(min_size=0)", "float8(recipe=current,min_size=0)"
X, W = jnp.ones((16, 16)), jnp.ones((16, 6))


def product(x, w, quantization, state=None, key=None):
    return dot_general(x, w, ROWS, quantization=quantization, state=state, key=key)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: product(X, quantize_array(W, "int8"), "int4"), ValueError,
         r"^The weight is quantized already, as 'int8', and cannot be as 'int4/128'\. Leave quan"),
        (lambda: product(X, quantize_array(X, "int8"), CURRENT), ValueError,
         r"^The weight is quantized already, as 'int8', and cannot be as 'float8\(recipe=current,min_size=0\)'\. Lea"),
        (lambda: product(X, W.astype(int), "int8"), TypeError,
         r"^Only floating arrays with axes and elements are quantized, got int32\[16, 6\]\. For example:"),
        *[
            (functools.partial(product, x, w, format), TypeError,
             rf"^A quantized matmul takes floating arrays, got int32{shape}\. For example: dot_gen")
            for x, w, format, shape in (
                (X, W.astype(int), "mxfp8/8", r"\[16, 6\]"), (X, W.astype(int), "mxfp4/8", r"\[16, 6\]"),
                (X.astype(int), W, "mxfp8/8", r"\[16, 16\]"), (X, X.astype(int), CURRENT, r"\[16, 16\]"),
            )
        ],
        (lambda: product(X.astype(int), quantize_array(W, "int8"), None), TypeError,
         r"^A quantized matmul takes floating arrays, got int32\[16, 16\]\. For example: dot_gen"),
        *[
            (functools.partial(einsum, equation, X, W, quantization=format), ValueError,
             rf"^The equation '{equation}' must have two operands and an output, without repeated labels\. For exam")
            for equation, format in (("ab,bc", "int8"), ("ab->a", "int8"), ("ab,bb->a", "int8"), ("ab,bc", CURRENT))
        ],
        (lambda: product(X, X, DELAYED), ValueError,
         r"^'float8/2\(min_size=0\)' needs a state of earlier steps, but got none\. For example: state=float8"),
        *[
            (functools.partial(product, X, X, format, {}), ValueError,
             rf"^'{name}' has no state, but got one\. For example: quantization='float8'\.$")
            for format, name in ((CURRENT, r"float8\(.*\)"), ("int8", "int8"), (None, "None"), ("mxfp8", "mxfp8"))
        ],
        (lambda: float8_state(CURRENT), ValueError,
         r"^'float8\(recipe=current,min_size=0\)' has no state\. For example: float8_state\(Float8\(\)\)\.$"),
        (lambda: float8_state(Int8()), ValueError, r"^'int8' has no state\. For example: float8_state\(Fl"),
        *[
            (lambda format=format: product(X, W, format, key=jax.random.key(0)), ValueError,
             r"uses no stochastic rounding, but got a key\. For example: quantization='nvfp4")
            for format in ("nvfp4", "mxfp8", "int8", None)
        ],
        (lambda: jax.grad(lambda x: product(x, X, "nvfp4(stochastic_rounding=true)").sum())(X), ValueError,
         r"differentiated has no key\. Pass one: .*rngs=\{'rounding': key\}"),
        (lambda: NVFP4(block_size=24, hadamard=True), ValueError,
         r"Hadamard transform needs a block_size that is a power of two, got 24\."),
    ],
)  # fmt: skip
def test_what_cannot_be_multiplied_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make()
