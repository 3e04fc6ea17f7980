"""The matmuls of attention under a quantized policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_apis import LINEN, NNX
from programs import products

import jmp_policy as jmp

POLICY = "int8(attention=true)_from_float32"
X = jnp.ones((2, 16, 64))


def count_products(api, policy, **options):
    """Returns the number of int8 matmuls, and of all."""
    found = [dtype for _, dtype in products(api.trace(api.under(lambda: api.attention(**options), policy), X))]
    return found.count("int8"), len(found)


def test_attention_is_quantized_if_the_format_says_so(api):
    assert count_products(api, "int8_from_float32") == (4, 6)
    assert count_products(api, POLICY) == (6, 6)
    assert count_products(api, "int8(act_scale=static,attention=true)_from_mixed_bfloat16") == (6, 6)
    again = jmp.with_policy(api.under(api.attention, POLICY), "int8_from_float32")
    assert [dtype for _, dtype in products(api.trace(again, X))].count("int8") == 4


def attend_to_nothing(query, key, value, **_):
    return query


@pytest.mark.parametrize(
    ("options", "count"), [({"attention_fn": attend_to_nothing}, 4), ({"precision": "highest"}, 6)]
)
def test_the_function_of_an_author_stays(api, options, count):
    assert count_products(api, POLICY, **options) == (4, count)


def test_the_einsums_of_an_author_stay_in_linen():
    einsums = {f"{name}_einsum_cls": lambda: jnp.einsum for name in ("qk_attn_weights", "attn_weights_value")}
    assert count_products(LINEN, POLICY, **einsums) == (4, 6)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "mxfp8", "float8(recipe=current,min_size=0)"])
def test_attention_of_linen_equals_einsums_by_hand(format):
    layer, x = LINEN.attention(), jax.random.normal(jax.random.key(0), (2, 32, 64))
    variables = layer.init(jax.random.key(1), x)
    multiply = lambda: functools.partial(jmp.quant.einsum, quantization=format)
    by_hand = layer.clone(qk_attn_weights_einsum_cls=multiply, attn_weights_value_einsum_cls=multiply)
    policy = f"{format.rstrip(')')}{',' if '(' in format else '('}attention=true)_from_float32"
    run = lambda layer: jax.jit(jmp.with_policy(layer, policy).apply)(variables, x)
    assert (run(layer) == run(by_hand)).all()


@pytest.mark.slow
def test_calls_of_nnx_that_need_the_weights_stay_in_the_compute_dtype():
    layer = NNX.attention(dropout_rate=0.5)
    run = lambda policy: jmp.with_policy(layer, policy)(X, deterministic=False, rngs=nnx.Rngs(0))
    assert (run(POLICY) == run("int8_from_float32")).all()


@pytest.mark.slow
def test_attention_of_nnx_equals_the_function_of_quant():
    x = jax.random.normal(jax.random.key(0), (3, 2, 16, 64))
    mask = nnx.make_causal_mask(jnp.ones((3, 2, 16)))

    def attend(query, key, value, *, is_causal, **_):
        operands = (each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
        return jmp.quant.dot_product_attention(*operands, is_causal=True, quantization="int8").reshape(query.shape)

    by_rule, by_hand = (jmp.with_policy(NNX.attention(**own), POLICY) for own in ({}, {"attention_fn": attend}))
    np.testing.assert_allclose(by_rule(x, mask=mask), by_hand(x), rtol=0, atol=2**-18)
    assert bool((by_rule(x[0], is_causal=True) == by_hand(x[0])).all())
