"""Constants under autocast: those that half precision has not, and how functions of the tables are found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_policy as jmp
from jmp_policy.autocast import AutocastRules, autocast

EYE = np.eye(8, dtype=np.float32)


def under(dtype: str, function, rules: AutocastRules | None = None):
    """A function of the result of a low operation."""
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=none")
    return jax.jit(autocast(lambda x: function(x @ EYE), policy, rules=rules))


def test_an_epsilon_too_small_for_float16_stays_an_epsilon():
    x = np.zeros((8, 8), np.float32)
    assert np.isfinite(under("float16", lambda h: h / (h + 1e-8))(x)).all()


@pytest.mark.parametrize("operation", [lambda h: h / 1e6, lambda h: h * 1e6])
def test_a_factor_too_large_for_float16_means_itself(operation):
    x = np.full((8, 8), 2.0, np.float32)
    np.testing.assert_allclose(under("float16", operation)(x), operation(x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", [-1e9, float(np.finfo(np.float32).min)])
def test_a_mask_too_large_for_half_precision_is_its_largest_number(dtype, mask):
    masked = under(dtype, lambda h: jnp.where(h > 0, h, mask))(-EYE)
    assert np.isfinite(masked).all()
    assert np.all(masked <= -65504)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "bias",
    [
        lambda allowed: jnp.where(allowed, 0.0, -1e9),
        lambda allowed: jnp.where(allowed, 0.0, jnp.finfo(jnp.float32).min),
        lambda allowed: (1.0 - allowed.astype(jnp.float32)) * -1e9,
        lambda allowed: -jnp.where(allowed, 0.0, 1e9)[None],
        lambda allowed: -(1e9 * ~allowed)[None],
    ],
    ids=["where", "finfo.min", "one minus", "negated", "times a truth value"],
)
def test_a_mask_that_is_added_stays_finite(dtype, bias):
    """Rows without a single allowed entry are uniform, as in float32; the logits below zero must not tip it over."""
    allowed = np.tri(8, k=-1, dtype=bool)
    x = np.random.default_rng().uniform(-60, 60, (8, 8)).astype(np.float32)
    attend = lambda h: jax.nn.softmax(h + bias(jnp.asarray(allowed)), axis=-1)
    with jax.numpy_dtype_promotion("standard"):
        ours, float32 = (np.reshape(fun(x), (8, 8)) for fun in (under(dtype, attend), jax.jit(attend)))
    np.testing.assert_allclose(ours[1:], float32[1:], atol=0.3)
    assert np.isfinite(ours).all()
    assert not ours[1:][~allowed[1:]].any()


@pytest.mark.slow
def test_a_mask_leaves_room_for_what_it_is_added_to():
    # Operation by operation: XLA would keep the sum in float32 between two operations that it fuses.
    fun = autocast(lambda x: x @ EYE + jnp.where(x > 0, 0.0, -1e9), "params=float32,compute=float16,output=none")
    assert np.isfinite(np.asarray(fun(jnp.full((8, 8), -60.0)))).all()


def test_an_infinite_mask_stays_infinite():
    assert np.all(under("float16", lambda h: jnp.where(h > 0, h, -jnp.inf))(-EYE) == -np.inf)


def test_a_comparison_with_a_constant_is_exact():
    # 0.1 is 0.10009765625 in bfloat16, which a comparison in bfloat16 would take for equal.
    x = np.full((8, 8), 0.10009765625, np.float32)
    assert np.all(under("bfloat16", lambda h: h > 0.1)(x))


@pytest.mark.slow
@pytest.mark.parametrize("operation", [lax.cumprod, lax.cumsum])
def test_what_accumulates_errors_in_bfloat16_has_those_of_float32(operation):
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.uniform(0.9, 1.1, (256, 8)), jnp.bfloat16))
    expected = getattr(np, operation.__name__)(x.astype(np.float64), axis=0)
    errors = [
        np.mean(np.abs(np.asarray(got, np.float64) - expected) / np.abs(expected))
        for got in (under("bfloat16", operation)(x.astype(np.float32)), operation(x))
    ]
    assert errors[0] < 1e-5
    assert errors[1] > 1e-3


@pytest.mark.parametrize("operation", [lax.optimization_barrier, lambda arrays: lax.sort(arrays, num_keys=1)])
def test_each_of_several_arrays_keeps_its_own_dtype(operation):
    text = under("bfloat16", lambda h: operation((h * jnp.exp(h), h))).lower(EYE).as_text()
    assert "tensor<8x8xf32>, tensor<8x8xbf16>" in text


def test_a_user_may_move_one_loss_out_of_the_package():
    loss = lambda h: optax.losses.squared_error(h, jnp.ones_like(h)) * 1.0
    rules = AutocastRules(functions={"optax.losses.squared_error": "infer"})
    texts = [under("bfloat16", loss, rules).lower(EYE).as_text() for rules in (None, rules)]
    assert "subtract" in texts[0]
    assert ["tensor<8x8xbf16>" in next(line for line in text.splitlines() if "subtract" in line) for text in texts] == [
        False,
        True,
    ]
