"""GPTQ, against the loop over columns in float64, and through models."""

import functools
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibrated_models import (
    POLICY,
    ROWS,
    Linen,
    Nnx,
    check_errors,
    check_resumed,
    draw_inputs,
    draw_nnx_inputs,
    linear,
    read_shares,
)
from flax import nnx

import jmp_policy as jmp
from jmp_policy import contrib, quant
from jmp_policy.contrib._gptq_awq import Rounding, round_by_hessian
from jmp_policy.contrib._layer_by_layer import read_inputs
from jmp_policy.quant._bilinear import describe_convolution, describe_dot_general, describe_einsum
from jmp_policy.quant._layout import Layout
from jmp_policy.quant._numbers import to_numbers


def round_columns(weight, hessian, damping, rounding):
    """Frantar et al., algorithm 1, without blocks of columns: in float64, with the inverse of the Hessian."""
    rest, hessian = weight.astype(np.float64), hessian.astype(np.float64)
    inputs, diagonal = len(rest), np.diagonal(hessian)
    damped = hessian + np.diag(np.where(diagonal == 0, 1, damping * diagonal.mean()))
    order = np.argsort(-diagonal, kind="stable") if rounding.act_order else np.arange(inputs)
    upper = np.linalg.cholesky(np.linalg.inv(damped[order][:, order])).T
    low, scale, original = {}, {}, rest.copy()
    values = np.zeros(rest.shape, int)
    is_int4 = isinstance(rounding.format, quant.Int4)
    for step, at in enumerate(order):
        group = at // rounding.block
        if group not in scale:
            source = original if rounding.act_order else rest
            rows = source[group * rounding.block : (group + 1) * rounding.block]
            least, most = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
            scale[group] = (most - least) / 15 if is_int4 else np.maximum(most, -least) / 127
            low[group] = np.rint(-least / scale[group]) if is_int4 else 0
        bounds = (0, 15) if is_int4 else (-127, 127)
        values[at] = np.clip(np.rint(rest[at] / scale[group]) + low[group], *bounds)
        error = (rest[at] - (values[at] - low[group]) * scale[group]) / upper[step, step]
        rest[order[step:]] -= np.outer(upper[step, step:], error)
    return values


@pytest.mark.parametrize("rounding", [
    Rounding(quant.Int4(16), 16, block_size=32),
    pytest.param(Rounding(quant.Int4(20), 20, block_size=8), marks=pytest.mark.slow),
    pytest.param(Rounding(quant.Int8(), 40, block_size=32, act_order=True), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_rounding_is_that_of_the_loop_over_columns(rounding):
    inputs = 48 if rounding.block == 16 else 40
    weight = np.random.default_rng(1).normal(size=(inputs, 5)).astype(np.float32)
    rows = draw_inputs(inputs)
    hessian = rows.T @ rows
    made = round_by_hessian(weight[None, :, None], hessian[None], 0.01, rounding)
    expected = round_columns(weight, hessian, 0.01, rounding)
    # Sums in float32 may move an element that lies between two numbers.
    assert np.mean(np.asarray(made.values[0, :, 0]) != expected) <= 0.01

    nearest = quant.quantize_array(weight, rounding.format).dequantize()
    spread = quant_numbers(made, rounding.block)
    error = [np.sum((rows.astype(np.float64) @ (new - weight)) ** 2) for new in (spread, nearest)]
    assert error[0] < 0.8 * error[1]


def test_rounding_is_in_float32_under_x64():
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 40, 1, 5), (1, 40, 40))]
    with jax.enable_x64(True):
        made = jax.eval_shape(lambda *arrays: round_by_hessian(*arrays, 0.01, Rounding(quant.Int4(20), 20)), *abstract)
    assert [part.dtype for part in made] == [jnp.uint8, jnp.float32, jnp.uint8]


def quant_numbers(made, block):
    """Returns the numbers of the only group, `(inputs, channels)`."""
    scale, zero_point = (None if x is None else jnp.repeat(x[0], block, axis=0) for x in made[1:])
    return to_numbers(made._replace(values=made.values[0, :, 0], scale=scale, zero_point=zero_point))


def _stored(shape, layout, format="int8"):
    return quant.quantize_array(jax.random.normal(jax.random.key(1), shape), format, layout)


def _convolve(x, weight, **options):
    names = ("NHWC", "HWIO", "NHWC")
    return describe_convolution(x, weight, (1, 2), "SAME", dimension_numbers=names, **options)


