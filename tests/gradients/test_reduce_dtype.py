"""Gradients with `reduce_dtype`: numbers, dtypes, what they compose with, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from losses import LOSSES, dense, make_arguments, stored_in_half, summed_of_a_matmul

import jmp_policy as jmp

PLAIN = jmp.NoOpLossScale()
SEED = np.random.SeedSequence().entropy % 2**32


def widen(loss, scale=PLAIN, **options):
    return jmp.value_and_grad(loss, loss_scale=scale, reduce_dtype="float32", **options)


@pytest.mark.parametrize(
    "name", [n if i and i % 4 == 0 else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(LOSSES)]
)
def test_nothing_is_changed_but_the_sums_of_gradients(name):
    loss = LOSSES[name]
    params, x = make_arguments(loss)
    plain, widened = (jax.make_jaxpr(f)(params, x) for f in (jax.value_and_grad(loss), widen(loss)))
    assert widened.out_avals == plain.out_avals
    assert str(widened) != str(plain)
    assert str(jax.make_jaxpr(jmp.value_and_grad(loss, loss_scale=PLAIN))(params, x)) == str(plain)


def linear(p, x, direction):
    """A loss whose gradients are sums of numbers that bfloat16 holds."""
    out = x @ p["w"].astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16)
    return jnp.sum(out.astype(jnp.float32) * direction) + jnp.sum(
        (p["table"].astype(jnp.bfloat16)[jnp.arange(len(x)) % 3]).astype(jnp.float32) * direction
    )


@pytest.mark.slow
def test_sums_are_those_of_float32():
    """Each is off by no more than float32 sums are: the number of terms times the unit roundoff, of the magnitudes."""
    rng = np.random.default_rng(SEED)
    count = 1000
    x, direction = (jnp.asarray(rng.standard_normal((count, 5)), jnp.bfloat16) for _ in range(2))
    params = {"w": jnp.ones((5, 5)), "b": jnp.ones(5), "table": jnp.ones((3, 5))}
    wide = [np.asarray(value).astype(np.float64) for value in (x, direction)]
    magnitudes = [np.abs(value) for value in wide]

    def sum_up(x, direction):
        table = np.stack([direction[row::3].sum(0) for row in range(3)])
        return {"w": x.T @ direction, "b": direction.sum(0), "table": table}

    exact, bound = sum_up(*wide), sum_up(*magnitudes)
    _, grads = jax.jit(widen(linear))(params, x, direction.astype(jnp.float32))
    _, narrow = jax.jit(jax.value_and_grad(linear))(params, x, direction.astype(jnp.float32))
    for name, grad in grads.items():
        error = np.abs(np.asarray(grad, np.float64) - exact[name])
        assert (error <= count * 2.0**-24 * bound[name]).all(), SEED
        assert error.max() < np.abs(np.asarray(narrow[name], np.float64) - exact[name]).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, p, x: jax.vmap(f, (None, 0))(p, x.reshape(2, 4, 4)),
        lambda f, p, x: lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, f(p, x)[1]), None), p, x[None])[0],
        lambda f, p, x: jax.grad(lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(f(p, x)[1])))(p),
        lambda f, p, x: jax.jvp(lambda p: f(p, x), (p,), (p,)),
    ],
    ids=["vmap", "scan", "differentiated again", "jvp"],
)
def test_it_is_a_function_like_any_other(transform):
    params, x = make_arguments(dense)
    run = jax.jit(transform, static_argnums=0)
    found, expected = run(widen(dense), params, x), run(jax.value_and_grad(dense), params, x)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.05, atol=0.05), found, expected)


@pytest.mark.slow
def test_auxiliary_data_and_positions_come_through():
    def loss(batch, scale, params, *, name):
        floats = {name: params[name] for name in ("w", "b")}
        return dense(floats, batch) * scale, {"name": name, "batch": batch, "count": jnp.int32(3), "none": None}

    params, x = make_arguments(dense)
    grad_fn = widen(loss, argnums=(2, 1), has_aux=True, scale=jmp.StaticLossScale(4.0))
    (value, aux), (grads, of_scale) = grad_fn(x, 2.0, params, name="run")
    plain = jax.value_and_grad(loss, (2, 1), has_aux=True)
    (expected, _), (wanted, wanted_of_scale) = plain(x, 2.0, params, name="run")
    assert (aux["name"], aux["none"], int(aux["count"])) == ("run", None, 3)
    np.testing.assert_array_equal(aux["batch"], x)
    np.testing.assert_allclose([value, of_scale], [expected, wanted_of_scale], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.05, atol=0.05), grads, wanted)
    only, _ = jmp.grad(loss, 2, True, loss_scale=PLAIN, reduce_dtype="float32")(x, 2.0, params, name="run")
    assert jax.tree.structure(only) == jax.tree.structure(params)


def count_widened_products(fun, *args):
    return str(jax.make_jaxpr(fun)(*args)).count("platform_index")


def test_a_sum_that_is_summed_once_more_is_widened_too():
    """Its own axis may be the one that devices share."""
    assert count_widened_products(widen(summed_of_a_matmul), *make_arguments(summed_of_a_matmul)) == 1


@pytest.mark.slow
def test_modules_of_nnx_keep_what_they_write_and_are_followed_to_their_sums():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            with jax.numpy_dtype_promotion("standard"):  # Flax's own code asks for it
                return self.dropout(self.norm(self.dense(x)))

    x, scale = jax.random.normal(jax.random.key(1), (8, 4)), jmp.DynamicLossScale(2.0**8)
    loss = lambda model, x: jnp.sum(model(x).astype(jnp.float32) ** 2)
    results = []
    for reduce_dtype in (None, "float32"):
        model = jmp.with_policy(Net(nnx.Rngs(0)), "mixed_bfloat16")
        grad_fn = jmp.nnx.value_and_grad(loss, loss_scale=scale, reduce_dtype=reduce_dtype)
        graphdef, state = nnx.split(model)
        compute = lambda state, x, graphdef=graphdef, f=grad_fn: nnx.to_pure_dict(f(nnx.merge(graphdef, state), x)[1])
        assert count_widened_products(compute, state, x) == (reduce_dtype is not None)
        value, grads = nnx.jit(lambda model, x, f=grad_fn: f(model, x))(model, x)
        state = nnx.state(model, nnx.Any(nnx.BatchStat, nnx.RngCount))
        results.append((value, nnx.to_pure_dict(grads), nnx.to_pure_dict(state)))
    (value, grads, state), (reduced, sums, state_after) = results
    np.testing.assert_allclose(value, reduced, rtol=1e-6)
    assert jax.tree.map(jnp.result_type, grads) == jax.tree.map(jnp.result_type, sums)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0.05, atol=0.3), grads, sums)
    jax.tree.map(np.testing.assert_array_equal, state, state_after)
    assert float(jnp.abs(state_after["norm"]["mean"]).max()) > 0


def test_minimize_hands_it_on():
    params, x = make_arguments(dense)
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.StaticLossScale(8.0))
    for reduce_dtype, count in ((None, 1), ("float32", 2)):  # the skip is one, too
        step = jmp.optim.minimize(dense, tx, reduce_dtype=reduce_dtype)
        assert count_widened_products(step, params, tx.init(params), x) == count


@jax.custom_vjp
def secretive(w, x):
    return x @ w


# What no table has: it may hide a sum, as a kernel does.
secretive.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, ct: (jnp.tanh(saved[1].T @ ct), ct @ saved[0].T))


def hidden(p, x):
    return dense({"w": jnp.eye(4), "b": p["layer"]["b"]}, secretive(p["layer"]["w"].astype(jnp.bfloat16), x))


HIDDEN = r"'layer/w': tanh in bfloat16, at .*test_reduce_dtype\.py:\d+ \(hidden\)"


def test_a_gradient_that_cannot_be_followed_is_an_error_that_names_it_or_a_warning_at_the_users_line():
    params, x = make_arguments(dense)
    with pytest.raises(ValueError, match=r"^These gradients cannot be followed to the sums (?s:.*)" + HIDDEN) as caught:
        widen(hidden)({"layer": params}, x)
    assert "layer/b" not in str(caught.value)
    assert "on_opaque='warn'" in str(caught.value)
    with pytest.warns(UserWarning, match=HIDDEN) as warned:
        _, grads = widen(hidden, on_opaque="warn")({"layer": params}, x)
    assert warned[0].filename == __file__
    _, expected = widen(dense)({"w": jnp.eye(4), "b": params["b"]}, secretive(params["w"].astype(jnp.bfloat16), x))
    np.testing.assert_array_equal(grads["layer"]["b"], expected["b"])


@pytest.mark.slow
def test_a_narrower_reduction_is_refused_whatever_strict_says():
    params, x = make_arguments(dense)
    wide = lambda p, x: jnp.mean((x.astype(jnp.float32) @ p["w"]) ** 2)
    message = (
        r"^reduce_dtype='bfloat16' is narrower than the dtype in which these gradients are summed:\n  'w': "
        r"dot_general in float32, at .*test_reduce_dtype\.py:\d+ (?s:.*)jax\.shard_map(?s:.*)jmp\.sharding.*reduce_dty"
    )
    for on_opaque in ("error", "warn"):
        with pytest.raises(ValueError, match=message):
            jmp.grad(wide, loss_scale=PLAIN, reduce_dtype="bfloat16", on_opaque=on_opaque)({"w": params["w"]}, x)
    jmp.grad(stored_in_half, loss_scale=PLAIN, reduce_dtype="bfloat16")(*make_arguments(stored_in_half))


SETTINGS = {
    "on_opaque must be 'error' or 'warn', got False": {"on_opaque": False},
    r"^Unknown dtype 'f33' for reduce_dtype\. Did you mean 'f32'\? For .*='float32'\.$": {"reduce_dtype": "f33"},
    r"^reduce_dtype='float64' needs jax\.config\.update\('jax_enable_x64', True\): .*'float32'": {
        "reduce_dtype": "f64"
    },
}


@pytest.mark.parametrize("make", [jmp.value_and_grad, jmp.nnx.grad])
@pytest.mark.parametrize("text", SETTINGS)
def test_a_setting_that_cannot_be_had_is_an_error(text, make):
    with pytest.raises(ValueError, match=text):
        make(dense, loss_scale=PLAIN, **SETTINGS[text])(*make_arguments(dense))
