"""What holds for products in every format: dtypes, derivatives, transformations, meshes, bad numbers, programs."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from quant_reference import TINY, edge_columns, fresh

from jmp_policy.quant import Layout, conv_general_dilated, dot_general, einsum, float8_state, quantize_array

# What only CUDA gets, which a machine without a GPU can run by its name alone.
from jmp_policy.quant._numbers import _measure_by_bits, measure_amax

ROWS = (((1,), (0,)), ((), ()))
DELAYED, CURRENT = "float8/3(min_size=0)", "float8(recipe=current,min_size=0)"
BY_ROW = "float8(recipe=current/row,min_size=0)"
W4A8 = "int4/8(activations=true)"
INTEGERS = ("int8", "int8(activations=false)", "int4/8", W4A8)
SQUARES, CHANNELS = "e4m3/8(activations=true)", "e4m3/-1(activations=true)"
BLOCKS = ("mxfp8/8", "nvfp4/8", "mxfp4/8(activations=true)", "mxfp4/8")
STORED = (*INTEGERS, "nf4/8", "e4m3/8", SQUARES, CHANNELS, *BLOCKS)
FORMATS = (*STORED, CURRENT, BY_ROW)


def array(*shape, dtype="float32"):
    return jnp.asarray(fresh(*shape), dtype)


def multiply(x, w, format):
    return dot_general(x, w, ROWS, quantization=format)


quantized = jax.jit(quantize_array, static_argnums=(1, 2))
multiplied = jax.jit(multiply, static_argnums=2)


def with_gradients(x, w, t, format):
    out, backward = jax.vjp(lambda x, w: multiply(x, w, format), x, w)
    return out, *backward(t)


def assert_close(found, expected, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


@pytest.mark.parametrize(("format", "preferred"), list(zip(FORMATS, itertools.cycle([None, jnp.float32, jnp.float16]))))
def test_the_result_has_the_preferred_dtype_and_gradients_those_of_their_operands(format, preferred):
    product = functools.partial(dot_general, preferred_element_type=preferred, quantization=format)
    loss = lambda x, w: (lambda out: (jnp.sum(out.astype(jnp.float32)), out))(product(x, w, ROWS))
    x, w = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    (of_x, of_w), out = jax.eval_shape(jax.grad(loss, (0, 1), has_aux=True), x, w)
    assert (out.dtype, of_x.dtype, of_w.dtype) == (preferred or jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("mxfp8/8", "float16"),
        pytest.param("int8", "float32", marks=pytest.mark.slow),
        pytest.param("int4/8", "bfloat16", marks=pytest.mark.slow),
        (W4A8, "bfloat16"),
        (SQUARES, "bfloat16"),
        ("nf4/8", "bfloat16"),
        pytest.param("e4m3/5", "bfloat16", marks=pytest.mark.slow),
        pytest.param(CHANNELS, "float32", marks=pytest.mark.slow),
        pytest.param("int8(activations=false)", "float16", marks=pytest.mark.slow),
        pytest.param("nvfp4/8", "float32", marks=pytest.mark.slow),
        pytest.param("mxfp4/8", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_stored_weight_gives_the_bits_of_the_floating_one(format, dtype):
    x, w = array(5, 16, dtype=dtype), array(16, 6)
    stored = quantized(w, format)
    plain, other = multiplied(x, w, format), multiplied(x, stored, None)
    assert plain.dtype == other.dtype == dtype
    as_floats = format in ("int4/8", "nf4/8", "e4m3/5")  # multiplied in an order of each kernel
    if jax.default_backend() == "gpu" and as_floats:
        np.testing.assert_allclose(np.float32(plain), np.float32(other), rtol=2.0**-7, atol=1e-5)
    else:
        np.testing.assert_array_equal(plain, other)
    # The backward pass of blocks rounds what is stored once more, along another axis.
    again = stored.dequantize() if format in BLOCKS[:3] else w
    loss = lambda x, w, format: jnp.sum(multiply(x, w, format))
    gradients = jax.jit(jax.grad(loss, (0, 1), allow_int=True), static_argnums=2)
    of_x, of_stored = gradients(x, stored, None)
    np.testing.assert_array_equal(of_x, gradients(x, again, format)[0])
    assert not any(leaf.any() for leaf in jax.tree.leaves(of_stored) if leaf.dtype == jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "bad"), list(zip(FORMATS, itertools.cycle([np.nan, np.inf, -np.inf]))))
def test_a_number_that_is_not_finite_shows_in_its_row_and_in_all_gradients_that_it_is_part_of(format, bad):
    x, w, t = array(48, 16), array(16, 16), array(48, 16)
    (plain, *_), (spoilt, _, of_w) = (
        jax.jit(with_gradients, static_argnums=3)(a, w, t, format) for a in (x, x.at[2, 3].set(bad))
    )
    assert not np.isfinite(spoilt[2]).any()
    if format not in (CURRENT, "nvfp4/8"):  # which scale the tensor by its largest finite magnitude, or by all of them
        np.testing.assert_array_equal(np.delete(spoilt, 2, axis=0), np.delete(plain, 2, axis=0))
    if format not in INTEGERS:  # whose gradients are of the rounded rows
        assert not np.isfinite(of_w[3]).any()
    spoilt_weight = multiplied(x, w.at[4, 5].set(bad), format)
    assert not np.isfinite(spoilt_weight[:, 5]).any()


@pytest.mark.parametrize(
    ("format", "rows", "sums", "columns"),
    [
        ("mxfp8/8", 0, 16, 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("int8", 3, 0, 5), ("int4/8", 3, 16, 5), (W4A8, 0, 16, 5))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("nvfp4/8", 3, 16, 0), (SQUARES, 0, 16, 5), ("mxfp4/8", 3, 0, 5))
        ),
    ],
)
def test_rows_of_zeros_no_rows_no_outputs_and_sums_of_nothing(format, rows, sums, columns):
    x, w = jnp.zeros((rows, sums)), jnp.ones((sums, columns))
    results = jax.jit(with_gradients, static_argnums=3)(x, w, jnp.ones((rows, columns)), format)
    assert [array.shape for array in results] == [(rows, columns), x.shape, w.shape]
    assert not any(array.any() for array in results[::2])


@pytest.mark.parametrize(
    ("format", "second"), list(zip((*BLOCKS[:3], DELAYED, CURRENT, BY_ROW), itertools.cycle([jax.grad, jax.jacfwd])))
)
def test_second_derivatives_are_refused(format, second):
    """Tangents that are cast to 8 bits without a scale would be nan for some losses, and a third wrong for others."""
    state = float8_state(format) if format == DELAYED else None
    loss = lambda w, state: jnp.sum(dot_general(jnp.ones((16, 16)), w, ROWS, quantization=format, state=state) ** 2)
    penalty = lambda w: jnp.sum(jax.grad(loss, argnums=(0, 1))(w, state)[0] ** 2)
    with pytest.raises(
        TypeError, match=r"^(Block-scaled matmuls \('.*'\)|Float8 matmuls) have no second derivative\. F"
    ):
        jax.eval_shape(second(penalty), jnp.ones((16, 16)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "format",
    ["mxfp8/8", "int8", "int4/8", W4A8, SQUARES, CHANNELS, "nf4/8", "nvfp4/8", "mxfp4/8", BY_ROW],
)
def test_remat_vmap_and_devices_compute_what_the_plain_call_does(format):
    x, w, t = array(64, 16), array(16, 16), array(64, 16)
    x, t = (
        jnp.clip(a, -8, 8).at[::8].set(8.0) for a in (x, t)
    )  # a largest magnitude that all devices have, which nvfp4 scales by
    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    run = functools.partial(with_gradients, format=format)

    def of_device(x, w, t):
        out, of_x, of_w = run(x, w, t)
        return out, of_x, lax.psum(of_w, "data")

    def all_ways(x, w, t):
        specs = {"in_specs": (P("data"), P(), P("data")), "out_specs": (P("data"), P("data"), P())}
        checked = jax.shard_map(run, mesh=mesh, **specs)(x, w, t)  # JAX sums what it knows devices to share
        unchecked = jax.shard_map(of_device, mesh=mesh, check_vma=False, **specs)(x, w, t)
        plain, pairs = run(x, w, t), [a.reshape(2, 32, 16) for a in (x, t)]
        mapped = jax.vmap(run, (0, None, 0))(pairs[0], w, pairs[1])
        loops = [run(*each) for each in ((pairs[0][i], w, pairs[1][i]) for i in range(2))]
        return (
            plain,
            jax.checkpoint(run)(x, w, t),
            checked,
            unchecked,
            mapped,
            jax.tree.map(lambda *a: jnp.stack(a), *loops),
        )

    plain, remat, checked, unchecked, mapped, looped = jax.jit(all_ways)(x, w, t)
    jax.tree.map(np.testing.assert_array_equal, plain, remat)
    for found, expected in ((checked, plain), (unchecked, plain), (mapped, looped)):
        assert_close(found, expected)


PLACES = [(P("d"), P(), None), (P(), P(None, "t"), None), (P("d"), P(None, "t"), None), (P("d", "t"), P("t"), P("d"))]


@pytest.mark.parametrize(
    ("format", "places"),
    list(
        zip(("mxfp8/8", CURRENT, "nvfp4/8", BY_ROW, DELAYED, "int8", W4A8, SQUARES, CHANNELS), itertools.cycle(PLACES))
    ),
    ids=str,
)
def test_gradients_lie_as_their_operands_where_shardings_are_part_of_types(format, places):
    rows, columns, out = places
    state = float8_state(format) if format == DELAYED else None
    product = functools.partial(einsum, "ab,bc->ac", quantization=format, out_sharding=out)
    gradients = jax.grad(lambda x, w, s: jnp.sum(jnp.sin(product(x, w, state=s))), (0, 1, 2))
    with jax.set_mesh(make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)):
        x, w = jax.device_put(jnp.ones((32, 32)), rows), jax.device_put(jnp.ones((32, 32)), columns)
        of_x, of_w, after = jax.eval_shape(gradients, x, w, state)
        plain, y = (
            jax.eval_shape(lambda x, w, f=f: einsum("ab,bc->ac", x, w, quantization=f, out_sharding=out, state=s), x, w)
            for f, s in ((None, None), (format, state))
        )
    assert (of_x.sharding, of_w.sharding, y.sharding) == (
        jax.typeof(x).sharding,
        jax.typeof(w).sharding,
        plain.sharding,
    )
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(after))


X, W = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 32)))
IMAGE, FILTER = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 9, 9, 16), (3, 3, 16, 8)))


def exported(function, *arguments, platform="cuda"):
    return jax.export.export(jax.jit(function), platforms=[platform])(*arguments).mlir_module()


def types_of(text, operation):
    """The element types of the operands and the result of each such operation."""
    lines = re.findall(rf"stablehlo\.{operation}.*: \((.*?)\) -> (tensor<\S*)", text)
    return [tuple(re.findall(r"x([a-z]+\d+)>", f"{operands} {result}")) for operands, result in lines]


@pytest.mark.parametrize(("stored", "platform"), [(True, "cuda"), (False, "tpu")])
def test_hardware_gets_products_of_integers(stored, platform):
    w, kernel = (quantize_array(a, "int8") if stored else a for a in (W, FILTER))
    form = None if stored else "int8"
    text = exported(functools.partial(multiply, format=form), X, w, platform=platform)
    assert types_of(text, "dot_general") == [("i8", "i8", "i32")]
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    convolve = lambda x, w: conv_general_dilated(x, w, **options, quantization=form)
    assert types_of(exported(convolve, IMAGE, kernel, platform=platform), "convolution") == [("i8", "i8", "i32")]


@pytest.mark.parametrize("format", ["int8(activations=false)", "e4m3/-1"])
@pytest.mark.parametrize("stored", [True, False])
def test_weights_alone_with_a_scale_per_output_are_multiplied_as_they_are_stored(format, stored):
    """XLA for GPUs writes a weight that is scaled before the product, but not one that is only cast."""
    weight = quantize_array(W, format) if stored else W
    text = exported(lambda x, w: dot_general(x, w, ROWS, quantization=None if stored else format), X, weight)
    before, after = text.split("stablehlo.dot_general")
    assert types_of(text, "dot_general") == [("bf16", "bf16", "f32")]
    assert not stored or "stablehlo.multiply" not in before
    assert after.count("stablehlo.multiply") == 1


@pytest.mark.parametrize("format", ["int8(activations=false)", "e4m3/-1"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_only_rounding_of_weights_alone_with_a_scale_per_output_is_of_the_result(format, dtype):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(16, 64)), dtype)
    stored = quantize_array(jnp.asarray(draw.normal(size=(64, 32)), jnp.float32), format)
    values, scale = (np.asarray(array.astype(jnp.float32), np.float64) for array in (stored.values, stored.scale))
    terms = np.asarray(x.astype(jnp.float32), np.float64)[:, :, None] * (values * scale)
    out = np.asarray(dot_general(x, stored, ROWS).astype(jnp.float32), np.float64)
    # Half a unit in the last place of the result, and float32 sums of 64 terms and a product.
    bound = 2.0 ** -(jnp.finfo(dtype).nmant + 1) * np.abs(terms.sum(1)) + 66 * 2.0**-24 * np.abs(terms).sum(1)
    assert (np.abs(out - terms.sum(1)) <= 1.01 * bound).all()


@pytest.mark.parametrize(("format", "platform"), [("e4m3/16", "cuda"), ("int4/8", "tpu")])
def test_weights_alone_in_blocks_are_multiplied_wide(format, platform):
    text = exported(lambda x, w: dot_general(x, w, ROWS), X, quantize_array(W, format), platform=platform)
    assert types_of(text, "dot_general") == [("bf16", "bf16", "bf16")]
    # XLA for TPUs fuses shifts of both halves of a block into the matmul, but neither interleaved values nor a
    # concatenation: a matmul of 2048 rows then moves 1.14 instead of 1.08 of bfloat16's bytes.
    assert "bitcast_convert" not in text
    assert "concatenate" not in text
    assert bool(re.search(r"shift_right_logical.*xui8>", text)) == format.startswith("int4")


def test_the_backward_pass_is_of_two_products_in_the_compute_dtype():
    text = exported(jax.grad(lambda x, w: jnp.sum(multiply(x, w, "int8").astype(jnp.float32) ** 2), (0, 1)), X, W)
    assert sorted(types_of(text, "dot_general")) == [("bf16", "bf16", "bf16")] * 2 + [("i8", "i8", "i32")]
    assert text.count("stablehlo.round_nearest_even") == 2  # each operand is rounded once for both passes


def test_an_integer_product_moves_no_scale_about():
    text = exported(lambda x, w: dot_general(x, w, ROWS), X, quantize_array(W, "int8"))
    assert "stablehlo.transpose" not in text
    assert "stablehlo.reshape" not in text
    split = quantize_array(jax.ShapeDtypeStruct((64, 4, 8), jnp.bfloat16), "int8", Layout((64,), 2))
    assert "stablehlo.transpose" not in exported(lambda x, w: dot_general(x, w, ROWS), X, split)


@pytest.mark.parametrize(("dtype", "axes"), [("float16", (1,)), ("bfloat16", (0, 1))])
def test_magnitudes_compared_by_bits_are_those_compared_as_numbers(dtype, axes):
    x = np.stack([*edge_columns(33).values(), fresh(33)])
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.concatenate([x, np.where(np.arange(33) == 7, bad, x[:1])])
    x = jnp.asarray(x, dtype)
    by_bits, by_select = jax.jit(lambda x: (_measure_by_bits(x, axes), measure_amax(x, axes)))(x)
    # A CPU flushes what is subnormal, of which no scale is made.
    np.testing.assert_array_equal(np.maximum(by_bits, TINY), np.maximum(by_select, TINY))
    assert np.isinf(by_bits).any()
    assert (by_bits.shape, by_bits.dtype) == (by_select.shape, by_select.dtype)
    for empty in (jnp.zeros((0, 4), dtype), jnp.zeros((4, 0), dtype)):
        np.testing.assert_array_equal(_measure_by_bits(empty, (1,)), measure_amax(empty, (1,)))


def exported_product(weight, *platforms, dtype=jnp.bfloat16):
    quantization = None if weight is not W else "int8"
    multiply = lambda x, w: dot_general(x, w, ROWS, quantization=quantization)
    x = jax.ShapeDtypeStruct(X.shape, dtype)
    return jax.export.export(jax.jit(multiply), platforms=platforms)(x, weight).mlir_module()


def barriers(text):
    """The types of what stands behind barriers."""
    return re.findall(r"stablehlo\.optimization_barrier .*: (tensor<\S+>)", text)


@pytest.mark.parametrize("is_stored", [False, True])
def test_an_exported_program_has_the_form_of_its_platform(is_stored):
    weight = quantize_array(W, "int8") if is_stored else W
    cuda, tpu = exported_product(weight, "cuda"), exported_product(weight, "tpu")
    assert barriers(cuda) == ["tensor<8x32xbf16>"]
    assert "stablehlo.bitcast_convert" in cuda
    assert barriers(tpu) == []
    assert "stablehlo.bitcast_convert" not in tpu
    every = exported_product(weight, "cpu", "cuda", "tpu")
    assert barriers(every) == ["tensor<8x32xbf16>"]
    assert "stablehlo.bitcast_convert" in every
    assert barriers(exported_product(weight, "cuda", dtype=jnp.float16)) == []  # results in other dtypes have wide sums


@pytest.mark.slow
def test_the_largest_sums_of_float16_do_not_overflow():
    x, w = jnp.full((1, 2048), 2.0**-7, jnp.float16), jnp.full((2048, 1), 2.0)
    product = dot_general(x, quantize_array(w, "int8"), ROWS)
    np.testing.assert_allclose(product, [[32]], rtol=2**-9)
