"""Grouped matmuls in 8 bits: equal to a dense matmul per group, forward and in both gradients."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

from jmp_policy import quant

FORMATS = ("int8", "float8(recipe=current,min_size=0)", "mxfp8")
VARIANTS = ("float8(recipe=current/row,min_size=0,weight_grad=false)", "mxfp8(block_size=16,gradients=e5m2)")
UNEVEN = (5, 0, 19, 6)  # of 32 rows
_DENSE = (((1,), (0,)), ((), ()))


def run_groups(x, w, g, sizes, format, **options):
    """Returns the output and both gradients of `ragged_dot`."""
    multiply = lambda x, w: quant.ragged_dot(x, w, jnp.array(sizes, np.int32), quantization=format, **options)
    out, pull = jax.vjp(multiply, x, w)
    return (out, *pull(g))


def run_dense(x, w, g, sizes, format, **options):
    """Returns the same from a `dot_general` per group; float8 needs rows of zeros after each group."""

    def multiply(x, w):
        outs, begin = [], 0
        for matrix, size in zip(w, sizes, strict=True):
            padding = -size % 16 if "float8" in format else 0
            rows = jnp.pad(x[begin : begin + size], ((0, padding), (0, 0)))
            outs.append(quant.dot_general(rows, matrix, _DENSE, quantization=format, **options)[:size])
            begin += size
        outs.append(jnp.zeros((len(x) - begin, w.shape[-1]), outs[0].dtype))
        return jnp.concatenate(outs)

    out, pull = jax.vjp(multiply, x, w)
    return (out, *pull(g))


def draw_exact(dtype, rows=32, groups=4, inputs=32, outputs=16):
    """Draws integers whose rounded products have exact float32 sums. Matrices differ in magnitude by group."""
    draws = np.random.default_rng(0)
    x, w, g = (
        draws.integers(-4, 5, shape).astype(np.float32)
        for shape in ((rows, inputs), (groups, inputs, outputs), (rows, outputs))
    )
    x[3:9] *= 8
    x[:, 0] = w[:, 0] = 127  # int8 scales are powers of two
    return jnp.array(x, dtype), jnp.array(w * 2.0 ** np.arange(groups)[:, None, None], dtype), jnp.array(g, dtype)


def assert_equal(tree, other):
    for x, y in zip(tree, other, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "sizes"),
    [
        *((format, UNEVEN) for format in (*FORMATS[:2], *VARIANTS)),
        ("int8", (0, 0, 0, 0)),
        ("mxfp8", (1, 29, 1, 1)),
    ],
)
def test_groups_equal_a_dense_matmul_each(format, sizes):
    x, w, g = draw_exact(np.float32)
    # A scale or a block that rows of two groups shared would round the smaller ones to fewer bits.
    magnitudes = 2.0 ** (10 * np.repeat((0, 1, -1) if sizes == UNEVEN else (0,) * 3, (5, 19, 8)))[:, None]
    magnitudes = magnitudes.astype(np.float32)
    operands = (x * magnitudes, w, g * magnitudes)
    groups, dense = (jax.jit(run, static_argnums=(3, 4)) for run in (run_groups, run_dense))
    assert_equal(groups(*operands, sizes, format), dense(*operands, sizes, format))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_rows_after_the_last_group_do_not_count_and_a_bad_group_leaves_the_others_alone(format):
    x, w, g = draw_exact(np.float32)
    sizes = (5, 0, 9, 2)
    poisoned = x.at[16:].set(jnp.nan), w, g.at[16:].set(1e30)
    groups = jax.jit(run_groups, static_argnums=(3, 4))
    results = groups(*poisoned, sizes, format)
    if format != "mxfp8":
        bad = groups(x.at[0, 0].set(jnp.inf), w, g, UNEVEN, format)[0]
        assert np.isfinite(bad).all(1).tolist() == [row >= (1 if format == "int8" else 5) for row in range(32)]
    assert_equal(results, groups(x.at[16:].set(0), w, g, sizes, format))
    assert not results[0][16:].any()
    assert not results[1][16:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "operands"),
    [
        ("int8", ["i8 i8 i32", "bf16 bf16 bf16", "bf16 bf16 bf16"]),
        ("float8(recipe=current)", ["f8E4M3FN f8E4M3FN bf16", "f8E5M2 f8E4M3FN bf16", "f8E4M3FN f8E5M2 bf16"]),
        ("mxfp8", ["bf16 bf16 f32"] * 3),  # JAX has no grouped matmul of blocks
    ],
)
def test_accelerators_get_8_bit_operands(format, operands):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 128), (4, 128, 128), (64, 128))]
    program = jax.jit(lambda *operands: run_groups(*operands, (16, 0, 40, 8), format))
    for platform in ("tpu", "cuda"):
        text = export.export(program, platforms=[platform])(*shapes).mlir_module()
        calls = [line for line in text.splitlines() if 'composite "chlo.ragged_dot"' in line]
        types = [re.findall(r"tensor<[0-9x]+x(\w+)>", line.rpartition(" : ")[2]) for line in calls]
        assert [f"{left} {right} {out}" for left, right, _, out in types] == operands


def test_output_and_gradients_have_the_dtypes_of_dot_general():
    x, w, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32, 32), (4, 32, 16), (32, 16)))
    for format in (None, *FORMATS, *VARIANTS):
        for options in ({}, {"preferred_element_type": np.float32}):
            arguments = x, w.update(dtype=np.float32) if format else w, g.update(dtype=np.float32) if options else g
            outs = jax.eval_shape(lambda *operands: run_groups(*operands, UNEVEN, format, **options), *arguments)
            assert [out.dtype for out in outs] == [arguments[2].dtype, x.dtype, arguments[1].dtype]


def test_small_or_odd_matmuls_stay_out_of_float8():
    x, w, _ = draw_exact(np.float32)
    plain = lax.ragged_dot(x, w, jnp.array(UNEVEN))
    small = quant.ragged_dot(x, w, jnp.array(UNEVEN), quantization="float8(recipe=current)")
    np.testing.assert_array_equal(small, plain)
    odd = quant.ragged_dot(x[:31], w, jnp.array(UNEVEN), quantization="float8(recipe=current,min_size=0)")
    np.testing.assert_array_equal(odd, plain.at[30:].set(0)[:31])


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS[:2])
def test_shard_map_sums_the_gradient_of_replicated_matrices(format):
    x, w, g = draw_exact(np.float32, rows=64)
    sizes, mesh = jnp.array([UNEVEN, (10, 2, 10, 10)]), make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def differentiate(x, w, g, sizes):
        return jax.grad(lambda x, w: jnp.vdot(quant.ragged_dot(x, w, sizes, quantization=format), g), (0, 1))(x, w)

    rows = P("data")
    sharded = jax.shard_map(
        lambda x, w, g, sizes: differentiate(x, w, g, sizes[0]),
        mesh=mesh,
        in_specs=(rows, P(), rows, rows),
        out_specs=(rows, P()),
    )
    halves = [jax.jit(differentiate)(x[at], w, g[at], sizes[n]) for n, at in enumerate((slice(32), slice(32, 64)))]
    expected = jnp.concatenate([halves[0][0], halves[1][0]]), halves[0][1] + halves[1][1]
    found = jax.jit(sharded)(x, w, g, sizes)
    if jax.default_backend() == "gpu" and "float8" in format:  # whose tensor cores add with about 14 bits
        for result, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(result, other, rtol=2.0**-12, atol=2.0**-12 * float(jnp.max(jnp.abs(other))))
    else:
        assert_equal(found, expected)


def test_a_second_derivative_is_an_error():
    x, w, _ = draw_exact(np.float32)
    for format in FORMATS[1:]:
        loss = lambda x, format=format: quant.ragged_dot(x, w, jnp.array(UNEVEN), quantization=format).sum()
        with pytest.raises(TypeError, match=r"have no second derivative\. For example"):
            jax.eval_shape(jax.grad(lambda x, loss=loss: jax.grad(loss)(x).sum()), x)


def test_a_mixed_second_derivative_of_int8_is_that_of_dot_general():
    x, w, g = draw_exact(np.float32)
    squares = lambda run: jax.jit(jax.grad(lambda w: jnp.sum(run(x, w, g, UNEVEN, "int8")[1] ** 2)))
    groups, dense = squares(run_groups)(w), squares(run_dense)(w)
    assert groups.any()  # the gradient of the rows depends on the matrices
    np.testing.assert_allclose(groups, dense, rtol=2**-20)


X, W, SIZES = jnp.ones((8, 4)), jnp.ones((2, 4, 3)), jnp.array([3, 5])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((X, W[0], SIZES), {}, ValueError, r"takes shapes \(m, k\), \(g, k, n\) and \(g,\), got \(8, 4\), \(4, 3\)"),
        ((X, W, SIZES[:1]), {}, ValueError, r"and \(1,\)\. For example: \(64, 32\), \(4, 32, 16\) and \(4,\)\."),
        ((X, W, SIZES.astype(np.float32)), {}, TypeError, r"integers, got 'float32'\. For example: group_sizes\.as"),
        ((X.astype(np.int32), W, SIZES), {}, TypeError, r"got int32\[8, 4\]\. For example: ragged_dot\(x\.astype\("),
        ((X, W, SIZES), {"group_offset": SIZES[:1]}, NotImplementedError, r"no group_offset with .*'int8'\. For exam"),
        ((X, W, SIZES), {"quantization": "int4"}, ValueError, r"'int4/128' has 4\. For example: quantization='int8'"),
        ((X, W, SIZES), {"quantization": "int8(activations=false)"}, ValueError, r"quantizes weights only\. For exam"),
        ((X, W, SIZES), {"quantization": "float8"}, ValueError, r"which 'float8' needs\. For .*float8\(recipe=current"),
        ((X, quant.quantize_array(jax.ShapeDtypeStruct(W.shape, W.dtype), "int8"), SIZES),
         {"quantization": "mxfp8"}, ValueError, r"got QuantizedArray\(int8, .* and quantization='mxfp8'\. Leave"),
    ],
)  # fmt: skip
def test_errors_quote_and_show_an_example(arguments, options, error, text):
    with pytest.raises(error, match=text):
        quant.ragged_dot(*arguments, **{"quantization": "int8"} | options)


@pytest.mark.parametrize("layout", [quant.Layout((4,), 1), None], ids=["a scale per matrix", "scales of all matrices"])
def test_a_stored_stack_of_matrices_is_multiplied_as_it_is_stored(layout):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)), jnp.float32)
    stored = quant.quantize_array(w, "int8", layout)
    given = w if layout else stored.dequantize()
    rows = jnp.asarray(np.random.default_rng(1).normal(size=X.shape), jnp.float32)
    wanted = quant.ragged_dot(rows, given, SIZES, quantization="int8")
    np.testing.assert_array_equal(quant.ragged_dot(rows, stored, SIZES), wanted)