@pytest.mark.parametrize(("shape", "weight", "describe"), [
    ((3, 7, 16), _stored((16, 4), None), lambda x, w: describe_dot_general(x, w, (((2,), (0,)), ((), ())))),
    ((7, 2, 8), _stored((2, 8, 4, 3), Layout((2, 8), 2)),
     lambda x, w: describe_dot_general(x, w, (((1, 2), (0, 1)), ((), ())))),
    ((7, 8), _stored((8, 2, 3), Layout((8, 2), 1), "int4/4"),
     lambda x, w: describe_dot_general(x, w, (((1,), (0,)), ((), ())))),
    ((5, 3, 8), _stored((3, 8, 4), Layout((8,), 1)), functools.partial(describe_einsum, "bnd,ndh->bnh")),
    ((2, 6, 6, 4), _stored((3, 2, 4, 5), None), _convolve),
    ((2, 6, 6, 4), _stored((3, 2, 2, 6), None), functools.partial(_convolve, feature_group_count=2)),
    ((2, 6, 6, 4), _stored((3, 2, 4, 5), None), functools.partial(_convolve, rhs_dilation=(2, 1))),
], ids=["dense", "general", "inner", "batch", "convolution", "groups", "dilated"])  # fmt: skip
def test_outputs_are_products_of_the_rows_that_are_read(shape, weight, describe):
    x = jax.random.normal(jax.random.key(0), shape)
    call = describe(x, weight)
    found = read_inputs(call.operation, x, weight)
    assert found is not None
    rows, inner = found
    matrices, groups, _, inputs = rows.shape
    numbers = weight.dequantize().reshape(matrices, inputs, inner, groups, -1)
    outputs = jnp.einsum("bgmk,bkign->bmgin", rows, numbers, precision="highest")
    expected = call.operation.compute(x, weight.dequantize())
    assert jnp.allclose(jnp.sort(outputs.ravel()), jnp.sort(expected.ravel()), atol=1e-4)
    assert outputs.size == expected.size


def test_scales_that_lie_across_the_inputs_are_not_read():
    weight = _stored((8, 6, 3), Layout((8, 6), 1), "int4/4")  # 6 outputs of an input, in blocks of 4
    call = describe_dot_general(jnp.ones((7, 8)), weight, (((1,), (0,)), ((), ())))
    assert read_inputs(call.operation, call.lhs, weight) is None


@pytest.fixture
def tokens():
    return list(jax.random.randint(jax.random.key(0), (2, 3, 40), 0, 32))


