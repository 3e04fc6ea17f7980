"""Causes that `contrib.parity` must not name: where nothing differs, where it is rounding, and where it cannot know."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_model import Options, make_cache, make_params, make_step, make_tokens, make_trainer

from jmp_policy.contrib import parity

PARAMS, TOKENS = make_params(), make_tokens()
TEMPERATURE = "as with a temperature of"


def draw(*shape):
    return np.random.default_rng().normal(size=shape).astype(np.float32)


def compare(trainer, sampler, tokens=None):
    """Compares logits as they are."""
    tokens = np.zeros(trainer.shape[:2], int) if tokens is None else tokens
    read = lambda i: lambda logits, tokens: logits[i]
    return parity(read(0), read(1), scopes=False)((jnp.asarray(trainer), jnp.asarray(sampler)), tokens)


@pytest.mark.parametrize("padding", [(-1e9, -1e10), (-3.4e38, -3.39e38), (-1e9, -np.inf), (-1e9, -1e9)])
def test_padding_of_the_vocabulary_is_no_temperature_and_hides_none(padding):
    logits = draw(2, 8, 11)
    sides = [logits.copy() for _ in padding]
    for side, number in zip(sides, padding, strict=True):
        side[..., 8:] = number
    assert compare(*sides).causes == ()
    sides[1][..., :8] /= np.float32(0.7)
    assert TEMPERATURE in compare(*sides).causes[0]


def test_a_scale_of_the_logits_in_bfloat16_is_no_temperature():
    logits = draw(2, 8, 11)
    scale = np.float32(96**-0.5)
    assert compare(logits * scale, logits * np.float32(jnp.bfloat16(scale))).causes == ()


def test_a_factor_between_few_numbers_is_no_temperature():
    assert compare(draw(1, 2, 2), draw(1, 2, 2)).causes == ()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_copy_of_the_weights_in_half_precision_is_no_other_update(dtype):
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), PARAMS)
    found = parity(make_trainer(), make_step(weights=weights), cache=make_cache())(PARAMS, TOKENS)
    assert found.causes == (f"The sampler closes over the given weights, rounded to {jnp.dtype(dtype)}.",)


def test_a_sampler_that_draws_its_tokens_has_no_dropout():
    def step(params, cache, token):
        cache, key, _ = cache
        logits, cache = make_step()(params, cache, token)
        key, own = jax.random.split(key)
        return 1.5 * logits, (cache, key, jax.random.categorical(own, logits))

    cache = make_cache(), jax.random.key(0), jnp.zeros(TOKENS.shape[0], jnp.int32)
    found = parity(make_trainer(), step, cache=cache)(PARAMS, TOKENS)
    assert not any("random" in cause for cause in found.causes)
    assert TEMPERATURE in found.causes[0]


def test_attention_in_both_directions_on_both_sides_is_no_cause():
    logits = draw(2, 8, 11)
    both = lambda add: lambda params, tokens: params + jnp.sin(tokens[:, ::-1, None] + jnp.arange(11)) + add
    tokens = np.arange(16).reshape(2, 8) % 11
    found = parity(both(0.0), both(jnp.linspace(0, 1, 11)), scopes=False)(jnp.asarray(logits), tokens)
    assert not any("causal" in cause for cause in found.causes)
    one = parity(both(0.0), lambda params, tokens: params, scopes=False)(jnp.asarray(logits), tokens)
    assert "The trainer's logits at position 3 change with the token at position 4" in one.causes[0]


def test_truncated_and_broken_logits_are_told_as_such():
    logits = draw(2, 8, 11)
    truncated = logits.copy()
    truncated[..., 0] = -np.inf
    found = compare(logits, truncated)
    assert found.causes[0].startswith("The sampler gives a probability of 0 to 14 of 14 tokens, as top-k or top-p")
    assert (found.largest, found.percentile_99, found.effective_sample_size) == (np.inf, np.inf, 14.0)
    broken = logits.copy()
    broken[1, 3] = np.nan
    found = compare(logits, broken)
    assert found.causes == ("The sampler's logits are not finite for sequence 1, position 4.",)
    assert found.outside >= 1 / 14


def test_weights_that_enter_in_int8_are_rounding():
    scale = jnp.abs(PARAMS["head"]).max() / 127
    stored = jnp.round(PARAMS["head"] / scale).astype(jnp.int8)

    def quantized(params, cache, token):
        with jax.named_scope("head"):
            head = stored.astype(jnp.float32) * scale
        return make_step()({**params, "head": head}, cache, token)

    found = parity(make_trainer(), quantized, cache=make_cache())(PARAMS, TOKENS)
    assert not any("more than rounding" in cause for cause in found.causes)


def test_rounding_of_scopes_inside_of_a_scope_is_no_cause_of_it():
    def run(params, x, dtype):
        with jax.named_scope("block"):
            for name in ("up", "down"):
                with jax.named_scope(name):
                    x = jnp.tanh(x.astype(dtype) @ params.astype(dtype)).astype(jnp.float32)
        with jax.named_scope("head"):
            return x @ params

    weights = jnp.asarray(draw(11, 11)) / 3
    trainer = lambda params, tokens: run(params, params[tokens], jnp.float32)
    step = lambda params, cache, token: (run(params, params[token], jnp.bfloat16), cache)
    found = parity(trainer, step, cache=jnp.zeros(()))(weights, np.arange(24).reshape(3, 8) % 11)
    assert found.causes == ()


def test_statistics_of_the_batch_are_no_mask():
    logits = 0.1 * jnp.asarray(draw(11, 11)) + 3 * jnp.eye(11)  # each token moves the mean
    batch_norm = lambda params, tokens: params[tokens] - 8 * params[tokens].mean((0, 1), keepdims=True)
    running = lambda params, tokens: params[tokens]
    tokens = np.arange(24).reshape(3, 8) % 11
    found = parity(batch_norm, running, scopes=False)(logits, tokens)
    assert found.causes[0].startswith("The trainer's logits change with a token of another sequence: statistics of")
    assert not any("causal" in cause for cause in found.causes)


def test_a_cache_in_8_bits_in_a_scope_of_the_sampler_alone_is_rounding():
    def step(params, cache, token):
        with jax.named_scope("kv_cache"):
            cache = jax.tree.map(
                lambda leaf: leaf.astype(jnp.float8_e4m3fn).astype(leaf.dtype) if leaf.ndim > 1 else leaf, cache
            )
        return make_step()(params, cache, token)

    found = parity(make_trainer(), step, cache=make_cache())(PARAMS, TOKENS)
    assert found.mean > 1e-4
    assert not any("weighs positions differently" in cause for cause in found.causes)


def test_another_scale_inside_of_a_scope_is_no_temperature():
    def step(params, cache, token):
        with jax.named_scope("head"):
            scaled = 1.3 * params["head"]
        return make_step()({**params, "head": scaled}, cache, token)

    found = parity(make_trainer(), step, cache=make_cache())(PARAMS, TOKENS)
    assert found.rows()[0].path == "head"
    assert re.search(r"and head introduces 0\.[23]\d*: its scale is another one: not a rounding", found.causes[0])


def test_a_trainer_without_the_last_token_has_rows():
    shorter = lambda params, tokens: make_trainer()(params, tokens[:, :-1])
    found = parity(shorter, make_step(Options(softmax_dtype=jnp.bfloat16)), cache=make_cache())(PARAMS, TOKENS)
    assert found.rows()[0].path == "attention"
    assert len(found.rows()[0].iterations) == TOKENS.shape[1] - 1


STEP = lambda params, cache, token: (params, cache)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: parity(STEP, STEP), ValueError, r"takes three arguments.* parity\(trainer, step, cache=cache\)"),
        (lambda: parity(compare, {}, names=["a"]), TypeError, r"^names=\['a'\] is not a dictionary"),
        (lambda: compare(draw(2, 4, 7), draw(2, 4, 8)), ValueError,
         r"^The trainer has logits of 7 tokens, and the sampler of 8\. .*: logits\[\.\.\., :7\]"),
        (lambda: parity(lambda p, t: (p, t), lambda p, t: p)(draw(2, 4, 7), np.zeros((2, 4), int)), ValueError,
         r"^The trainer returns a tuple of float32\[2, 4, 7\], int32\[2, 4\], not floating logits"),
        (lambda: parity(lambda p, t: p, lambda p, t: p)(np.zeros((2, 4), int), {"w": 1}), TypeError,
         r"^parity takes params, then tokens, got {'w': 1} as tokens"),
        (lambda: jax.jit(parity(lambda p, t: p, lambda p, t: p))(draw(2, 4, 7), np.zeros((2, 4), int)), TypeError,
         r"got traced tokens .*outside of jax\.jit"),
        (lambda: parity(lambda p, t: p, lambda p, t: p)(draw(2, 4, 7), np.zeros((2, 4), int), np.full((2, 4), -1e9)),
         ValueError, r"^The mask of float64 has other values than True and False, or 1 and 0, such as -1"),
        (lambda: parity(lambda p, t: p, {"log_probs": np.ones((2, 4))})(draw(2, 4, 7), np.zeros((2, 4), int)),
         ValueError, r"^'log_probs' of the recording has 1, and a log-probability is at most 0"),
        (lambda: compare(draw(2, 4, 7), draw(2, 4, 7)).assert_within(mean=float("nan")), ValueError,
         r"^mean is a difference of log-probabilities, a number above 0, got nan"),
        (lambda: compare(draw(2, 4, 7), draw(2, 4, 7)).policy_map("a"), ValueError, r"^tolerance is a .* got 'a'"),
    ],
)  # fmt: skip
def test_wrong_calls_say_what_works(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_lists_of_log_probabilities_are_taken():
    logits = draw(2, 4, 7)
    given = np.asarray(jax.nn.log_softmax(logits))[:, :, 0]
    rows = [[0.0, *row[:-1].tolist()] for row in given]
    found = parity(lambda p, t: p, {"log_probs": rows}, scopes=False)(jnp.asarray(logits), np.zeros((2, 4), int))
    assert found.largest < 1e-6
