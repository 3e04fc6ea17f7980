"""The file of a lock: written, read back, folded, damaged, and never put in the place of another file."""

import concurrent.futures
import dataclasses
import errno
import os
import pathlib
import socket
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from jmp_policy.numerics import Lock, LockRow, lock
from jmp_policy.numerics._lock_rows import fold_paths, read_line, write_lines

X = jax.ShapeDtypeStruct((2, 8), jnp.float32)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(str.strip)
PARTS = st.one_of(TEXTS, st.from_regex(r"[a-z]{0,2}_?(0|[1-9][0-9]?|0[0-9])[a-z]?", fullmatch=True))
ROWS = st.builds(
    LockRow, st.lists(PARTS, max_size=3).map("/".join), st.sampled_from(["forward cast", "argument"]), TEXTS, TEXTS
)


@hypothesis.given(st.lists(ROWS, unique_by=lambda row: (row.path, row.fact, row.what), max_size=12))
def test_any_rows_are_read_back(rows):
    lines = write_lines(rows)
    assert not any("\n" in line or "\r" in line for line in lines)
    read = [row for line in lines for row in read_line(line)]
    assert sorted(read, key=repr) == sorted(rows, key=repr)
    assert write_lines(read) == lines


def test_modules_that_differ_in_a_number_share_a_line():
    rows = [LockRow(f"blocks/{i}/Dense_{j}", "forward cast", "a", "b") for i in range(12) for j in range(2) if i != 5]
    rows += [LockRow("blocks/5/Dense_1", "forward cast", "a", "b"), LockRow("Conv_0", "forward cast", "a", "b")]
    assert write_lines(rows) == [
        "Conv_0 | forward cast | a | b",
        "blocks/[0-4,6-11]/Dense_0 | forward cast | a | b",
        "blocks/[0-11]/Dense_1 | forward cast | a | b",
    ]
    rows += [LockRow("blocks/5/Dense_0", "forward cast", "a", "b")]
    assert write_lines(rows)[1:] == ["blocks/[0-11]/Dense_[0-1] | forward cast | a | b"]


def test_names_sort_by_number_and_zeros_before_a_number_stay():
    assert [path for path, _ in fold_paths((f"b{i}", (str(i),)) for i in (10, 9, 1))] == ["b1", "b9", "b10"]
    assert [path for path, _ in fold_paths((f"b{i}", ("fact",)) for i in ("01", "02", "2", "3"))] == [
        "b0[1-2]",
        "b[2-3]",
    ]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step.lock"
    lock(lambda x: jnp.exp(x) @ x.T, platform="tpu")(X).save(path)
    return path


def test_a_file_is_text_that_says_what_it_is_of(saved):
    loaded = Lock.load(saved)
    assert str(loaded) + "\n" == saved.read_text() == saved.read_bytes().decode()
    assert (loaded.function, loaded.platform, loaded.compiled) == ("<lambda>", "tpu", "")
    assert dict(loaded.versions)["jax"] == jax.__version__
    assert repr(loaded) == f"<Lock of <lambda>: {len(loaded.rows)} facts; print it for its file>"
    assert loaded.to_dict()["rows"][0].keys() == {"path", "fact", "what", "amount", "source"}


def edit(old, new):
    return lambda text: text.replace(old, new)


