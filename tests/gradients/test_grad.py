"""Law 13: the loss as the user computed it, and gradients divided by the scale that multiplied them."""

import inspect
import re
from typing import NamedTuple

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


class Pair(NamedTuple):
    loss: jax.Array
    aux: jax.Array


def loss_fn(w, x=2.0):
    return jnp.sum((w * x) ** 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("scale", SCALES, ids=repr)
@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0), -1])
@pytest.mark.parametrize("has_aux", [False, True])
def test_it_is_value_and_grad_of_jax(scale, argnums, has_aux):
    fun = (lambda w, x: (loss_fn(w, x), {"aux": w, "n": jnp.arange(2)})) if has_aux else loss_fn
    expected = jax.value_and_grad(fun, argnums, has_aux)(W, 3.0)
    ours = jmp.value_and_grad(fun, argnums, has_aux, loss_scale=scale)(W, 3.0)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    grads = jmp.grad(fun, argnums, has_aux, loss_scale=scale)(W, 3.0)
    jax.tree.map(np.testing.assert_array_equal, grads, jax.grad(fun, argnums, has_aux)(W, 3.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda f: jax.vmap(f, in_axes=(None, 0)),
        lambda f: lambda w, x: jax.lax.scan(lambda c, x: (c, f(w, x)), 0.0, x)[1],
        lambda f: lambda w, x: jax.checkpoint(lambda w: f(w, x[0]))(w),
        lambda f: lambda w, x: jax.jvp(lambda w: f(w, x[0])[0], (w,), (w,)),
        lambda f: lambda w, x: jax.shard_map(
            lambda w, x: jax.tree.map(lambda y: jax.lax.psum(y, "d"), f(jax.lax.pcast(w, "d", to="varying"), x[0])),
            mesh=MESH, in_specs=(P(), P("d")), out_specs=P(),
        )(w, x),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", SCALES, ids=repr)
def test_it_is_value_and_grad_of_jax_under_every_transformation(transform, scale):
    x = jnp.arange(4.0)
    ours = transform(jmp.value_and_grad(loss_fn, loss_scale=scale))(W, x)
    expected = transform(jax.value_and_grad(loss_fn))(W, x)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


def test_with_a_no_op_scale_the_program_is_that_of_jax():
    ours = jax.jit(jmp.value_and_grad(loss_fn, loss_scale=jmp.NoOpLossScale())).lower(W).as_text()
    assert ours == jax.jit(jax.value_and_grad(loss_fn)).lower(W).as_text()


def tiny_gradients(w):
    """A loss whose gradients with respect to float16 weights, 1e-8 each, are below half the smallest subnormal."""
    return jnp.sum(w.astype(jnp.float32) * 1e-8)


@pytest.mark.slow
def test_gradients_below_float16_survive():
    w = jnp.ones(3, jnp.float16)
    assert jax.grad(tiny_gradients)(w).tolist() == [0, 0, 0]
    grads = jmp.grad(tiny_gradients, loss_scale=jmp.DynamicLossScale())(w)
    np.testing.assert_allclose(grads, 1e-8, rtol=2**-10)  # float16 rounds 1e-8 * 2^15 once


@given(st.lists(st.floats(-1, 1, width=16), min_size=2, max_size=6))
@examples(10)
def test_float16_gradients_are_close_to_those_of_float64(weights):
    # d/dw sum(w^2) = 2w: one rounding to float16 (2^-11) of a scaled gradient, exact powers of two otherwise.
    w = np.asarray(weights, np.float16)
    w = w[np.abs(w) > 1e-4]
    grads = jmp.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), loss_scale=jmp.StaticLossScale(8.0))(jnp.asarray(w))
    np.testing.assert_allclose(np.asarray(grads, np.float64), 2 * w.astype(np.float64), rtol=2**-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("scale", SCALES[1:], ids=repr)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_are_float32_and_true_whatever_the_scale(scale, dtype):
    w = jnp.array([0.5, 2.0], dtype)
    loss, grads = jmp.value_and_grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), loss_scale=scale)(w)
    assert grads.dtype == jnp.float32
    assert (float(loss), grads.tolist()) == (4.25, [1.0, 4.0])


