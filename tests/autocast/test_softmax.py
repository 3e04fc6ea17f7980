"""The softmax of half-precision logits: float32 inside, and nothing kept in float32."""

import contextlib
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from programs import trace

import jmp_policy as jmp

# The form for TPUs is chosen where a program is lowered: computed here, it must be put in place of the other.
from jmp_policy.autocast import _residuals

HALVES = ["bfloat16", "float16"]
EYE = jnp.eye(64)


@pytest.fixture(params=["here", "tpu"])
def platform(request, monkeypatch):
    """The form of the softmax for the platform of the tests, or the one for TPUs, computed here."""
    caches = _residuals._trace_softmax, _residuals._change
    if request.param == "tpu":
        choose = lambda *operands, tpu, default: tpu(*operands)
        monkeypatch.setattr(_residuals, "lax", types.SimpleNamespace(platform_dependent=choose))
    for cache in caches:
        cache.cache_clear()
    yield request.param
    for cache in caches:
        cache.cache_clear()


def policy(half):
    return jmp.Policy("float32", half, None)


def after_a_matmul(fun):
    """A function of logits that are half, because a matmul made them."""
    return lambda x: fun(x @ EYE)


def names(fun, *args):
    return [eqn.primitive.name for eqn in trace(fun)(*args).eqns]


def attend(x):
    return jax.nn.softmax(x) @ EYE


def logits():
    return jnp.asarray(np.random.default_rng().normal(0, 3, (32, 64)), jnp.float32)


@pytest.mark.parametrize("half", HALVES)
def test_it_is_one_operation(half):
    x = logits()
    assert names(jmp.autocast(after_a_matmul(attend), policy(half)), x).count("custom_jvp_call") == 1
    assert "custom_jvp_call" not in names(jmp.autocast(after_a_matmul(attend), "float32"), x)
    assert "custom_jvp_call" not in names(jmp.autocast(attend, policy(half)), x)  # of float32 arguments


def test_nothing_is_kept_in_float32(platform):
    def kept(fun):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print_saved_residuals(lambda x: fun(x).sum(), logits())
        lines = out.getvalue().splitlines()
        return [line for line in lines if line.startswith("f32[32,64]") and "argument" not in line]

    assert kept(after_a_matmul(attend))
    assert not kept(jmp.autocast(after_a_matmul(attend), policy("float16")))


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "half"), [(-1, "bfloat16"), (-1, "float16"), (0, "float16"), ((0, 1), "bfloat16")])
def test_its_error_is_one_rounding(half, axis, platform):
    """Of the result: 2 to the -8 or -11 of it, and what float16 loses below 6e-5. The same for the derivative, of
    which every factor is rounded once."""
    x, tangent = logits(), logits()
    half_of = lambda a: np.asarray(a.astype(half), np.float64)
    exact_x, exact_tangent = half_of(x), half_of(tangent)
    exponentials = np.exp(exact_x - exact_x.max(axis, keepdims=True))
    exact = exponentials / exponentials.sum(axis, keepdims=True)
    exact_change = exact * (exact_tangent - (exact * exact_tangent).sum(axis, keepdims=True))

    fun = jmp.autocast(after_a_matmul(lambda x: jax.nn.softmax(x, axis)), jmp.Policy("float32", half, half))
    with jax.numpy_dtype_promotion("standard"):
        y, change = jax.jvp(fun, (x.astype(half).astype(jnp.float32),), (tangent.astype(half).astype(jnp.float32),))
    unit = float(jnp.finfo(half).eps) / 2
    assert np.abs(half_of(y) - exact).max() <= 1.01 * unit * exact.max()
    spacing = float(jnp.finfo(half).smallest_subnormal)
    size = np.abs(exact_tangent)
    mean = (exact * size).sum(axis, keepdims=True)
    bound = 4 * unit * exact * (size + mean) + spacing * (1 + size + mean + exact * size.sum(axis, keepdims=True))
    assert (np.abs(half_of(change) - exact_change) <= bound).all()


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_a_row_of_masked_logits_is_what_it_is_in_float32(half, platform):
    allowed = (jnp.arange(64) < 3) & (jnp.arange(32) > 0)[:, None]
    for mask in (-1e30, -jnp.inf):
        fun = after_a_matmul(lambda x, mask=mask: jax.nn.softmax(jnp.where(allowed, x, mask)))
        x = logits()
        ours, float32 = jmp.autocast(fun, policy(half))(x), fun(x)
        np.testing.assert_allclose(ours, float32, atol=0.02)  # a row without a logit: uniform, or nan
        assert not np.asarray(ours[1:, 3:]).any()


def test_each_platform_is_lowered_to_its_own_form():
    """On TPUs the derivative takes the exponentials of the logits once more, elsewhere it reads the result."""
    fun = jmp.autocast(after_a_matmul(jax.nn.softmax), policy("bfloat16"))
    traced = jax.jit(jax.value_and_grad(lambda x: (fun(x) ** 2).sum())).trace(logits())
    count = lambda platform: traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.exponential")
    assert count("tpu") == count("cpu") + 1 == count("cuda") + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.nn.softmax(x, where=x > 0),
        lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
        lambda x: jax.grad(lambda x: jax.nn.softmax(x)[0, 0])(x),
    ],
    ids=["where", "written out", "inside of a derivative"],
)
def test_what_is_not_that_softmax_is_written_out(fun):
    x = logits()
    cast = jmp.autocast(after_a_matmul(fun), policy("bfloat16"))
    assert "custom_jvp_call" not in names(cast, x)
    np.testing.assert_allclose(cast(x), after_a_matmul(fun)(x), atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("deviation", "half"), [(10, "bfloat16"), (50, "float16")])
def test_the_gradient_of_a_saturated_softmax_is_that_of_float32_inside(half, deviation, platform):
    """Row by row, for most rows have a gradient that is small beside that of those that are not saturated."""
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.normal(0, size, (256, 64)), half) for size in (deviation, 1))
    by_hand = lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(half)
    fun = jmp.autocast(after_a_matmul(jax.nn.softmax), jmp.Policy("float32", half, half))
    [ours] = jax.vjp(fun, x.astype(jnp.float32))[1](cotangent)
    [float32] = jax.vjp(by_hand, x)[1](cotangent)

    exact_x, exact_cotangent = np.asarray(x, np.float64), np.asarray(cotangent, np.float64)
    y = np.exp(exact_x - exact_x.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    exact = y * (exact_cotangent - (y * exact_cotangent).sum(-1, keepdims=True))
    size = np.abs(exact).sum(-1)
    is_held = size > max(1e4 * float(jnp.finfo(half).smallest_subnormal), 1e-4)  # float32 has too few digits below

    def error(gradient):
        return np.mean((np.abs(np.asarray(gradient, np.float64) - exact).sum(-1) / size)[is_held])

    assert error(ours) < 2 * error(float32) < 0.01