DAMAGES = {
    "foreign": (lambda text: "import jax\n", "step.lock is not a lock: it starts with 'import jax'."),
    "edited": (edit("exp in float32", "exp in float16"), "step.lock: the digest does not match the lines."),
    "cut": (lambda text: text[: text.rindex("|")], ": 'x | argument | float32 ' is not a line of a lock. Regenerate"),
    "merged": (edit(". | forward m", "<<<<<<< HEAD\n. | forward m"), ": '<<<<<<< HEAD' is not a line of a lock. Rege"),
    "header": (edit("platform: tpu", "platform tpu"), "line 4: 'platform tpu' is not a line of a lock. Regenerate"),
    "platform": (edit("platform: tpu", "platform: cuda"), "step.lock: the digest does not match the lines."),
    "no platform": (edit("platform: tpu\n", ""), "step.lock: the digest does not match the lines."),
    "range": (edit("x | argument", "x[3-] | argument"), "'x[3-] | argument | float32 | shape 2x8' is not a line of a "),
    "later": (edit("format: 1", "format: 2"), "step.lock has format 2, and this version of jmp_policy reads 1: update"),
    "much later": (edit("format: 1", "format: 10"), "step.lock has format 10, and this version of jmp_policy reads 1: "
                   "update it. For example, in a newer clone: pip install ."),
    "a blank": (edit("format: 1", "format: 1 "), "step.lock: the digest does not match the lines."),
    "conflict": (lambda text: f"<<<<<<< HEAD\n{text}", "step.lock has a merge conflict. Regenerate it. For example: "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error_of_one_line_that_says_what_to_do(saved, damage):
    change, message = DAMAGES[damage]
    before = saved.read_text()
    saved.write_text(change(before))
    assert saved.read_text() != before
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Lock.load(saved)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_line_ends_of_windows_are_read(saved):
    rows = Lock.load(saved).rows
    saved.write_bytes(saved.read_bytes().replace(b"\n", b"\r\n"))
    assert Lock.load(saved).rows == rows


def test_a_version_in_the_header_is_no_damage(saved):
    saved.write_text(saved.read_text().replace(f"jax: {jax.__version__}", "jax: 0.9"))
    assert dict(Lock.load(saved).versions)["jax"] == "0.9"


def test_digits_of_other_scripts_are_letters():
    rows = [LockRow(f"block_{digit}", "result", "a", "b") for digit in "\u0661\u0662"]
    assert [row for line in write_lines(rows) for row in read_line(line)] == rows


def test_another_file_is_never_overwritten(saved):
    loaded = Lock.load(saved)
    loaded.save(saved)
    saved.write_text("precious")
    with pytest.raises(ValueError, match=r"step\.lock is not a lock: it starts with 'precious'\."):
        loaded.save(saved)
    assert saved.read_text() == "precious"


def test_a_lock_of_a_newer_version_is_never_overwritten(saved):
    loaded, text = Lock.load(saved), saved.read_text().replace("format: 1", "format: 3")
    saved.write_text(text)
    with pytest.raises(ValueError, match=r"step\.lock has format 3, and this version of jmp_policy reads 1"):
        loaded.save(saved)
    assert saved.read_text() == text


def test_a_lock_is_equal_to_what_is_read_back_and_to_its_rows_in_another_order(saved):
    made = lock(lambda x: jnp.exp(x) @ x.T, platform="tpu")(X)
    others = Lock.load(saved), dataclasses.replace(made, rows=made.rows[::-1])
    assert {made, *others} == {made}
    assert made != dataclasses.replace(made, rows=made.rows[1:])
    assert made != dataclasses.replace(made, platform="cpu")
    assert made != str(made)


def test_a_disk_that_is_full_leaves_the_old_lock(saved, monkeypatch):
    loaded, before = Lock.load(saved), saved.read_text()

    def write_half(path, text, **options):
        path.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pathlib.Path, "write_text", write_half)
    with pytest.raises(OSError, match=r"No space left on device: '.*step\.lock'"):
        loaded.save(saved)
    assert saved.read_text() == before
    assert os.listdir(saved.parent) == ["step.lock"]


def test_an_error_of_the_last_step_leaves_the_old_lock(saved, monkeypatch):
    def stop(*paths):
        raise KeyboardInterrupt

    loaded, before = Lock.load(saved), saved.read_text()
    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        loaded.save(saved)
    assert saved.read_text() == before
    assert os.listdir(saved.parent) == ["step.lock"]


def test_a_lock_that_is_read_while_it_is_written_is_whole(saved):
    loaded, failures, done = Lock.load(saved), [], threading.Event()

    def read():
        while not done.is_set():
            try:
                assert Lock.load(saved) == loaded
            except Exception as error:
                failures.append(error)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        reader = pool.submit(read)
        for writer in [pool.submit(loaded.save, saved) for _ in range(200)]:
            writer.result()
        done.set()
        reader.result()
    assert failures == []
    assert os.listdir(saved.parent) == ["step.lock"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes, and links need a right")
def test_a_link_and_the_mode_of_a_file_stay(saved):
    link, loaded = saved.with_name("link.lock"), Lock.load(saved)
    link.symlink_to(saved.name)
    saved.chmod(0o640)
    saved.write_text(saved.read_text().replace("float32", "float16"))
    loaded.save(link)
    assert link.is_symlink()
    assert Lock.load(saved) == loaded
    assert saved.stat().st_mode & 0o777 == 0o640
    saved.unlink()
    loaded.save(link)
    assert Lock.load(saved) == loaded


@pytest.mark.skipif(os.name == "nt", reason="Windows has no sockets in folders")
def test_only_regular_files_are_read_and_replaced(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    loaded = Lock.load(saved)
    for path in ("socket", saved.parent):  # never a device: a mistake would replace it
        with pytest.raises(ValueError, match=r"is not a regular file\. Pass another name"):
            loaded.save(path)
        with pytest.raises(ValueError, match=r"is not a regular file\. Pass another name"):
            Lock.load(path)


def test_a_policy_with_a_colon_in_a_rule_is_read_back(saved):
    policies = ((". rule 'a: b'", "float32"), (".", "bfloat16"))
    locked = dataclasses.replace(Lock.load(saved), policies=policies)
    locked.save(saved)
    assert Lock.load(saved).policies == policies
