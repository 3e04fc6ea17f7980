"""GPTQ, against the loop over columns in float64, and through models."""

import functools
import json
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibrated_models import POLICY, ROWS, draw_inputs, linear
from flax import nnx

import jmp_policy as jmp
from jmp_policy import contrib, quant

# A model for each kind of weight would be calibrated for ten times as long.
from jmp_policy.contrib._layer_by_layer import read_inputs
from jmp_policy.quant import Layout, describe_convolution, describe_dot_general, label_einsum


def round_columns(weight, rows, block, is_int4, act_order):
    """Frantar et al., algorithm 1, without blocks of columns: in float64, with the inverse of the Hessian."""
    rest, hessian = weight.astype(np.float64), (rows.T @ rows).astype(np.float64)
    inputs, diagonal = len(rest), np.diagonal(hessian)
    damped = hessian + np.diag(np.where(diagonal == 0, 1, 0.01 * diagonal.mean()))
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(inputs)
    upper = np.linalg.cholesky(np.linalg.inv(damped[order][:, order])).T
    low, scale, original = {}, {}, rest.copy()
    numbers = np.zeros(rest.shape)
    for step, at in enumerate(order):
        group = at // block
        if group not in scale:
            source = original if act_order else rest
            part = source[group * block : (group + 1) * block]
            least, most = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
            scale[group] = (most - least) / 15 if is_int4 else np.maximum(most, -least) / 127
            low[group] = np.rint(-least / scale[group]) if is_int4 else 0
        bounds = (0, 15) if is_int4 else (-127, 127)
        values = np.clip(np.rint(rest[at] / scale[group]) + low[group], *bounds)
        numbers[at] = (values - low[group]) * scale[group]
        rest[order[step:]] -= np.outer(upper[step, step:], (rest[at] - numbers[at]) / upper[step, step])
    return numbers


@pytest.mark.parametrize(
    ("format", "block", "options"),
    [
        ("int4/16(min_size=0)", 16, {"block_size": 32}),
        pytest.param("int4/20(min_size=0)", 20, {"block_size": 8}, marks=pytest.mark.slow),
        pytest.param("int8(min_size=0)", 40, {"block_size": 32, "act_order": True}, marks=pytest.mark.slow),
    ],
)
def test_rounding_is_that_of_the_loop_over_columns(format, block, options):
    inputs = 48 if block == 16 else 40
    model, rows = nnx.Linear(inputs, 5, rngs=nnx.Rngs(0)), draw_inputs(inputs)
    policied, weight = jmp.with_policy(model, f"{format}_from_float32"), np.asarray(model.kernel[...])
    made = contrib.gptq(policied, [jnp.asarray(rows)], **options).kernel[...].dequantize()
    expected = round_columns(weight, rows, block, "int4" in format, options.get("act_order", False))
    # Sums in float32 may move an element that lies between two numbers.
    assert np.mean(np.abs(made - expected) > 1e-4) <= 0.01
    nearest = quant.quantize_array(weight, format).dequantize()
    error = [np.sum((rows.astype(np.float64) @ (new - weight)) ** 2) for new in (made, nearest)]
    assert error[0] < 0.8 * error[1]


def _convolve(x, weight, **options):
    names = ("NHWC", "HWIO", "NHWC")
    return describe_convolution(x, weight, (1, 2), "SAME", dimension_numbers=names, **options).operation


def _multiply(x, weight, axes=1):
    numbers = (tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes)))
    return describe_dot_general(x, weight, (numbers, ((), ()))).operation


@pytest.mark.parametrize(
    ("shape", "weight", "layout", "describe"),
    [
        ((2, 6, 6, 4), (3, 2, 4, 5), None, functools.partial(_convolve, rhs_dilation=(2, 1))),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ((7, 2, 8), (2, 8, 4, 3), Layout((2, 8), 2), functools.partial(_multiply, axes=2)),
                ((7, 8), (8, 2, 3), Layout((8, 2), 1), _multiply),
                ((5, 3, 8), (3, 8, 4), Layout((8,), 1), lambda x, w: label_einsum(x.ndim, w.ndim, "bnd,ndh->bnh")),
                ((5, 8), (3, 8, 4), Layout((8,), 1), lambda x, w: label_einsum(x.ndim, w.ndim, "nd,edh->enh")),
                ((2, 6, 6, 4), (3, 2, 2, 6), None, functools.partial(_convolve, feature_group_count=2)),
            )
        ),
    ],
    ids=["dilated", "general", "inner", "batch", "experts", "groups"],
)
def test_outputs_are_products_of_the_rows_that_are_read(shape, weight, layout, describe):
    x = jax.random.normal(jax.random.key(0), shape)
    weight = quant.quantize_array(jax.random.normal(jax.random.key(1), weight), "int8", layout)
    operation = describe(x, weight)
    rows, inner = read_inputs(operation, x, weight)
    matrices, groups, _, inputs = rows.shape
    numbers = weight.dequantize().reshape(matrices, inputs, inner, groups, -1)
    outputs = jnp.einsum("bgmk,bkign->bmgin", rows, numbers, precision="highest")
    expected = operation.compute(x, weight.dequantize())
    assert jnp.allclose(jnp.sort(outputs.ravel()), jnp.sort(expected.ravel()), atol=1e-4)
    assert outputs.size == expected.size


