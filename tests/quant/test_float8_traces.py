"""The scales, histories and results of several steps, against Flax's operations and Keras's formulas."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from float8_reference import FORMATS, LARGEST, TWO_AXES, computed

from jmp_policy.quant import DelayedScaling, Float8, float8_state

STEPS = 6
ROWS = (((1,), (0,)), ((), ()))
Float8 = functools.partial(Float8, min_size=0)


def sequence():
    """Inputs, weights and gradients of steps that outgrow and underrun the scales of those before."""
    random = np.random.default_rng()
    return tuple(
        np.float32(random.normal(size=(STEPS, 16, 16)) * np.exp(random.normal(size=(STEPS, 1, 1)) * 2))
        for _ in range(3)
    )


@functools.partial(jax.jit, static_argnums=0)
def trace(product, state, arrays):
    """The results and states of each step."""

    def step(state, arrays):
        x, w, grad = arrays
        out, backward = jax.vjp(product, x, w, state)
        *grads, state = backward(grad)
        return state, (out, grads, state)

    return jax.lax.scan(step, state, arrays)[1]


def flax_trace(name, length, arrays):
    key = fp8_ops.OVERWRITE_WITH_GRADIENT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Fp8DotGeneralOp
        operation = getattr(fp8_ops, name)(amax_history_length=length)
        product = lambda x, w, state: operation.apply({key: state}, x, w, ROWS)
        return trace(product, float8_state(Float8(amax_history_length=length)), arrays)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 4])
def test_states_and_results_are_those_of_flax_bit_for_bit(length):
    arrays = sequence()
    format = Float8(amax_history_length=length)
    product = lambda x, w, state: TWO_AXES(x, w, quantization=format, state=state)
    out, grads, states = trace(product, float8_state(format), arrays)
    of_out, of_grads, of_states = flax_trace("Fp8DirectDotGeneralOp", length, arrays)
    jax.tree.map(np.testing.assert_array_equal, (out, states), (of_out, of_states))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, grads, of_grads)  # one of theirs is the transpose of a product


@pytest.mark.slow
def test_states_are_those_of_flax_where_it_multiplies_rounded_wide_numbers():
    arrays = sequence()
    product = lambda x, w, state: TWO_AXES(x, w, quantization=Float8(amax_history_length=3), state=state)
    out, _, states = trace(product, float8_state(Float8(amax_history_length=3)), arrays)
    of_out, _, of_states = flax_trace("Fp8DotGeneralOp", 3, arrays)
    jax.tree.map(np.testing.assert_array_equal, states, of_states)
    np.testing.assert_allclose(out, of_out, rtol=1e-5, atol=1e-5 * np.abs(of_out).max())


def compute_float8_scale(amax, scale, dtype_max):
    """As Keras documents it, with a margin of zero."""
    scale = np.reciprocal(scale)
    with np.errstate(divide="ignore"):
        sf = np.where(amax > 0.0, dtype_max / amax, scale)
    return np.reciprocal(np.where(np.isfinite(amax), sf, scale))


def compute_float8_amax_history(x, amax_history):
    history = np.roll(amax_history, -1)
    history[0] = np.abs(x).max()
    return history


def quantize_and_dequantize(inputs, scale, name):
    clipped = np.clip(inputs / scale, -LARGEST[name], LARGEST[name])
    return clipped.astype(FORMATS[name]).astype(np.float32) * scale


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 3])
def test_a_delay_of_two_is_the_scaling_of_keras(length):
    """The stored scale acts, and the one that is stored comes from the history as it was before this step."""
    format = Float8(DelayedScaling(delay=2), amax_history_length=length)
    state = float8_state(format)
    keras = {name: (np.ones(1, np.float32), np.zeros(length, np.float32)) for name in FORMATS}
    for arrays in zip(*sequence(), strict=True):
        rounded = []
        for name, array in zip(FORMATS, arrays, strict=True):
            scale, history = keras[name]
            rounded.append(quantize_and_dequantize(array, scale, name))
            made = compute_float8_scale(history.max(axis=0), scale, LARGEST[name])
            keras[name] = made, compute_float8_amax_history(array, history)
        out, to_x, to_w, state = computed(TWO_AXES, format, *arrays, state)
        for name, (scale, history) in keras.items():
            np.testing.assert_array_equal(state[f"{name}_scale"], scale)
            np.testing.assert_array_equal(state[f"{name}_amax_history"], history)
        x, w, grad = rounded
        for ours, by_hand in ((out, x @ w), (to_x, grad @ w.T), (to_w, x.T @ grad)):
            np.testing.assert_allclose(ours, by_hand, rtol=1e-5, atol=1e-5 * np.abs(by_hand).max())


@pytest.mark.slow
def test_a_spike_leaves_a_history_after_its_length():
    x = jnp.ones((16, 16))
    format = Float8(amax_history_length=3)
    inputs = jnp.stack([x, x * 1000, *[x] * 4])
    product = lambda x, w, state: TWO_AXES(x, w, quantization=format, state=state)
    states = trace(product, float8_state(format), (inputs, inputs, inputs))[2]
    assert [round(float(scale) * 448) for scale in states["input_scale"][1:, 0]] == [1, 1000, 1000, 1000, 1]
