"""Attention in 8 bits: JAX's arguments and masks, and errors within a bound of float64, forward and backward."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jmp_policy import quant

# The largest relative error of an operand: 2**-4 in e4m3, and for int8 1/254 of an amax of up to 4 standard deviations.
FORMATS = {"int8": 2**-6, "float8(recipe=current,min_size=0)": 2**-4, "mxfp8": 2**-4}
ROWS, COLUMNS = jnp.array([20, 32], np.int32), jnp.array([48, 17], np.int32)


def draw(dtype=np.float32):
    """Draws queries of 4 heads, and keys and values of 2."""
    draws = np.random.default_rng(0)
    shapes = ((2, 32, 4, 32), (2, 48, 2, 32), (2, 48, 2, 32))
    return tuple(jnp.array(draws.normal(size=shape), dtype) for shape in shapes)


def draw_masks():
    draws = np.random.default_rng(1)
    return jnp.array(draws.normal(size=(2, 4, 32, 48)), np.float32), jnp.array(draws.random((1, 1, 32, 48)) < 0.9)


BIAS, MASK = draw_masks()


@pytest.mark.parametrize(
    "options",
    [
        {"query_seq_lengths": ROWS, "key_value_seq_lengths": COLUMNS, "local_window_size": (20, 2)},
        {"bias": BIAS, "mask": MASK, "scale": 0.3, "is_causal": True, "return_residual": True},
    ],
)
def test_masks_equal_those_of_jax(options):
    exact = jax.jit(lambda *operands: jax.nn.dot_product_attention(*operands, **options))(*draw())
    # The output dtype selects our own program without quantization.
    wide = options | {"preferred_element_type": np.float32}
    ours = jax.jit(lambda *operands: quant.dot_product_attention(*operands, **wide))(*draw())
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-16)
    unbatched = {name: x[0] if name in ("bias", "mask") else x for name, x in options.items() if "lengths" not in name}
    shapes = jax.eval_shape(
        lambda *operands: quant.dot_product_attention(*operands, **unbatched, quantization="int8"),
        *(x[0] for x in draw()),
    )
    assert jax.tree.leaves(shapes)[0].shape == (32, 4, 32)


def run(attend, operands, grad, **options):
    out, pull = jax.vjp(lambda *operands: attend(*operands, **options), *operands)
    return (out, *pull(grad))


def differentiate_exactly(operands, lengths, grad):
    """Returns the output and the gradients of causal attention in float64, by its formulas."""
    query, key, value, grad = (np.asarray(x, np.float64) for x in (*operands, grad))
    key, value, scale = key.repeat(2, axis=2), value.repeat(2, axis=2), query.shape[-1] ** -0.5
    seen = (np.arange(48) <= np.arange(32)[:, None]) & (np.arange(48) < np.asarray(lengths)[:, None, None, None])
    weights = np.exp(np.where(seen, np.einsum("btnh,bsnh->bnts", query, key) * scale, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("btnh,bsnh->bnts", grad, value)
    of_logits = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True)) * scale
    sum_heads = lambda x: x.reshape(2, 48, 2, 2, 32).sum(3)
    return (
        np.einsum("bnts,bsnh->btnh", weights, value),
        np.einsum("bnts,bsnh->btnh", of_logits, key),
        sum_heads(np.einsum("bnts,btnh->bsnh", of_logits, query)),
        sum_heads(np.einsum("bnts,btnh->bsnh", weights, grad)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_error_against_float64_is_within_the_format(format):
    operands, grad = draw(), jnp.array(np.random.default_rng(2).normal(size=(2, 32, 4, 32)), np.float32)
    options = {"is_causal": True, "key_value_seq_lengths": COLUMNS, "quantization": format}
    results = jax.jit(lambda *operands: run(quant.dot_product_attention, operands, grad, **options))(*operands)
    # To first order, the relative errors of the rounded operands add: query, key, weights and value for the output, and
    # for a gradient also the weights of its own matmul, the gradient in e5m2 (twice as coarse) and its other operand.
    for result, exact, count in zip(results, differentiate_exactly(operands, COLUMNS, grad), (4, 8, 8, 8), strict=True):
        error = np.linalg.norm(np.asarray(result, np.float64) - exact) / np.linalg.norm(exact)
        assert FORMATS[format] / 4 < error < count * FORMATS[format]


@pytest.mark.slow
def test_positions_after_a_sequence_do_not_count_in_scales():
    query, key, value = draw()
    options = {"key_value_seq_lengths": COLUMNS, "query_seq_lengths": ROWS, "quantization": "int8"}
    attend = jax.jit(lambda *operands: quant.dot_product_attention(*operands, **options))
    out = attend(query, key, value)
    after = jnp.arange(48)[:, None, None] >= COLUMNS[:, None, None, None]
    poisoned = (jnp.where(after, 1e20, x) for x in (key, value))
    np.testing.assert_array_equal(attend(query, *poisoned), out)
    assert not out[0, 20:].any()


@pytest.mark.parametrize(
    ("format", "forward", "backward"),
    [
        ("int8", ["i8 i8"], ["bf16 bf16"]),
        ("float8(recipe=current,min_size=0)", ["f8E4M3FN f8E4M3FN"], ["f8E5M2 f8E4M3FN", "f8E4M3FN f8E5M2"]),
        ("mxfp8", ["f8E4M3FN f8E4M3FN f8E8M0FNU f8E8M0FNU"], ["f8E4M3FN f8E4M3FN f8E8M0FNU f8E8M0FNU"]),
    ],
)
def test_accelerators_get_8_bit_operands(format, forward, backward):
    operands = [jax.ShapeDtypeStruct((1, 32, 2, 32), jnp.bfloat16)] * 3
    attend = lambda *operands: quant.dot_product_attention(*operands, is_causal=True, quantization=format)
    program = jax.jit(lambda *operands: run(attend, operands[:3], operands[3]))
    for platform in ("tpu", "cuda"):
        text = export.export(program, platforms=[platform])(*operands, operands[0]).mlir_module()
        body = text.partition("func.func private")[0]
        lines = [x for x in body.splitlines() if "stablehlo.dot_general" in x or '"xla.scaled_dot"' in x]
        types = [re.findall(r"tensor<[0-9x]+x(\w+)>", line.rpartition(" : ")[2].partition("->")[0]) for line in lines]
        assert [" ".join(each) for each in types[:2]] == forward * 2
        assert {" ".join(each) for each in types[2:6]} == set(backward)


@pytest.mark.slow
def test_dtypes_are_those_of_jax():
    bfloat16 = draw(jnp.bfloat16)
    for format in FORMATS:  # JAX's own function raises under strict promotion
        attend = lambda *operands, **options: quant.dot_product_attention(*operands, quantization=format, **options)
        out, residual = jax.eval_shape(lambda *operands: attend(*operands, return_residual=True), *bfloat16)
        assert (out.dtype, residual.dtype, residual.shape) == (jnp.bfloat16, jnp.bfloat16, (2, 32, 4))
        wide = jax.eval_shape(lambda *operands: attend(*operands, preferred_element_type=np.float32), *bfloat16)
        assert wide.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "options", "error", "text"),
    [
        (lambda q, k, v: (q.astype(np.int32), k, v), {}, TypeError, r"got int32\[2, 32, 4, 32\]\. For example: dot_"),
        (lambda q, k, v: (q, k[:1], v), {}, ValueError, r"value shape should be \[1, 48, 2, 32\]: but got \(2, 48"),
        (lambda q, k, v: (q, k.astype(jnp.bfloat16), v), {}, ValueError, "value dtype should be bfloat16, but got"),
        (lambda q, k, v: (q[:, :, :3], k, v), {}, ValueError, "multiple of key/value heads, but got 3 vs 2"),
        (None, {"implementation": "cudnn"}, ValueError, r"no implementation 'cudnn'\. For example: implementation="),
        (None, {"quantization": "int8(act_scale=static)"}, ValueError,
         r"^dot_product_attention has no calibrated scale, which 'int8\(act_scale=static\)' needs\. For exam"),
        (None, {"quantization": "nvfp4"}, ValueError, r"'nvfp4' has 4\. For example: quantization='int8', 'float8"),
        (None, {"quantization": "float8"}, ValueError, r"keeps no state .* 'float8' needs\. For example: quantizatio"),
        (None, {"quantization": "mxfp8(activations=false)"}, ValueError, r"quantizes weights only\. For example: qua"),
    ],
)  # fmt: skip
def test_errors_quote_and_show_an_example(change, options, error, text):
    operands = draw() if change is None else change(*draw())
    with pytest.raises(error, match=text):
        quant.dot_product_attention(*operands, **{"quantization": "int8"} | options)
