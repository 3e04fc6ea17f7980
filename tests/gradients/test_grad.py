"""Law 13: the loss as the user computed it, and gradients divided by the scale that multiplied them."""

import collections
import linecache
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, strategies as st
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from properties import examples

import jmp_policy as jmp

MESH = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
SCALES = [jmp.NoOpLossScale(), jmp.StaticLossScale(2.0**12), jmp.DynamicLossScale(2.0**10)]
W = jnp.array([1.0, -2.0, 3.0, 0.5])


def loss_fn(w, x=2.0):
    return jnp.sum((w * x) ** 2)


PAIR = collections.namedtuple("Pair", "loss aux")


@pytest.mark.parametrize(
    ("scale", "argnums", "pair"),
    [
        (SCALES[0], 0, None),
        (SCALES[0], (1, 0), list),
        (SCALES[1], (0, 1), tuple),
        (SCALES[2], 1, None),
        (SCALES[2], -1, lambda two: PAIR(*two)),
    ],
)
def test_it_is_value_and_grad_of_jax(scale, argnums, pair):
    """Whatever the pair of loss and auxiliary data is, and from any state that holds one scale."""
    fun = loss_fn if pair is None else lambda w, x: pair((loss_fn(w, x), {"aux": w, "n": jnp.arange(2)}))
    expected = jax.value_and_grad(fun, argnums, pair is not None)(W, 3.0)
    state = {"opt": (None, [scale]), "step": jnp.zeros((), jnp.int32)}
    ours = jmp.value_and_grad(fun, argnums, pair is not None, loss_scale=state)(W, 3.0)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    grads = jmp.grad(fun, argnums, pair is not None, loss_scale=scale)(W, 3.0)
    jax.tree.map(np.testing.assert_array_equal, grads, jax.grad(fun, argnums, pair is not None)(W, 3.0))
    differentiated = jmp.value_and_grad(loss_fn, loss_scale=scale)
    assert differentiated.__name__ == "loss_fn"
    if scale == SCALES[0]:
        assert jax.jit(differentiated).lower(W).as_text() == jax.jit(jax.value_and_grad(loss_fn)).lower(W).as_text()


def _in_shard_map(f):
    reduced = lambda w, x: jax.tree.map(lambda y: jax.lax.psum(y, "d"), f(jax.lax.pcast(w, "d", to="varying"), x[0]))
    return jax.shard_map(reduced, mesh=MESH, in_specs=(P(), P("d")), out_specs=P())


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.vmap(f, in_axes=(None, 0)),
        lambda f: lambda w, x: jax.lax.scan(lambda c, x: (c, f(w, x)), 0.0, x)[1],
        lambda f: lambda w, x: jax.checkpoint(lambda w: f(w, x[0]))(w),
        lambda f: lambda w, x: jax.jvp(lambda w: f(w, x[0])[0], (w,), (w,)),
        _in_shard_map,
    ],
    ids=["vmap", "scan", "checkpoint", "jvp", "shard_map"],
)
def test_it_is_value_and_grad_of_jax_under_every_transformation(transform):
    x = jnp.arange(4.0)
    ours = jax.jit(transform(jmp.value_and_grad(loss_fn, loss_scale=SCALES[2])))(W, x)
    expected = jax.jit(transform(jax.value_and_grad(loss_fn)))(W, x)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


def tiny_gradients(w):
    """A loss whose gradients with respect to float16 weights, 1e-8 each, are below half the smallest subnormal."""
    return jnp.sum(w.astype(jnp.float32) * 1e-8)


@pytest.mark.slow
@given(st.lists(st.floats(-1, 1, width=16), min_size=2, max_size=6))
@examples(10)
def test_float16_gradients_are_close_to_those_of_float64(weights):
    # d/dw sum(w^2) = 2w: one rounding to float16 (2^-11) of a scaled gradient, exact powers of two otherwise.
    w = np.asarray(weights, np.float16)
    w = w[np.abs(w) > 1e-4]
    grads = jmp.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), loss_scale=jmp.StaticLossScale(8.0))(jnp.asarray(w))
    np.testing.assert_allclose(np.asarray(grads, np.float64), 2 * w.astype(np.float64), rtol=2**-10)


