"""Bytes to train on, the standard library's own sources or the user's files, and the losses that counting achieves."""

import dataclasses
import hashlib
import math
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from . import UserError

VOCABULARY = 256
VALIDATION_SHARE = 0.1

# Not the standard library's sources, or (the tests) not installed with every Python.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The bytes of some files, cut into a part to train on and a part to validate on."""

    train: np.ndarray  # uint8, the first nine tenths of the bytes
    validation: np.ndarray  # the rest
    source: str  # where the bytes come from, for people to read

    @property
    def sha256(self) -> str:
        """The digest of all bytes, by which a resumed run knows that it still has the same data."""
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()


def load_corpus(paths: Sequence[str | Path] = ()) -> Corpus:
    """Reads text files and folders, or the Python standard library's sources if `paths` is empty.

    Folders are read recursively, without hidden and binary files. Files are ordered by the hash of their name, so the
    validation part, a contiguous tail, is a fair sample of all of them on every machine.

    Raises:
      UserError: a path is missing, unreadable, or holds no text.
    """
    if paths:
        source = ", ".join(str(path) for path in paths)
        texts = [text for path in paths for text in _read_path(Path(path))]
    else:
        stdlib = Path(sysconfig.get_path("stdlib"))
        source = f"the Python standard library in {stdlib}"
        files = [path for path in stdlib.rglob("*.py") if not _NOT_STDLIB.intersection(path.relative_to(stdlib).parts)]
        texts = _read_files(stdlib, files)
    data = np.frombuffer(b"".join(texts), np.uint8)
    cut = len(data) - int(len(data) * VALIDATION_SHARE)
    return Corpus(train=data[:cut], validation=data[cut:], source=source)


def check_size(corpus: Corpus, context: int) -> None:
    """Raises a UserError if the corpus is too small for a window of each part."""
    if min(len(corpus.train), len(corpus.validation)) <= context:
        size = len(corpus.train) + len(corpus.validation)
        needed = math.ceil((context + 1) / VALIDATION_SHARE)
        raise UserError(f"{corpus.source} holds only {size} bytes: training needs at least {needed}")


def sample_batch(
    data: np.ndarray, rows: slice = slice(None), *, seed: int, step: int, batch_size: int, context: int
) -> np.ndarray:
    """Draws the windows of one training step, uint8 `(batch_size, context + 1)`, or some rows of them.

    A pure function of its arguments, so a resumed run needs no state of the data to continue bit-exactly.

    >>> sample_batch(np.arange(10, dtype=np.uint8), seed=0, step=3, batch_size=2, context=3).shape
    (2, 4)
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - context, batch_size)[rows]
    return data[starts[:, None] + np.arange(context + 1)]


def validation_batches(data: np.ndarray, *, count: int, batch_size: int, context: int) -> np.ndarray:
    """Spreads at most `count` batches of windows that do not overlap evenly over the data.

    With less data than one batch needs, windows repeat.

    Returns:
      uint8 array of shape `(batches, batch_size, context + 1)`.

    >>> validation_batches(np.arange(100, dtype=np.uint8), count=2, batch_size=3, context=4)[:, :, 0].tolist()
    [[0, 16, 32], [48, 64, 80]]
    """
    windows = (len(data) - 1) // context
    batches = max(1, min(count, windows // batch_size))
    chosen = np.arange(batches * batch_size) * windows // (batches * batch_size)
    starts = chosen * context
    return data[starts[:, None] + np.arange(context + 1)].reshape(batches, batch_size, context + 1)


def bigram_bits_per_byte(train: np.ndarray, windows: np.ndarray) -> float:
    """Returns the cross-entropy of each byte given the one before it, counted on `train`, on `windows`.

    Smoothed by method C of Witten and Bell (The zero-frequency problem, 1991), since add-one smoothing would make a
    weak baseline.

    >>> alternating = np.tile(np.array([0, 1], np.uint8), 1000)
    >>> bigram_bits_per_byte(alternating, alternating[None, :100]) < 0.01
    True
    """
    unigram = np.bincount(train, minlength=VOCABULARY) + 1.0
    unigram /= unigram.sum()
    pairs = train[:-1].astype(np.int64) * VOCABULARY + train[1:]
    counts = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
    weight = np.maximum((counts > 0).sum(axis=1, keepdims=True), 1)  # a byte that was never seen has the unigram's
    bigram = (counts + weight * unigram) / (counts.sum(axis=1, keepdims=True) + weight)
    return _mean_bits(bigram[windows[..., :-1], windows[..., 1:]])


def _read_path(path: Path) -> list[bytes]:
    if not path.exists():
        raise UserError(f"--data {path} does not exist: give text files or folders of them")
    if path.is_dir():
        visible = [file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts)]
        texts = _read_files(path, (file for file in visible if file.is_file()))
    else:
        texts = [_read_file(path)]
    if not any(texts):
        raise UserError(f"--data {path} holds no text: give text files or folders of them")
    return texts


def _read_files(root: Path, files: Iterable[Path]) -> list[bytes]:
    def order(path: Path) -> bytes:
        return hashlib.sha256(path.relative_to(root).as_posix().encode("utf-8", "surrogateescape")).digest()

    texts = [_read_file(path) for path in sorted(files, key=order)]
    return [text for text in texts if b"\0" not in text[:8000]]  # Git's rule for binary files


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _mean_bits(probabilities: np.ndarray) -> float:
    return float(-np.log2(probabilities).mean())