def test_scales_that_lie_across_the_inputs_are_not_read():
    # 6 outputs of an input, in blocks of 4
    weight = quant.quantize_array(jax.ShapeDtypeStruct((8, 6, 3), jnp.float32), "int4/4", Layout((8, 6), 1))
    x = jnp.ones((7, 8))
    assert read_inputs(_multiply(x, weight), x, weight) is None


def test_a_weight_is_seen_through_wide_sums():
    """A matmul with an accumulate dtype dequantizes its weight before it multiplies."""
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    policy = "int4/16(min_size=0)_from_params=float32,compute=bfloat16,output=float32,accumulate=float32"
    with pytest.raises(ValueError, match=r"^The inputs of the weight 'kernel' are not all finite"):
        contrib.gptq(jmp.with_policy(layer, policy), [jnp.full((2, 16), jnp.nan)])


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: contrib.gptq(linear("float32"), [ROWS]), ValueError,
     r"^Nothing to quantize: the policy 'float32' stores no quantized weights"),
    (lambda: contrib.gptq(jnp.ones, [ROWS]), TypeError, r"^gptq takes a Flax module, got .* For example: gptq\(with"),
    (lambda: contrib.gptq(linear(), [ROWS], damping=-1.0), ValueError, r"^damping is a number from 0, got -1\.0\."),
    (lambda: contrib.gptq(linear(), [ROWS], block_size=0), ValueError, r"^block_size is a number of inputs, got 0\."),
    (lambda: contrib.awq(linear(), [ROWS], grid_size=1), ValueError, r"^grid_size is a number of powers from 2, got 1"),
    (lambda: contrib.gptq(linear(), [jnp.ones(16)], method=lambda model, x: x), ValueError,
     r"^gptq cannot read the inputs of any weight \('kernel'\): they are not called"),
    pytest.param(lambda: contrib.gptq(linear(), [ROWS], damping=0), ValueError,
     r"^The Hessian of the weight 'kernel' is singular: .* For example: gptq\(\.\.\., damping=0\.01\)\.$",
     marks=pytest.mark.slow),
])  # fmt: skip
def test_what_cannot_be_rounded_is_an_error(call, error, text):
    with pytest.raises(error, match=text):
        call()


def read(model):
    return np.asarray(model.kernel[...].values)


@pytest.mark.slow
def test_inputs_that_are_always_zero_are_rounded_to_nearest():
    policied = linear("int8(min_size=0)_from_float32")
    nearest = read(quant.quantize(policied, "int8(min_size=0)_from_float32"))
    made = read(contrib.gptq(policied, [jnp.asarray(draw_inputs(16)).at[:, 3].set(0)]))
    assert (made[3] == nearest[3]).all()
    assert (made != nearest).any()
    assert (read(contrib.gptq(policied, [0 * ROWS])) == nearest).all()


class Shifted(nnx.Module):
    """Reads its inputs in several ways, and beside statistics."""

    def __init__(self, mean=0.0):
        self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=nnx.Rngs(0))
        self.norm.mean[...] = jnp.full(16, mean)
        self.dense = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x, flip=False):
        return self.dense(self.norm(x[:, ::-1] if flip else x))

    def other(self, x):
        return self.dense(x)


class Edited(Shifted):
    def __call__(self, x, flip=False):
        return self.dense(jnp.tanh(self.norm(x)))


def calibrate_into(file, model=None, **options):
    return contrib.gptq(jmp.with_policy(model or Shifted(), POLICY), [ROWS], file=file, progress=False, **options)


