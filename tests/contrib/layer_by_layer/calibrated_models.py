"""Layers and inputs for `gptq` and `awq`."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jmp_policy as jmp

POLICY = "int4/16(min_size=0)_from_float32"
ROWS = jnp.ones((2, 16))


def draw_inputs(inputs, rows=96, seed=0):
    """Draws inputs that depend on each other, of different magnitudes."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(rows, inputs // 2)) @ rng.normal(size=(inputs // 2, inputs))
    return ((mixed + rng.normal(size=mixed.shape)) * np.exp(rng.normal(size=inputs))).astype(np.float32)


def linear(policy=POLICY):
    return jmp.with_policy(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), policy)
