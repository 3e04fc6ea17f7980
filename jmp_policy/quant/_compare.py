"""Compares a model with its quantized form, layer by layer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._base import Args, Kwargs, hide_frames, is_floating, is_floating_dtype
from ..modules import Method, ModuleCall, require_adapter
from ..report import (
    BEFORE,
    KEPT,
    Bars,
    Panel,
    Plain,
    Report,
    Table,
    choose_byte_unit,
    find_row,
    find_style,
    format_bytes,
    make_columns,
    plot_bars,
)
from ._array import QuantizedArray
from ._observe import defer, observe_products


@dataclasses.dataclass(frozen=True)
class LayerComparison(Plain):
    """A layer with a weight, before and after quantization.

    Attributes:
      path: module names joined by `/`; empty for the root. With the name of the parameter if the module is not a layer
        of Flax, such as one of your own.
      type: the class name; empty if the layer was not called.
      quantization: the format of the weight afterwards, or the reason why it is unchanged.
      bytes_before: size of the weight.
      bytes_after: size of the quantized weight and its scales.
      weight_error: norm of the change of the weight, relative to its norm.
      output_error: norm of the difference of the layer's outputs, over all calls, relative to the norm of the first. It
        includes the errors of earlier layers. `None` if the layer was not called, or in `vmap`, `remat` and gradients.

    >>> import jmp_policy as jmp
    >>> row = jmp.quant.LayerComparison("head", "Dense", "int8", 16384, 4352, weight_error=0.01, output_error=0.02)
    >>> row.is_quantized, row.sqnr
    (True, 40.0)
    """

    path: str
    type: str
    quantization: str
    bytes_before: int
    bytes_after: int
    weight_error: float
    output_error: float | None

    _properties = ("sqnr",)

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio of the weight, in decibels."""
        return math.inf if self.weight_error == 0 else -20 * math.log10(self.weight_error)

    @property
    def is_quantized(self) -> bool:
        """True if the weight is quantized afterwards."""
        return not self.quantization.startswith("left: ")


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Result of `quant.compare`: prints as a table, also in notebooks.

    Attributes:
      rows: one per parameter of two or more axes (but not `bias` or `scale`), in the order of the first calls.
      output_error: norm of the difference of the models' outputs, relative to the norm of the first.
      parameters_before: size of all parameters in bytes, with those that have no row, such as biases.
      parameters_after: size of all parameters afterwards.

    >>> import jmp_policy as jmp
    >>> head = jmp.quant.LayerComparison("head", "Dense", "int8", 16384, 4352, weight_error=0.01, output_error=0.02)
    >>> comparison = jmp.quant.Comparison((head,), output_error=0.02)
    >>> comparison["head"].bytes_after, comparison.bytes_before
    (4352, 16384)
    """

    rows: tuple[LayerComparison, ...]
    output_error: float
    parameters_before: int = 0
    parameters_after: int = 0

    _properties = ("bytes_before", "bytes_after")

    @property
    def bytes_before(self) -> int:
        """Size of the weights of all rows."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Size of these weights afterwards."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def quantized(self) -> tuple[LayerComparison, ...]:
        """Rows with quantized weights."""
        return tuple(row for row in self.rows if row.is_quantized)

    def __getitem__(self, path: str) -> LayerComparison:
        """Returns the row of the layer at `path`, or raises KeyError."""
        return find_row(self.rows, path, "layer", "compared")

    def plot(self) -> Any:
        """Plots output error and bytes per layer, as a `matplotlib.figure.Figure`. Needs matplotlib."""
        rows = self.rows
        colors = [_choose_color(row) for row in rows]
        errors, whole = [row.output_error and 100 * row.output_error for row in rows], 100 * self.output_error
        unit, divisor = choose_byte_unit(max((row.bytes_before for row in rows), default=0))
        before = [row.bytes_before / divisor for row in rows]
        after = [row.bytes_after / divisor for row in rows]
        formats = {row.quantization.partition("(")[0]: _choose_color(row) for row in self.quantized}
        has_left = len(self.quantized) < len(rows)
        return plot_bars(
            kind="layer",
            names=[row.path or row.type for row in rows],
            panels=[
                Panel("Output error", "% of the norm before", [Bars(errors, colors)], whole, "not seen"),
                Panel("Weights", unit, [Bars(before, BEFORE), Bars(after, colors, height=0.5)]),
            ],
            legend={"before": BEFORE, **formats, **({"left as it was": KEPT} if has_left else {})},
            line_name="the model itself",
        )

    def _summarize(self) -> str:
        return f"{len(self.quantized)} of {len(self.rows)} layers quantized"

    def _list_tables(self, width: int | None) -> list[Table]:
        columns = make_columns("layer, type, format", "before, after, weight error, SQNR, output error")
        return [Table(columns, [*map(_list_cells, self.rows)])]

    def _list_notes(self) -> list[str]:
        before, after, quantized = self.bytes_before, self.bytes_after, self.quantized
        notes = [f"weights: {_format_sizes(before, after)}"]
        if self.parameters_before > before:
            notes.append(f"all parameters: {_format_sizes(self.parameters_before, self.parameters_after)}")
        size = sum(row.bytes_before for row in quantized)
        if size and len(quantized) < len(self.rows):
            share = sum(row.bytes_after for row in quantized) / size
            notes.append(f"those quantized, {len(quantized)} of {len(self.rows)}: {share:.1%}")
        names: dict[str, list[str]] = {}
        for row in self.rows:
            if not row.is_quantized:
                names.setdefault(row.quantization, []).append(row.path or row.type)
        reasons = [f"{why}: {', '.join(layers)}" for why, layers in names.items()]
        return [*notes, f"output of the model: {_format_error(self.output_error)} off", *reasons]


