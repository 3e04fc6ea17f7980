"""Text that is the same on every machine, for what must not depend on the sources that a machine happens to have."""

import numpy as np

from examples.gpt.data import VALIDATION_SHARE, Corpus

VOCABULARY = 500
SEPARATORS = {b" ": 0.7, b", ": 0.08, b".\n": 0.08, b"(": 0.05, b") ": 0.05, b" = ": 0.04}


def made_text(seed: int, words: int = 200_000) -> Corpus:
    """Words of random letters, some far more frequent than others, with marks between.

    Args:
      seed: another text for each.
      words: how long it is.
    """
    rng = np.random.default_rng(seed)
    letters = [rng.integers(ord("a"), ord("z") + 1, size) for size in rng.integers(2, 9, VOCABULARY)]
    vocabulary = [bytes(word.astype(np.uint8)) for word in letters]
    frequency = 1 / np.arange(1, VOCABULARY + 1)  # Zipf's law
    chosen = rng.choice(VOCABULARY, words, p=frequency / frequency.sum())
    marks = rng.choice(len(SEPARATORS), words, p=list(SEPARATORS.values()))
    separators = list(SEPARATORS)
    data = b"".join(vocabulary[word] + separators[mark] for word, mark in zip(chosen, marks, strict=True))
    text = np.frombuffer(data, np.uint8)
    cut = len(text) - int(len(text) * VALIDATION_SHARE)
    return Corpus(train=text[:cut], validation=text[cut:], source=f"made text {seed}")
