"""The benchmark that needs a device, without one: it loses no row, goes on where it stopped, and says what failed."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _gpu_measure, _gpu_results, gpu
from benchmarks._gpu_models import Work
from benchmarks._gpu_rows import Row, Table, tables

MACHINE = {
    "device": {"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "memory_bytes": 80 * 10**9},
    "versions": {"jax": "0.10.2", "platform": "cuda 12090", "driver": None},
}
KEYS = [row.key for table in tables() for row in table.rows]
RECORD = {"seconds": [0.002, 0.001, 0.003], "over_first": [1.0, 1.0, 1.0], "teraflops": 1.0, "items_per_second": 5.0}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command with `job` in place of what measures a row; `job` is told the rows."""

    def run(job, *options, machine=MACHINE):
        def measure(table, rows, save, seconds):
            for row in rows:
                save(row.key, job(row.key) or RECORD)

        monkeypatch.setattr(gpu, "_prepare", lambda tiny, folder: (machine, measure))
        return gpu.main(["--results", str(tmp_path), *options])

    return run


def _read(folder: pathlib.Path) -> dict:
    return json.loads((folder / "nvidia-h100-80gb-hbm3.json").read_text(encoding="utf-8"))


def test_rows_have_names_of_their_own():
    assert len(KEYS) == len(set(KEYS))


def test_a_run_measures_each_row_and_the_next_none(run, tmp_path, capsys):
    measured = []
    assert run(measured.append) == 0
    assert measured == KEYS == list(_read(tmp_path)["rows"])
    assert run(measured.append) == 0
    assert measured == KEYS
    assert "not measured" not in capsys.readouterr().out.replace("| not measured |\n", "")  # but for peak memory


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rows_and_the_next_goes_on(run, tmp_path, capsys):
    measured = []

    def until_the_ninth(key):
        if len(measured) == 9:
            raise KeyboardInterrupt
        measured.append(key)

    assert run(until_the_ninth) == 130
    assert "goes on" in capsys.readouterr().out
    assert list(_read(tmp_path)["rows"]) == KEYS[:9]
    assert "| 2.00 (1.00 to 3.00) |" in (tmp_path / "nvidia-h100-80gb-hbm3.md").read_text(encoding="utf-8")
    assert run(measured.append) == 0
    assert measured == KEYS


