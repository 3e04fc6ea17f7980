"""The benchmark that needs a device, without one: it loses no row, goes on where it stopped, and says what failed."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _gpu_measure, gpu
from benchmarks._gpu_models import Row, Table, Work, tables

MACHINE = {
    "device": {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "memory_bytes": 80 * 10**9},
    "versions": {"jax": "0.10.2", "platform": "cuda 12090", "driver": None},
}
FILE = "nvidia-h100-80gb-hbm3"
KEYS = [row.key for table in tables() for row in table.rows]
RECORD = {"seconds": [0.002, 0.001, 0.003], "over_first": [1.0, 1.0, 1.0], "items_per_second": 5.0}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command with `measure`, `key -> record`, in place of the process that measures a row."""

    def run(measure, *options, machine=MACHINE):
        def start(job, seconds, folder):
            return [["device", machine] if not job else [job["row"], measure(job["row"]) or RECORD]], None

        monkeypatch.setattr(gpu, "start", start)
        return gpu.main(["--results", str(tmp_path), *options])

    return run


def _read(folder):
    return json.loads((folder / f"{FILE}.json").read_text(encoding="utf-8"))


def test_an_interrupted_run_keeps_its_rows_and_the_next_goes_on(run, tmp_path):
    measured = []

    def until_the_ninth(key):
        if len(measured) == 9:
            raise KeyboardInterrupt
        measured.append(key)

    with pytest.raises(KeyboardInterrupt):
        run(until_the_ninth)
    assert list(_read(tmp_path)["rows"]) == KEYS[:9]
    assert "| 2.00 (1.00 to 3.00) |" in (tmp_path / f"{FILE}.md").read_text(encoding="utf-8")
    for _ in range(2):
        assert run(measured.append) == 0
        assert measured == KEYS


def test_a_run_that_dies_while_it_writes_leaves_the_file_whole(run, tmp_path, monkeypatch):
    run(lambda key: None, "--only", "gpt2/float32")
    before = _read(tmp_path)

    def write_half(path, text, encoding):
        with path.open("w", encoding=encoding) as file:
            file.write(text[: len(text) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(pathlib.Path, "write_text", write_half)
    with pytest.raises(OSError, match="disk full"):
        run(lambda key: None)
    assert _read(tmp_path) == before


def test_results_of_other_versions_are_not_mixed(run, tmp_path, capsys):
    run(lambda key: None)
    before = _read(tmp_path)
    newer = MACHINE | {"versions": MACHINE["versions"] | {"jax": "0.12.0"}}
    assert run(pytest.fail, machine=newer) == 2
    assert "measured with jax 0.10.2, platform cuda 12090, and here is jax 0.12.0" in capsys.readouterr().err
    assert _read(tmp_path) == before


def test_a_run_stops_before_a_row_that_may_not_end_in_time(run, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    def take_forty_seconds(key):
        now[0] += 40

    assert run(take_forty_seconds, "--minutes", "3", "--only", "gpt2/") == 1
    assert now == [160.0]
    left = len([key for key in KEYS if key.startswith("gpt2/")]) - 4
    assert f"{left} rows are left after 3 minutes: the same command goes on." in capsys.readouterr().out


def test_a_row_that_failed_shows_why_and_is_not_tried_again(run, tmp_path):
    failing = lambda key: {"error": "XlaRuntimeError: out of memory"} if key == KEYS[1] else None
    assert run(failing) == 0
    assert run(pytest.fail) == 0
    assert "| float32 | failed: XlaRuntimeError: out of memory |" in (tmp_path / f"{FILE}.md").read_text("utf-8")


def _work(log=None, name="", loss=0.0):
    if log is not None:
        log.append(name)
    step = jax.jit(lambda state, x: (state + 1, loss + x.sum() * 0), donate_argnums=0)
    return Work(step, lambda: (jnp.zeros(2), jnp.ones(2)), items=10)


def _fail(tiny):
    raise MemoryError("RESOURCE_EXHAUSTED: too large\nby 3 GB")


def _table(*loads):
    return Table("T", tuple(Row(f"t/{i}", str(i), load) for i, load in enumerate(loads)), "tokens")


def test_a_row_is_measured_beside_the_first_or_without_one_that_fails():
    table, alone = _table(lambda tiny: _work(), lambda tiny: _work()), _table(_fail, lambda tiny: _work())
    record = _gpu_measure.measure(table, table.rows[1], tiny=True)
    middle, low, high = record["over_first"]
    assert 0 < low <= middle <= high
    assert record["items_per_second"] == 10 / record["seconds"][0]
    assert "over_first" not in _gpu_measure.measure(alone, alone.rows[1], tiny=True)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (_fail, "MemoryError: RESOURCE_EXHAUSTED: too large"),
        (
            lambda tiny: _work(loss=float("nan")),
            "The loss is nan after some steps: they may not have been the usual ones.",
        ),
    ],
)
def test_a_row_that_fails_says_why(load, said):
    table = _table(load)
    assert _gpu_measure.measure(table, table.rows[0], tiny=True) == {"error": said}


def test_peak_memory_is_read_before_what_a_row_is_compared_with_is_there(monkeypatch):
    log = []
    monkeypatch.setattr(_gpu_measure, "_memory", log.append)
    monkeypatch.setattr(_gpu_measure, "TURN_SECONDS", 1e-9)
    table = _table(lambda tiny: _work(log, "first"), lambda tiny: _work(log, "second"))
    _gpu_measure.measure(table, table.rows[1])
    assert log == ["second", "peak_bytes_in_use", "first"]


@pytest.mark.slow
@pytest.mark.cpu("asks what the command says where there is no GPU")
def test_without_a_gpu_only_tiny_rows_are_measured(tmp_path, capsys):
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert (
        "JAX finds no GPU, only 'cpu', which would take hours. Try what works there: --tiny." in capsys.readouterr().err
    )
    assert not list(tmp_path.glob("*.json"))
    assert gpu.main(["--results", str(tmp_path), "--tiny", "--only", "mixed_float16/jmp"]) == 0
    [record] = json.loads((tmp_path / "cpu-tiny.json").read_text(encoding="utf-8"))["rows"].values()
    assert record["loss"] > 0


def test_a_device_that_does_not_answer_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "START_SECONDS", 0.0)
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert "JAX finds no device: it has not started within 0 seconds" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_dies_says_why(tmp_path):
    lines, complaint = gpu.start({"row": "no such/row", "tiny": True}, 300.0, tmp_path)
    assert lines == []
    assert complaint.startswith("its process ended with 1: ValueError: not enough values")