def test_a_backward_pass_that_overflows_gives_non_finite_gradients_and_the_true_loss():
    overflowing = lambda w: jnp.sum(w.astype(jnp.float32)) * 100
    loss, grads = jmp.value_and_grad(overflowing, loss_scale=jmp.DynamicLossScale())(jnp.ones(2, jnp.float16))
    assert float(loss) == 200.0
    assert not jmp.all_finite(grads)


def _minimized(fun, w, scale):
    tx = jmp.optim.loss_scaled(optax.set_to_zero(), scale)
    return jmp.optim.minimize(fun, tx)(w, tx.init(w))


def _in_nnx(fun, w, scale):
    return nnx.jit(jmp.nnx.grad(lambda m: fun(m["w"][...]), loss_scale=scale))({"w": nnx.Param(w)})


def _in_a_scan(fun, w, scale):
    return jax.lax.scan(lambda w, _: (jmp.grad(fun, loss_scale=scale)(w).astype(w.dtype), 0), w, W)


HALF_LOSSES = {
    "eager": lambda f, w, scale: jmp.value_and_grad(f, loss_scale=scale)(w),
    "aux in jit": lambda f, w, scale: jax.jit(jmp.grad(lambda w: (f(w), f(w)), has_aux=True, loss_scale=scale))(w),
    "vmap": lambda f, w, scale: jax.vmap(jmp.grad(f, loss_scale=scale))(w[None]),
    "scan": _in_a_scan,
    "nnx": _in_nnx,
    "minimize": _minimized,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "scale", "dtype"),
    [
        ("eager", SCALES[2], "bfloat16"),
        ("minimize", SCALES[0], "float16"),
        ("nnx", SCALES[0], "bfloat16"),
        *((way, SCALES[2], "float16") for way in ("aux in jit", "vmap", "scan")),
    ],
    ids=str,
)
def test_a_half_loss_warns_once_at_the_users_line(way, scale, dtype):
    with pytest.warns(UserWarning, match=f"^The loss is {dtype}, and so is its cotangent, ") as caught:
        HALF_LOSSES[way](lambda w: jnp.sum(w.astype(dtype)), jnp.ones(2), scale)
    (warning,) = caught
    harm = {"float16": "each of 11", "bfloat16": "each of 8"}[dtype] if scale == SCALES[0] else "the loss scale"
    assert re.match(
        rf"The loss is {dtype}, and so is its cotangent, {harm}.*: compute the loss in float32, for example "
        rf"loss_fn = .*, or give .* for example 'params=float32,compute={dtype},output=float32'\.$",
        str(warning.message),
    )
    assert warning.filename == __file__


def test_the_line_is_that_of_the_call_in_a_training_step():
    @jax.jit
    def step(w):
        return jmp.value_and_grad(jnp.sum, loss_scale=jmp.DynamicLossScale())(w)  # this line

    with pytest.warns(UserWarning, match="^The loss is float16, ") as caught:
        loss, _ = step(jnp.ones(2, jnp.float16))
    (warning,) = caught
    assert "# this line" in linecache.getline(__file__, warning.lineno)
    assert loss.dtype == jnp.float16  # as the user computed it
    step(jnp.ones(2, jnp.float16))  # is not traced again, so that it does not warn


@pytest.mark.slow
def test_auxiliary_data_policies_and_complex_numbers_come_through_untouched():
    aux, z = {"count": 3, "half": jnp.float16(7), "key": jax.random.key(0)}, jnp.array([1 + 2j, 3 - 1j], jnp.complex64)
    tree = {"z": z, "policy": jmp.get_policy("float16"), "none": None}
    fun = lambda tree: (jnp.sum(jnp.abs(tree["z"]) ** 2), aux)
    (_, got), grads = jmp.value_and_grad(fun, has_aux=True, loss_scale=SCALES[1])(tree)
    assert (got["half"].dtype, float(got["half"]), got["key"].dtype) == (jnp.float16, 7, aux["key"].dtype)
    assert grads["policy"] is tree["policy"]
    assert grads["none"] is None
    np.testing.assert_allclose(grads["z"], jax.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(z), rtol=1e-6)


