"""The state of products in 8-bit floating point: over steps, as Flax has it, and of several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from float8_reference import TWO_AXES, fresh_state, rolled, scale_from
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.quant import Float8, conv_general_dilated, float8_state

KEY = "_overwrite_with_gradient"
Float8 = functools.partial(Float8, min_size=0)
FORMAT = Float8(amax_history_length=3)
product = functools.partial(TWO_AXES, quantization=FORMAT)


def sequence():
    """Inputs, weights and gradients of steps that outgrow and underrun the scales of those before."""
    random = np.random.default_rng()
    return tuple(
        np.float32(random.normal(size=(6, 16, 16)) * np.exp(random.normal(size=(6, 1, 1)) * 2)) for _ in range(3)
    )


def run_steps(product, state, arrays):
    """The results, gradients and states of each step."""

    def step(state, arrays):
        x, w, grad = arrays
        out, backward = jax.vjp(product, x, w, state)
        *grads, state = backward(grad)
        return state, (out, grads, state)

    return jax.jit(functools.partial(lax.scan, step))(state, arrays)[1]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4])
def test_states_and_results_are_those_of_flax_bit_for_bit(length):
    arrays, format = sequence(), Float8(amax_history_length=length)
    ours = functools.partial(TWO_AXES, quantization=format)
    operation = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=length)
    flax = lambda x, w, state: operation.apply({KEY: state}, x, w, (((1,), (0,)), ((), ())))
    out, grads, states = run_steps(lambda x, w, state: ours(x, w, state=state), float8_state(format), arrays)
    of_out, of_grads, of_states = run_steps(flax, float8_state(format), arrays)
    jax.tree.map(np.testing.assert_array_equal, (out, states), (of_out, of_states))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, grads, of_grads)  # one of theirs is the transpose of a product


CONVOLUTION = functools.partial(
    conv_general_dilated,
    window_strides=(2, 2),
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
    quantization=FORMAT,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        (product, [(64, 16), (16, 16), (64, 16)]),
        (CONVOLUTION, [(4, 3, 3, 16), (2, 2, 16, 16), (4, 2, 2, 16)]),
    ],
    ids=["a product", "a convolution"],
)
def test_devices_have_the_maximum_of_what_they_all_saw(product, shapes):
    x, w, t = (jnp.asarray(np.random.default_rng().normal(size=shape), jnp.float32) for shape in shapes)
    before = fresh_state(3)
    grad = functools.partial(jmp.grad, argnums=(0, 1), loss_scale=jmp.NoOpLossScale())

    def loss(w, variables, x, t):
        return jnp.mean(product(x, w, state=variables[KEY]) * t)

    of_device = grad(lambda *arrays: lax.pmean(loss(*arrays), "data"))
    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    of_devices = jax.shard_map(of_device, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
    of_w, after = jax.jit(of_devices)(w, {KEY: before}, x, t)
    by_hand, _ = jax.jit(grad(loss))(w, {KEY: before}, x, t)
    np.testing.assert_allclose(of_w, by_hand, atol=1e-5 * np.abs(by_hand).max())
    for name, array in {"input": x, "kernel": w, "output_grad": t / t.size}.items():
        history = np.asarray(before[f"{name}_amax_history"])
        expected = rolled(history, np.float32(np.abs(array).max()))
        np.testing.assert_allclose(after[KEY][f"{name}_amax_history"], expected, rtol=1e-6)
        np.testing.assert_array_equal(after[KEY][f"{name}_scale"], scale_from(history.max(), name))


def test_a_weight_that_is_differentiated_without_its_state_is_an_error():
    """Under `jit` and `scan` too; a frozen layer that passes gradients on needs no gradient of its state."""
    x, w, state = jnp.ones((16, 16)), jnp.ones((16, 16)), fresh_state(3)
    loss = lambda x, w, state: jnp.sum(product(x, w, state=state))
    scanned = lambda x, w, state: jax.lax.scan(lambda x, _: (product(x, w, state=state), None), x, length=2)[0].sum()
    text = r"^The weight of shape \(16, 16\), multiplied in 'float8.*jmp\.value_and_grad\("
    for fun in (loss, jax.jit(loss), scanned, jax.checkpoint(scanned)):
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(jax.grad(fun, argnums=(0, 1)), x, w, state)
        assert jax.eval_shape(jax.grad(fun), x, w, state).shape == x.shape
