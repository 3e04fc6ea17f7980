"""Generated data with structure to learn: batches of numpy arrays that never repeat, stacked over the steps."""

from typing import Any

import numpy as np

Batches = dict[str, Any]


def gratings(rng: np.random.Generator, steps: int, batch: int, classes: int, size: int = 32) -> Batches:
    """Noisy color images of waves; their direction is the class."""
    label = rng.integers(0, classes, (steps, batch))
    angle = np.pi * label / classes
    phase = rng.uniform(0, 2 * np.pi, (steps, batch, 1, 1, 3))
    y, x = np.mgrid[:size, :size]
    along = np.cos(angle)[..., None, None] * x + np.sin(angle)[..., None, None] * y
    image = np.sin(0.8 * along[..., None] + phase) + rng.normal(0, 0.3, (steps, batch, size, size, 3))
    return {"image": np.float32(image), "label": np.int32(label)}


def markov_chains(rng: np.random.Generator, steps: int, batch: int, length: int, vocabulary: int) -> Batches:
    """Sequences of tokens; each token has four likely successors."""
    successors = rng.integers(0, vocabulary, (vocabulary, 4))
    tokens = np.empty((steps, batch, length + 1), np.int32)
    tokens[..., 0] = rng.integers(0, vocabulary, (steps, batch))
    for position in range(length):
        follows = successors[tokens[..., position], rng.choice(4, (steps, batch), p=[0.7, 0.1, 0.1, 0.1])]
        tokens[..., position + 1] = follows
    return {"tokens": tokens}


def sentences(rng: np.random.Generator, steps: int, batch: int, length: int, vocabulary: int, tags: int) -> Batches:
    """Words and their tags; the tag of a word hangs on its kind and on the kinds of both of its neighbours."""
    tokens = rng.integers(0, vocabulary, (steps, batch, length))
    kinds = rng.integers(0, tags, vocabulary)[tokens]
    left, right = (np.roll(kinds, shift, axis=-1) for shift in (1, -1))
    left[..., 0], right[..., -1] = 0, 0
    labels = (kinds + (left > tags // 2) + (right > tags // 2)) % tags
    lengths = rng.integers(length // 2, length + 1, (steps, batch))
    return {"tokens": np.int32(tokens), "tags": np.int32(labels), "lengths": np.int32(lengths)}


def blobs(rng: np.random.Generator, steps: int, batch: int, size: int = 16) -> Batches:
    """Grey images of a round spot, of any place and width."""
    place = rng.uniform(3, size - 3, (steps, batch, 2, 1, 1))
    width = rng.uniform(1.5, 3, (steps, batch, 1, 1))
    y, x = np.mgrid[:size, :size]
    distance = (y - place[:, :, 0]) ** 2 + (x - place[:, :, 1]) ** 2
    return {"image": np.float32(np.exp(-distance / (2 * width**2)))[..., None]}


def clusters(rng: np.random.Generator, steps: int, batch: int, features: int, classes: int, kinds: int) -> Batches:
    """Points around `kinds` centres; each centre has a linear classifier of its own."""
    centres = rng.normal(0, 2, (kinds, features))
    classifiers = rng.normal(0, 1, (kinds, features, classes))
    kind = rng.integers(0, kinds, (steps, batch))
    noise = rng.normal(0, 1, (steps, batch, features))
    label = np.einsum("sbf,sbfc->sbc", noise, classifiers[kind]).argmax(-1)
    return {"features": np.float32(centres[kind] + noise), "label": np.int32(label)}