def test_integer_arguments_are_differentiated_on_request():
    tree = {"w": W, "n": jnp.arange(2)}
    grads = jmp.grad(lambda tree: loss_fn(tree["w"]), loss_scale=SCALES[1], allow_int=True)(tree)
    assert grads["n"].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="int32"):
        jmp.grad(lambda tree: loss_fn(tree["w"]), loss_scale=SCALES[1])(tree)


@pytest.mark.parametrize(
    ("bad", "has_aux"),
    [
        (lambda w: w, False),
        (lambda w: jnp.arange(3).sum(), False),
        (lambda w: [w[0]], False),
        (lambda w: w[0], True),
        (lambda w: (w[0], 1, 2), True),
    ],
    ids=["vector", "int", "list", "no aux", "two aux"],
)
def test_a_loss_that_is_no_real_scalar_is_the_error_of_jax(bad, has_aux):
    with pytest.raises(TypeError) as expected:
        jax.grad(bad, has_aux=has_aux)(W)
    with pytest.raises(TypeError, match=str(expected.value)[:30]):
        jmp.grad(bad, has_aux=has_aux, loss_scale=SCALES[1])(W)


def test_the_scale_is_an_ordinary_argument_of_a_jitted_step():
    traces = []

    @jax.jit
    def step(w, scale):
        traces.append(w)
        grads = jmp.grad(tiny_gradients, loss_scale=scale)(w)
        return grads, scale.adjust(jmp.all_finite(grads))

    scale = jmp.DynamicLossScale(period=2)
    for _ in range(4):
        grads, scale = step(jnp.ones(2, jnp.float16), scale)
    assert len(traces) == 1
    assert float(scale.loss_scale) == 2.0**17
    np.testing.assert_allclose(grads, 1e-8, rtol=2**-10)


@pytest.mark.parametrize("state", [{}, [jmp.NoOpLossScale(), jmp.NoOpLossScale()]], ids=repr)
def test_none_or_several_loss_scales_are_an_error(state):
    with pytest.raises(ValueError, match=r"^Expected a state that holds exactly one loss scale, got \w+ with [02]\. P"):
        jmp.value_and_grad(loss_fn, loss_scale=state)


class Checked:
    """A pytree that refuses to be made of what is no array, as validating classes do."""

    def __init__(self, weight, state):
        if not hasattr(weight, "shape") and type(weight) is not object:
            raise ValueError(f"no weight: {weight}")
        self.weight, self.state = weight, state


jax.tree_util.register_pytree_node(Checked, lambda c: ((c.weight, c.state), None), lambda _, c: Checked(*c))


def test_class_that_checks_its_fields_is_never_made_of_none_beside_float8_state():
    params = Checked(jnp.ones(2), jmp.quant.float8_state("float8"))
    grads = jmp.grad(lambda params: jnp.sum(params.weight**2), loss_scale=jmp.StaticLossScale(8.0))(params)
    assert grads.weight.tolist() == [2.0, 2.0]
    assert grads.state.keys() == params.state.keys()


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(SCALES[0], "bfloat16"), (SCALES[1], "float16"), (SCALES[2], "bfloat16"), (SCALES[2], "float32")],
)
def test_gradients_have_the_dtypes_that_the_docs_say(dtype, scale):
    """The docstring, and two guides, each said something else."""
    differentiated = jmp.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), loss_scale=scale)
    kept = isinstance(scale, jmp.NoOpLossScale)
    grad = jax.eval_shape(differentiated, jax.ShapeDtypeStruct((2,), dtype))
    assert grad.dtype == (dtype if kept else jnp.float32)