@pytest.mark.slow
def test_linen_models_are_rounded_matrix_by_matrix_into_the_storage_of_quantize(tokens, capsys, tmp_path):
    model = jmp.with_policy(Linen(maps=True), POLICY)
    variables = jax.jit(model.init)(jax.random.key(1), tokens[0])
    options = {"stacked": ["blocks"], "file": tmp_path / "gptq.jsonl", "progress": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = contrib.gptq(model, tokens, variables=variables, **options)
    assert [str(one.message).partition(":")[0] for one in caught] == [
        "gptq rounds 'last/kernel' to nearest and cannot read their inputs"
    ]
    assert caught[0].filename == __file__
    paths, shares = read_shares(capsys.readouterr().err)
    assert paths == ["blocks/dense/kernel"] * 2 + ["twice/kernel"]
    assert max(shares) < 1

    nearest = quant.quantize(variables, POLICY, stacked=["blocks"])
    assert jax.tree.structure(made) == jax.tree.structure(nearest)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, nearest)
    same = jax.tree.map(lambda x, y: bool((x == y).all()), made, nearest)["params"]
    assert all(jax.tree.leaves([same["embed"], same["last"]]))
    assert not same["twice"]["kernel"].values
    apply: Any = model.apply
    check_errors(made, nearest, lambda one: apply(one, tokens[0]), Linen(maps=True).apply(variables, tokens[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = lambda: contrib.gptq(model.bind(variables), tokens, **options)
        check_resumed(run, options["file"], made, capsys)
    with pytest.raises(
        ValueError, match=r"gptq\.jsonl has the matrices of another run: its damping is 0\.01, expected"
    ):
        contrib.gptq(model, tokens, variables=variables, damping=0.1, **options)


@pytest.mark.slow
def test_nnx_models_stay_tied_and_masked(capsys):
    model = Nnx(nnx.Rngs(0))
    x = 2 * draw_nnx_inputs()
    policied = jmp.with_policy(model, "int8(min_size=0)_from_float32")
    made = contrib.gptq(policied, list(x), progress=True)
    assert max(read_shares(capsys.readouterr().err)[1]) < 1
    assert made.first.kernel is made.tied.kernel
    assert not made.masked.kernel[...].dequantize()[2].any()
    assert made.masked.kernel[...].dequantize()[:2].all(axis=0).any()
    nearest = quant.quantize(policied, "int8(min_size=0)_from_float32")
    assert jax.tree.structure(nnx.state(made)) == jax.tree.structure(nnx.state(nearest))
    assert isinstance(model.first.kernel, nnx.Param)


class Heads(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.query, self.key, self.out = (nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        RUNS.append(len(x))
        return self.out(nnx.relu(self.query(x) * self.key(x)))


RUNS = []


@pytest.mark.slow
def test_matrices_with_the_same_inputs_share_a_run():
    model, x = Heads(nnx.Rngs(0)), jnp.asarray(draw_inputs(16))
    RUNS.clear()
    made = contrib.gptq(jmp.with_policy(model, POLICY), [x[:50], x[50:]])
    assert RUNS == [50, 50, 46, 50, 46]  # one to find the order, then two for each Hessian
    alone = contrib.gptq(jmp.with_policy(model.key, POLICY), [x[:50], x[50:]])
    values = [jax.tree.leaves(nnx.state(one, jmp.nnx.QuantizedParam))[0] for one in (made.key, alone)]
    assert (values[0] == values[1]).all()


def test_a_weight_is_seen_through_wide_sums():
    """A matmul with an accumulate dtype dequantizes its weight before it multiplies."""
    layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    policy = "int4/16(min_size=0)_from_params=float32,compute=bfloat16,output=float32,accumulate=float32"
    with pytest.raises(ValueError, match=r"^The inputs of the weight 'kernel' are not all finite"):
        contrib.gptq(jmp.with_policy(layer, policy), [jnp.full((2, 16), jnp.nan)])


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: contrib.gptq(linear(), []), ValueError, r"^gptq was given no batches\. For example: gptq\(model, \[x\]"),
    (lambda: contrib.gptq(linear(), ROWS), TypeError, rf"^gptq takes a list of batches, got an array of shape "
     rf"\({ROWS.shape[0]}, 16\)\. Pass a list of batches: \[x\]\. For example: gptq\(model, \[x\]"),
    (lambda: contrib.gptq(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), [ROWS]), ValueError,
     r"^gptq quantizes by the policy of a model, and .* has none\. For example: gptq\(with_policy\(model, 'int4_from"),
    (lambda: contrib.gptq(linear("float32"), [ROWS]), ValueError,
     r"^Nothing to quantize: the policy 'float32' stores no quantized weights"),
    (lambda: contrib.gptq(linear("mxfp8/16(min_size=0)_from_float32"), [ROWS]), ValueError,
     r"^gptq rounds to int4 and int8, and the weight 'kernel' has the format 'mxfp8/16\(min_size=0\)'"),
    (lambda: contrib.gptq(linear(), [ROWS.at[1, 3].set(jnp.inf)]), ValueError,
     r"^The inputs of the weight 'kernel' are not all finite, .* For example: \[x for x in batches"),
    (lambda: contrib.gptq(jnp.ones, [ROWS]), TypeError, r"^gptq takes a Flax module, got .* For example: gptq\(with"),
    (lambda: contrib.gptq(linear(), [ROWS], damping=-1.0), ValueError, r"^damping is a number from 0, got -1\.0\."),
    (lambda: contrib.gptq(linear(), [ROWS], block_size=0), ValueError, r"^block_size is a number of inputs, got 0\."),
    (lambda: contrib.gptq(linear(), [ROWS], clip="best"), ValueError, r"^clip is 'absmax', 'mse' or a percentile"),
    (lambda: contrib.gptq(linear(), [jnp.ones(16)], method=lambda model, x: x), ValueError,
     r"^gptq cannot read the inputs of any weight \('kernel'\): they are not called"),
    pytest.param(lambda: contrib.gptq(linear(), [ROWS], damping=0), ValueError,
     r"^The Hessian of the weight 'kernel' is singular: .* For example: gptq\(\.\.\., damping=0\.01\)\.$",
     marks=pytest.mark.slow),
])  # fmt: skip
def test_what_cannot_be_rounded_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.slow
def test_inputs_that_are_always_zero_are_rounded_to_nearest():
    rows = jnp.asarray(draw_inputs(16)).at[:, 3].set(0)
    policied = linear("int8(min_size=0)_from_float32")
    read = lambda model: np.asarray(jax.tree.leaves(nnx.state(model, jmp.nnx.QuantizedParam))[0])
    nearest = read(quant.quantize(policied, "int8(min_size=0)_from_float32"))
    made = read(contrib.gptq(policied, [rows]))
    assert (made[3] == nearest[3]).all()
    assert (made != nearest).any()
    assert (read(contrib.gptq(policied, [0 * rows])) == nearest).all()


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
    others = {
        "arguments": [{"flip": True}, {"method": "other"}],
        "traced program": [{"model": Shifted(mean=2.0)}, {"model": Edited()}],
    }
    for name, calls in others.items():
        for options in calls:
            with pytest.raises(ValueError, match=rf"^.*gptq\.jsonl has the matrices of another run: its {name} is "):
                calibrate_into(file, **options)
    header, line = before.splitlines()
    changed = {key: json.loads(line) | {key: value} for key, value in (("matrix", 1), ("scale", None), ("path", "x"))}
    for entry in changed.values():
        file.write_text(f"{header}\n{json.dumps(entry)}\n")
        with pytest.raises(
            ValueError, match=r"gptq\.jsonl is not a file of matrices, or is damaged, so it was not chan"
        ):
            calibrate_into(file)
    file.write_text(before)
    read = lambda model: np.asarray(jax.tree.leaves(nnx.state(model, jmp.nnx.QuantizedParam))[0])
    np.testing.assert_array_equal(read(calibrate_into(file)), read(calibrate_into(None)))
