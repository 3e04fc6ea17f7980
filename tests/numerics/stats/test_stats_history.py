"""A history of statistics: steps in order, lines of JSON that come back, and the rows of all steps together."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from records import FORMATS, SHAPE, make_layout, make_record, make_site

from jmp_policy.numerics import Stats, StatsHistory

LAYOUT = make_layout(make_site("a", turn=(0, 1)), make_site("b", direction="backward"))


def make_stats(scale):
    return Stats(make_record(scale * np.ones((2, *SHAPE))), LAYOUT)


def make_history(*steps):
    history = StatsHistory()
    for step, stats in steps:
        history.append(step, stats)
    return history


def make_steps(*steps):
    return make_history(*((step, make_stats(2.0**step)) for step in steps))


def test_steps_are_in_order_whatever_the_order_of_appending():
    history = make_steps(3, 1, 2)
    history.append(jnp.int32(7), make_stats(1))
    history.append(1, make_stats(5))  # replaces the first
    history.append(8, make_stats(1).empty())  # a step on which nothing was measured
    assert history.steps == (1, 2, 3, 7)
    assert type(history.steps[-1]) is int
    assert [(step, rows[0].amax) for step, rows in history] == [(1, 5), (2, 4), (3, 8), (7, 1)]
    assert len(history) == 4
    assert [repr(make_steps(*steps)) for steps in ((), (4,), (1, 9))] == [
        "<StatsHistory: no steps>", "<StatsHistory: step 4>", "<StatsHistory: 2 steps from 1 to 9>",
    ]  # fmt: skip


def test_lines_are_strict_json_and_come_back():
    history = make_steps(1, 2)
    lines = history.to_json_lines().splitlines()
    assert list(StatsHistory.from_json_lines(lines)) == list(history)
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert StatsHistory.from_json_lines([]).to_json_lines() == ""
    logged = [json.dumps({"step": step} | make_stats(2.0**step).to_dict()) for step in (1, 2)]
    assert list(StatsHistory.from_json_lines([*logged, "\n"])) == list(history)


OTHER_LINES = ['{"loss": 1.0}', '{"step": 1', "3", '{"step": 1, "rows": [{"path": "a"}]}', '{"step": "x", "rows": []}']


@pytest.mark.parametrize("line", [*OTHER_LINES, "[" * 99_999])
def test_a_line_of_something_else_is_quoted(line):
    with pytest.raises(ValueError, match=r"Line 2 holds no statistics of a step: .*A line is, for example") as caught:
        StatsHistory.from_json_lines(["", line])
    assert line[:50] in str(caught.value).replace("\\", "")


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


ERRORS = [
    (lambda: make_steps().append(1.5, make_stats(1)), r"A step is an integer, got 1.5: history.append\(100, stats\)"),
    (lambda: make_steps().append(make_stats(1), 1), r"is of Stats, not of a int: history.append\(step, stats\)"),
    (lambda: make_steps(1, 9)[8], r"Nothing was measured on step 8. The nearest one that was is 9."),
    (lambda: make_steps()[8], r"Nothing was measured on step 8. No step was."),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_an_error_says_what_a_history_is_of(call, message):
    with pytest.raises((KeyError, TypeError), match=message):
        call()


SITES = make_site("a"), make_site("a"), make_site("b", direction="backward", turn=(0, 1))  # two share a site
SUMS = {"rms": 1e-14, "error": 1e-14, "scaled_error": 1e-14}  # float64; all else comes back as it was


def draw_stats(seed, sites=SITES, histogram=True, formats=FORMATS):
    rng = np.random.default_rng(seed)
    tensors = [rng.normal(size=SHAPE) * 2.0 ** rng.uniform(-40, 20, SHAPE) for _ in sites]
    tensors[0][0, :3] = 0, np.nan, np.inf
    tensors[-1][:] = 0
    return Stats(make_record(tensors, formats, histogram), make_layout(*sites, formats=formats, histogram=histogram))


def check_same(rows, expected):
    for row, wanted in zip(rows, expected, strict=True):
        found, known = row.to_dict(), wanted.to_dict()
        for plain in (found, known):  # numbers of formats beside the others
            for name, shares in plain.pop("formats").items():
                plain |= {f"{name} {key}": value for key, value in shares.items()}
        assert found.keys() == known.keys()
        for key, value in known.items():
            bound = SUMS.get(key.rpartition(" ")[2])
            assert found[key] == (value if bound is None else pytest.approx(value, rel=bound)), key


@pytest.mark.parametrize("histogram", [True, False])
def test_one_step_is_what_it_was(histogram):
    stats = draw_stats(0, histogram=histogram)
    merged = make_history((0, stats)).merge()
    check_same(merged.rows(), stats.rows())
    assert merged.layout.sites == stats.layout.sites
    for _ in range(50):  # 2**50 times as many numbers: more than a word holds
        stats = stats.merge(stats)
    check_same(make_history((0, stats)).merge().rows(), stats.rows())


def test_steps_merge_to_what_their_arrays_merge_to_from_a_file_as_well():
    parts = [draw_stats(seed) for seed in range(3)]
    history = make_history(*enumerate(parts))
    check_same(history.merge().rows(), parts[0].merge(parts[1]).merge(parts[2]).rows())
    again = StatsHistory.from_json_lines(history.to_json_lines().splitlines()).merge()
    check_same(again.rows(), history.merge().rows())
    assert str(again) == str(history.merge())


def test_a_row_that_a_step_lacks_is_of_the_others():
    first, second = draw_stats(0), draw_stats(1, SITES[:2], formats=FORMATS[1:])
    merged = make_history((0, first), (1, second)).merge()
    assert [row.times for row in merged] == [2, 2, 1]
    assert merged.layout.meter.formats == FORMATS[1:]  # those that all have
    assert merged.rows()[0].amax == max(first.rows()[0].amax, second.rows()[0].amax)
    assert merged.rows()[2].zeros == 1
    assert StatsHistory().merge().rows() == ()
