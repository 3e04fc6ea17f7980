"""The decode cache of attention is made in the dtype of its layer or in 8 bits; another format is a clear error."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_policy as jmp

INT8 = "params=float32,compute=bfloat16,cache=int8"
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


MAKE = r"Make the cache under the same policy, model.init\(...\)\['cache'\]"


@pytest.mark.parametrize(
    ("made", "read", "text"),
    [
        ("mixed_bfloat16", INT8, rf"is bfloat16, but under its policy it is stored in int8 with scales. {MAKE}\."),
        (
            INT8,
            "mixed_bfloat16",
            rf"is int8 with scales, but .* the layer computes in bfloat16. {MAKE}\.",
        ),
        (INT8, "c=bf16,cache=float8", rf"is int8 with scales, but .* stored in float8_e4m3fn with scales. {MAKE}\."),
    ],
)
def test_cache_of_another_format_is_an_error_that_says_where_and_what_to_do(made, read, text):
    variables = jax.eval_shape(jmp.with_policy(Decoder(), made).init, jax.random.key(0), X)
    apply = lambda variables: jmp.with_policy(Decoder(), read).apply(variables, X[:, :1], mutable=["cache"])
    with pytest.raises(ValueError, match=f"^The cache of 'attention' {text}"):
        jax.eval_shape(apply, variables)


def test_stacked_layers_have_a_cache_each():
    stack = nn.scan(Layer, variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True}, length=3)
    model = jmp.with_policy(stack(), "params=float32,cache=int8")
    make_zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)
    variables = jax.tree.map(make_zeros, jax.eval_shape(model.init, jax.random.key(0), X))
    shapes = {path[-1].key: (leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(variables["cache"])}
    assert shapes.pop("cache_index") == ((3,), jnp.int32)
    assert shapes == {
        "cached_key": ((3, 1, 4, 2, 4), jnp.int8),
        "cached_key_scale": ((3, 1, 4, 2, 1), jnp.float32),
        "cached_value": ((3, 1, 4, 2, 4), jnp.int8),
        "cached_value_scale": ((3, 1, 4, 2, 1), jnp.float32),
    }
    (_, _), new = jax.jit(lambda v, x: model.apply(v, x, mutable=["cache"]))(variables, X[:, :1])
    cache = new["cache"]["attention"]
    assert cache["cache_index"].tolist() == [1, 1, 1]
    assert (cache["cached_key_scale"][:, :, 0] > 0).all()  # also of rows of zeros
    assert (cache["cached_key_scale"][:, :, 1:] == 0).all()


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        attend = nn.MultiHeadDotProductAttention(2, decode=True, name="attention")
        return x + attend(nn.LayerNorm(use_bias=False, name="norm")(x)), None


def test_a_rule_decides_which_layers_have_a_cache_in_8_bits():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            first, last = (nn.MultiHeadAttention(2, decode=True, name=name) for name in ("first", "last"))
            return last(first(x))

    model = jmp.with_policy(Two(), jmp.PolicyMap({"last": INT8}, "mixed_bfloat16"))
    cache = jax.eval_shape(model.init, jax.random.key(0), X)["cache"]
    assert {name: layer["cached_key"].dtype for name, layer in cache.items()} == {
        "first": jnp.bfloat16,
        "last": jnp.int8,
    }
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
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    seen.clear()
    step = lambda v: model.apply(v, X[:, :1], mutable=["cache", "intermediates"])
    _, new = jax.eval_shape(step, {name: variables[name] for name in ("params", "cache")})
    assert seen == [((1, 4, 2, 4), jnp.bfloat16, (1, 1, 1, 4))]
    assert jax.tree.leaves(new["intermediates"])[0].shape == (1, 2, 1, 4)


def test_a_policy_with_a_cache_and_no_attention_layer_is_a_warning():
    dense = jmp.with_policy(nn.Dense(8), INT8)
    with pytest.warns(UserWarning, match=r"^The policy says cache='int8', but no attention layer of Flax has that pol"):
        jax.eval_shape(dense.init, jax.random.key(0), X)
    for kind in (nn.MultiHeadAttention, nn.jit(nn.MultiHeadAttention), lambda heads: nn.Sequential([Decoder()])):
        model = jmp.with_policy(kind(2), INT8)
        with warnings.catch_warnings(action="error"):
            jax.eval_shape(model.init, jax.random.key(0), X)
