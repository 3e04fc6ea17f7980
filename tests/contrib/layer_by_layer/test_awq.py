"""AWQ, against the search over powers in float64 and qwix, and through models."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
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
from flax import nnx, serialization

import jmp_policy as jmp
from jmp_policy import contrib, quant
from jmp_policy.contrib._gptq_awq import round_with_input_scales, take_blocks
from jmp_policy.contrib._layer_by_layer import add_input_scale, measure_inputs
from jmp_policy.quant._layout import Layout
from jmp_policy.quant._numbers import Quantized, to_numbers


def round_in_float64(weight, scales, block):
    """Rounds `weight * scales` to 16 values per block, and returns the numbers divided by the scales."""
    blocks = (weight * scales[:, None]).reshape(-1, block, weight.shape[1])
    low, high = np.minimum(blocks.min(1, keepdims=True), 0), np.maximum(blocks.max(1, keepdims=True), 0)
    step = (high - low) / 15
    zero_point = np.rint(-low / step)
    values = np.clip(np.rint(blocks / step) + zero_point, 0, 15)
    return ((values - zero_point) * step).reshape(weight.shape) / scales[:, None]


def read_numbers(made, block):
    """Returns the numbers of the only group, `(inputs, channels)`."""
    scale, zero_point = (jnp.repeat(part[0], block, axis=0) for part in (made.scale, made.zero_point))
    return to_numbers(Quantized(made.values[0, :, 0], scale, zero_point)) * made.input_scale[:, None]


def test_scales_are_those_of_the_search_over_powers_in_float64():
    """Lin et al., section 3.2: the power of the mean magnitude for which the outputs change least."""
    weight, rows = np.random.default_rng(1).normal(size=(48, 5)).astype(np.float32), draw_inputs(48)
    made = round_with_input_scales(weight[None, :, None], measure_inputs(rows[None]), 16, 20, "absmax", False)
    wide, magnitude = weight.astype(np.float64), np.abs(rows.astype(np.float64)).mean(0)
    attempts = []
    for power in np.linspace(0, 1, 20):
        scales = magnitude**power
        scales = scales / np.sqrt(scales.min() * scales.max())
        numbers = round_in_float64(wide, scales, 16)
        attempts.append((np.sum((rows.astype(np.float64) @ (numbers - wide)) ** 2), power, scales, numbers))
    error, power, scales, numbers = min(attempts, key=lambda attempt: attempt[0])
    assert 0 < power < 1
    assert error < 0.9 * attempts[0][0]
    np.testing.assert_allclose(made.input_scale, 1 / scales, rtol=1e-5)
    np.testing.assert_allclose(read_numbers(made, 16), numbers, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("block", [32, 64])
def test_outputs_change_as_little_as_with_qwix_and_less_with_smaller_ranges(block):
    from qwix._src.core import qarray
    from qwix.contrib import awq_core

    weight, rows = np.random.default_rng(1).normal(size=(64, 24)).astype(np.float32), draw_inputs(64, 256)
    how = qarray.HowToQuantize(
        qtype=jnp.int4, channelwise_axes=(0,), tiled_axes={1: block}, calibration_method="minmax"
    )
    theirs, scales = awq_core.quantize_weight(jnp.asarray(weight.T), awq_core.compute_act_scale(jnp.asarray(rows)), how)
    statistics = measure_inputs(rows[None])
    errors = [
        np.linalg.norm(rows.astype(np.float64) @ (np.asarray(numbers, np.float64) - weight))
        for numbers in (
            (qarray.dequantize(theirs) / scales).T,
            *(
                read_numbers(
                    round_with_input_scales(weight[None, :, None], statistics, block, 20, "absmax", search), block
                )
                for search in (False, True)
            ),
        )
    ]
    assert errors[1] < 1.01 * errors[0]
    assert errors[2] < 0.95 * errors[1]


@pytest.mark.parametrize(("inner", "block"), [(1, 4), (2, 4), (3, 12), (8, 4)])
def test_hessians_of_blocks_measure_the_change_of_each_block(inner, block):
    rows = draw_inputs(8, 20)
    hessian = jnp.asarray(rows.T @ rows)[None]
    change = np.zeros((8 * inner,), np.float32)
    change[block : 2 * block] = np.random.default_rng(2).normal(size=block)
    blocks = change.reshape(-1, block)
    own = np.asarray(take_blocks(hessian, inner, block))[0]
    outputs = rows @ change.reshape(8, inner)
    np.testing.assert_allclose(np.einsum("bi,bij,bj->", blocks, own, blocks), np.sum(outputs**2), rtol=1e-4)


def test_rounding_is_in_float32_under_x64():
    abstract = jax.ShapeDtypeStruct((1, 48, 1, 5), jnp.float32)
    rows = jax.ShapeDtypeStruct((1, 7, 48), jnp.float32)
    with jax.enable_x64(True):
        made = jax.eval_shape(
            lambda weight, rows: round_with_input_scales(weight, measure_inputs(rows), 16, 20, "absmax", True),
            abstract,
            rows,
        )
    assert [part.dtype for part in made] == [jnp.uint8, jnp.float32, jnp.uint8, jnp.float32]


def _is_none(node):
    return node is None


def _scaled_weight(key=0):
    layout = Layout((16,), 1)
    weight = add_input_scale(quant.quantize_array(jax.random.normal(jax.random.key(key), (3, 16, 4)), "int4/8", layout))
    assert weight.input_scale is not None
    return dataclasses.replace(weight, input_scale=jnp.linspace(0.5, 2, 48).reshape(weight.input_scale.shape))


def test_an_input_scale_multiplies_the_weights_of_an_input_and_is_sliced_with_them():
    weight = _scaled_weight()
    plain = dataclasses.replace(weight, input_scale=None)
    factors = jnp.linspace(0.5, 2, 48).reshape(3, 16, 1)
    assert (weight.dequantize() == plain.dequantize() * factors).all()
    assert (jax.jit(lambda weight: weight.dequantize())(weight) == weight.dequantize()).all()
    assert weight.nbytes == plain.nbytes + 4 * 48
    assert (weight.shape, repr(weight)) == (plain.shape, repr(plain))
    empty = jax.tree.map(lambda _: None, weight)
    assert jax.tree.structure(empty, is_leaf=_is_none) == jax.tree.structure(weight, is_leaf=_is_none)
    second = jax.tree.map(lambda leaf: leaf[1], weight)
    assert (second.dequantize() == weight.dequantize()[1]).all()
    x = jax.random.normal(jax.random.key(1), (2, 16))
    product = quant.dot_general(x, second, (((1,), (0,)), ((), ())))
    assert (product == x @ second.dequantize()).all()
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = weight.shard(jax.NamedSharding(mesh, jax.P(None, "x", None)))
    spec = jax.NamedSharding(mesh, jax.P(None, "x", None, None))
    assert placed.input_scale is not None
    assert placed.input_scale.sharding == spec


@pytest.mark.slow
def test_an_input_scale_is_saved_and_belongs_to_the_saved_values(tmp_path):
    scaled = {"kernel": _scaled_weight()}
    plain = {"kernel": dataclasses.replace(_scaled_weight(1), input_scale=None)}
    quant.quantize({"params": {"dense": {"kernel": jnp.ones((64, 64))}}}, "int8_from_float32")  # registers with Flax
    for saved, target in ((scaled, plain), (plain, scaled), (scaled, jax.eval_shape(lambda: plain))):
        bytes_ = serialization.to_bytes(saved)
        restored = (
            serialization.from_bytes(target, bytes_)["kernel"],
            jmp.convert_state(saved, target)["kernel"],
            jmp.convert_state(serialization.msgpack_restore(bytes_), target)["kernel"],
        )
        for new in restored:
            assert jax.tree.structure(new) == jax.tree.structure(saved["kernel"])
            assert (new.dequantize() == saved["kernel"].dequantize()).all()
    floats = jmp.convert_state(scaled, {"kernel": jnp.ones((3, 16, 4))})["kernel"]
    assert (floats == scaled["kernel"].dequantize()).all()
    again = jmp.convert_state({"kernel": floats}, scaled)["kernel"]
    assert (again.dequantize() == quant.quantize_array(floats, "int4/8", Layout((16,), 1)).dequantize()).all()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", scaled)
    with ocp.StandardCheckpointer() as checkpointer:
        for target in (scaled, jax.eval_shape(lambda: scaled)):
            restored = checkpointer.restore(tmp_path / "orbax", target)["kernel"]
            assert (restored.dequantize() == scaled["kernel"].dequantize()).all()
        raw = checkpointer.restore(tmp_path / "orbax")
        with pytest.raises(ValueError, match=r"(?i)structure"):  # it would skip an input scale of None
            checkpointer.restore(tmp_path / "orbax", plain)
    assert (jmp.convert_state(raw, plain)["kernel"].dequantize() == scaled["kernel"].dequantize()).all()
    bad = {"kernel": dataclasses.replace(_scaled_weight(), input_scale=-jnp.ones((3, 2, 8, 1)))}
    with pytest.raises(ValueError, match=r"was saved with an input_scale of -1\.0"):
        jmp.convert_state(bad, plain)


@pytest.mark.slow
def test_linen_models_are_rounded_matrix_by_matrix(capsys, tmp_path):
    rules = jmp.PolicyMap({"last": "int8(min_size=0)_from_float32"}, POLICY)
    model, tokens = jmp.with_policy(Linen(), rules), list(jax.random.randint(jax.random.key(0), (2, 3, 40), 0, 32))
    variables = jax.jit(model.init)(jax.random.key(1), tokens[0])
    options: Any = {"stacked": ["blocks"], "file": tmp_path / "awq.jsonl", "progress": True}
    made = contrib.awq(model, tokens, variables=variables, **options)
    paths, shares = read_shares(capsys.readouterr().err)
    assert paths == ["blocks/dense/kernel"] * 2 + ["twice/kernel"]
    assert max(shares) < 1

    nearest = quant.quantize(variables, rules, stacked=["blocks"])
    remove = lambda node: (
        dataclasses.replace(node, input_scale=None) if isinstance(node, quant.QuantizedArray) else node
    )
    stored = jax.tree.map(remove, made, is_leaf=lambda node: isinstance(node, quant.QuantizedArray))
    assert jax.tree.structure(stored) == jax.tree.structure(nearest)
    assert jax.tree.map(jnp.shape, stored) == jax.tree.map(jnp.shape, nearest)
    same = jax.tree.map(lambda x, y: bool((x == y).all()), stored, nearest)["params"]
    assert all(jax.tree.leaves([same["embed"], same["last"]]))
    assert made["params"]["blocks"]["dense"]["kernel"].input_scale.shape == (2, 1, 16, 1)
    apply: Any = model.apply
    check_errors(made, nearest, lambda one: apply(one, tokens[0]), Linen().apply(variables, tokens[0]))
    run = lambda: contrib.awq(model.bind(variables), tokens, **options)
    check_resumed(run, options["file"], made, capsys)


@pytest.mark.slow
def test_nnx_models_stay_tied_and_masked(capsys):
    model = Nnx(nnx.Rngs(0))
    x = draw_nnx_inputs()
    policied = jmp.with_policy(model, "int4/4(min_size=0)_from_float32")
    made = contrib.awq(policied, list(x), progress=True)
    _, shares = read_shares(capsys.readouterr().err)
    assert len(shares) == 2
    assert max(shares) < 1
    assert made.first.kernel is made.tied.kernel
    assert made.first.kernel[...].input_scale.shape == (4, 4, 1, 1)
    assert not made.masked.kernel[...].dequantize()[2].any()
    nearest = quant.quantize(policied, "int4/4(min_size=0)_from_float32")
    check_errors(made, nearest, lambda one: one(x[0]), model(x[0]))


def test_weights_in_int8_are_those_of_quantize():
    policy = "int8(min_size=0)_from_float32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = contrib.awq(linear(policy), [ROWS])
    nearest = quant.quantize(linear(policy), policy)
    assert jax.tree.structure(nnx.state(made)) == jax.tree.structure(nnx.state(nearest))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), nnx.state(made), nnx.state(nearest)))


@pytest.mark.slow
def test_inputs_that_are_always_zero_are_rounded_to_nearest():
    made = contrib.awq(linear(), [0 * ROWS])
    weight: Any = made.kernel[...]
    assert (weight.input_scale == 1).all()
    assert (
        weight.values == jax.tree.leaves(nnx.state(quant.quantize(linear(), POLICY), jmp.nnx.QuantizedParam))[0]
    ).all()


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: contrib.awq(linear(), []), ValueError, r"^awq was given no batches\. For example: awq\(model, \[x\]"),
    (lambda: contrib.awq(linear(), ROWS), TypeError, rf"^awq takes a list of batches, got an array of shape "
     rf"\({ROWS.shape[0]}, 16\)\. Pass a list of batches: \[x\]\. For example: awq\(model, \[x\]"),
    (lambda: contrib.awq(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), [ROWS]), ValueError,
     r"^awq quantizes by the policy of a model, and .* has none\. For example: awq\(with_policy\(model, 'int4_from"),
    (lambda: contrib.awq(linear("mxfp4/16(min_size=0)_from_float32"), [ROWS]), ValueError,
     r"^awq rounds to int4 and int8, and the weight 'kernel' has the format 'mxfp4/16\(min_size=0\)'"),
    (lambda: contrib.awq(linear(), [ROWS.at[1, 3].set(jnp.nan)]), ValueError,
     r"^The inputs of the weight 'kernel' are not all finite, .* so awq cannot round it\. .*: \[x for x in batches"),
    (lambda: contrib.awq(linear(), [ROWS], grid_size=1), ValueError, r"^grid_size is a number of powers from 2, got 1"),
    (lambda: contrib.awq(linear(), [ROWS], clip="best"), ValueError, r"^clip is 'absmax', 'mse' or a percentile"),
])  # fmt: skip
def test_what_cannot_be_rounded_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make()
