"""`contrib.parity`: statistics of log-probabilities are those of NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.contrib import parity

BATCH, LENGTH, VOCABULARY = 3, 7, 11
RNG = np.random.default_rng()  # new numbers in each run: the bounds are derived
LOGITS, NOISE = (RNG.normal(size=(BATCH, LENGTH, VOCABULARY)) for _ in range(2))
TOKENS = RNG.integers(0, VOCABULARY, (BATCH, LENGTH))
OTHER = LOGITS + 0.3 * NOISE


def compare(trainer, sampler, mask=None, tokens=TOKENS, **options):
    give = lambda logits: lambda params, tokens: logits
    sampler = sampler if isinstance(sampler, dict) else give(jnp.asarray(sampler, jnp.float32))
    return parity(give(jnp.asarray(trainer, jnp.float32)), sampler, **options)(None, tokens, mask)


def find_log_probs(logits, tokens=TOKENS):
    """Returns log-probabilities of the vocabulary, and of the tokens, after rounding the logits to float32."""
    logits = np.asarray(logits, np.float32).astype(np.float64)
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return every[:, :-1], np.take_along_axis(every[:, :-1], tokens[:, 1:, None], -1)[..., 0]


def test_statistics_are_those_of_their_definitions():
    mask = np.arange(LENGTH) < np.array([LENGTH, 4, 5])[:, None]
    found, counted = compare(LOGITS, OTHER, mask), mask[:, 1:]  # padding on the right
    (p, lp), (q, lq) = find_log_probs(LOGITS), find_log_probs(OTHER)
    sizes, ratios = np.abs(lp - lq)[counted], np.exp(lp - lq)[counted]
    close = lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-13)
    assert found.count == 6 + 3 + 4
    close([found.mean, found.largest, found.median], [sizes.mean(), sizes.max(), np.median(sizes)])
    close(found.percentile_99, np.percentile(sizes, 99))
    close(found.kl, (np.exp(q) * (q - p)).sum(-1)[counted].mean())
    close(found.k3, (ratios - 1 - np.log(ratios)).mean())
    close(found.outside, ((ratios < 0.8) | (ratios > 1.2)).mean())
    close(found.effective_sample_size, ratios.sum() ** 2 / (ratios**2).sum())
    close(found.perplexities, [np.exp(-lp[counted].mean()), np.exp(-lq[counted].mean())])
    close(found.perplexity_gap, found.perplexities[0] - found.perplexities[1])
    close(found.by_position, [np.abs(lp - lq)[:, i][counted[:, i]].mean() for i in range(LENGTH - 1)])
    row, position = found.where
    close(np.abs(lp - lq)[row, position - 1], found.largest)


def test_equal_runs_have_no_difference():
    found = compare(LOGITS, LOGITS)
    assert (found.mean, found.largest, found.kl, found.k3, found.outside, found.perplexity_gap) == (0,) * 6
    assert found.effective_sample_size == found.count == BATCH * (LENGTH - 1)
    assert (found.causes, found.rows()) == ((), ())


def test_small_differences_keep_their_digits():
    shift = np.zeros(LOGITS.shape)
    shift[..., 0] = 2.0**-20
    base = np.round(LOGITS * 8) / 8  # so that the sum with 2**-20 is exact in float32
    found = compare(base, base + shift)
    (_, lp), (_, lq) = find_log_probs(base), find_log_probs(base + shift)
    # k3 is x**2 / 2 + O(x**3), and x is known up to 4 roundings of float64 of logarithms below 8.
    x = (lp - lq).ravel()
    assert abs(found.k3 - (x**2 / 2).mean()) <= 2.0**-48 * np.abs(x).max() + np.abs(x).max() ** 3


def test_k3_and_kl_agree_on_tokens_that_the_sampler_drew():
    count = 4000
    trainer, sampler = (np.broadcast_to(x[:1, :1], (1, count, VOCABULARY)) for x in (LOGITS, OTHER))
    tokens = np.asarray(jax.random.categorical(jax.random.key(0), jnp.asarray(sampler[0])))[None]
    found = compare(trainer, sampler, tokens=tokens)
    (p, _), (q, _) = (find_log_probs(logits, tokens) for logits in (trainer, sampler))
    terms = np.exp(p[0, 0] - q[0, 0]) - 1 - (p[0, 0] - q[0, 0])
    probabilities = np.exp(q[0, 0])
    deviation = np.sqrt((probabilities * terms**2).sum() - (probabilities * terms).sum() ** 2)
    assert abs(found.k3 - found.kl) < 6 * deviation / count**0.5


def test_last_position_of_logits_may_be_missing():
    full, short = compare(LOGITS, OTHER), compare(LOGITS[:, :-1], OTHER[:, :-1])
    assert (full.mean, full.kl) == (short.mean, short.kl)


@pytest.mark.parametrize("first", [0, 1])
def test_recorded_log_probabilities_are_compared(first):
    _, given = find_log_probs(OTHER)
    array = np.concatenate([np.full((BATCH, 1 - first), np.nan), given], 1)  # no token predicts the first one
    found = compare(LOGITS, {"logprobs": array}, names={"logprobs": "log_probs"})
    full = compare(LOGITS, OTHER)
    np.testing.assert_allclose([found.mean, found.k3], [full.mean, full.k3], rtol=1e-9)
    assert found.kl is None
    assert "KL" not in str(found)


def test_tokens_that_only_one_side_excludes_are_infinitely_apart():
    excluded = LOGITS.copy()
    excluded[0, 2, TOKENS[0, 3]] = -np.inf
    found = compare(LOGITS, excluded)
    assert (found.largest, found.where) == (np.inf, (0, 3))
    assert np.isfinite(found.median)
    assert found.to_dict()["largest"] is None


def test_words_that_both_sides_exclude_do_not_count():
    tokens = TOKENS % (VOCABULARY - 1)
    excluded, other = LOGITS.copy(), OTHER.copy()
    excluded[..., -1] = other[..., -1] = -np.inf
    found, without = compare(excluded, other, tokens=tokens), compare(LOGITS[..., :-1], OTHER[..., :-1], tokens=tokens)
    np.testing.assert_allclose([found.mean, found.kl], [without.mean, without.kl], rtol=1e-9)


def test_padding_does_not_count():
    mask = np.arange(LENGTH) >= np.array([0, 2, 3])[:, None]  # on the left
    wrong = np.where(mask[..., None], OTHER, np.nan)
    found = compare(LOGITS, wrong, mask)
    (_, lp), (_, lq) = find_log_probs(LOGITS), find_log_probs(OTHER)
    np.testing.assert_allclose(found.largest, np.abs(lp - lq)[mask[:, :-1]].max(), rtol=1e-9)
    assert found.count == 6 + 4 + 3
