"""The baselines that a model has to beat."""

import numpy as np
import pytest

from examples.gpt._data import bigram_bits_per_byte, unigram_bits_per_byte


def markov_bytes(length: int) -> tuple[np.ndarray, float]:
    """Two bytes of which each repeats with probability 0.9, and the entropy of the next one given the last."""
    flips = np.random.default_rng(0).random(length) < 0.1
    entropy = -(0.1 * np.log2(0.1) + 0.9 * np.log2(0.9))
    return (np.cumsum(flips) % 2).astype(np.uint8), float(entropy)


def test_baselines_come_to_the_entropies_of_a_markov_chain():
    data, entropy = markov_bytes(200_000)
    windows = data[-20_000:].reshape(100, 200)
    assert unigram_bits_per_byte(data, windows) == pytest.approx(1.0, abs=0.01)
    assert bigram_bits_per_byte(data, windows) == pytest.approx(entropy, abs=0.02)


def test_bytes_that_were_never_seen_cost_finitely_many_bits():
    train, unseen = np.zeros(100, np.uint8), np.full((1, 10), 7, np.uint8)
    assert np.isfinite(unigram_bits_per_byte(train, unseen))
    assert np.isfinite(bigram_bits_per_byte(train, unseen))


@pytest.mark.slow
def test_bigram_probabilities_sum_to_one():
    train = np.random.default_rng(1).integers(0, 5, 50).astype(np.uint8)
    for last in (0, 200):
        pairs = np.stack([np.full(256, last), np.arange(256)], axis=1).astype(np.uint8)
        probabilities = [2 ** -bigram_bits_per_byte(train, pair[None]) for pair in pairs]
        assert sum(probabilities) == pytest.approx(1.0)


def test_smoothing_costs_less_than_add_one():
    data = np.random.default_rng(2).integers(0, 8, 4000).astype(np.uint8)
    windows = data[None, -500:]
    counts = np.ones((256, 256))
    np.add.at(counts, (data[:-1], data[1:]), 1)
    add_one = -np.log2((counts / counts.sum(1, keepdims=True))[windows[:, :-1], windows[:, 1:]]).mean()
    assert bigram_bits_per_byte(data, windows) < add_one
