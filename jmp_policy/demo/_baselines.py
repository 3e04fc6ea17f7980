"""What counting alone achieves: the unigram and bigram models of bytes."""

import numpy as np

VOCABULARY = 256


def unigram_bits_per_byte(train: np.ndarray, windows: np.ndarray) -> float:
    """Cross-entropy of the byte frequencies of `train`, with add-one smoothing, on `windows`.

    Args:
      train: uint8 array, what is counted.
      windows: uint8 array `(..., context + 1)`, scored on all but the first byte of each, as a language model is.

    Returns:
      Bits per byte.

    >>> unigram_bits_per_byte(np.arange(256, dtype=np.uint8), np.zeros((1, 5), np.uint8))
    8.0
    """
    counts = np.bincount(train, minlength=VOCABULARY) + 1.0
    return _mean_bits((counts / counts.sum())[windows[..., 1:]])


def bigram_bits_per_byte(train: np.ndarray, windows: np.ndarray) -> float:
    """Cross-entropy of each byte given the one before it, counted on `train`, on `windows`.

    Smoothed by a Dirichlet prior with the unigram frequencies as its mean and the weight of one observation per
    distinct follower (Witten-Bell): add-one would waste half of the mass of a rare byte on bytes that never follow
    it, and a weak baseline proves nothing.

    Args:
      train: uint8 array, what is counted.
      windows: uint8 array `(..., context + 1)`, scored on all but the first byte of each.

    Returns:
      Bits per byte.

    Source: Witten and Bell, The zero-frequency problem, IEEE Transactions on Information Theory, 1991, method C.

    >>> alternating = np.tile(np.array([0, 1], np.uint8), 1000)
    >>> bigram_bits_per_byte(alternating, alternating[None, :100]) < 0.01
    True
    """
    unigram = np.bincount(train, minlength=VOCABULARY) + 1.0
    unigram /= unigram.sum()
    pairs = train[:-1].astype(np.int64) * VOCABULARY + train[1:]
    counts = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    # A byte that was never seen has no follower: weight 1 leaves it the unigram frequencies.
    weight = np.maximum((counts > 0).sum(axis=1, keepdims=True), 1)
    bigram = (counts + weight * unigram) / (counts.sum(axis=1, keepdims=True) + weight)
    return _mean_bits(bigram[windows[..., :-1], windows[..., 1:]])


def _mean_bits(probabilities: np.ndarray) -> float:
    return float(-np.log2(probabilities).mean())
