"""A transformer trained with teacher forcing decodes with its cache what it computes at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from trained import trained

import jmp_policy as jmp
from benchmarks.architectures._registry import ARCHITECTURES, make_transformer

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@functools.partial(jax.jit, static_argnums=0)
def decode(model: Any, params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The logits after each of `(batch, length)` tokens, given one by one; the cache."""
    cache = model.init(jax.random.key(0), tokens)["cache"]

    def step(cache, token):
        logits, new = model.apply({"params": params, "cache": cache}, token[:, None], mutable=["cache"])
        return new["cache"], logits[:, 0]

    cache, logits = lax.scan(step, cache, tokens.T)
    return logits.swapaxes(0, 1), cache


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_decoded_logits_are_those_of_the_whole_sequence(policy):
    with jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda stacked: stacked[0], trained("transformer", policy).params)
        tokens = jnp.asarray(ARCHITECTURES["transformer"].batch["tokens"][:, :-1])
        whole = jax.jit(jmp.with_policy(make_transformer(), policy).apply)({"params": params}, tokens)
        decoded, cache = decode(jmp.with_policy(make_transformer(decode=True), policy), params, tokens)
    dtype = jmp.get_policy(policy).compute_dtype
    keys = [leaf for path, leaf in jax.tree.leaves_with_path(cache) if path[-1].key == "cached_key"]
    assert [key.dtype for key in keys] == [dtype, dtype]
    assert whole.dtype == decoded.dtype == dtype
    difference = np.abs(np.float64(decoded) - np.float64(whole)).max()
    # Measured: 2.5 units of rounding in float32, 0.6 in half, where the logits themselves are rounded.
    assert difference <= 8 * jnp.finfo(dtype).eps * np.abs(np.float64(whole)).max()
