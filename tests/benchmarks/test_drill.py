"""The drill in short: killed while a checkpoint is written, and told to stop, a run ends with the same bits."""

import signal

import pytest

from benchmarks import drill
from benchmarks.drill import (
    SCENARIOS,
    Kill,
    Result,
    check_kill,
    count_steps,
    draw_results,
    find_saved_step,
    find_writes,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", [1, 2])
def test_a_run_that_was_killed_ends_with_the_same_bits(index, tmp_path, monkeypatch):
    monkeypatch.setattr(drill, "STEPS", 24)
    monkeypatch.setattr(drill, "MOMENTS", ("write", "step"))
    signals = iter([signal.SIGKILL, signal.SIGTERM])
    monkeypatch.setattr(drill, "choose_signal", lambda rng: next(signals))
    result = drill.drill(SCENARIOS[index], 2, tmp_path, seed=3)
    assert result.is_same
    assert result.loss == 0
    assert [kill.status for kill in result.kills] == [1, 0]


@pytest.mark.parametrize(
    ("kill", "message"),
    [
        (Kill(signal.SIGTERM, "step", done=8, saved=8, status=1), "SIGTERM ended with status 1"),
        (Kill(signal.SIGTERM, "write", done=8, saved=7), "SIGTERM lost 1 steps"),
        (Kill(signal.SIGKILL, "step", done=21, saved=10, status=1), "11 steps were lost"),
    ],
)
def test_too_much_that_is_lost_is_an_error(kill, message):
    with pytest.raises(AssertionError, match=message):
        check_kill(kill)


def test_what_a_run_has_come_to_is_read_from_its_folder(tmp_path):
    assert (count_steps(tmp_path), find_saved_step(tmp_path), find_writes(tmp_path)) == (0, 0, set())
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n{"step": 12}\n{"st')
    for name in ("5", "10", "15.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert (count_steps(tmp_path), find_saved_step(tmp_path)) == (12, 10)
    assert find_writes(tmp_path) == {"15.orbax-checkpoint-tmp"}


def test_results_are_a_table():
    kills = [Kill(signal.SIGKILL, "step", done=9, saved=5), Kill(signal.SIGTERM, "step", done=9, saved=9)]
    rows = [(SCENARIOS[0], Result(kills, 2, True, 0.0)), (SCENARIOS[3], Result(kills[:1], 1, None, 2e-7))]
    assert draw_results(rows).to_markdown().splitlines()[2:4] == [
        "| 1 process, no mesh | 1 | 1 | 2 of 2 | 4 | 0 | yes |",
        "| 2 processes, other meshes | 1 | 0 | 1 of 1 | 4 | 0 | loss same to 1e-03 |",
    ]
