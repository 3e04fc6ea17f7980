"""Measures the error of block-scaled formats where one scale per tensor does not fit, beside float8 and qwix.

Run from the root of the repository:

    python -m benchmarks.blocks [--quick]

Makes two tables of a dense layer's errors against float64: with all of its operands at one magnitude, small or large;
and with some rows far above the others. The costs of the matmuls are in `benchmarks.float8`, and their times on a GPU
in `benchmarks.gpu`.
"""

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._float8_contestants import BFLOAT16, Case, case, in_float64, relative_error
from benchmarks._float8_models import Layer
from benchmarks._results import ResultTable, print_tables

CONTESTANTS = (BFLOAT16, "current", "current/row", "mxfp8", "nvfp4", "qwix mxfp8", "qwix nvfp4")
SHAPE = (4, 64, 256)
"""The shape of the input: batch, length, width."""

SCALES = (1e-4, 1.0, 1e4)
SPANS = (1.0, 1e3, 1e5, 1e6, 1e8)
"""How far the large rows are above the others. The largest number of e4m3 is 2e5 times the smallest."""

LAYOUTS = {"a sequence of 64": np.s_[:1, :], "every 32nd row": np.s_[:, ::32]}
"""The rows that are larger than the others."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one scale and one span")
    quick = parser.parse_args(argv).quick
    with jax.numpy_dtype_promotion("standard"):
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "qwix")]
        print(", ".join([*versions, jax.default_backend()]))
        print_tables(tables(quick))


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the errors of a dense layer: with one magnitude, and with rows of several magnitudes."""
    scales, spans = (SCALES[:1], SPANS[-1:]) if quick else (SCALES, SPANS)
    layouts = list(LAYOUTS)[:1] if quick else list(LAYOUTS)
    header = ["magnitude", "error of", *CONTESTANTS]
    title = "A dense layer whose input, weight and gradient have one magnitude: errors against float64"
    notes = ("qwix's nvfp4 has no scale of the tensor, and e4m3 scales from 2e-3 to 448 do not reach the rest.",)
    yield ResultTable.of("magnitudes", title, header, scale_rows(scales), notes=notes)
    header = ["large rows", "times", "error of", *CONTESTANTS]
    title = "The same with rows that are so many times as large as the others: errors where they are small"
    yield ResultTable.of("rows", title, header, span_rows(spans, layouts), notes=_ROW_NOTES)


_ROW_NOTES = (
    "Where ours is not the nearest: bfloat16 keeps all rows, in twice the bytes; qwix's nvfp4 rounds each row by "
    "itself, without a scale of the tensor: its result is good where the input has magnitude 1, and its gradients are "
    "zero.",
    "Every 32nd row: each block of a product that sums over rows has one large row, and what is 1e6 below it is lost "
    "in mxfp8 as well. The range within a block is that of e4m3.",
    "The scales of nvfp4 are e4m3 below a scale of the tensor: it reaches 1e5, and not 1e6.",
)


@dataclasses.dataclass(frozen=True)
class Results:
    """Outputs of a layer.

    Attributes:
      out: the output, `(batch, length, width)`.
      kernel_grad: the gradient of the weight.
      x_grad: the gradient of the input, of the shape of `out`.
    """

    out: np.ndarray
    kernel_grad: np.ndarray
    x_grad: np.ndarray

    @classmethod
    def of(cls, layer: Case) -> "Results":
        """Runs both passes."""
        forward = layer.forward()
        kernels, x_grad = layer.gradients()
        wide = lambda x: np.asarray(x).astype(np.float64)
        return cls(wide(forward.step(*forward.args)), wide(kernels["dense"]["kernel"]), wide(x_grad))


def scale_rows(scales: Iterable[float]) -> list[list[str]]:
    """Makes a row of errors of both passes for each magnitude of input, weight and output gradient."""
    rows = []
    for scale in scales:
        results = {name: Results.of(_scale_case(name, scale, scale)) for name in CONTESTANTS}
        expected = _expect(_scale_case(BFLOAT16, scale, scale))
        for field in ("out", "x_grad", "kernel_grad"):
            errors = [relative_error(getattr(each, field), getattr(expected, field)) for each in results.values()]
            rows.append([f"{scale:g}", _FIELDS[field], *(f"{error:.3f}" for error in errors)])
    return rows


def span_rows(spans: Iterable[float], layouts: Iterable[str] = tuple(LAYOUTS)) -> list[list[str]]:
    """Makes a row of errors for each kind and magnitude of large rows.

    Where a row of the input is large, its gradient is small by the same factor, so each row contributes equally to the
    gradient of the weight. The output is compared where the input is small, and the input gradient where the output
    gradient is small.
    """
    rows = []
    for layout in layouts:
        is_large = np.zeros((*SHAPE[:2], 1), bool)
        is_large[LAYOUTS[layout]] = True
        small = {"out": ~is_large[..., 0], "x_grad": is_large[..., 0], "kernel_grad": slice(None)}
        for span in spans:
            factors = np.where(is_large, span, 1.0).astype(np.float32)
            results = {name: Results.of(_scale_case(name, 1.0, 1.0, factors)) for name in CONTESTANTS}
            expected = _expect(_scale_case(BFLOAT16, 1.0, 1.0, factors))
            for field, where in small.items():
                read = lambda each, field=field, where=where: getattr(each, field)[where]
                errors = [relative_error(read(each), read(expected)) for each in results.values()]
                rows.append([layout, f"{span:g}", _FIELDS[field], *(f"{error:.3f}" for error in errors)])
    return rows


_FIELDS = {"out": "result", "x_grad": "gradient of the input", "kernel_grad": "gradient of the weight"}


def _scale_case(name: str, scale: float, weight_scale: float, factors: np.ndarray | float = 1.0) -> Case:
    """Makes a dense layer whose operands and output gradient have given magnitudes."""
    made = case(name, Layer, SHAPE)
    dense = made.variables["params"]["dense"]
    # Normal numbers, as the input and the gradient: the loss is a mean.
    kernel = dense["kernel"] * (weight_scale * np.sqrt(SHAPE[-1]))
    variables = made.variables | {"params": {"dense": dense | {"kernel": _round(kernel)}}}
    x, target = made.x * (scale * factors), made.target * (scale * made.target.size / factors)
    return dataclasses.replace(made, variables=variables, x=_round(x), target=_round(target))


def _round(x: jax.Array) -> jax.Array:
    """Rounds to bfloat16, the inputs of all contestants."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _expect(layer: Case) -> Results:
    """Computes the layer in float64."""
    with jax.enable_x64(True):
        return Results.of(in_float64(layer, Layer))


if __name__ == "__main__":
    main()
