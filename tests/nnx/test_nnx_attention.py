"""The matmuls of nnx's attention under a quantized policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from programs import products

import jmp_policy as jmp

POLICY = "int8(attention=true)_from_float32"


def make(**options):
    return nnx.MultiHeadAttention(2, 64, decode=False, rngs=nnx.Rngs(0), **options)


def count_products(model, *args, **options):
    """Returns the number of int8 matmuls, and of all."""
    found = products(jax.make_jaxpr(lambda *args: model(*args, **options))(*args))
    return sum(dtype == "int8" for _, dtype in found), len(found)


X = jnp.ones((2, 16, 64))


def test_attention_is_quantized_if_the_format_says_so():
    assert count_products(jmp.with_policy(make(), "int8_from_float32"), X) == (4, 6)
    assert count_products(jmp.with_policy(make(), POLICY), X) == (6, 6)
    again = jmp.with_policy(jmp.with_policy(make(), POLICY), "int8_from_float32")
    assert count_products(again, X) == (4, 6)


def test_the_function_of_an_author_stays():
    attend = lambda query, key, value, **_: query
    assert count_products(jmp.with_policy(make(attention_fn=attend), POLICY), X) == (4, 4)
    assert count_products(jmp.with_policy(make(precision="highest"), POLICY), X) == (4, 6)


@pytest.mark.slow
def test_calls_that_need_the_weights_stay_in_the_compute_dtype():
    layer = make(dropout_rate=0.5)
    run = lambda policy: jmp.with_policy(layer, policy)(X, deterministic=False, rngs=nnx.Rngs(0))
    assert (run(POLICY) == run("int8_from_float32")).all()


@pytest.mark.slow
def test_attention_equals_the_function_of_quant():
    x = jax.random.normal(jax.random.key(0), (3, 2, 16, 64))
    mask = nnx.make_causal_mask(jnp.ones((3, 2, 16)))

    def attend(query, key, value, *, is_causal, **_):
        operands = (each.reshape(-1, *each.shape[-3:]) for each in (query, key, value))
        return jmp.quant.dot_product_attention(*operands, is_causal=True, quantization="int8").reshape(query.shape)

    policy = "int8(attention=true)_from_float32"
    by_rule, by_hand = jmp.with_policy(make(), policy), jmp.with_policy(make(attention_fn=attend), policy)
    np.testing.assert_allclose(by_rule(x, mask=mask), by_hand(x), rtol=0, atol=2**-18)
    assert bool((by_rule(x[0], is_causal=True) == by_hand(x[0])).all())
