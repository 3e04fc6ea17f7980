"""Compares a model with its quantized form, layer by layer."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from .._base import Args, Kwargs, is_array, is_floating_dtype
from ..modules import Adapter, Method, ModuleCall, find_adapter
from ..report import (
    BEFORE,
    KEPT,
    Bars,
    Column,
    Panel,
    Report,
    Table,
    choose_byte_unit,
    find_row,
    find_style,
    format_bytes,
    plot_bars,
)
from ._weights import QuantizedArray


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """A layer with a weight, before and after.

    Attributes:
      path: the module names joined by `/`; the root's is the empty string.
      type: the name of its class; the empty string, if it was not called.
      quantization: the format of the weight afterwards, or why it is as it was.
      bytes_before: the size of the weight.
      bytes_after: its size afterwards, with its scales.
      weight_error: the norm of what the weight lost, relative to its own.
      output_error: how far apart the outputs of the layer are in the two models, over all of its calls: the norm of
        their difference, relative to the norm of the first. The errors of earlier layers are part of it. `None` where
        the layer was not called, or returned no numbers, as inside of `vmap` and `remat`.

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

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio of the weight, in decibels."""
        return math.inf if self.weight_error == 0 else -20 * math.log10(self.weight_error)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is quantized afterwards."""
        return not self.quantization.startswith("left: ")

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the ratio."""
        return dataclasses.asdict(self) | {"sqnr": self.sqnr}


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Report):
    """What `quant.compare` found: a table in a terminal and in a notebook, and a plot.

    Attributes:
      rows: one for each layer with a weight, in the order of their first calls.
      output_error: how far apart the outputs of the two models are: the norm of their difference, relative to the
        norm of the first.

    >>> import jmp_policy as jmp
    >>> head = jmp.quant.LayerComparison("head", "Dense", "int8", 16384, 4352, weight_error=0.01, output_error=0.02)
    >>> comparison = jmp.quant.Comparison((head,), output_error=0.02)
    >>> comparison["head"].bytes_after, comparison.bytes_before
    (4352, 16384)
    >>> print(comparison)
    layer  type   format   before    after  weight error     SQNR  output error
    ───────────────────────────────────────────────────────────────────────────
    head   Dense  int8    16.4 kB  4.35 kB           1 %  40.0 dB           2 %
    <BLANKLINE>
    weights: 16.4 kB, now 4.35 kB: 26.6%
    output of the model: 2 % off
    """

    rows: tuple[LayerComparison, ...]
    output_error: float

    @property
    def bytes_before(self) -> int:
        """The size of the weights of all rows."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Their size afterwards."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def quantized(self) -> tuple[LayerComparison, ...]:
        """The rows whose weights are quantized."""
        return tuple(row for row in self.rows if row.is_quantized)

    def __getitem__(self, path: str) -> LayerComparison:
        """The row of the layer at a path.

        Raises:
          KeyError: no row has this path.
        """
        return find_row(self.rows, path, "layer", "compared")

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain dictionaries, lists, strings and numbers, for tests and for JSON."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "output_error": self.output_error,
        }

    def plot(self) -> Any:
        """Bars of the output error and the bytes of each layer, as a `matplotlib.figure.Figure`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        rows = self.rows
        colors = [_choose_color(row) for row in rows]
        errors = [None if row.output_error is None else 100 * row.output_error for row in rows]
        unit, divisor = choose_byte_unit(max((row.bytes_before for row in rows), default=0))
        before = [row.bytes_before / divisor for row in rows]
        after = [row.bytes_after / divisor for row in rows]
        formats = {row.quantization.partition("(")[0]: _choose_color(row) for row in self.quantized}
        has_left = len(self.quantized) < len(rows)
        return plot_bars(
            kind="layer",
            names=[row.path or row.type for row in rows],
            panels=[
                Panel(
                    "Output error", "% of the norm before", [Bars(errors, colors)], 100 * self.output_error, "not seen"
                ),
                Panel("Weights", unit, [Bars(before, BEFORE), Bars(after, colors, height=0.5)]),
            ],
            legend={"before": BEFORE, **formats, **({"left as it was": KEPT} if has_left else {})},
            line_name="the model itself",
        )

    def __repr__(self) -> str:
        counts = f"{len(self.quantized)} of {len(self.rows)} layers quantized"
        return f"<Comparison: {counts}; print it for the table>"

    def _list_tables(self, width: int | None) -> list[Table]:
        texts, numbers = ("layer", "type", "format"), ("before", "after", "weight error", "SQNR", "output error")
        columns = [*map(Column, texts), *(Column(number, is_number=True) for number in numbers)]
        return [Table(columns, [*map(_list_cells, self.rows)])]

    def _list_notes(self) -> list[str]:
        before, after, quantized = self.bytes_before, self.bytes_after, self.quantized
        if not before:
            notes = ["weights: 0 B"]
        else:
            notes = [f"weights: {format_bytes(before)}, now {format_bytes(after)}: {after / before:.1%}"]
        size = sum(row.bytes_before for row in quantized)
        if size and len(quantized) < len(self.rows):
            share = sum(row.bytes_after for row in quantized) / size
            notes.append(f"those quantized, {len(quantized)} of {len(self.rows)}: {share:.1%}")
        return [*notes, f"output of the model: {_format_error(self.output_error)} off", *_list_reasons(self.rows)]


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


def _list_reasons(rows: Sequence[LayerComparison]) -> list[str]:
    """A sentence for each reason to leave a weight."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if not row.is_quantized:
            names.setdefault(row.quantization, []).append(row.path or row.type)
    return [f"{why}: {', '.join(layers)}" for why, layers in names.items()]


