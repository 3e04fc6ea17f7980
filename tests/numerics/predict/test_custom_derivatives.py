"""Behind a function with its own derivative an overflow is predicted as anywhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.numerics import collect, predict

HALF = "params=float32,compute=float16,output=float32"
W = {
    name: jnp.asarray(np.random.default_rng(i).normal(size=(4, 4)), jnp.float32)
    for i, name in enumerate(["up", "down"])
}
X = jnp.asarray(np.random.default_rng(2).normal(size=(8, 4)), jnp.float32)


def observe(fun, *args):
    return jax.jit(collect(fun, ["float16"], where="all"))(*args)[1]


@jax.custom_jvp
def clip_below(x):
    return jnp.maximum(x, 0)


@clip_below.defjvp
def _(primals, tangents):
    return clip_below(*primals), tangents[0] * (primals[0] > 0).astype(jnp.float32)


@jax.custom_vjp
def clip_inside(x):
    return jnp.maximum(x, 0)


clip_inside.defvjp(lambda x: (jnp.maximum(x, 0), x), lambda x, g: (g * (x > 0).astype(jnp.float32),))


def shard_relu(x):
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(jax.nn.relu, mesh=mesh, in_specs=spec, out_specs=spec)(x)


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "custom_jvp": clip_below,
    "custom_vjp": clip_inside,
    "vmapped": jax.vmap(jax.nn.relu),
    "checkpointed": jax.checkpoint(jax.nn.relu),
    "scanned": lambda x: jax.lax.scan(lambda _, row: (None, jax.nn.relu(row)), None, x)[1],
    "sharded": shard_relu,
}


def make_activated_loss(activation):
    def loss(w, x):
        with jax.named_scope("up"):
            h = x @ w["up"]
        with jax.named_scope("act"):
            h = activation(h)
        with jax.named_scope("down"):
            return jnp.mean(((h @ w["down"]) * 1e-6) ** 2)

    return loss


def find_largest_error(found, true):
    errors = jax.tree.map(lambda a, b: float(abs(a - b).max() / abs(b).max()), found, true)
    return max(jax.tree.leaves(errors))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "relu")) for name in ACTIVATIONS]
)
def test_an_overflow_behind_a_custom_derivative_is_in_the_map_and_training_under_it_is_finite(name):
    loss = make_activated_loss(ACTIVATIONS[name])
    w, x = {"up": W["up"] * 300, "down": W["down"]}, X * 300
    prediction = predict(observe(jax.value_and_grad(loss), w, x), HALF)
    assert {"up", "down"} <= set(prediction.culprits)
    scale = jmp.StaticLossScale(prediction.loss_scale)
    found = jmp.value_and_grad(jmp.autocast(loss, prediction.policy_map), loss_scale=scale)(w, x)
    # float16 rounds to 2**-11, and four roundings in a row are within 2**-9.
    assert find_largest_error(found, jax.value_and_grad(loss)(w, x)) < 2**-9


def test_the_backward_pass_of_a_custom_jvp_has_the_path_of_its_forward_pass():
    observed = collect(jax.grad(make_activated_loss(clip_below)), where="all", formats=["float16"])
    stats = jax.eval_shape(observed, W, X)[1]
    paths = {site.path for site in stats.layout.sites if site.primitive in ("mul", "custom_jvp_call")}
    assert paths == {"act", "down"}
