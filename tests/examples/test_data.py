"""The bytes to train on."""

import sysconfig

import numpy as np
import pytest

from examples.gpt import UserError
from examples.gpt.data import (
    bigram_bits_per_byte,
    check_size,
    load_corpus,
    sample_batch,
    validation_batches,
)


def test_default_corpus_is_the_standard_library_without_what_not_every_machine_has(tmp_path, monkeypatch):
    files = {
        "json/decoder.py": "class JSONDecoder: ...\n",
        "ast.py": "# trees\n",
        "site-packages/jax/__init__.py": "import jaxlib\n",
        "test/test_json.py": "import unittest\n",
        "json/tests/test_json.py": "import unittest\n",
        "lib-dynload/parser.so": "no text\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    corpus = load_corpus()
    text = bytes(corpus.train) + bytes(corpus.validation)
    assert sorted(text.splitlines()) == [b"# trees", b"class JSONDecoder: ..."]
    assert corpus.source == f"the Python standard library in {tmp_path}"


def test_a_tenth_is_kept_for_validation(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    corpus = load_corpus([tmp_path / "a.txt"])
    assert bytes(corpus.train) == bytes(range(1, 91))
    assert bytes(corpus.validation) == bytes(range(91, 101))


def test_folders_are_read_recursively_without_hidden_and_binary_files(tmp_path):
    files = {"a.md": b"aa", "deep/er/b.txt": b"bb", ".hidden/c": b"cc", ".d": b"dd", "e.bin": b"\0"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    corpus = load_corpus([tmp_path])
    assert sorted(bytes(corpus.train) + bytes(corpus.validation)) == sorted(b"aabb")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist: give text files or folders of them"),
        (lambda path: path.touch(), "holds no text: give text files or folders of them"),
        (lambda path: path.mkdir(), "holds no text: give text files or folders of them"),
    ],
)
def test_missing_and_empty_paths_are_errors(tmp_path, make, message):
    path = tmp_path / "data"
    make(path)
    with pytest.raises(UserError, match=message):
        load_corpus([path])


def test_an_unreadable_file_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("a")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied"):
        load_corpus([path])


def test_a_corpus_without_a_validation_window_is_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a" * 100)
    with pytest.raises(UserError, match="holds only 100 bytes: training needs at least 170"):
        check_size(load_corpus([path]), context=16)
    path.write_text("a" * 170)
    check_size(load_corpus([path]), context=16)


def test_batches_are_windows_of_the_data_and_differ_from_step_to_step():
    data = np.arange(200, dtype=np.uint8)
    sizes = {"batch_size": 4, "context": 8}
    first, again, later, other = (
        sample_batch(data, seed=seed, step=step, **sizes) for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert first.shape == (4, 9)
    assert (np.diff(first.astype(int), axis=1) == 1).all()
    assert (first == again).all()
    assert (first != later).any()
    assert (first != other).any()


def test_the_last_byte_can_be_drawn():
    data = np.arange(5, dtype=np.uint8)
    drawn = {int(sample_batch(data, seed=0, step=step, batch_size=1, context=3)[0, -1]) for step in range(20)}
    assert drawn == {3, 4}


def test_validation_windows_do_not_overlap_and_span_the_data():
    data = np.arange(250, dtype=np.uint8)
    windows = validation_batches(data, count=100, batch_size=3, context=8).reshape(-1, 9)
    starts = windows[:, 0]
    assert (np.diff(starts) >= 8).all()
    assert starts[0] == 0
    assert starts[-1] >= 230


def markov_bytes(length: int) -> tuple[np.ndarray, float]:
    """Two bytes of which each repeats with probability 0.9, and the entropy of the next one given the last."""
    flips = np.random.default_rng(0).random(length) < 0.1
    entropy = -(0.1 * np.log2(0.1) + 0.9 * np.log2(0.9))
    return (np.cumsum(flips) % 2).astype(np.uint8), float(entropy)


def test_the_baseline_comes_to_the_entropy_of_a_markov_chain():
    data, entropy = markov_bytes(200_000)
    windows = data[-20_000:].reshape(100, 200)
    assert bigram_bits_per_byte(data, windows) == pytest.approx(entropy, abs=0.02)


def test_bytes_that_were_never_seen_cost_finitely_many_bits():
    train, unseen = np.zeros(100, np.uint8), np.full((1, 10), 7, np.uint8)
    assert np.isfinite(bigram_bits_per_byte(train, unseen))