def _format_error(error: float) -> str:
    return f"{error:.3g}" if error > 10 else f"{error * 100:.2g} %"


def compare(before: Any, after: Any, *inputs: Any, method: Method = None, **kwargs: Any) -> Comparison:
    """Runs a model and its quantized self on the same inputs, and says what each layer lost and saved.

    Both run one operation after the other, so that the layers of a scan are seen as well.

    Args:
      before: the model as it was, with a policy or without: a bound linen module (`model.bind(variables)`), or an nnx
        model. It stays as it is.
      after: the same with quantized weights: `with_policy(model, policy).bind(quantize(variables, policy))`, or what
        `quantize` returns for an nnx model.
      *inputs: positional arguments of the method.
      method: what to call instead of the module itself, as for `explain`.
      **kwargs: other arguments of the call; of `apply`, for linen.

    Returns:
      A `Comparison`: a table when printed or shown in a notebook, `.plot()`, `.rows` and `.to_dict()` for programs.

    Raises:
      TypeError: one of the two is not a Flax module.
      ValueError: they are not the same model, or a linen module is not bound.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> comparison = jmp.quant.compare(model, jmp.quant.quantize(model, "int8_from_float32"), jnp.ones((1, 64)))
    >>> row = comparison.rows[0]
    >>> row.quantization, row.bytes_before, row.bytes_after, row.weight_error < 0.01
    ('int8', 16384, 4352, True)
    """
    old, new = _weights(before), _weights(after)
    _check_same(old, new)
    wanted, got = _Outputs(old), _Outputs(old)
    whole = [_arrays(_run(*run, inputs, method, kwargs)) for run in ((before, wanted), (after, got))]
    rows = (
        _row(path, old[path], new[path], got.called.get(path), _error(wanted.by_path[path], got.by_path[path]))
        for path in dict.fromkeys([*wanted.called, *old])
    )
    return Comparison(tuple(rows), _error(*whole) or 0.0)


class _Called(NamedTuple):
    """What is told of a layer that was called.

    Attributes:
      type: the name of its class.
      quantization: what becomes of its weight, in the words of `explain`.
    """

    type: str
    quantization: str


