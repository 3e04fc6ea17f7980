"""The decoding cache of an attention layer has the dtype of its layer, or 8 bits if the policy says so."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_layers import attend
from nnx_models import BF16_INSIDE, X, rngs

import jmp_policy as jmp

INT8 = "params=float32,compute=bfloat16,cache=int8"
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


@pytest.mark.parametrize(
    ("made", "read", "text"),
    [
        ("mixed_bfloat16", INT8, "is bfloat16, but its policy stores it in int8 with scales"),
        (INT8, "mixed_bfloat16", "is int8, but the layer computes in bfloat16"),
        (INT8, "c=bf16,cache=float8", "is int8, but its policy stores it in float8_e4m3fn with scales"),
    ],
)
def test_cache_of_another_format_is_an_error_that_says_what_to_do(made, read, text):
    def decode():
        first = jmp.with_policy(decoder(), made)
        first.init_cache((2, 3, 4))
        return jmp.with_policy(first, read)(TOKEN)

    make = r"Make it anew under the policy: layer.init_cache\(input_shape\)\."
    with pytest.raises(ValueError, match=f"^The cache of this attention layer {text}. {make}"):
        nnx.eval_shape(decode)


def test_a_cache_in_a_dtype_of_the_caller_is_an_error_under_a_policy_that_says_int8():
    def decode():
        model = jmp.with_policy(decoder(), INT8)
        model.init_cache((2, 3, 4), jnp.bfloat16)
        return model(TOKEN)

    with pytest.raises(ValueError, match="is bfloat16, but its policy stores it in int8 with scales"):
        nnx.eval_shape(decode)


def test_cache_in_8_bits_is_state_that_splits_and_merges():
    class Model(nnx.Module):
        def __init__(self):
            self.first, self.last = decoder(), decoder()

        def __call__(self, x):
            return self.last(self.first(x))

        def init_cache(self, shape):
            self.first.init_cache(shape)
            self.last.init_cache(shape)

    def make():
        model = jmp.with_policy(Model(), jmp.PolicyMap({"last": INT8}, "mixed_bfloat16"))
        model.init_cache((2, 3, 4))
        model(TOKEN)
        return nnx.clone(model)

    model = nnx.eval_shape(make)
    cache = nnx.state(model, nnx.Cache)
    assert sorted(cache["first"]) == ["cache_index", "cached_key", "cached_value"]
    assert {name: (value.dtype, value.shape) for name, value in cache["last"].items()} == {
        "cache_index": (jnp.int32, ()),
        "cached_key": (jnp.int8, (2, 3, 2, 2)),
        "cached_key_scale": (jnp.float32, (2, 3, 2, 1)),
        "cached_value": (jnp.int8, (2, 3, 2, 2)),
        "cached_value_scale": (jnp.float32, (2, 3, 2, 1)),
    }
    assert (
        nnx.eval_shape(
            lambda: make()(
                TOKEN,
            )
        ).dtype
        == jnp.bfloat16
    )


def test_layers_with_fewer_heads_of_keys_have_a_scale_for_each_and_multiply_in_int8_as_well():
    def decode(x):
        layer = nnx.MultiHeadAttention(4, 8, num_kv_heads=2, decode=True, rngs=rngs())
        model = jmp.with_policy(layer, f"int8(attention=true)_from_{INT8}")
        model.init_cache((2, 3, 8))
        return model(x), nnx.state(model, nnx.Cache)

    out, cache = nnx.eval_shape(decode, jnp.ones((2, 1, 8)))
    assert out.shape == (2, 1, 8)
    assert cache["cached_key_scale"].shape == (2, 3, 2, 1)
    text = str(jax.make_jaxpr(lambda x: decode(x)[0])(jnp.ones((2, 1, 8))))
    assert text.count(":i32[2,2,3,1,2] = dot_general") == 1  # 3 positions by 2 groups of 2 heads, in each of 2 rows
    assert len(re.findall(r":i32\S* = dot_general", text)) == 2  # by values too; weights are smaller than `min_size`


def test_subclasses_that_prepare_their_own_cache_have_it_in_8_bits():
    class Prepared(nnx.MultiHeadAttention):
        def decode_one(self, x):
            if self.cached_key is None:
                self.init_cache((2, 3, 4))
            return self(x, decode=True)

    def decode():
        model = jmp.with_policy(Prepared(2, 4, attention_fn=attend, rngs=rngs()), INT8)
        model.decode_one(TOKEN)
        model.decode_one(TOKEN)
        return nnx.state(model, nnx.Cache)

    assert nnx.eval_shape(decode)["cached_value"].dtype == jnp.int8


def test_a_policy_with_a_cache_and_no_attention_layer_is_a_warning():
    class Own(nnx.MultiHeadAttention):
        def __call__(self, x, decode=None):  # whose cache nobody knows
            return x

    for module in (nnx.Linear(2, 2, rngs=rngs()), Own(2, 4, rngs=rngs())):
        with pytest.warns(UserWarning, match=r"^The policy says cache='int8', but no attention layer of Flax has that"):
            jmp.with_policy(module, INT8)

    decorated = jmp.with_policy(type("Dense", (nnx.Linear,), {}), INT8)
    with pytest.warns(UserWarning, match="no attention layer of Flax"):
        decorated(2, 2, rngs=rngs())
    with warnings.catch_warnings(action="error"):
        jmp.with_policy(nnx.List([decoder()]), INT8)
        jmp.with_policy(decoder(), INT8)
