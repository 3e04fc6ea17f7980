"""`jmp-policy compare`: its table, and the words below it."""

import math
from pathlib import Path

import pytest

import examples.gpt as demo
from jmp_policy.cli import main

ROWS = [
    demo.VariantResult("float32", 3.5, 0.0, 0.0, 0, 1.0, 2**20, 2**26, 0.5),
    demo.VariantResult("mixed_bfloat16", 3.503, 0.003, 0.0, 0, 1.0, 2**20, 2**25, 0.5),
    demo.VariantResult(
        "mixed_float16, no scaling", 3.75, 0.25, 0.1477, 0, 1.0, 2**20, 2**25, 0.4, 0.83, {"embed": 0.64}
    ),
    demo.VariantResult("mixed_float16, dynamic scaling", math.nan, math.nan, 0.0, 7, 2.0**15, 2**20, 2**25, 0.0123),
]


@pytest.fixture
def shown(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "compare", lambda options, console: (Path("out"), ROWS))
    assert main(["compare"]) == 0
    return capsys.readouterr().out


def test_the_table_shows_every_figure_and_fits_80_columns(shown):
    for text in ("3.500", "+0.2500", "nan", "14.8%", "83.0%", "64.0", " 12\n", "out/ holds table.json, loss.png"):
        assert text in shown
    assert "dynamic scaling  " in shown  # on one line
    assert all(len(line) <= 80 and "…" not in line for line in shown.splitlines())


def test_every_column_is_explained_below_the_table(shown):
    for name in ("final loss:", "vs float32:", "zeroed:", "skipped steps:", "activ. MiB:", "step ms:"):
        assert name in " ".join(shown.split())


def test_the_words_follow_the_figures(shown):
    words = " ".join(shown.split())
    assert "mixed_float16, no scaling: ends 0.25 bits per byte above float32" in words
    assert "dynamic scaling: does not end at a finite loss; 7 steps overflowed" in words
    assert "Verdict: float16 falls behind here even with the dynamic loss scale." in words
    assert "the mean over 32,768 bytes" in words
