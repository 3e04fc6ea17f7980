"""The decoding cache of an attention layer has the dtype of its layer."""

import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_layers import attend
from nnx_models import BF16_INSIDE, X, rngs

import jmp_policy as jmp

TOKEN = X[:, None]


def decoder(dtype=None):
    return nnx.MultiHeadAttention(2, 4, dtype=dtype, attention_fn=attend, decode=True, rngs=rngs())


@pytest.mark.slow
def test_cache_is_made_in_the_dtype_of_its_layer():
    model = jmp.with_policy(decoder(), BF16_INSIDE)
    model.init_cache((2, 3, 4))
    assert model.cached_key.dtype == jnp.bfloat16
    assert model(TOKEN).dtype == jnp.float32
    assert (model.cached_key.dtype, int(model.cache_index[...])) == (jnp.bfloat16, 1)


@pytest.mark.slow
def test_dtype_that_the_author_wrote_is_that_of_the_cache():
    with pytest.warns(UserWarning, match="4 of 4 layers with weights compute in the dtype that their author wrote"):
        model = jmp.with_policy(decoder(jnp.float32), BF16_INSIDE)
    model.init_cache((2, 3, 4))
    assert model.cached_key.dtype == jnp.float32
    assert model(TOKEN).dtype == jnp.float32


@pytest.mark.slow
def test_cache_of_another_dtype_is_an_error_that_says_what_to_do():
    plain = decoder()
    plain.init_cache((2, 3, 4))
    model = jmp.with_policy(plain, BF16_INSIDE)
    message = (
        r"The cache of this attention layer is float32, but the layer computes in bfloat16. "
        r"Make it anew under the policy: layer.init_cache\(input_shape\)."
    )
    with pytest.raises(ValueError, match=message):
        model(TOKEN)
    assert model(TOKEN, decode=False).dtype == jnp.float32  # which needs no cache
    model.init_cache((2, 3, 4))
    assert model(TOKEN).dtype == jnp.float32


def test_cache_of_a_layer_whose_dtype_its_inputs_tell_is_made_in_the_dtype_that_the_error_says():
    def decode(*dtype):
        model = jmp.with_policy(decoder(), "params=float32,compute=none,output=none")
        model.init_cache((2, 3, 4), *dtype)
        return model(TOKEN.astype(jnp.bfloat16))

    with pytest.raises(ValueError, match=r"only inputs tell it: layer.init_cache\(input_shape, jnp.bfloat16\)."):
        nnx.eval_shape(decode)
    assert nnx.eval_shape(lambda: decode(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.slow
def test_caches_of_other_modules_are_never_narrowed():
    class Cached(nnx.Module):
        def __init__(self):
            self.cache = nnx.Cache(jnp.zeros(4, jnp.float32))

        def __call__(self, x):
            self.cache[...] = self.cache[...] + x[0].astype(jnp.float32)
            return x

    model = jmp.with_policy(Cached(), BF16_INSIDE)
    model(X)
    assert model.cache.dtype == jnp.float32
