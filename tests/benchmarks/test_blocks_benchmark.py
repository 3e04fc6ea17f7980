"""What the benchmark of blocks says of ours, in little: errors where one scale fits a tensor, and where none does."""

import jax
import pytest

pytest.importorskip("qwix")

from benchmarks import blocks

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning"),  # qwix asks Flax for it
]

OURS = ("current", "mxfp8", "nvfp4", "qwix nvfp4")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(blocks, "SHAPE", (2, 64, 64))
    monkeypatch.setattr(blocks, "CONTESTANTS", OURS)
    with jax.numpy_dtype_promotion("standard"):  # for qwix
        yield


def _errors(rows, *labels):
    """The errors of a row, by contestant."""
    (row,) = [row for row in rows if row[: len(labels)] == [*labels]]
    return dict(zip(OURS, map(float, row[len(labels) :]), strict=True))


@pytest.mark.exhaustive
def test_the_magnitude_of_a_tensor_changes_no_error_of_ours():
    """It decides all of qwix's nvfp4, which has no scale of the tensor."""
    rows = blocks.scale_rows([1e-4, 1.0])
    for of in ("result", "gradient of the input", "gradient of the weight"):
        small, one = _errors(rows, "0.0001", of), _errors(rows, "1", of)
        assert small["mxfp8"] == pytest.approx(one["mxfp8"], rel=0.05)
        assert small["nvfp4"] == pytest.approx(one["nvfp4"], rel=0.05)
        assert one["mxfp8"] <= min(1.02 * one["current"], 0.045)
        assert small["qwix nvfp4"] > 0.9


def test_mxfp8_keeps_rows_that_current_scaling_loses():
    rows = blocks.span_rows([1e6])
    sequence, scattered = "a sequence of 64", "every 32nd row"
    for of in ("result", "gradient of the weight"):
        errors = _errors(rows, sequence, "1e+06", of)
        assert errors["mxfp8"] < 0.045 < 0.5 < errors["current"]
    assert _errors(rows, scattered, "1e+06", "gradient of the input")["mxfp8"] < 0.045
    # Within a block the range is that of e4m3, and nobody keeps what is below it.
    inside = _errors(rows, scattered, "1e+06", "gradient of the weight")
    assert 0.5 < inside["mxfp8"] < inside["current"]
