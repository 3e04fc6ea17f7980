"""The reduce dtype of a policy reaches the gradients of what the policy is for, without being handed on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from programs import walk

import jmp_policy as jmp
from jmp_policy._base import forget_warnings
from jmp_policy.gradients._grad import _PolicySearch

PLAIN = jmp.NoOpLossScale()
POLICY = "params=float32,compute=bfloat16,output=float32,reduce=float32"
X = jnp.ones((8, 4), jnp.bfloat16)
WEIGHTS = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}


def product(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def loss_of(apply, p, x=X):
    return jnp.mean(jnp.square(apply(p, x).astype(jnp.float32)))


def count_widened_products(fun, *args):
    return str(jax.make_jaxpr(fun)(*args)).count("platform_index")


def list_operations(fun, *args):
    """Those that lead to a result: what was traced before the policy was met does not."""
    steps = walk(jax.make_jaxpr(fun)(*args).jaxpr, live_only=True)
    return [(step.name, [str(var.aval) for var in step.results]) for step in steps]


def take_grad(loss, *args):
    return jmp.grad(loss, loss_scale=PLAIN)(*args)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="head")(nn.relu(nn.Dense(4, name="body")(x)))


def make_linen(policy):
    model = jmp.with_policy(Mlp(), policy)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    return model.apply, jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)


def make_nnx(policy):
    graphdef, state = nnx.split(jmp.with_policy(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), policy))
    return lambda state, x: nnx.merge(graphdef, state)(x), state


PROGRAMS = {
    "a function": (jmp.with_policy(product, POLICY), WEIGHTS, 1),
    "autocast": (jmp.autocast(lambda p, x: product(p, x.astype(jnp.float32)), POLICY), WEIGHTS, 1),
    "linen": (*make_linen(POLICY), 2),
    "a rule of a map": (*make_linen(jmp.PolicyMap({"head": POLICY}, default="mixed_bfloat16")), 2),
    "nnx": (*make_nnx(POLICY), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_take_the_reduce_dtype_of_a_policy_that_they_meet(name):
    apply, params, products = PROGRAMS[name]
    loss = functools.partial(loss_of, apply)
    found = jmp.value_and_grad(loss, loss_scale=PLAIN)
    given = jmp.value_and_grad(loss, loss_scale=PLAIN, reduce_dtype="float32")
    assert list_operations(found, params) == list_operations(given, params)
    assert count_widened_products(found, params) == products


def _in_a_scan(apply):
    return lambda p, x: lax.scan(lambda h, _: (apply(p, h).astype(h.dtype), None), x, length=2)[0]


def _in_shard_map(apply):
    mesh = make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("a function", jax.jit),
        ("autocast", jax.checkpoint),
        ("linen", lambda apply: lambda p, x: jax.vmap(apply, (None, 0))(p, x[None])),
        ("a rule of a map", _in_a_scan),
        ("nnx", _in_shard_map),
    ],
    ids=["jit", "checkpoint", "vmap", "scan", "shard_map"],
)
def test_and_they_meet_it_inside_of_transformations(name, around):
    """Also a second time: a jitted function is not traced again, and would not meet its policy."""
    apply, params, products = PROGRAMS[name]
    loss = functools.partial(loss_of, around(apply))
    assert [count_widened_products(functools.partial(take_grad, loss), params) for _ in range(2)] == [products] * 2


def test_what_is_handed_on_wins_and_else_the_widest_of_several():
    narrow, wide = jmp.with_policy(product, "p=f32,c=bf16,o=f32,r=bf16"), jmp.with_policy(product, POLICY)
    given = jmp.grad(functools.partial(loss_of, narrow), loss_scale=PLAIN, reduce_dtype="float32")
    assert count_widened_products(given, WEIGHTS) == 1
    loss = lambda p: loss_of(narrow, p) + loss_of(wide, p)
    assert count_widened_products(functools.partial(take_grad, loss), WEIGHTS) == 2


def test_a_function_is_traced_as_before_where_no_policy_has_a_reduce_dtype():
    calls = []
    apply = jmp.with_policy(product, "params=float32,compute=bfloat16,output=float32")
    loss = lambda p: (calls.append(1), loss_of(apply, p))[1]
    found = jax.make_jaxpr(jmp.value_and_grad(loss, loss_scale=PLAIN))(WEIGHTS)
    assert len(calls) == 1
    assert str(found) == str(jax.make_jaxpr(jax.value_and_grad(loss))(WEIGHTS))


@pytest.mark.slow
def test_modules_of_nnx_are_written_to_once():
    class Counting(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return self.linear(x)

    model = jmp.with_policy(Counting(), POLICY)
    grad = jmp.nnx.grad(lambda model: jnp.mean(model(X) ** 2), loss_scale=jmp.StaticLossScale(8.0))
    grads = grad(model)
    assert grads["linear"]["kernel"].dtype == jnp.float32
    assert float(model.calls[...]) == 1
    graphdef, state = nnx.split(model)
    assert count_widened_products(lambda state: nnx.to_pure_dict(grad(nnx.merge(graphdef, state))), state) == 1


@pytest.mark.parametrize("scale", [None, jmp.StaticLossScale(8.0)], ids=["plain", "scaled"])
def test_minimize_takes_it_too(scale):
    apply, params, _ = PROGRAMS["a function"]
    tx = optax.sgd(0.1) if scale is None else jmp.optim.loss_scaled(optax.sgd(0.1), scale)
    step = jmp.optim.minimize(functools.partial(loss_of, apply), tx)
    given = jmp.optim.minimize(functools.partial(loss_of, apply), tx, reduce_dtype="float32")
    state = tx.init(params)
    assert list_operations(step, params, state) == list_operations(given, params, state)


def test_gradients_inside_of_gradients_hand_it_on():
    loss = functools.partial(loss_of, PROGRAMS["a function"][0])
    inner = lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(take_grad(loss, p)))
    assert count_widened_products(functools.partial(take_grad, inner), WEIGHTS) > 1


@pytest.mark.parametrize(
    ("policy", "text"),
    [("p=f32,c=f32,o=f32,r=bf16", "reduce"), ("p=f32,c=bf16,o=f32,r=f64", r"reduce_dtype='float64' needs jax\.config")],
)
def test_a_policy_that_would_narrow_sums_or_needs_x64_warns_once_and_changes_nothing(policy, text):
    loss = functools.partial(loss_of, jmp.with_policy(product, policy))
    with pytest.warns(UserWarning, match=rf"^A policy has a reduce dtype that its gradients cannot have\. {text}"):
        found = list_operations(functools.partial(take_grad, loss), WEIGHTS)
    assert found == list_operations(jax.grad(loss), WEIGHTS)
    jax.make_jaxpr(functools.partial(take_grad, loss))(WEIGHTS)  # warnings are errors here


def test_a_loss_that_decides_on_values_warns_once_and_runs():
    def loss(p):
        out = loss_of(PROGRAMS["a function"][0], p)
        return out if float(p["b"].sum()) > -1 else -out  # which jax.grad allows, and tracing does not

    with pytest.warns(UserWarning, match=r"^Gradients are not reduced in float32, the reduce dtype of a policy: thi"):
        found = jmp.grad(lambda p, b: loss({"w": p, "b": b}), loss_scale=PLAIN)(WEIGHTS["w"], WEIGHTS["b"])
    expected = jax.grad(lambda p, b: loss({"w": p, "b": b}))(WEIGHTS["w"], WEIGHTS["b"])
    np.testing.assert_array_equal(found, expected)


UNSCALED = {
    "a function": (jmp.with_policy(product, "mixed_float16"), WEIGHTS),
    "autocast": (jmp.autocast(lambda p, x: product(p, x.astype(jnp.float32)), "mixed_float16"), WEIGHTS),
    "linen": make_linen(jmp.PolicyMap({"head": "mixed_float16"}, default="mixed_bfloat16")),
    "nnx": make_nnx("mixed_float16"),
}


@pytest.mark.parametrize("name", UNSCALED)
def test_float16_without_a_loss_scale_warns_once(name):
    apply, params = UNSCALED[name]
    loss = functools.partial(loss_of, apply)
    jax.eval_shape(loss, params)  # warnings are errors here
    for options in ({}, {"reduce_dtype": "float32"}):
        scaled, plain = (jmp.grad(loss, loss_scale=scale, **options) for scale in (jmp.StaticLossScale(8.0), PLAIN))
        jax.eval_shape(scaled, params)
        _check_warning(plain, params)
    for tx in (jmp.optim.skip_nonfinite(optax.sgd(1.0)), optax.sgd(1.0)):
        _check_warning(lambda params: jmp.optim.minimize(loss, tx)(params, tx.init(params)), params)


def _check_warning(fun, params):
    forget_warnings(_PolicySearch)
    with pytest.warns(UserWarning, match="^A policy computes in float16, and its gradients have no loss scale"):
        jax.eval_shape(fun, params)
    jax.eval_shape(fun, params)
