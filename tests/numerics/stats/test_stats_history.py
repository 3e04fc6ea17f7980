"""A history of statistics: steps in order, and lines of JSON that come back."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from records import SHAPE, make_layout, make_record, make_site

from jmp_policy.numerics import Stats, StatsHistory

LAYOUT = make_layout(make_site("a", turn=(0, 1)), make_site("b", direction="backward"))


def make_stats(scale):
    return Stats(make_record(scale * np.ones((2, *SHAPE))), LAYOUT)


def make_history(*steps):
    history = StatsHistory()
    for step in steps:
        history.append(step, make_stats(2.0**step))
    return history


def test_steps_are_in_order_whatever_the_order_of_appending():
    history = make_history(3, 1, 2)
    assert history.steps == (1, 2, 3)
    assert [(step, rows[0].amax) for step, rows in history] == [(1, 2), (2, 4), (3, 8)]
    assert len(history) == 3


def test_a_step_of_jax_is_an_integer():
    history = make_history()
    history.append(jnp.int32(7), make_stats(1))
    assert history.steps == (7,)
    assert type(history.steps[0]) is int


def test_a_step_that_comes_again_is_replaced():
    history = make_history(1)
    history.append(1, make_stats(5))
    assert history[1][0].amax == 5
    assert len(history) == 1


def test_a_step_on_which_nothing_was_measured_is_left_out():
    history = make_history(1)
    history.append(2, make_stats(1).empty())
    assert history.steps == (1,)


def test_lines_are_strict_json_and_come_back():
    history = make_history(1, 2)
    text = history.to_json_lines()
    again = StatsHistory.from_json_lines(text.splitlines())
    assert list(again) == list(history)
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2]
    assert StatsHistory.from_json_lines([]).to_json_lines() == ""


def test_a_log_may_write_the_lines_itself():
    lines = [json.dumps({"step": step} | make_stats(2.0**step).to_dict()) for step in (1, 2)]
    assert list(StatsHistory.from_json_lines([*lines, "\n"])) == list(make_history(1, 2))


def test_repr_is_one_line():
    assert [repr(make_history(*steps)) for steps in ((), (4,), (1, 9))] == [
        "<StatsHistory: no steps>", "<StatsHistory: step 4>", "<StatsHistory: 2 steps from 1 to 9>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line", ['{"loss": 1.0}', '{"step": 1', "3", '{"step": 1, "rows": [{"path": "a"}]}', '{"step": "x", "rows": []}']
)
def test_a_line_of_something_else_is_quoted(line):
    with pytest.raises(ValueError, match=r"Line 2 holds no statistics of a step: .*A line is, for example") as caught:
        StatsHistory.from_json_lines(["", line])
    assert line in str(caught.value).replace("\\", "")


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("path", 3, "path of a row is a string, got 3"),
        ("direction", "sideways", r"direction of a row is one of \('forward', .*, got 'sideways'"),
        ("direction", [], "direction of a row is one of"),
        ("turn", [1.5], r"turn of a row is an iteration, a list of them, or None, got \[1.5\]"),
        ("turn", True, "turn of a row is"),
        ("shape", None, "shape of a row is a list of sizes, got None"),
        ("shape", [-1], "shape of a row is"),
        ("count", "8", "count of a row is a count, got '8'"),
        ("count", 7, "count of a row is times"),
        ("times", 2**64, "times of a row is a count"),
        ("times", 0, "count of a row is times"),
        ("sampled", 10**6, "count of a row is times .* and at least sampled"),
        ("amax", math.nan, "amax of a row is a finite number that is not negative, got nan"),
        ("rms", math.inf, "rms of a row is"),
        ("zeros", 1.5, "zeros of a row is a share, got 1.5"),
        ("min_nonzero", 0.0, "min_nonzero of a row is a positive number or None, got 0.0"),
        ("histogram", [1, 2], r"histogram of a row is 64 counts or None, got \[1, 2\]"),
        ("formats", [], r"formats of a row is the losses of formats by name, got \[\]"),
        ("formats", {"float16": {"underflow": 0.5}}, "formats of a row is"),
        ("formats", {"float17": dict.fromkeys(("underflow", "subnormal", "overflow", "error", "scaled_error"), 0.0)},
         "Unknown format 'float17'"),
        ("new_field", 3, r"A row has the fields \['path', .*, got \{"),
    ],
)  # fmt: skip
def test_a_row_with_a_bad_field_is_refused(field, value, what):
    row = make_stats(1).rows()[0].to_dict() | {field: value}
    with pytest.raises(ValueError, match=rf"^Line 1 holds no statistics of a step: .*{what}.* For example: "):
        StatsHistory.from_json_lines([json.dumps({"step": 1, "rows": [row]})])


def test_a_line_with_very_many_levels_is_refused():
    with pytest.raises(ValueError, match="Line 1 holds no statistics of a step: "):
        StatsHistory.from_json_lines(["[" * 100_000])


def test_a_step_is_an_integer():
    with pytest.raises(TypeError, match=r"A step is an integer, got 1.5: history.append\(100, stats\)"):
        make_history().append(1.5, make_stats(1))


def test_a_history_is_of_stats():
    with pytest.raises(TypeError, match=r"A history is of Stats, not of a int: history.append\(step, stats\)"):
        make_history().append(make_stats(1), 1)


def test_a_step_that_is_not_there_names_the_nearest():
    with pytest.raises(KeyError, match=r"Nothing was measured on step 8. The nearest one that was is 9."):
        make_history(1, 9)[8]
    with pytest.raises(KeyError, match=r"Nothing was measured on step 8. No step was."):
        make_history()[8]