def test_a_run_that_dies_while_it_writes_leaves_the_file_whole(run, tmp_path, monkeypatch):
    run(lambda key: None, "--only", "products-8192/bfloat16")
    before = _read(tmp_path)

    def write_half(path, text, encoding):
        with path.open("w", encoding=encoding) as file:
            file.write(text[: len(text) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(pathlib.Path, "write_text", write_half)
    with pytest.raises(OSError, match="disk full"):
        run(lambda key: None)
    assert _read(tmp_path) == before


@pytest.mark.slow
def test_again_measures_anew(run, tmp_path):
    run(lambda key: None)
    measured = []
    assert run(measured.append, "--again", "--only", "gpt2/") == 0
    assert measured == [key for key in KEYS if key.startswith("gpt2/")] == list(_read(tmp_path)["rows"])


@pytest.mark.parametrize("options", [[], ["--again"]])
@pytest.mark.parametrize(
    ("text", "problem"),
    [('{"layout": 0, "rows": {}}', "has the layout 0"), ("[]", "the layout None"), ("{", "not JSON")],
)
def test_a_file_of_another_layout_is_refused_and_stays(run, tmp_path, capsys, text, problem, options):
    path = tmp_path / "nvidia-h100-80gb-hbm3.json"
    path.write_text(text)
    assert run(pytest.fail, *options) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "Move it away, or name another folder: --results DIR." in said
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_results_of_other_versions_are_not_mixed(run, tmp_path, capsys):
    run(lambda key: None)
    before = _read(tmp_path)
    newer = MACHINE | {"versions": MACHINE["versions"] | {"jax": "0.12.0"}}
    assert run(pytest.fail, machine=newer) == 2
    assert "was measured with jax 0.10.2, and here is jax 0.12.0: " in capsys.readouterr().err
    assert _read(tmp_path) == before
    assert run(lambda key: None, "--again", machine=newer) == 0
    assert _read(tmp_path)["versions"]["jax"] == "0.12.0"


def test_tiny_rows_are_not_mixed_with_full_ones(tmp_path):
    path = tmp_path / "a.json"
    _gpu_results.save_results(path, _gpu_results.new_results(MACHINE, tiny=True))
    with pytest.raises(_gpu_results.ResultsError, match=r"holds tiny rows\. Name another folder: --results DIR"):
        _gpu_results.load_results(path, MACHINE)


def test_a_run_stops_before_a_row_that_may_not_end_in_time(run, monkeypatch, tmp_path, capsys):
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    def take_forty_seconds(key):
        now[0] += 40

    options = ["--minutes", "3", "--only", "gpt2/"]
    assert run(take_forty_seconds, *options) == 1
    assert now == [160.0]  # the fifth could have ended after 200
    left = len([key for key in KEYS if key.startswith("gpt2/")]) - 4
    assert (
        f"{left} rows are left after 3 minutes: the same command, without --again, goes on." in capsys.readouterr().out
    )


def test_a_row_that_takes_longer_than_a_whole_run_has_failed(run, tmp_path):
    def never_end(key):
        raise TimeoutError

    assert run(never_end, "--only", "gpt2/") == 1
    assert _read(tmp_path)["rows"] == {"gpt2/bfloat16 by hand": {"error": "It took longer than 9 minutes."}}


@pytest.mark.slow
def test_a_row_that_failed_shows_why_and_is_not_tried_again(run, tmp_path):
    failing = lambda key: {"error": "XlaRuntimeError: out of memory"} if key == KEYS[1] else None
    assert run(failing) == 0
    assert run(pytest.fail) == 0
    table = (tmp_path / "nvidia-h100-80gb-hbm3.md").read_text(encoding="utf-8")
    assert "| float32 | failed: XlaRuntimeError: out of memory |" in table


def _work(log=None, name="", **changes):
    if log is not None:
        log.append(name)
    step = jax.jit(lambda state, x: (state + 1, changes.get("loss", 0.0) + x.sum() * 0), donate_argnums=0)
    return Work(step, lambda: (jnp.zeros(2), jnp.ones(2)), items=10)


def _fail(tiny):
    raise MemoryError("RESOURCE_EXHAUSTED: too large\nby 3 GB")


def _table(*loads, alone=True):
    return Table("t", "T", tuple(Row(f"t/{i}", str(i), load) for i, load in enumerate(loads)), "tokens", alone)


def _measure(table, rows=None):
    records = {}
    _gpu_measure.measure(table, table.rows if rows is None else rows, records.__setitem__, tiny=True)
    return records


@pytest.mark.slow
def test_a_failing_row_does_not_stop_the_others():
    records = _measure(_table(lambda tiny: _work(), _fail, lambda tiny: _work()))
    assert records["t/1"] == {"error": "MemoryError: RESOURCE_EXHAUSTED: too large"}
    assert [len(records[key]["seconds"]) for key in ("t/0", "t/2")] == [3, 3]
    middle, low, high = records["t/2"]["over_first"]
    assert 0 < low <= middle <= high
    assert records["t/0"]["items_per_second"] == 10 / records["t/0"]["seconds"][0]


def test_a_row_is_measured_without_the_one_it_would_be_compared_with():
    table = _table(_fail, lambda tiny: _work())
    [record] = _measure(table, table.rows[1:]).values()
    assert record["seconds"]
    assert "over_first" not in record


@pytest.mark.slow
def test_a_row_that_does_not_fit_beside_the_first_is_measured_alone(monkeypatch):
    take_turns = _gpu_measure.take_turns

    def run_out_of_memory(runners, tiny):
        if len(runners) == 2:
            raise MemoryError
        return take_turns(runners, tiny)

    monkeypatch.setattr(_gpu_measure, "take_turns", run_out_of_memory)
    table = _table(lambda tiny: _work(), lambda tiny: _work())
    [record] = _measure(table, table.rows[1:]).values()
    assert record["seconds"]
    assert "over_first" not in record


@pytest.mark.slow
def test_a_row_that_fails_in_its_turns_says_why(monkeypatch):
    def fail(runners, tiny):
        raise MemoryError("too large")

    monkeypatch.setattr(_gpu_measure, "take_turns", fail)
    assert _measure(_table(lambda tiny: _work())) == {"t/0": {"error": "MemoryError: too large"}}


def test_a_loss_that_is_not_finite_is_no_measurement():
    [record] = _measure(_table(lambda tiny: _work(loss=float("nan")))).values()
    assert record == {"error": "The loss is nan after some steps: they may not have been the usual ones."}


@pytest.mark.slow
def test_peak_memory_is_read_before_what_a_row_is_compared_with_is_there(monkeypatch):
    log = []
    monkeypatch.setattr(_gpu_measure, "_memory", log.append)
    monkeypatch.setattr(_gpu_measure, "TURN_SECONDS", 1e-9)
    table = _table(lambda tiny: _work(log, "first"), lambda tiny: _work(log, "second"))
    _gpu_measure.measure(table, table.rows[1:], lambda *_: None)
    assert log == ["second", "peak_bytes_in_use", "first"]


@pytest.mark.slow
@pytest.mark.cpu("asks what the command says where there is no GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert (
        "JAX finds no GPU, only 'cpu', which would take hours. Try what works there: --tiny." in capsys.readouterr().err
    )
    assert not list(tmp_path.glob("*.json"))


def test_a_device_that_does_not_answer_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "START_SECONDS", 0.0)
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert "JAX finds no device: it has not started within 0 seconds" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_of_its_own_says_what_it_measured_or_why_it_died(tmp_path):
    records = {}
    table = tables()[0]
    gpu.measure_apart(tmp_path, table, table.rows[:1], records.__setitem__, 300.0, tiny=True)
    assert records["products-8192/bfloat16"]["teraflops"] > 0
    unknown = Table("no such", "", (Row("no such/row", "row", _fail),))
    gpu.measure_apart(tmp_path, unknown, unknown.rows, records.__setitem__, 300.0, tiny=True)
    assert records["no such/row"] == {"error": "its process ended with 1: StopIteration"}
    with pytest.raises(TimeoutError):
        gpu.measure_apart(tmp_path, table, table.rows[:1], records.__setitem__, 0.0, tiny=True)
