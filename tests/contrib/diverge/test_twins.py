"""`contrib.diverge`: a GPT of linen aligns with its twin of nnx, and a planted fault is first in their gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmp
from jmp_policy.contrib import diverge

pytestmark = pytest.mark.slow
TOKENS = jnp.asarray(np.random.default_rng(0).integers(11, size=(2, 6)))
MASK = nn.make_causal_mask(TOKENS)
WIDTH, HEADS = 8, 2
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


class LinenGPT(nn.Module):
    fault: str | None = None

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, WIDTH, name="embed")
        x = embed(tokens)
        for i in range(2):
            x = LinenBlock(self.fault if i else None, name=f"block{i}")(x)
        return nn.Dense(11, name="head")(nn.LayerNorm(name="norm")(x))


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


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
        self.block0, self.block1 = Block(rngs), Block(rngs)
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.block1(self.block0(self.embed(tokens)))
        return self.head(self.norm(x))


def loss_of(logits):
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp, TOKENS[:, 1:, None], -1))


def compare(linen):
    """Compares the gradients of an nnx model with those of a linen model with the same parameters."""
    model = GPT(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    f = nnx.value_and_grad(lambda model, params: loss_of(model(TOKENS)))
    g = jax.value_and_grad(lambda model, params: loss_of(linen.apply({"params": params}, TOKENS)), argnums=1)
    return diverge(f, g)(model, params)


def test_twins_differ_by_rounding():
    divergence = compare(LinenGPT())
    paths = {row.path for row in divergence.rows()}
    assert paths >= {
        f"block{i}/{name}" for i in range(2) for name in ("ln1", "ln2", "attention/query", "up", "act", "down")
    }
    assert max(row.introduced for row in divergence.rows()) < 1e-5
    assert divergence.unaligned == ()


@pytest.mark.parametrize(
    ("fault", "path"),
    [("eps", "block1/ln1"), ("mask", "block1/attention"), ("gelu", "block1/act"), ("half", "block1/up")],
)
def test_planted_fault_is_first(fault, path):
    model = LinenGPT(fault)
    if fault == "half":
        model = jmp.with_policy(LinenGPT(), jmp.PolicyMap({path: LOW}, "float32"))
    divergence = compare(model)
    rows = sorted(divergence.rows(), key=lambda row: -row.introduced)
    assert rows[0].path == path, str(divergence)
    assert {row.path for row in rows if row.introduced > 1e-5} == {path}, str(divergence)
