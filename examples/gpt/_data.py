"""Bytes to train on, the standard library's own sources or the user's files, and what counting them achieves."""

import dataclasses
import hashlib
import math
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jmp_policy.cli import UserError

VOCABULARY = 256
VALIDATION_SHARE = 0.1

# Not the standard library's sources, or (the tests) not installed with every Python: with them the default data
# would differ from machine to machine even more than Python versions do.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The bytes of some files, cut into a part to train on and a part to validate on.

    Attributes:
      train: uint8 array, the first nine tenths of the bytes.
      validation: uint8 array, the rest.
      source: where the bytes come from, for people to read.
    """

    train: np.ndarray
    validation: np.ndarray
    source: str

    @property
    def sha256(self) -> str:
        """The digest of all bytes, by which a resumed run knows that it still has the same data."""
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()


def load_corpus(paths: Sequence[str | Path] = ()) -> Corpus:
    """Reads files and folders, the Python standard library's sources when there are none.

    Folders are read recursively, hidden and binary files left out. The order of the files depends on nothing but
    their names: they are shuffled by the hash of the name, so that the validation part, a contiguous tail, is a fair
    sample of all of them.

    Args:
      paths: text files or folders.

    Returns:
      A `Corpus`.

    Raises:
      UserError: a path is missing, unreadable, or holds no text.
    """
    if paths:
        source = ", ".join(str(path) for path in paths)
        texts = [text for path in paths for text in _read_path(Path(path))]
    else:
        stdlib = Path(sysconfig.get_path("stdlib"))
        source = f"the Python standard library in {stdlib}"
        texts = _read_files(stdlib, _stdlib_files(stdlib))
    data = np.frombuffer(b"".join(texts), np.uint8)
    cut = len(data) - int(len(data) * VALIDATION_SHARE)
    return Corpus(train=data[:cut], validation=data[cut:], source=source)


def check_size(corpus: Corpus, context: int) -> None:
    """Raises a `UserError` if the corpus is too small for a window of each part."""
    if min(len(corpus.train), len(corpus.validation)) <= context:
        size = len(corpus.train) + len(corpus.validation)
        needed = math.ceil((context + 1) / VALIDATION_SHARE)
        raise UserError(f"{corpus.source} holds only {size} bytes: training needs at least {needed}")


def sample_batch(data: np.ndarray, *, seed: int, step: int, batch_size: int, context: int) -> np.ndarray:
    """Draws the windows of one training step.

    A pure function of its arguments: a resumed run needs no state of the data to go on bit-exactly.

    Args:
      data: uint8 array.
      seed: the seed of the run.
      step: the number of the step.
      batch_size: the number of windows.
      context: the number of bytes that the model sees.

    Returns:
      uint8 array of shape `(batch_size, context + 1)`: inputs and, one further, targets.

    >>> import numpy as np
    >>> import examples.gpt as demo
    >>> demo.sample_batch(np.arange(10, dtype=np.uint8), seed=0, step=3, batch_size=2, context=3).shape
    (2, 4)
    """
    return sample_rows(data, slice(None), seed=seed, step=step, batch_size=batch_size, context=context)


def sample_rows(data: np.ndarray, rows: slice, *, seed: int, step: int, batch_size: int, context: int) -> np.ndarray:
    """Draws some of the windows that `sample_batch` draws, such as those of the devices of one process."""
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - context, batch_size)[rows]
    return data[starts[:, None] + np.arange(context + 1)]


def validation_batches(data: np.ndarray, *, count: int, batch_size: int, context: int) -> np.ndarray:
    """Spreads at most `count` batches of windows that do not overlap evenly over the data.

    Args:
      data: uint8 array of at least `context + 1` bytes.
      count: the most batches to return; with little data there are fewer.
      batch_size: the number of windows in a batch. With less data than one batch needs, the windows repeat.
      context: the number of bytes that the model sees.

    Returns:
      uint8 array of shape `(batches, batch_size, context + 1)`.

    >>> import numpy as np
    >>> import examples.gpt as demo
    >>> demo.validation_batches(np.arange(100, dtype=np.uint8), count=2, batch_size=3, context=4)[:, :, 0].tolist()
    [[0, 16, 32], [48, 64, 80]]
    """
    windows = (len(data) - 1) // context
    batches = max(1, min(count, windows // batch_size))
    chosen = np.arange(batches * batch_size) * windows // (batches * batch_size)
    starts = chosen * context
    return data[starts[:, None] + np.arange(context + 1)].reshape(batches, batch_size, context + 1)


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


def _read_path(path: Path) -> list[bytes]:
    if path.is_dir():
        texts = _read_files(path, _visible_files(path))
    elif path.exists():
        texts = [_read_file(path)]
    else:
        raise UserError(f"--data {path} does not exist: give text files or folders of them")
    if not any(texts):
        raise UserError(f"--data {path} holds no text: give text files or folders of them")
    return texts


def _read_files(root: Path, files: Iterable[Path]) -> list[bytes]:
    def order(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode("utf-8", "surrogateescape")).digest()

    texts = [_read_file(path) for path in sorted(files, key=order)]
    return [text for text in texts if not _is_binary(text)]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _stdlib_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.py") if not _NOT_STDLIB.intersection(path.relative_to(root).parts)]


def _visible_files(root: Path) -> list[Path]:
    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(root).parts)

    return [path for path in root.rglob("*") if path.is_file() and not hidden(path)]


def _is_binary(text: bytes) -> bool:
    # Git's rule: a zero byte near the start.
    return b"\0" in text[:8000]


def _mean_bits(probabilities: np.ndarray) -> float:
    return float(-np.log2(probabilities).mean())