def _choose_color(row: LayerComparison) -> str:
    return find_style(row.quantization).color if row.is_quantized else KEPT


def _list_cells(row: LayerComparison) -> tuple[str, ...]:
    is_exact = row.weight_error == 0
    return (
        row.path,
        row.type,
        row.quantization if row.is_quantized else "left",
        format_bytes(row.bytes_before),
        format_bytes(row.bytes_after),
        "" if is_exact else _format_error(row.weight_error),
        "" if is_exact else f"{row.sqnr:.1f} dB",
        "not seen" if row.output_error is None else _format_error(row.output_error),
    )


def _format_sizes(before: int, after: int) -> str:
    return f"{format_bytes(before)}, now {format_bytes(after)}: {after / before:.1%}" if before else "0 B"


def _format_error(error: float) -> str:
    return f"{error:.3g}" if error > 10 else f"{error * 100:.2g} %"


@hide_frames
def compare(before: Any, after: Any, *inputs: Any, method: Method = None, **kwargs: Any) -> Comparison:
    """Runs a model and its quantized form on the same inputs, and compares each layer.

    Both run one op at a time, so that the layers of a scan are seen too.

    Args:
      before: the original model, with or without a policy: a bound linen module (`model.bind(variables)`), or an nnx
        model. It is not changed.
      after: the quantized model: `with_policy(model, policy).bind(quantize(variables, policy))`, or the result of
        `quantize` for an nnx model.
      *inputs: positional arguments of the method.
      method: the method to call, as for `explain`.
      **kwargs: further arguments of the call; for linen, of `apply`.

    Returns:
      A `Comparison`, with `.plot()`, `.rows` and `.to_dict()`.

    Raises:
      TypeError: an argument is not a Flax module.
      ValueError: they are not the same model, or a linen module is not bound.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> comparison = jmp.quant.compare(model, jmp.quant.quantize(model, "int8_from_float32"), jnp.ones((1, 64)))
    >>> row = comparison.rows[0]
    >>> row.quantization, row.bytes_before, row.bytes_after, row.weight_error < 0.01
    ('int8', 16384, 4352, True)
    """
    example = "compare(model.bind(variables), with_policy(model, policy).bind(quantize(variables, policy)), x)"
    message = "compare takes Flax modules, got {!r}. For example: " + example + "."
    models = [(model, require_adapter(model, message.format(model))) for model in (before, after)]
    bound = [(adapter.bind(model, None), adapter) for model, adapter in models]
    (old, owners, before_bytes), (new, _, after_bytes) = (_list_weights(*each) for each in bound)
    for path in sorted(old.keys() | new.keys()):
        shapes = [weights[path].shape if path in weights else None for weights in (old, new)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"before and after are not the same model: the weight of {path!r} has the shapes {shapes[0]} and "
                f"{shapes[1]}."
            )
    if not old:
        raise ValueError("There is nothing to compare: the model has no parameter of two or more axes.")
    wanted, got = _Outputs(owners.values()), _Outputs(owners.values())
    with observe_products():
        runs = zip(models, (wanted, got), strict=True)
        whole = [_arrays(adapter.run(model, inputs, method, kwargs, to.hook)) for (model, adapter), to in runs]
    dequantize = lambda weight: weight.dequantize() if isinstance(weight, QuantizedArray) else weight
    order = {path: n for n, path in enumerate(wanted.called)}
    rows = (
        LayerComparison(
            path=path,
            type=got.called[owners[path]][0] if owners[path] in got.called else "",
            quantization=_quantization(new[path], got.called.get(owners[path]), is_layer=owners[path] == path),
            bytes_before=old[path].nbytes,
            bytes_after=new[path].nbytes,
            weight_error=_error([dequantize(old[path])], [dequantize(new[path])]) or 0.0,
            output_error=_error(wanted.by_path[owners[path]], got.by_path[owners[path]]),
        )
        for path in sorted(old, key=lambda path: order.get(owners[path], len(order)))
    )
    return Comparison(tuple(rows), _error(*whole) or 0.0, before_bytes, after_bytes)