class _Outputs:
    """What the layers of a model return.

    Args:
      paths: of the layers.

    Attributes:
      called: those that were called, by path, in the order of their first calls.
      by_path: the arrays that each returned, in the order of its calls.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.called: dict[str, _Called] = {}
        self.by_path: dict[str, list[Any]] = {path: [] for path in paths}
        self._running: set[str] = set()

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method of a module; of methods that call each other, the outermost one counts."""
        if call.path not in self.by_path or call.path in self._running:
            return next_fun(*args, **kwargs)
        if call.path not in self.called:
            self.called[call.path] = _Called(call.type.__name__, call.describe_quantization())
        self._running.add(call.path)
        try:
            out = next_fun(*args, **kwargs)
        finally:
            self._running.discard(call.path)
        self.by_path[call.path].extend(_arrays(out))
        return out


def _find_adapter(model: Any) -> Adapter:
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(
            f"compare takes Flax modules, got {model!r}. For example: compare(model.bind(variables), "
            "with_policy(model, policy).bind(quantize(variables, policy)), x)."
        )
    return adapter


def _weights(model: Any) -> dict[str, Any]:
    adapter = _find_adapter(model)
    return adapter.find_weights(adapter.bind(model, None))


def _check_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Checks that two models have weights of the same shapes at the same paths."""
    for path in sorted(before.keys() | after.keys()):
        shapes = [weights[path].shape if path in weights else None for weights in (before, after)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"before and after are not the same model: the weight of {path!r} has the shapes {shapes[0]} and "
                f"{shapes[1]}."
            )
    if not before:
        raise ValueError("There is nothing to compare: the model has no 'kernel' or 'embedding' of two or more axes.")


def _run(model: Any, outputs: _Outputs, inputs: Args, method: Method, kwargs: Kwargs) -> Any:
    with jax.disable_jit():
        return _find_adapter(model).run(model, inputs, method, kwargs, outputs.hook)


def _row(path: str, before: Any, after: Any, called: _Called | None, error: float | None) -> LayerComparison:
    return LayerComparison(
        path=path,
        type="" if called is None else called.type,
        quantization=_quantization(after, called),
        bytes_before=before.nbytes,
        bytes_after=after.nbytes,
        weight_error=_error([_numbers(before)], [_numbers(after)]) or 0.0,
        output_error=error,
    )


def _quantization(weight: Any, called: _Called | None) -> str:
    if isinstance(weight, QuantizedArray):
        return str(weight.format)
    if called is None:
        return "left: not called"
    said = called.quantization or "left: no quantization in its policy"
    if said.startswith("left: "):
        return said
    # Float8 rounds the operands of products: weights are not stored in it, before or after.
    stored = "from a weight that stays as it is" if said.startswith("float8") else "and is yet to be quantized"
    return f"left: computes as {said}, {stored}"


def _numbers(weight: Any) -> Any:
    return weight.dequantize() if isinstance(weight, QuantizedArray) else weight


def _arrays(out: Any) -> list[Any]:
    """The floating arrays of a result, where they have numbers."""
    leaves = [leaf for leaf in jax.tree.leaves(out) if is_array(leaf) and is_floating_dtype(leaf.dtype)]
    return [] if any(isinstance(leaf, Tracer) for leaf in leaves) else leaves


def _error(before: Sequence[Any], after: Sequence[Any]) -> float | None:
    """The norm of the difference of some arrays, relative to the norm of the first ones; `None` without arrays."""
    if not before:
        return None
    lost = kept = 0.0
    for old, new in zip(before, after, strict=True):
        wide = np.asarray(old).astype(np.float64)
        lost += float(np.sum((np.asarray(new).astype(np.float64) - wide) ** 2))
        kept += float(np.sum(wide**2))
    if kept == 0:
        return 0.0 if lost == 0 else math.inf
    return math.sqrt(lost / kept)
