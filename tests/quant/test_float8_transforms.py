"""What JAX's transformations make of products in 8-bit floating point and of their state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_reference import TWO_AXES, computed, fresh_state, rolled, scale_from
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy._base import _float8_state
from jmp_policy.quant import Float8, conv_general_dilated, einsum

KEY = "_overwrite_with_gradient"
FORMAT = Float8(amax_history_length=3, min_size=0)
CURRENT, BY_ROW = (Float8(recipe, min_size=0) for recipe in ("current", "current/row"))
product = functools.partial(TWO_AXES, quantization=FORMAT)
unscaled_grad = functools.partial(jmp.grad, loss_scale=jmp.NoOpLossScale())


def arrays(*shape):
    random = np.random.default_rng()
    return jnp.asarray(random.normal(size=shape), jnp.float32)


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
def test_jit_computes_what_eager_calls_compute():
    x, w, grad, state = arrays(16, 16), arrays(16, 16), arrays(16, 16), fresh_state(3)
    out, backward = jax.vjp(lambda x, w, s: product(x, w, state=s), x, w, state)
    *eager, after = out, *backward(grad)
    *jitted, jitted_after = computed(TWO_AXES, FORMAT, x, w, grad, state)
    jax.tree.map(np.testing.assert_array_equal, after, jitted_after)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), eager, jitted)


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
def test_remat_gives_the_same_bits():
    x, w, grad, state = arrays(16, 16), arrays(16, 16), arrays(16, 16), fresh_state(3)
    remat = lambda x, w, *, state, quantization: jax.checkpoint(lambda *a: product(*a[:2], state=a[2]))(x, w, state)
    both = (computed(call, FORMAT, x, w, grad, state) for call in (TWO_AXES, remat))
    jax.tree.map(np.testing.assert_array_equal, *both)


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
    x, w, state = arrays(16, 16), arrays(16, 16), {KEY: fresh_state(3)}

    @jax.jit
    def after(state, is_taken):
        branch = lambda tree: lax.cond(is_taken, lambda: jnp.sum(product(x, w, state=tree[KEY])), lambda: 1.0)
        return _float8_state.next_state(state, unscaled_grad(branch)(state))

    check_state(after(state, True)[KEY], state[KEY], input=np.abs(x).max(), kernel=np.abs(w).max(), output_grad=1)
    jax.tree.map(np.testing.assert_array_equal, after(state, False), state)


@pytest.mark.slow
def test_a_while_loop_computes_forward():
    x, w, state = arrays(16, 16), arrays(16, 16), fresh_state(3)

    @jax.jit
    def looped(x):
        body = lambda carry: (carry[0] + 1, product(carry[1], w, state=state))
        return lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]

    by_hand = product(product(x, w, state=state), w, state=state)
    np.testing.assert_allclose(looped(x), by_hand, rtol=1e-5, atol=1e-4)


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


@pytest.mark.slow
def test_forward_mode_is_refused_by_jax():
    x, w, state = arrays(16, 16), arrays(16, 16), fresh_state(3)
    with pytest.raises(TypeError, match=r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function"):
        jax.jvp(lambda x: product(x, w, state=state), (x,), (x,))


@pytest.mark.parametrize("format", [FORMAT, CURRENT, BY_ROW], ids=str)
@pytest.mark.parametrize("second", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
def test_second_derivatives_are_refused(second, format):
    """Tangents that are cast to 8 bits without a scale would be nan for some losses, and a third wrong for others."""
    x, w, state = arrays(16, 16), arrays(16, 16), fresh_state(3) if format == FORMAT else None
    loss = lambda w, state: jnp.sum(TWO_AXES(x, w, quantization=format, state=state) ** 2)
    penalty = lambda w: jnp.sum(jax.grad(loss, argnums=(0, 1))(w, state)[0] ** 2)
    with pytest.raises(TypeError, match=r"^Float8 matmuls have no second"):
        jax.eval_shape(second(penalty), w)


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


@pytest.mark.slow
@pytest.mark.parametrize("format", [FORMAT, CURRENT, BY_ROW], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "out"),
    [
        (P("data"), P(), None),
        (P(), P(None, "data"), None),
        (P(None, "data"), P("data"), P()),
        (P("data"), P(), P(None, "data")),
    ],
    ids=["rows", "columns", "sums", "transposed"],
)
def test_gradients_lie_as_their_operands_where_shardings_are_part_of_types(rows, columns, out, format):
    x, w, state = arrays(32, 64), arrays(64, 16), fresh_state(3) if format == FORMAT else None
    product = functools.partial(einsum, "ab,bc->ca", quantization=format, out_sharding=out)
    if out is None:
        product = functools.partial(TWO_AXES, quantization=format)
    gradients = jax.grad(lambda x, w, s: jnp.sum(jnp.sin(product(x, w, state=s))), (0, 1, 2))
    with jax.set_mesh(make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
        x, w = jax.device_put(x, rows), jax.device_put(w, columns)
        of_x, of_w, after = jax.eval_shape(gradients, x, w, state)
        assert (of_x.sharding, of_w.sharding) == (jax.typeof(x).sharding, jax.typeof(w).sharding)
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(after))
