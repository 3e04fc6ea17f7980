"""Weights whose inputs blocks do not divide: stored and multiplied with zeros to whole blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh
from quant_reference import fresh

from jmp_policy.quant import Layout, dot_general, quantize_array, ragged_dot

ROWS = (((1,), (0,)), ((), ()))
FORMATS = ["int4/8", "int4/8(activations=true)", "nf4/8", "mxfp4/8", "mxfp8/8", "mxfp4/8(activations=true)", "nvfp4/8"]
quantized = jax.jit(quantize_array, static_argnums=(1, 2))


def array(*shape):
    return jnp.asarray(fresh(*shape), jnp.float32)


def pad(x, axis, length):
    return jnp.pad(x, [(0, length - n if i == axis else 0) for i, n in enumerate(x.shape)])


def assert_same_sums(found, expected, left, right):
    """The same products, summed in two orders: rounding makes each factor up to 2.2 times as large, scales included."""
    left, right, found, expected = (np.asarray(each, np.float64) for each in (left, right, found, expected))
    roundings = 2 * (left.shape[1] + 4)
    assert (np.abs(found - expected) <= roundings * 2.0**-24 * 5 * (np.abs(left) @ np.abs(right))).all()


@functools.partial(jax.jit, static_argnums=3)
def with_gradients(x, w, t, format):
    out, backward = jax.vjp(lambda x, w: dot_general(x, w, ROWS, quantization=format), x, w)
    return out, *backward(t)


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_what_padding_by_hand_is(format):
    x, w, t = array(5, 13), array(13, 6), array(5, 6)
    whole = quantized(pad(w, 0, 16), format)
    made = quantized(w, format)
    assert (made.shape, made.values.shape) == (w.shape, whole.values.shape)
    for name in ("values", "scale", "zero_point", "tensor_scale"):
        np.testing.assert_array_equal(getattr(made, name), getattr(whole, name))
    np.testing.assert_array_equal(made.dequantize(), whole.dequantize()[:13])
    assert not whole.dequantize()[13:].any()
    out, of_x, of_w = with_gradients(x, w, t, format)
    wide, wide_of_x, wide_of_w = with_gradients(pad(x, 1, 16), pad(w, 0, 16), t, format)
    rounded = made.dequantize()
    assert_same_sums(out, wide, x, rounded)
    assert_same_sums(of_x, wide_of_x[:, :13], t, rounded.T)
    assert_same_sums(of_w, wide_of_w[:13], x.T, t)
    np.testing.assert_array_equal(out, jax.jit(lambda x, w: dot_general(x, w, ROWS))(x, made))


@pytest.mark.parametrize("format", ["int4/8", "nvfp4/8"])
def test_axes_that_are_merged_are_padded_together_and_a_stack_is_sliced(format):
    w = array(3, 5, 2, 4, 2)
    made = quantized(w, format, Layout((5, 2), 2))
    assert (made.shape, made.scale.shape) == (w.shape, (3, 2, 1, 4, 2))
    alone = quantized(w[1].reshape(10, 8), format)
    np.testing.assert_array_equal(made.dequantize()[1].reshape(10, 8), alone.dequantize())
    np.testing.assert_array_equal(jax.tree.map(lambda leaf: leaf[1], made).dequantize(), made.dequantize()[1])


def test_the_groups_of_a_ragged_dot_are_padded():
    x, w, sizes = array(6, 13), array(2, 13, 4), jnp.array([2, 4])
    multiply = jax.jit(functools.partial(ragged_dot, quantization="mxfp8/8"))
    found, padded = multiply(x, w, sizes), multiply(pad(x, 1, 16), pad(w, 1, 16), sizes)
    for group, rows in enumerate((slice(2), slice(2, None))):
        assert_same_sums(found[rows], padded[rows], x[rows], w[group])


def test_devices_share_the_blocks_under_jit_and_not_in_shard_map():
    """96 inputs of two devices are no whole blocks of 64, of which the weight has two."""
    w, x = array(96, 8), array(4, 96)
    made = quantized(w, "int4/64")
    mesh = make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    placed = made.shard(NamedSharding(mesh, P("model")))
    assert placed.values.sharding.spec == P("model", None, None)
    multiply = jax.jit(lambda x, w: dot_general(x, w, ROWS))
    whole = multiply(x, made)
    assert_same_sums(multiply(x, placed), whole, x, made.dequantize())
    run = lambda specs: jax.shard_map(multiply, mesh=mesh, in_specs=(P(), specs), out_specs=P(None, "model"))
    assert_same_sums(run(P(None, None, "model"))(x, made), whole, x, made.dequantize())
    message = "A weight in 'int4/64', padded from 96 to 128 inputs, cannot be split along its inputs in shard_map, and "
    with pytest.raises(ValueError, match=re.escape(message + "a shard has 1 of its 2 blocks. Leave its inputs whole")):
        jax.eval_shape(run(P("model")), x, made)
