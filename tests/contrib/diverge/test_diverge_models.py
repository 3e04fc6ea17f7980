"""`contrib.diverge` on Flax models, on twins of linen and nnx, and on random models with scopes swapped by hand."""

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
WIDTH, HEADS = 8, 2
MASK = nn.make_causal_mask(jnp.ones((2, 6)))
X, TOKENS = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in ((6, 8), (2, 6, 8)))
LOW = "params=float32,compute=bfloat16,output=float32"


class LinenBlock(nn.Module):
    fault: str | None = None

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="ln1", epsilon=0.1 if self.fault == "eps" else 1e-6)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(h, mask=None if self.fault == "mask" else MASK)
        h = nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="ln2")(x))
        with jax.named_scope("act"):
            h = nn.gelu(h, approximate=self.fault != "gelu")
        return x + nn.Dense(WIDTH, name="down")(h)


class LinenBlocks(nn.Module):
    fault: str | None = None

    @nn.compact
    def __call__(self, x):
        return LinenBlock(self.fault, name="block1")(LinenBlock(name="block0")(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.ln1(x), mask=MASK)
        h = self.up(self.ln2(x))
        with jax.named_scope("act"):
            h = nnx.gelu(h)
        return x + self.down(h)


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.block0, self.block1 = Block(rngs), Block(rngs)

    def __call__(self, x):
        return self.block1(self.block0(x))


def compare(linen):
    """Compares the gradients of an nnx model with those of a linen model with the same parameters."""
    model = Blocks(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    f = nnx.value_and_grad(lambda model, params: jnp.mean(model(TOKENS) ** 2))
    g = jax.value_and_grad(lambda model, params: jnp.mean(linen.apply({"params": params}, TOKENS) ** 2), argnums=1)
    return diverge(f, g)(model, params)


def test_twins_differ_by_rounding():
    divergence = compare(LinenBlocks())
    layers = ("ln1", "ln2", "attention/query", "up", "act", "down")
    assert {row.path for row in divergence.rows()} >= {f"block{i}/{name}" for i in range(2) for name in layers}
    assert max(row.introduced for row in divergence.rows()) < 1e-5
    assert divergence.unaligned == ()


@pytest.mark.parametrize(
    ("fault", "path"),
    [("eps", "block1/ln1"), ("mask", "block1/attention"), ("gelu", "block1/act"), ("half", "block1/up")],
)
def test_planted_fault_is_first(fault, path):
    model = LinenBlocks(fault)
    if fault == "half":
        model = jmp.with_policy(LinenBlocks(), jmp.PolicyMap({path: LOW}, "float32"))
    divergence = compare(model)
    rows = sorted(divergence.rows(), key=lambda row: -row.introduced)
    assert rows[0].path == path, str(divergence)
    assert {row.path for row in rows if row.introduced > 1e-5} == {path}, str(divergence)


def linear(w, x, dtype):
    return x.astype(dtype) @ w.astype(dtype)


def normalize(w, x, dtype):
    x = x.astype(dtype)
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.asarray(1e-5, dtype))


def wave(w, x, dtype):
    return jnp.sin(jnp.asarray(3, dtype) * x.astype(dtype))


def run_chain(seed, low, w, x, stop=5):
    """Runs a random chain of scopes up to `stop`; those whose numbers are in `low` run in bfloat16."""
    for i, chosen in enumerate(np.random.default_rng(seed).integers(3, size=5)[:stop]):
        with jax.named_scope(f"layer{i}"):
            x = (linear, normalize, wave)[chosen](w, x, jnp.bfloat16 if i in low else jnp.float32).astype(jnp.float32)
    return x


@pytest.mark.parametrize("seed", range(4))
def test_swapping_scopes_by_hand_gives_the_introduced_errors(seed):
    w = jnp.asarray(np.random.default_rng(seed).normal(size=(8, 8)), jnp.float32)
    f, g = (functools.partial(run_chain, seed, low) for low in ((), range(5)))
    rows = {row.path: row for row in diverge(f, g)(w, X).rows()}
    for i in range(5):
        reference, value = (
            np.asarray(jax.jit(functools.partial(run_chain, seed, swapped, stop=i + 1))(w, X), np.float64)
            for swapped in ((), (i,))
        )
        expected = np.linalg.norm(value - reference) / np.linalg.norm(reference)
        np.testing.assert_allclose(rows[f"layer{i}"].introduced, expected, rtol=0.1)


def test_layer_in_half_of_a_scanned_and_rematerialized_linen_model_is_first():
    low = jmp.with_policy(Scanned(), jmp.PolicyMap({"layers/up": LOW}, "float32"))
    variables = Scanned().init(jax.random.key(0), X)
    f, g = (jax.grad(lambda variables, net=net: jnp.mean(net.apply(variables, X) ** 2)) for net in (Scanned(), low))
    rows = diverge(f, g)(variables).rows()
    assert {row.path for row in rows if row.introduced > 0} == {"layers/up"}
    assert all(len(row.iterations) == 3 for row in rows if row.path == "layers/up")


def test_nnx_modules_have_paths_as_closures_arguments_and_methods():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs))
    low = jmp.with_policy(model, jmp.PolicyMap({"layers/0": LOW}, "float32"))
    for divergence in (diverge(lambda x: model(x), lambda x: low(x))(X), diverge(model.__call__, low.__call__)(X)):
        assert [row.path for row in divergence.rows() if row.introduced > 0] == ["layers/0"]
    loss = lambda scale: lambda model, x: jnp.mean(model(x) ** 2) * scale
    before = nnx.state(model)
    diverge(nnx.grad(loss(1.0)), nnx.grad(loss(1.01)))(model, X)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model))))
