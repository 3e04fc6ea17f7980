"""A mask may become infinite, other large constants may not, and running the format shows that it is so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_policy as jmp
from jmp_policy.numerics import collect, predict

HALF = "params=float32,compute=float16,output=float32"
TRIANGLE = jnp.tri(8, dtype=bool)
ALL_BUT_LAST = jnp.arange(8)[:, None] < 7  # the last row is masked throughout


def weigh(scores, x):
    return nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ x


CONSTANTS = {
    "shift": (False, lambda w, x: x @ (w + 1e5)),
    "bound": (False, lambda w, x: (x * 1e-3) @ jnp.maximum(w, 1e5)),
    "selected": (False, lambda w, x: (x * 1e-3) @ jnp.where(w > 0, 1e5, w)),
    "selected mask": (True, lambda w, x: weigh(jnp.where(TRIANGLE, x @ w, -1e9), x)),
    "added mask": (True, lambda w, x: weigh((x @ w) / 2 + jnp.where(TRIANGLE, 0.0, -1e9), x)),
    "subtracted mask": (True, lambda w, x: weigh((x @ w) - jnp.where(TRIANGLE, 0.0, 1e9), x)),
    "masked row": (True, lambda w, x: weigh(jnp.where(ALL_BUT_LAST, x @ w, jnp.finfo(w.dtype).min), x)),
    "maximum": (True, lambda w, x: jnp.max(jnp.where(TRIANGLE, x @ w, -1e9), axis=-1)),
    "minimum": (True, lambda w, x: jnp.min(jnp.where(TRIANGLE, x @ w, 1e9), axis=-1)),
    "log-softmax": (True, lambda w, x: jax.nn.log_softmax(jnp.where(TRIANGLE, x @ w, -1e9))[:, 0]),
}
"""By name: whether the constant is a mask, and a function of a weight and a batch that has it."""

W = jnp.asarray(np.random.default_rng(0).uniform(0.1, 1, size=(8, 8)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).uniform(0.1, 1, size=(8, 8)), jnp.float32)


def compute_all(w, x):
    found = {}
    for name, (_, fun) in CONSTANTS.items():
        with jax.named_scope(name):
            found[name] = fun(w, x)
    return found


def observe(fun, *args):
    return jax.jit(collect(fun, ["float16"], where="all", of="forward", histogram=False))(*args)[1]


@pytest.mark.slow
def test_only_masks_may_overflow_under_autocast():
    prediction = predict(observe(compute_all, W, X), HALF)
    named = {reason.path for reason in prediction.reasons}
    assert named == {name for name, (is_mask, _) in CONSTANTS.items() if not is_mask}
    values = jax.jit(jmp.autocast(compute_all, HALF))(W, X)
    assert {name for name, value in values.items() if not np.isfinite(value).all()} == named


def test_constants_in_float16_are_compared_with_limits_beyond_its_range():
    stats = observe(lambda x: jnp.where(x > 0, x, jnp.float16(-6e4)) * jnp.float16(0.5), X.astype("float16"))
    assert not predict(stats, "mixed_bfloat16").reasons  # NumPy's warnings are errors here


class ShiftedAndMasked(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        with jax.named_scope("shifted"):
            shifted = (x + 1e5) @ x
        return shifted + jnp.max(x - 1e30 * (1 - mask))


def test_a_shift_that_a_matmul_reads_and_a_factor_that_is_zero_today_are_no_masks():
    stats = observe(ShiftedAndMasked().apply, {}, X, jnp.ones((8, 8)))
    constants = {reason.amax for reason in predict(stats, HALF, by="with_policy").reasons if reason.is_operand}
    assert constants == {np.float32(1e30)}
    assert "shifted" in predict(stats, HALF).culprits


@jax.custom_vjp
def wave(x):
    return jnp.sin((x * 3e4) @ jnp.ones((8, 8)))


def wave_forward(x):
    large = (x * 3e4) @ jnp.ones((8, 8))
    return jnp.sin(large), large


wave.defvjp(wave_forward, lambda large, g: (g * jnp.cos(large),))


@pytest.mark.slow
@pytest.mark.parametrize("fun", [wave, jax.vmap(wave), lambda x: jax.lax.map(wave, x)], ids=["", "vmap", "map"])
def test_a_custom_vjp_that_autocast_runs_as_written_is_not_blamed(fun):
    x = X if fun is wave else X[None]
    loss = lambda w, x: jnp.mean(fun(x @ w))
    stats = jax.jit(collect(jax.value_and_grad(loss), ["float16"], where="all"))(W, x)[1]
    assert [reason.what for reason in predict(stats, HALF).reasons if reason.what == "overflow"] == []