def test_matrices_of_another_call_or_damaged_ones_are_refused(tmp_path):
    """They were taken, and made a model worse than without calibration."""
    file = tmp_path / "gptq.jsonl"
    calibrate_into(file)
    before = file.read_text(encoding="utf-8")
    for name, options in (
        ("arguments", {"flip": True}),
        ("arguments", {"method": "other"}),
        ("traced program", {"model": Shifted(mean=2.0)}),
        ("traced program", {"model": Edited()}),
    ):
        with pytest.raises(ValueError, match=rf"^.*gptq\.jsonl has the matrices of another run: its {name} is "):
            calibrate_into(file, **options)
    header, line = before.splitlines()
    for key, value in (("matrix", 1), ("scale", None), ("path", "x")):
        file.write_text(f"{header}\n{json.dumps(json.loads(line) | {key: value})}\n")
        with pytest.raises(ValueError, match=r"gptq\.jsonl is not a file of matrices, or is damaged, so it was not c"):
            calibrate_into(file)
    file.write_text(before)
    np.testing.assert_array_equal(read(calibrate_into(file).dense), read(calibrate_into(None).dense))


class Parallel(nnx.Module):
    """Two layers of the same size, in an order that the inputs choose, after one whose outputs they take."""

    def __init__(self, notice=lambda: None, swaps=True):
        self.first, self.left, self.right = (nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3))
        self.notice, self.swaps = notice, swaps

    def __call__(self, x):
        self.notice()
        x = self.first(x)
        layers = [self.left, self.right] if not self.swaps or x[0, 0] > 0 else [self.right, self.left]
        found = {id(layer): layer(x if layer is self.left else jnp.abs(x)) for layer in layers}
        return found[id(self.left)] - found[id(self.right)]


BATCHES = [sign * jnp.asarray(draw_inputs(16, seed=seed)) for seed, sign in ((0, 1), (1, -1), (2, 1), (3, -1))]


def test_each_batch_runs_once_with_the_settings_of_the_caller():
    seen, before = [], threading.active_count()
    notice = lambda: seen.append((jax.default_matmul_precision.value, jax.sharding.get_mesh().axis_names))
    model = jmp.with_policy(Parallel(notice, swaps=False), POLICY)
    with jax.default_matmul_precision("float32"), jax.set_mesh(jax.make_mesh((1,), ("data",))):
        contrib.gptq(model, BATCHES)
    assert seen == [("float32", ("data",))] * (1 + len(BATCHES))
    assert threading.active_count() == before


def test_matrices_are_measured_in_any_order_of_the_batches():
    swapped, straight = (contrib.gptq(jmp.with_policy(Parallel(swaps=s), POLICY), BATCHES) for s in (True, False))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(swapped), nnx.state(straight))


def test_an_error_of_a_batch_is_raised_and_ends_all_runs():
    calls, before = [], threading.active_count()

    def fail_at_the_fourth():
        calls.append(None)
        if len(calls) == 4:
            raise KeyError("the third batch")

    with pytest.raises(KeyError, match="the third batch"):
        contrib.gptq(jmp.with_policy(Parallel(fail_at_the_fourth), POLICY), BATCHES)
    assert threading.active_count() == before


PADDED = {
    "matrix": (lambda: nnx.Linear(20, 8, rngs=nnx.Rngs(0)), (64, 20)),
    "convolution": (lambda: nnx.Conv(5, 8, (2, 2), rngs=nnx.Rngs(0)), (4, 6, 6, 5)),
    "heads": (lambda: nnx.LinearGeneral((3, 4), 8, axis=(-2, -1), rngs=nnx.Rngs(0)), (64, 3, 4)),
}


@pytest.mark.parametrize("method", [contrib.gptq, pytest.param(contrib.awq, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", PADDED)
def test_a_weight_that_is_padded_to_whole_blocks_is_rounded_for_its_inputs(layer, method):
    make, shape = PADDED[layer]
    few = 1 if layer == "convolution" else 3  # directions that the inputs lie in
    draw, inputs = np.random.default_rng(0).normal, math.prod(shape[1:]) if layer == "heads" else shape[-1]
    x = draw(size=(math.prod(shape) // inputs, few)) @ draw(size=(few, inputs))
    x = jnp.asarray(x.reshape(shape), jnp.float32)
    model = jmp.with_policy(make(), "int4/8(min_size=0)_from_float32")
    wanted = make()(x)
    error = lambda found: float(jnp.linalg.norm(found(x) - wanted))
    rounded = method(model, [x])
    assert "padded" in str(jmp.explain(rounded, x))
    assert error(rounded) < 0.95 * error(jmp.quant.quantize(model, "int4/8(min_size=0)_from_float32"))