_VECTORS = ("bias", "scale")
"""Parameters that no matmul reads; in a scan they have two axes."""


def _list_weights(model: Any, adapter: Any) -> tuple[dict[str, Any], dict[str, str], int]:
    """Lists the parameters of two or more axes by path, the paths of their modules, and the size of all parameters.

    The weight of a Flax layer has the path of the layer.
    """
    weights, parameters = adapter.find_weights(model), adapter.list_parameters(model)
    identify = lambda weight: id(weight.values if isinstance(weight, QuantizedArray) else weight)
    of_layers = set(map(identify, weights.values()))
    owners = {path: path for path in weights}
    for path, leaf in parameters.items():
        owner, _, name = path.rpartition("/")
        is_matrix = is_floating_dtype(leaf.dtype) and len(leaf.shape) > 1 and name not in _VECTORS
        if identify(leaf) not in of_layers and is_matrix:
            weights[path], owners[path] = leaf, owner
    return weights, owners, sum(leaf.nbytes for leaf in parameters.values())


class _Outputs:
    """Outputs of the layers at some paths, in the order of calls."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.called: dict[str, tuple[str, str]] = {}  # class name, and quantization in the words of `explain`
        self.by_path: dict[str, list[Any]] = {path: [] for path in paths}
        self._running: set[str] = set()

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method of a module; if methods call each other, records the outermost."""
        if call.path not in self.by_path or call.path in self._running:
            return next_fun(*args, **kwargs)
        if call.path not in self.called:
            self.called[call.path] = call.type.__name__, call.describe_quantization()
        self._running.add(call.path)
        try:
            out = next_fun(*args, **kwargs)
        finally:
            self._running.discard(call.path)
        arrays = [leaf for leaf in jax.tree.leaves(out) if is_floating(leaf)]
        defer(functools.partial(self._keep, call.path), *arrays)
        return out

    def _keep(self, path: str, *arrays: Any) -> None:
        self.by_path[path].extend(_arrays(arrays))


def _quantization(weight: Any, called: tuple[str, str] | None, *, is_layer: bool) -> str:
    if isinstance(weight, QuantizedArray):
        return str(weight.format)
    if not is_layer:
        return "left: not stored, and not the weight of a Flax layer"
    if called is None:
        return "left: not called"
    described = called[1] or "left: no quantization in its policy"
    if described.startswith("left: "):
        return described
    # Float8 rounds operands; weights are never stored in it.
    stored = "from an unquantized weight" if described.startswith("float8") else "and is yet to be quantized"
    return f"left: computes as {described}, {stored}"


def _arrays(out: Any) -> list[Any]:
    """Returns the floating arrays of an output; none if they are traced."""
    leaves = [leaf for leaf in jax.tree.leaves(out) if is_floating(leaf)]
    return [] if any(isinstance(leaf, Tracer) for leaf in leaves) else leaves


def _error(before: Sequence[Any], after: Sequence[Any]) -> float | None:
    """Returns the norm of the difference, relative to the norm of the first arrays; None without arrays."""
    if not before or len(before) != len(after):  # some outputs have no values
        return None
    lost = kept = 0.0
    for old, new in zip(before, after, strict=True):
        wide = np.asarray(old).astype(np.float64)
        lost += float(np.sum((np.asarray(new).astype(np.float64) - wide) ** 2))
        kept += float(np.sum(wide**2))
    if kept == 0:
        return 0.0 if lost == 0 else math.inf
    return math.sqrt(lost / kept)
