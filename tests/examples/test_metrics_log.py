"""Metrics as JSON lines."""

import json
import math
import re

import pytest

from examples.gpt import UserError
from examples.gpt._run_folder import MetricsLog


def test_records_come_back_and_numbers_that_json_lacks_are_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 2.5})
    log.append({"step": 2, "loss": math.nan})
    assert log.read() == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    steps, losses = log.curve("loss")
    assert steps == [1, 2]
    assert losses[0] == 2.5
    assert math.isnan(losses[1])


def test_there_are_no_records_before_the_first(tmp_path):
    assert MetricsLog(tmp_path / "metrics.jsonl").read() == []


def test_a_line_broken_by_a_kill_is_dropped(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert log.read() == [{"step": 1}]
    log.truncate(1)
    log.append({"step": 2})
    assert [json.loads(line)["step"] for line in log.path.read_text(encoding="utf-8").splitlines()] == [1, 2]


def test_truncating_drops_later_steps_only(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append({"step": step})
    log.truncate(3)
    assert [record["step"] for record in log.read()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "must be a JSON object, got []"),
        ("{}", "step: must be an integer from 1 to 4294967295, got None"),
        ('{"step": ', "Expecting value"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"step": 1, "loss": "low"}', "loss: must be a finite number, got 'low'"),
        ('{"step": 1, "validation_loss": [1]}', "validation_loss: must be a finite number, got [1]"),
        ('{"step": 1, "loss_scale": 0}', "loss_scale: must be a positive finite number, got 0"),
        ('{"step": 1, "skipped_steps": Infinity}', "skipped_steps: must be a finite number, got inf"),
    ],
    ids=range(8),
)
def test_a_damaged_line_is_an_error_that_names_file_and_line(tmp_path, line, message):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.path.write_text(f'{{"step": 1, "loss": 1.5}}\n{line}\n', encoding="utf-8")
    with pytest.raises(UserError, match=rf"metrics\.jsonl, line 2: {re.escape(message)}.*Remove the line to resume"):
        log.read()
