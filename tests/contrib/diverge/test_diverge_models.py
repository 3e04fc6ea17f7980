"""`contrib.diverge` on Flax models, and on random models whose scopes are swapped one at a time by hand."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_models import Scanned
from flax import nnx

import jmp_policy as jmp
from jmp_policy.contrib import diverge

pytestmark = pytest.mark.slow
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
HALF = "params=float32,compute=bfloat16,output=float32"


def relative(reference, value):
    return np.linalg.norm(np.asarray(value - reference, np.float64)) / np.linalg.norm(np.asarray(reference, np.float64))


def linear(w, x, dtype=jnp.float32):
    return (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)


def normalize(w, x, dtype=jnp.float32):
    x = x.astype(dtype)
    return (x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.asarray(1e-5, dtype))).astype(jnp.float32)


def wave(w, x, dtype=jnp.float32):
    return jnp.sin(jnp.asarray(3, dtype) * x.astype(dtype)).astype(jnp.float32)


LAYERS = (linear, normalize, wave)


def run_chain(seed, low, w, x, stop=5):
    """Runs a random chain of scopes up to `stop`; those whose numbers are in `low` run in bfloat16."""
    chosen = np.random.default_rng(seed).integers(len(LAYERS), size=5)
    for i in range(stop):
        with jax.named_scope(f"layer{i}"):
            x = LAYERS[chosen[i]](w, x, jnp.bfloat16 if i in low else jnp.float32)
    return x


@pytest.mark.parametrize("seed", range(10))
def test_swapping_scopes_by_hand_gives_the_introduced_errors(seed):
    w = jnp.asarray(np.random.default_rng(seed).normal(size=(8, 8)), jnp.float32)
    f, g = (functools.partial(run_chain, seed, low) for low in ((), range(5)))
    rows = {row.path: row for row in diverge(f, g)(w, X).rows()}
    for i in range(5):
        values = [jax.jit(functools.partial(run_chain, seed, swapped, stop=i + 1))(w, X) for swapped in ((), (i,))]
        np.testing.assert_allclose(rows[f"layer{i}"].introduced, relative(*values), rtol=0.1)


def test_layer_in_half_of_a_scanned_and_rematerialized_linen_model_is_first():
    low = jmp.with_policy(Scanned(), jmp.PolicyMap({"layers/up": HALF}, "float32"))
    variables = Scanned().init(jax.random.key(0), X)
    f, g = (jax.grad(lambda variables, net=net: jnp.mean(net.apply(variables, X) ** 2)) for net in (Scanned(), low))
    rows = diverge(f, g)(variables).rows()
    assert {row.path for row in rows if row.introduced > 0} == {"layers/up"}
    assert all(len(row.iterations) == 3 for row in rows if row.path == "layers/up")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a, self.norm, self.b = (
            nnx.Linear(8, 8, rngs=rngs),
            nnx.LayerNorm(8, rngs=rngs),
            nnx.Linear(8, 5, rngs=rngs),
        )

    def __call__(self, x):
        return self.b(self.norm(nnx.relu(self.a(x))))


class Twin(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm", epsilon=1e-2)(nn.relu(nn.Dense(8, name="a")(x)))
        return nn.Dense(5, name="b")(x)


def test_nnx_modules_have_paths_as_closures_arguments_and_methods():
    model = Net(nnx.Rngs(0))
    low = jmp.with_policy(model, jmp.PolicyMap({"a": HALF}, "float32"))
    for divergence in (
        diverge(lambda x: model(x), lambda x: low(x))(X),
        diverge(model.__call__, low.__call__)(X),
    ):
        assert [row.path for row in divergence.rows() if row.introduced > 0] == ["a"]
    loss = lambda scale: lambda model, x: jnp.mean(model(x) ** 2) * scale
    before = nnx.state(model)
    diverge(nnx.grad(loss(1.0)), nnx.grad(loss(1.01)))(model, X)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model))))


def test_a_linen_model_aligns_with_its_nnx_twin():
    model = Net(nnx.Rngs(0))
    read = lambda layer, *names: {name: getattr(layer, name)[...] for name in names}
    params = {"a": read(model.a, "kernel", "bias"), "b": read(model.b, "kernel", "bias")}
    params["norm"] = read(model.norm, "scale", "bias")
    divergence = diverge(lambda x: model(x), lambda x: Twin().apply({"params": params}, x))(X)
    assert [row.path for row in divergence.rows() if row.introduced > 1e-4] == ["norm"]
    assert divergence.unaligned == ()
