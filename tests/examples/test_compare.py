"""The comparison of policies."""

import dataclasses
import json
import math

import pytest
import tiny

from examples.gpt import UserError
from examples.gpt.compare import VARIANTS, Row, compare, draw, judge, tabulate
from examples.gpt.run import hold_folder, new_folder

ROW = Row("float32", 3.5, 0.0, 0.0, 0, 64.0, 12.3)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_table_tells_what_each_policy_costs_and_saves(folder, capsys):
    out, rows = compare((str(folder / "text.txt"),), 5, 0, folder / "out", tiny.MODEL, batch_size=16)
    float32, bfloat16, unscaled, scaled = rows
    assert [row.name for row in rows] == list(VARIANTS)
    assert (float32.difference, float32.zeroed) == (0.0, 0.0)
    assert unscaled.zeroed >= scaled.zeroed
    assert bfloat16.zeroed < 0.01  # exact cancellations only
    assert all(abs(row.difference) < 0.05 and row.skipped_steps == 0 for row in rows)
    assert all(row.activation_mib > 0 and row.step_ms > 0 for row in rows)
    assert json.loads((out / "table.json").read_text(encoding="utf-8")) == [dataclasses.asdict(row) for row in rows]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "16 windows of 16 bytes: each loss is the mean over 256 bytes" in shown
    assert "out/ holds table.json, loss.png" in shown


@pytest.mark.parametrize(
    ("unscaled", "scaled", "verdict"),
    [
        (0.3, 0.001, "float16 needs its loss scale here"),
        (math.nan, 0.001, "float16 needs its loss scale here"),
        (0.05, 0.02, "float16 loses here without a loss scale, by less than 0.1 bits per byte"),
        (-0.2, 0.0, "float16 loses nothing here"),
        (0.3, 0.03, "float16 falls behind here even with the dynamic loss scale"),
        (0.0, math.nan, "float16 falls behind here even with the dynamic loss scale"),
    ],
)
def test_the_verdict_is_what_the_losses_say(unscaled, scaled, verdict):
    rows = [dataclasses.replace(ROW, difference=difference) for difference in (0.0, 0.0, unscaled, scaled)]
    assert judge(rows).startswith(f"Verdict: {verdict}")
    rows[0] = dataclasses.replace(ROW, loss=math.nan)
    assert judge(rows).startswith("Verdict: float32 itself does not end at a finite loss")


def test_the_table_shows_every_figure_and_fits_80_columns():
    rows = [ROW, dataclasses.replace(ROW, name=list(VARIANTS)[-1], loss=math.nan, difference=math.nan, zeroed=0.1477)]
    lines = tabulate(rows)
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split() == ["float32", "3.500", "+0.0000", "0.0%", "0", "64.0", "12"]
    assert "nan" in lines[2]
    assert "14.8%" in lines[2]


@pytest.mark.slow
def test_a_comparison_of_any_losses_has_a_plot_in_which_each_variant_looks_different(tmp_path):
    figure = draw({name: [math.nan, math.inf] if "no scaling" in name else [3.0, 2.0] for name in VARIANTS})
    figure.savefig(tmp_path / "loss.png")
    assert len({line.get_color() for line in figure.axes[0].lines}) == len(VARIANTS)


def test_a_folder_that_is_occupied_or_in_use_is_refused(folder):
    with pytest.raises(UserError, match="is not empty: choose another --out"):
        compare((str(folder / "text.txt"),), out=folder)
    out = folder / "compared"
    with hold_folder(new_folder(out)), pytest.raises(UserError, match="compared is in use by another process"):
        compare((str(folder / "text.txt"),), out=out)
