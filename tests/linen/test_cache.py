"""The decode cache of attention is made in the dtype of its layer, and one of another dtype is a clear error."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_policy as jmp

X = jnp.ones((1, 4, 8))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, decode=True, name="attention")(x, x)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's decoding compares and promotes as it goes
        yield


@pytest.mark.exhaustive
def test_cache_is_made_in_compute_dtype_and_used_in_it():
    model = jmp.with_policy(Decoder(), "mixed_bfloat16")
    variables = model.init(jax.random.key(0), X)
    assert variables["cache"]["attention"]["cached_key"].dtype == jnp.bfloat16
    out, updated = model.apply(variables, X[:, :1], mutable=["cache"])
    assert out.dtype == jnp.bfloat16
    assert updated["cache"]["attention"]["cache_index"] == 1


@pytest.mark.slow
def test_cache_of_another_dtype_is_an_error_that_says_where_and_what_to_do():
    variables = Decoder().init(jax.random.key(0), X)
    model = jmp.with_policy(Decoder(), "mixed_bfloat16")
    with pytest.raises(ValueError, match=r"The cache of 'attention' is float32, .* in bfloat16.*cast_floating"):
        model.apply(variables, X[:, :1], mutable=["cache"])
    cast = variables | {"cache": jmp.cast_floating(variables["cache"], "bfloat16")}
    assert model.apply(cast, X[:, :1], mutable=["cache"])[0].dtype == jnp.bfloat16
