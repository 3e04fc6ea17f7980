"""Arguments that half precision would ruin enter uncast: positions and timesteps, in functions, linen and nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

POLICY = "params=float32,compute=bfloat16,output=none"
POSITIONS = jnp.arange(0.0, 4096.5, 0.5)  # bfloat16 has 8 bits of precision: from 128 on it has no halves
X = jnp.ones(2)


class LinenModel(nn.Module):
    """Two methods with an argument of one name."""

    def __call__(self, x, where):
        return x, where

    def decode(self, x, *, where):
        return x, where


class NnxModel(nnx.Module):
    """The same."""

    def __call__(self, x, where):
        return x, where

    def decode(self, x, *, where):
        return x, where


def function(no_cast):
    policied = jmp.with_policy(lambda x, where: (x, where), POLICY, no_cast=no_cast)
    return policied, policied


def linen(no_cast):
    model = jmp.with_policy(LinenModel(), POLICY, no_cast=no_cast)
    return lambda *a, **k: model.apply({}, *a, **k), lambda *a, **k: model.apply({}, *a, **k, method="decode")


def linen_class(no_cast):
    model = jmp.with_policy(LinenModel, POLICY, no_cast=no_cast)()
    return lambda *a, **k: model.apply({}, *a, **k), lambda *a, **k: model.apply({}, *a, **k, method=LinenModel.decode)


def of_nnx(no_cast):
    model = jmp.with_policy(NnxModel(), POLICY, no_cast=no_cast)
    return model, model.decode


def nnx_class(no_cast):
    model = jmp.with_policy(NnxModel, POLICY, no_cast=no_cast)()
    return model, model.decode


CALLS = {
    "positional": lambda call, decode, where: call(X, where),
    "keyword": lambda call, decode, where: call(X, where=where),
    "other method": lambda call, decode, where: decode(X, where=where),
    "jitted": lambda call, decode, where: jax.jit(call)(X, where),
}
in_every_target = pytest.mark.parametrize("make", [function, linen, linen_class, of_nnx, nnx_class])
however_called = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.mark.sample(2)
@in_every_target
@however_called
def test_float_positions_collide_in_half_precision_and_kept_ones_do_not(make, call):
    x, ruined = call(*make(()), POSITIONS)
    assert len(np.unique(ruined)) == 256 + 5 * 128 + 1  # of 8193: below 128, in the octaves from there, and 4096
    x, kept = call(*make(["where"]), POSITIONS)
    np.testing.assert_array_equal(kept, POSITIONS, strict=True)
    assert x.dtype == jnp.bfloat16


@in_every_target
@however_called
def test_whole_tree_of_a_kept_argument_enters_uncast(make, call):
    tree = {"time": jnp.float32(999.5), "grid": [POSITIONS, (jnp.arange(3), None)]}
    _, kept = call(*make(["where"]), tree)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), kept, tree)


@pytest.mark.slow
@in_every_target
def test_timesteps_of_a_diffusion_keep_their_frequencies(make):
    """The highest frequency of a sinusoidal embedding turns by a radian each step: a rounded step is another angle."""
    steps = jnp.arange(1000.0)
    _, ruined = make(())[0](X, steps)
    _, kept = make(["where"])[0](X, steps)
    exact = np.sin(np.arange(1000.0))
    assert np.abs(np.sin(np.asarray(ruined, np.float64)) - exact).max() > 0.9
    assert np.abs(np.asarray(jnp.sin(kept), np.float64) - exact).max() < 1e-4
