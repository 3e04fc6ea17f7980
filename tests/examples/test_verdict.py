"""What a comparison says: it follows from the figures, whatever they are."""

import dataclasses
import math

import pytest

from examples.gpt import VariantResult
from examples.gpt._verdict import explain_underflow, judge

FLOAT32 = VariantResult("float32", 3.5, 0.0, 0.0, 0, 1.0, 1, 1, 1.0)


def make_rows(*, unscaled=0.0, scaled=0.0, bfloat16=0.0, **of_unscaled):
    """Four results that differ from float32's by these bits per byte."""

    def make(name, difference, **figures):
        return dataclasses.replace(FLOAT32, name=name, final_loss=3.5 + difference, difference=difference, **figures)

    names = {"mixed_bfloat16": bfloat16, "no scaling": unscaled, "dynamic scaling": scaled}
    rows = [make(name, difference) for name, difference in names.items()]
    rows[1] = dataclasses.replace(rows[1], **of_unscaled)
    return [FLOAT32, *rows]


@pytest.mark.parametrize(
    ("unscaled", "scaled", "verdict"),
    [
        (0.3, 0.001, "float16 needs its loss scale here"),
        (math.nan, 0.001, "float16 needs its loss scale here"),
        (math.inf, -0.3, "float16 needs its loss scale here"),
        (0.05, 0.02, "float16 loses here without a loss scale, by less than 0.1 bits per byte"),
        (0.001, 0.001, "float16 loses nothing here, with or without a loss scale"),
        (-0.2, 0.0, "float16 loses nothing here, with or without a loss scale"),
        (0.3, 0.03, "float16 falls behind here even with the dynamic loss scale"),
        (0.0, math.nan, "float16 falls behind here even with the dynamic loss scale"),
    ],
)
def test_the_verdict_is_what_the_losses_say(unscaled, scaled, verdict):
    assert judge(make_rows(unscaled=unscaled, scaled=scaled))[-1].startswith(f"Verdict: {verdict}")


@pytest.mark.parametrize(
    ("difference", "end"),
    [
        (0.3, "ends 0.30 bits per byte above float32, a clear loss."),
        (0.05, "ends 0.050 bits per byte above float32."),
        (-0.05, "ends 0.050 bits per byte below float32."),
        (0.0123, "ends as float32 does, within 0.02 bits per byte (+0.0123)."),
        (math.nan, "does not end at a finite loss."),
    ],
)
def test_each_end_is_said_in_bits_per_byte(difference, end):
    assert judge(make_rows(bfloat16=difference))[0] == f"mixed_bfloat16: {end}"


def test_skipped_steps_are_said():
    assert judge(make_rows(unscaled=0.3, skipped_steps=4))[1].endswith("a clear loss; 4 steps overflowed.")
    assert judge(make_rows(unscaled=0.3, skipped_steps=1))[1].endswith("a clear loss; 1 step overflowed.")


def test_nothing_is_compared_with_a_reference_that_is_not_finite():
    rows = [dataclasses.replace(FLOAT32, final_loss=math.nan), *make_rows()[1:]]
    assert judge(rows) == ["Verdict: float32 itself does not end at a finite loss; there is nothing to compare with."]


def test_the_explanation_quotes_the_figures_of_the_run():
    layers = {"norm": 0.0, "blocks.0": 0.012, "embed": 0.64}
    figures = {"zeroed_logits_share": 0.834, "zeroed_gradient_share": 0.1477, "zeroed_layer_shares": layers}
    text = explain_underflow(make_rows(**figures), 32768)
    assert "the mean over 32,768 bytes" in text
    assert "for wrong bytes less likely than 0.001." in text  # 3e-8 times 32768
    assert "Without a loss scale 83% of the gradient by the logits is zero" in text
    assert "15% of that by the parameters (embed 64%, blocks.0 1.2%)" in text
    assert "norm" not in text


def test_the_explanation_names_no_layer_where_none_lost():
    assert "0% of that by the parameters; with" in explain_underflow(make_rows(), 1024)
