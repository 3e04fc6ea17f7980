"""The state of products in 8-bit floating point: over steps, as Flax has it, and in transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
unscaled_grad = functools.partial(jmp.grad, loss_scale=jmp.NoOpLossScale())


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


def arrays(*shape):
    return jnp.asarray(np.random.default_rng().normal(size=shape), jnp.float32)


def next_state(loss, state):
    """The state after a step, by the package's own derivative, which combines it by max."""
    return jax.jit(unscaled_grad(lambda variables: loss(variables[KEY])))({KEY: state})[KEY]


def check_state(state, before, **seen):
    """A state has these largest magnitudes, and the scales that its history made."""
    for name, amax in seen.items():
        history = np.asarray(before[f"{name}_amax_history"])
        np.testing.assert_allclose(state[f"{name}_amax_history"], rolled(history, np.float32(amax)), rtol=1e-6)
        np.testing.assert_array_equal(state[f"{name}_scale"], scale_from(history.max(), name))


@pytest.mark.slow
def test_a_scan_combines_a_shared_state_by_max_and_keeps_stacked_ones_apart():
    x, w, t, state = arrays(4, 16, 16), arrays(16, 16), arrays(4, 16, 16), fresh_state(3)

    def shared(state):
        step = lambda total, xt: (total + jnp.sum(product(xt[0], w, state=state) * xt[1]), None)
        return lax.scan(step, 0.0, (x, t))[0]

    def stacked(states):
        step = lambda total, xts: (total + jnp.sum(product(xts[0], w, state=xts[2]) * xts[1]), None)
        return lax.scan(step, 0.0, (x, t, states))[0]

    peak = lambda array, axes=None: np.abs(array).max(axis=axes)
    check_state(next_state(shared, state), state, input=peak(x), kernel=peak(w), output_grad=peak(t))
    states = next_state(stacked, jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state))
    for i in range(4):
        seen = {"input": peak(x[i]), "kernel": peak(w), "output_grad": peak(t[i])}
        check_state(jax.tree.map(lambda leaf, i=i: leaf[i], states), state, **seen)


@pytest.mark.slow
def test_reuse_takes_the_maximum_and_remat_updates_once():
    x, w, t, state = arrays(2, 16, 16), arrays(16, 16), arrays(16, 16), fresh_state(3)

    def layer(x, state):
        return product(x, w, state=state)

    def twice(state, layer):
        return jnp.sum((layer(x[0], state) + layer(x[1], state)) * t)

    plain, remat = (next_state(functools.partial(twice, layer=f), state) for f in (layer, jax.checkpoint(layer)))
    jax.tree.map(np.testing.assert_array_equal, plain, remat)
    check_state(plain, state, input=np.abs(x).max(), kernel=np.abs(w).max(), output_grad=np.abs(t).max())


@pytest.mark.slow
def test_vmap_sees_all_examples_of_a_shared_state_and_each_of_its_own():
    x, w, t, state = arrays(4, 16, 16), arrays(16, 16), arrays(4, 16, 16), fresh_state(3)

    def over(axes, state):
        return jnp.sum(jax.vmap(lambda x, s: product(x, w, state=s), axes)(x, state) * t)

    seen = {"kernel": np.abs(w).max(), "input": np.abs(x).max(), "output_grad": np.abs(t).max()}
    check_state(next_state(functools.partial(over, (0, None)), state), state, **seen)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    states = next_state(functools.partial(over, (0, 0)), states)
    for i in range(4):
        seen |= {"input": np.abs(x[i]).max(), "output_grad": np.abs(t[i]).max()}
        check_state(jax.tree.map(lambda leaf, i=i: leaf[i], states), state, **seen)


@pytest.mark.slow
def test_a_branch_that_was_not_taken_keeps_its_state():
    x, w, state, tx = arrays(16, 16), arrays(16, 16), {KEY: fresh_state(3)}, optax.sgd(1.0)

    @jax.jit
    def after(state, is_taken):
        branch = lambda tree: lax.cond(is_taken, lambda: jnp.sum(product(x, w, state=tree[KEY])), lambda: 1.0)
        return jmp.optim.step(tx, unscaled_grad(branch)(state), tx.init(state), state)[0]

    check_state(after(state, True)[KEY], state[KEY], input=np.abs(x).max(), kernel=np.abs(w).max(), output_grad=1)
    jax.tree.map(np.testing.assert_array_equal, after(state, False), state)


MESH = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


CONVOLUTION = functools.partial(
    conv_general_dilated,
    window_strides=(2, 2),
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
    quantization=FORMAT,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("product", "shapes", "is_checked"),
    [
        (product, [(64, 16), (16, 16), (64, 16)], True),
        (product, [(64, 16), (16, 16), (64, 16)], False),
        (CONVOLUTION, [(4, 3, 3, 16), (2, 2, 16, 16), (4, 2, 2, 16)], True),
    ],
    ids=["a product", "a product, unchecked", "a convolution"],
)
def test_devices_have_the_maximum_of_what_they_all_saw(product, shapes, is_checked):
    (x, w, t), variables = (arrays(*shape) for shape in shapes), {KEY: fresh_state(3)}

    def loss(w, variables, x, t):
        return jnp.mean(product(x, w, state=variables[KEY]) * t)

    def of_device(*arrays):
        if is_checked:
            return unscaled_grad(lambda *arrays: lax.pmean(loss(*arrays), "data"), (0, 1))(*arrays)
        return jmp.sharding.pmean(unscaled_grad(loss, (0, 1))(*arrays), "data")

    specs = (P(), P(), P("data"), P("data"))
    of_devices = jax.shard_map(of_device, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=is_checked)
    of_w, after = jax.jit(of_devices)(w, variables, x, t)
    by_hand, _ = jax.jit(unscaled_grad(loss, (0, 1)))(w, variables, x, t)
    np.testing.assert_allclose(of_w, by_hand, atol=1e-5 * np.abs(by_hand).max())
    size = t.size if is_checked else t.size / 4  # the mean that a device's own backward pass begins with
    seen = {"input": np.abs(x).max(), "kernel": np.abs(w).max(), "output_grad": np.abs(t).max() / size}
    check_state(after[KEY], variables[KEY], **seen)


def test_a_weight_that_is_differentiated_without_its_state_is_an_error():
    """Under `jit` and `scan` too; a frozen layer that passes gradients on needs no gradient of its state."""
    x, w, state = arrays(16, 16), arrays(16, 16), fresh_state(3)
    loss = lambda x, w, state: jnp.sum(product(x, w, state=state))
    scanned = lambda x, w, state: jax.lax.scan(lambda x, _: (product(x, w, state=state), None), x, length=2)[0].sum()
    text = r"^The weight of shape \(16, 16\), multiplied in 'float8.*jmp\.value_and_grad\("
    for fun in (loss, jax.jit(loss), scanned, jax.checkpoint(scanned)):
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(jax.grad(fun, argnums=(0, 1)), x, w, state)
        assert jax.eval_shape(jax.grad(fun), x, w, state).shape == x.shape
