"""The decode cache of attention in both APIs: in the dtype of its layer or in 8 bits; another format is an error."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

INT8, HALF = "params=float32,compute=bfloat16,cache=int8", "mixed_bfloat16"
X = jnp.ones((2, 3, 8))
TOKEN = X[:, :1]
KEY = jax.random.key(0)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, decode=True, name="attention")(x, x)


def decoder(kind=nnx.MultiHeadAttention, dtype=None):
    return kind(2, 8, dtype=dtype, decode=True, rngs=nnx.Rngs(0))


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's decoding compares and promotes as it goes
        yield


def linen_cache(made, read):
    """Makes the cache under a policy, and decodes a token under another."""
    attach = lambda policy: Decoder() if policy is None else jmp.with_policy(Decoder(), policy)
    variables = attach(made).init(KEY, X)
    out, updated = attach(read).apply(variables, TOKEN, mutable=["cache"])
    return out, updated["cache"]["attention"]


def nnx_cache(made, read):
    model = decoder() if made is None else jmp.with_policy(decoder(), made)
    model.init_cache(X.shape)
    model = jmp.with_policy(model, read)
    out = model(TOKEN)
    return out, nnx.to_pure_dict(nnx.state(model, nnx.Cache))


CACHES = {"linen": linen_cache, "nnx": nnx_cache}
BY_LINEN = (
    r"^The cache of 'attention' is {}, but .*{}. Make the cache under the same policy, model.init\(...\)\['cache'\]\."
)
BY_NNX = (
    r"^The cache of this attention layer is {}, but .*{}. Make it anew under the policy: layer.init_cache\(input_sh"
)
ERRORS = {
    "linen": {
        (None, HALF): r"The cache of 'attention' is float32, .* in bfloat16.*cast_floating",
        (HALF, INT8): BY_LINEN.format("bfloat16", "under its policy it is stored in int8 with scales"),
        (INT8, HALF): BY_LINEN.format("int8 with scales", "the layer computes in bfloat16"),
        (INT8, "c=bf16,cache=float8"): BY_LINEN.format("int8 with scales", "stored in float8_e4m3fn with scales"),
    },
    "nnx": {
        (None, HALF): BY_NNX.format("float32", "the layer computes in bfloat16"),
        (HALF, INT8): BY_NNX.format("bfloat16", "its policy stores it in int8 with scales"),
        (INT8, HALF): BY_NNX.format("int8", "the layer computes in bfloat16"),
        (INT8, "c=bf16,cache=float8"): BY_NNX.format("int8", "its policy stores it in float8_e4m3fn with scales"),
    },
}


@pytest.mark.parametrize(("api", "case"), [(api, case) for api, errors in ERRORS.items() for case in errors])
def test_a_cache_of_another_format_is_an_error_that_says_what_to_do(api, case):
    call = lambda: CACHES[api](*case)
    with pytest.raises(ValueError, match=ERRORS[api][case]):
        jax.eval_shape(call) if api == "linen" else nnx.eval_shape(call)


@pytest.mark.parametrize("api", CACHES)
def test_a_cache_is_made_in_the_compute_dtype_or_in_8_bits_with_scales(api):
    evaluate = jax.eval_shape if api == "linen" else nnx.eval_shape
    out, cache = evaluate(lambda: CACHES[api](HALF, HALF))
    assert out.dtype == jnp.bfloat16
    assert {name: leaf.dtype.name for name, leaf in cache.items()} == {
        "cache_index": "int32", "cached_key": "bfloat16", "cached_value": "bfloat16",
    }  # fmt: skip
    _, cache = evaluate(lambda: CACHES[api](INT8, INT8))
    assert {name: (leaf.dtype.name, leaf.shape) for name, leaf in cache.items()} == {
        "cache_index": ("int32", ()),
        "cached_key": ("int8", (2, 3, 2, 4)),
        "cached_key_scale": ("float32", (2, 3, 2, 1)),
        "cached_value": ("int8", (2, 3, 2, 4)),
        "cached_value_scale": ("float32", (2, 3, 2, 1)),
    }


def test_a_rule_decides_which_layers_have_a_cache_in_8_bits():
    class LinenTwo(nn.Module):
        @nn.compact
        def __call__(self, x):
            first, last = (nn.MultiHeadAttention(2, decode=True, name=name) for name in ("first", "last"))
            return last(first(x))

    class NnxTwo(nnx.Module):
        def __init__(self):
            self.first, self.last = decoder(), decoder()

        def __call__(self, x):
            return self.last(self.first(x))

    def make():
        model = jmp.with_policy(NnxTwo(), rules)
        model.first.init_cache(X.shape)
        model.last.init_cache(X.shape)
        model(TOKEN)
        return nnx.clone(model)

    rules = jmp.PolicyMap({"last": INT8}, HALF)
    linen = jax.eval_shape(jmp.with_policy(LinenTwo(), rules).init, KEY, X)["cache"]
    for cache in (linen, nnx.to_pure_dict(nnx.state(nnx.eval_shape(make), nnx.Cache))):
        assert {name: cache[name]["cached_key"].dtype.name for name in cache} == {"first": "bfloat16", "last": "int8"}
        assert sorted(cache["first"]) == ["cache_index", "cached_key", "cached_value"]


def test_attention_functions_of_authors_read_the_cache_and_sow_weights_of_all_positions():
    seen = []

    def attend(query, key, value, mask=None):
        seen.append((key.shape, key.dtype, None if mask is None else mask.shape))
        return nn.dot_product_attention(query, key, value, mask=mask)

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.MultiHeadAttention(2, decode=True, attention_fn=attend)(x)
            return nn.MultiHeadAttention(2, decode=True)(x, sow_weights=True)

    model = jmp.with_policy(Own(), INT8)
    variables = jax.eval_shape(model.init, KEY, X)
    seen.clear()
    step = lambda v: model.apply(v, TOKEN, mutable=["cache", "intermediates"])
    _, new = jax.eval_shape(step, {name: variables[name] for name in ("params", "cache")})
    assert seen == [((2, 3, 2, 4), jnp.bfloat16, (2, 1, 1, 3))]
    assert jax.tree.leaves(new["intermediates"])[0].shape == (2, 2, 1, 3)


NO_ATTENTION = r"^The policy says cache='int8', but no attention layer of Flax has that pol"


def test_a_policy_with_a_cache_and_no_attention_layer_is_a_warning():
    class Own(nnx.MultiHeadAttention):
        def __call__(self, x, decode=None):  # whose cache nobody knows
            return x

    dense = jmp.with_policy(nn.Dense(8), INT8)
    decorated = jmp.with_policy(type("Decorated", (nnx.Linear,), {}), f"{INT8},output=float32")  # one that is told once
    warned = [
        lambda: jax.eval_shape(dense.init, KEY, X),
        lambda: jmp.with_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), INT8),
        lambda: jmp.with_policy(decoder(Own), INT8),
        lambda: decorated(2, 2, rngs=nnx.Rngs(0)),
    ]
    for call in warned:
        with pytest.warns(UserWarning, match=NO_ATTENTION):
            call()
    with warnings.catch_warnings(action="error"):
        for kind in (nn.MultiHeadAttention, nn.jit(nn.MultiHeadAttention), lambda heads: nn.Sequential([Decoder()])):
            jax.eval_shape(jmp.with_policy(kind(2), INT8).init, KEY, X)
        nnx.eval_shape(lambda: jmp.with_policy(nnx.List([decoder()]), INT8))
        nnx.eval_shape(lambda: jmp.with_policy(decoder(), INT8))


def test_a_dtype_that_the_author_wrote_is_that_of_the_cache():
    def decode():
        with pytest.warns(UserWarning, match="4 of 4 layers with weights compute in the dtype that their author wrote"):
            model = jmp.with_policy(decoder(dtype=jnp.float32), "params=float32,compute=bfloat16,output=float32")
        model.init_cache(X.shape)
        return model(TOKEN), model.cached_key[...]

    assert {leaf.dtype.name for leaf in nnx.eval_shape(decode)} == {"float32"}


def test_a_cache_of_a_layer_whose_dtype_its_inputs_tell_is_made_in_the_dtype_that_the_error_says():
    def decode(*dtype):
        model = jmp.with_policy(decoder(), "params=float32,compute=none,output=none")
        model.init_cache(X.shape, *dtype)
        return model(TOKEN.astype(jnp.bfloat16))

    with pytest.raises(ValueError, match=r"only inputs tell it: layer.init_cache\(input_shape, jnp.bfloat16\)."):
        nnx.eval_shape(decode)
    assert nnx.eval_shape(lambda: decode(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("policy", "dtype"), [(INT8, "bfloat16"), (HALF, "int8")])
def test_a_cache_in_a_dtype_of_the_caller_is_an_error_under_a_policy_that_says_int8(policy, dtype):
    def decode():
        model = jmp.with_policy(decoder(), policy)
        model.init_cache(X.shape, jnp.dtype(dtype))  # without scales
        return jmp.with_policy(model, INT8)(TOKEN)

    with pytest.raises(ValueError, match=f"is {dtype}, but its policy stores it in int8 with scales"):
        nnx.eval_shape(decode)


def test_caches_of_other_modules_are_never_cast_down():
    class Cached(nnx.Module):
        def __init__(self):
            self.cache = nnx.Cache(jnp.zeros(8, jnp.float32))

        def __call__(self, x):
            self.cache[...] = self.cache[...] + x[0, 0].astype(jnp.float32)
            return x

    model = jmp.with_policy(Cached(), "bfloat16")
    model(X)
    assert model.cache.dtype == jnp.float32


def test_layers_with_fewer_heads_of_keys_have_a_scale_for_each_and_multiply_in_int8_as_well():
    def decode(x):
        layer = nnx.MultiHeadAttention(4, 8, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
        model = jmp.with_policy(layer, f"int8(attention=true)_from_{INT8}")
        model.init_cache(X.shape)
        return model(x), nnx.state(model, nnx.Cache)

    out, cache = nnx.eval_shape(decode, TOKEN)
    assert out.shape == (2, 1, 8)
    assert cache["cached_key_scale"].shape == (2, 3, 2, 1)
    text = str(jax.make_jaxpr(lambda x: decode(x)[0])(TOKEN))
    assert text.count(":i32[2,2,3,1,2] = dot_general") == 1  # 3 positions by 2 groups of 2 heads, in each of 2 rows
    assert len(re.findall(r":i32\S* = dot_general", text)) == 2  # by values too; weights are smaller than `min_size`


def test_subclasses_that_prepare_their_own_cache_have_it_in_8_bits():
    class Prepared(nnx.MultiHeadAttention):
        def decode_one(self, x):
            if self.cached_key is None:
                self.init_cache(X.shape)
            return self(x, decode=True)

    def decode():
        model = jmp.with_policy(decoder(Prepared), INT8)
        model.decode_one(TOKEN)
        model.decode_one(TOKEN)
        return nnx.state(model, nnx.Cache)

    assert nnx.eval_shape(decode)["cached_value"].dtype == jnp.int8