def test_no_op_leaves_half_gradients_half():
    assert jmp.grad(tiny_gradients, loss_scale=jmp.NoOpLossScale())(jnp.ones(2, jnp.float16)).dtype == jnp.float16


@pytest.mark.slow
def test_a_backward_pass_that_overflows_gives_non_finite_gradients_and_the_true_loss():
    loss, grads = jmp.value_and_grad(lambda w: jnp.sum(w.astype(jnp.float32)) * 100, loss_scale=jmp.DynamicLossScale())(
        jnp.ones(2, jnp.float16)
    )
    assert float(loss) == 200.0
    assert not jmp.all_finite(grads)


def line_of(fun, text):
    """The number of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(fun)
    return first + next(i for i, line in enumerate(lines) if text in line)


HALF_LOSSES = {
    "eager": lambda f, w, scale: jmp.value_and_grad(f, loss_scale=scale)(w),
    "jit": lambda f, w, scale: jax.jit(jmp.value_and_grad(f, loss_scale=scale))(w),
    "step": lambda f, w, scale: jax.jit(lambda w: jmp.grad(f, loss_scale=scale)(w))(w),
    "vmap": lambda f, w, scale: jax.vmap(jmp.grad(f, loss_scale=scale))(w[None]),
    "scan": lambda f, w, scale: jax.lax.scan(lambda w, _: (jmp.grad(f, loss_scale=scale)(w).astype(w.dtype), 0), w, W),
    "nnx": lambda f, w, scale: nnx.jit(jmp.nnx.grad(lambda m: f(m["w"][...]), loss_scale=scale))({"w": nnx.Param(w)}),
    "minimize": lambda f, w, scale: minimized(f, w, scale),
    "minimize in jit": lambda f, w, scale: jax.jit(lambda w: minimized(f, w, scale))(w),
    "aux": lambda f, w, scale: jmp.grad(lambda w: (f(w), f(w)), has_aux=True, loss_scale=scale)(w),
}


def minimized(fun, w, scale):
    tx = jmp.optim.loss_scaled(optax.set_to_zero(), scale)
    return jmp.optim.minimize(fun, tx)(w, tx.init(w))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [SCALES[0], SCALES[2]], ids=["no scale", "a scale"])
@pytest.mark.parametrize("way", HALF_LOSSES)
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
    assert warning.lineno == line_of(test_the_line_is_that_of_the_call_in_a_training_step, "# this line")
    assert loss.dtype == jnp.float16  # as the user computed it
    step(jnp.ones(2, jnp.float16))  # is not traced again, so that it does not warn


def test_aux_is_returned_untouched():
    aux = {"count": 3, "half": jnp.float16(7), "key": jax.random.key(0)}
    (_, got), _ = jmp.value_and_grad(lambda w: (loss_fn(w), aux), has_aux=True, loss_scale=SCALES[1])(W)
    assert got["half"].dtype == jnp.float16
    assert float(got["half"]) == 7
    assert got["key"].dtype == aux["key"].dtype


def test_keyword_arguments_are_forwarded():
    grads = jmp.grad(lambda w, *, x: loss_fn(w, x), loss_scale=SCALES[1])(W, x=3.0)
    np.testing.assert_array_equal(grads, jax.grad(loss_fn)(W, 3.0))


@pytest.mark.slow
def test_complex_gradients_keep_their_imaginary_part():
    z = jnp.array([1 + 2j, 3 - 1j], jnp.complex64)
    fun = lambda z: jnp.sum(jnp.abs(z) ** 2)
    np.testing.assert_allclose(jmp.grad(fun, loss_scale=SCALES[1])(z), jax.grad(fun)(z), rtol=1e-6)


def test_integer_arguments_are_differentiated_on_request():
    tree = {"w": W, "n": jnp.arange(2)}
    grads = jmp.grad(lambda tree: loss_fn(tree["w"]), loss_scale=SCALES[1], allow_int=True)(tree)
    assert grads["n"].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="int32"):
        jmp.grad(lambda tree: loss_fn(tree["w"]), loss_scale=SCALES[1])(tree)


def test_policies_and_none_pass_through_the_differentiated_tree():
    tree = {"w": W, "policy": jmp.get_policy("float16"), "none": None}
    grads = jmp.grad(lambda tree: loss_fn(tree["w"]), loss_scale=SCALES[1])(tree)
    assert grads["policy"] is tree["policy"]
    assert grads["none"] is None


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("bad", "has_aux"),
    [
        (lambda w: w, False),
        (lambda w: jnp.arange(3).sum(), False),
        (lambda w: [w[0]], False),
        (lambda w: None, False),
        (lambda w: w[0], True),
        (lambda w: (w[0], 1, 2), True),
        (lambda w: (w, 1), True),
    ],
    ids=["vector", "int", "list", "none", "no aux", "two aux", "vector and aux"],
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


def test_any_state_that_holds_one_loss_scale_will_do():
    state = {"opt": (None, [jmp.StaticLossScale(8.0)]), "step": jnp.zeros((), jnp.int32)}
    np.testing.assert_array_equal(jmp.grad(loss_fn, loss_scale=state)(W), jax.grad(loss_fn)(W))


@pytest.mark.parametrize("state", [{}, [jmp.NoOpLossScale(), jmp.NoOpLossScale()]], ids=repr)
def test_none_or_several_loss_scales_are_an_error(state):
    with pytest.raises(
        ValueError, match=r"^Expected a state that holds exactly one loss scale, got \w+ with [02]\. Pass "
    ):
        jmp.value_and_grad(loss_fn, loss_scale=state)


def test_the_name_of_the_function_is_kept():
    assert jmp.value_and_grad(loss_fn, loss_scale=SCALES[1]).__name__ == "loss_fn"


@pytest.mark.parametrize("pair", [list, tuple, lambda two: Pair(*two)], ids=["list", "tuple", "NamedTuple"])
@pytest.mark.parametrize("scale", SCALES, ids=repr)
def test_loss_and_aux_may_be_any_pair_that_jax_takes(pair, scale):
    fun = lambda w: pair((loss_fn(w), w))
    expected = jax.value_and_grad(fun, has_aux=True)(W)
    ours = jmp.value_and_grad(fun, has_aux=True, loss_scale=scale)(W)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


class Checked:
    """A pytree that refuses to be made of what is no array, as validating classes do."""

    def __init__(self, weight, state):
        if not hasattr(weight, "shape") and type(weight) is not object:
            raise ValueError(f"no weight: {weight}")
        self.weight, self.state = weight, state


jax.tree_util.register_pytree_node(Checked, lambda c: ((c.weight, c.state), None), lambda _, c: Checked(*c))


@pytest.mark.slow
def test_class_that_checks_its_fields_is_never_made_of_none_beside_float8_state():
    params = Checked(jnp.ones(2), jmp.quant.float8_state("float8"))
    grads = jmp.grad(lambda params: jnp.sum(params.weight**2), loss_scale=jmp.StaticLossScale(8.0))(params)
    assert grads.weight.tolist() == [2.0, 2.0]
    assert grads.state.keys() == params.state.keys()


@pytest.mark.parametrize("scale", SCALES, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_have_the_dtypes_that_the_docs_say(dtype, scale):
    """The docstring, and two guides, each said something else."""
    differentiated = jmp.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), loss_scale=scale)
    kept = isinstance(scale, jmp.NoOpLossScale)
    grad = jax.eval_shape(differentiated, jax.ShapeDtypeStruct((2,), dtype))
    assert grad.dtype == (dtype if kept else jnp.float32)
