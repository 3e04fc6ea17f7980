"""Result of `diverge`: the errors of each scope, which of them it introduced, and a map that avoids them."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...numerics import wrap_narrow
from ...policy import Policy, PolicyMap, PolicySpec, get_policy, make_map
from ...report import REFERENCE_LINE, Plain, Report, Table, make_columns, make_figure, make_finite, make_plain
from ._measure import NOISE, Measured, Worst, combine, describe_worst, measure_cosine
from ._run import RowLayout, TableLayout
from ._scopes import is_inside

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class ScopeErrors(Plain):
    """Errors of one scope in one pass, without the scopes inside it: relative errors in the root mean square.

    Attributes:
      path: the path of the module or named scope; empty for operations outside all of them.
      direction: the pass.
      incoming: error of the values that the scope reads in the run of `g`, against the run of `f`. It is nan, as
        `introduced` is, if a recording does not have these values.
      outgoing: error of the values that it passes on.
      introduced: error of these values if the scope of `g` runs on the values of `f`; 0 if they are equal.
      cosine: cosine between these values in `f` and in `g`.
      worst: the element of these values that differs most; None if all are equal.
      dtype: the narrowest dtype that the scope computes in, and after an arrow the dtype of `g`, if it differs.
      iterations: the introduced error of each iteration of a `scan` around the scope, on each device of a
        `shard_map`, or at each position of `parity`.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> (row,) = jmp.contrib.diverge(lambda x: 2 * x, lambda x: 2.5 * x)(jnp.ones(3)).rows()
    >>> row.incoming, row.outgoing, row.introduced, row.amplification, row.cosine
    (0.0, 0.25, 0.25, inf, 1.0)
    """

    path: str
    direction: Literal["forward", "backward"]
    incoming: float
    outgoing: float
    introduced: float
    cosine: float
    worst: Worst | None
    dtype: str
    iterations: tuple[float, ...] = ()

    _properties = ("amplification",)

    @property
    def amplification(self) -> float:
        """The outgoing over the incoming error: infinite if no error comes in, and nan if none goes out either."""
        if self.incoming != 0:
            return self.outgoing / self.incoming
        return math.inf if self.outgoing > 0 else math.nan


@dataclasses.dataclass(frozen=True)
class OutputErrors:
    """The difference of one output of the two functions.

    Attributes:
      path: the place in the outputs of `f`, such as `"result/0"`.
      error: the relative error in the root mean square.
      gap: the root mean square of the difference.
      is_log_probability: True if the exponentials along the last axis add up to 1.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.contrib.diverge(lambda x: 2 * x, lambda x: 2.5 * x)(jnp.ones(3)).outputs()
    (OutputErrors(path='result', error=0.25, gap=0.5, is_log_probability=False),)
    """

    path: str
    error: float
    gap: float
    is_log_probability: bool


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["record", "compared", "totals"], meta_fields=["layout"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Divergence(Report):
    """Errors of the scopes of two functions of one model, from `diverge`. Prints as a table.

    A pytree of arrays, so that it may be made inside `jit`. Its methods read the arrays, outside of `jit`.

    Attributes:
      record: the measurements of the scopes.
      compared: the measurements of the outputs.
      totals: for each output, how far its exponentials are from adding up to 1.
      layout: the scopes, outputs and shapes.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def model(x, dtype):
    ...     with jax.named_scope("a"):
    ...         x = jnp.tanh(x)
    ...     with jax.named_scope("b"):
    ...         return jnp.exp(x.astype(dtype)).astype(jnp.float32)
    >>> f, g = (lambda x, dtype=dtype: model(x, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    >>> divergence = jmp.contrib.diverge(f, g)(jnp.linspace(0, 1, 8))
    >>> [(row.path, row.introduced > 0, row.dtype) for row in divergence.rows()]
    [('a', False, 'float32'), ('b', True, 'float32 → bfloat16')]
    >>> print(divergence.policy_map(1e-4)["b"])
    params=float32,compute=float32,output=none
    """

    record: Any
    compared: list[Any]
    totals: list[Any]
    layout: TableLayout

    @property
    def unaligned(self) -> tuple[str, ...]:
        """The scopes and values that only one of the functions has, as sentences."""
        return self.layout.unaligned

    def rows(self) -> tuple[ScopeErrors, ...]:
        """Returns the errors by scope and pass, in the order of execution. Scopes inside a scope stand before it.

        Calls of a module, and iterations of a loop, share a row: squares of their errors are added up. If a scope
        has several outputs, its row has the largest of their errors. Small outputs are compared with a tenth of the
        others' root mean square.

        Raises:
          TypeError: the arrays are tracers, as inside `jit`.
        """
        if not self._has_numbers():
            raise TypeError(
                "The rows of a Divergence are numbers, and there are none yet inside jit. Return it from the function, "
                "and read the rows outside: jax.jit(diverge(f, g))(x).rows()."
            )
        return self._rows

    def outputs(self) -> tuple[OutputErrors, ...]:
        """Returns the differences of the outputs, for which the functions have one of the same shape."""
        found = []
        for (path, shape), array, total in zip(self.layout.outputs, self.compared, self.totals, strict=True):
            measured, size = np.asarray(array, np.float64)[None], math.prod(shape)
            m = Measured(*measured[0])
            gap = float(m.unit) * math.sqrt(m.error / size) if size else 0.0
            is_log_probability = bool(np.asarray(total) < _LOG_PROBABILITY)
            found.append(OutputErrors(path, combine([(measured, size)]), gap, is_log_probability))
        return tuple(found)

    @property
    def log_probability_gap(self) -> float | None:
        """The root mean square difference of log-probabilities; None if no output has log-probabilities.

        In reinforcement learning it is the mismatch between the policy that samples and the one that trains.
        """
        gaps = [output.gap for output in self.outputs() if output.is_log_probability]
        return max(gaps, default=None)

    def policy_map(self, tolerance: float, policy: PolicySpec = None) -> PolicyMap:
        """Proposes a map that keeps in the full dtype the scopes that introduce a larger error than `tolerance`.

        Its keys are modules, without the named scopes around them, if `g` has a policy by `with_policy`.

        Args:
          tolerance: the largest introduced error of a scope that stays in low precision.
          policy: the policy of all other scopes. If None, it computes in float16 or bfloat16, or in float32 if
            `f` is in float64, as `g` does, and returns what `f` is in. If `f` is in float64, `"float32"` stands for all
            operations in float32, not matmuls alone.

        Raises:
          ValueError: the tolerance is not positive, or the policy is a map.
        """
        if not 0 < tolerance < math.inf:
            raise ValueError(f"The tolerance must be a relative error above 0, got {tolerance!r}. For example: 1e-3.")
        low = get_policy(self._guess_policy() if policy is None else policy)
        if not isinstance(low, Policy):
            raise ValueError(f"policy_map takes the policy of all other scopes, got {low!r}. For example: 'bfloat16'.")
        key = lambda row: self.layout.keys.get(row.path, row.path)
        scopes = list(dict.fromkeys(key(row) for row in self.rows()))
        kept = {key(row) for row in self.rows() if row.introduced > tolerance}
        changed: Any = {"quantization": None} if low.quantization is not None else {"compute_dtype": low.full_dtype}
        if low.quantization is None and low.compute_dtype == low.full_dtype == "float32" and self._is_from_float64():
            if not kept:
                return wrap_narrow(low)
            changed = {"param_dtype": "float64", "compute_dtype": "float64"}
        return make_map(scopes, kept, low, low.replace(**changed))

    def to_dict(self) -> dict[str, Any]:
        """Returns rows and outputs as dictionaries, lists, strings and finite numbers. Others become None."""
        lists = {"rows": self.rows(), "outputs": self.outputs(), "unaligned": self.unaligned}
        return make_finite(make_plain(lists))

    def plot(self) -> "Figure":
        """Draws the outgoing error along the depth, and the introduced error of each scope, forward and backward.

        Raises:
          ImportError: matplotlib is not installed.
        """
        passes = [name for name in ("forward", "backward") if any(row.direction == name for row in self.rows())]
        most = max((sum(row.direction == name for row in self.rows()) for name in passes), default=1)
        figure = make_figure(max(6, 0.25 * most + 2), 3.2 * max(1, len(passes)))
        for axes, name in zip(figure.subplots(max(1, len(passes)), squeeze=False)[:, 0], passes, strict=False):
            rows = [row for row in self.rows() if row.direction == name]
            places = range(len(rows))
            bars = [row.introduced if row.introduced < math.inf else math.nan for row in rows]
            axes.bar(places, bars, color="#D55E00", label="introduced")
            axes.plot(places, [row.outgoing or math.nan for row in rows], color="#0072B2", marker="o", label="outgoing")
            axes.axhline(NOISE, **REFERENCE_LINE, label="rounding of float32")
            axes.set_yscale("log")
            axes.set_xticks(places, [*map(_name, rows)], rotation=90, fontsize=8)
            axes.set_ylabel("relative error")
            axes.set_title(name, loc="left")
            axes.legend(frameon=False)
        return figure

    def _summarize(self) -> str:
        return f"{' and '.join(self.layout.names)}, {len(self.layout.rows)} scopes"

    def _has_numbers(self) -> bool:
        return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self.record))

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        cells = [
            (
                _name(row),
                row.direction,
                row.dtype,
                *map(format_number, (row.introduced, row.incoming, row.outgoing, row.amplification)),
                f"{row.cosine:.4f}",
            )
            for row in self._keep_largest(self.rows(), _rank)
        ]
        columns = make_columns("scope, pass, dtype", "introduced, incoming, outgoing, amplified, cosine")
        return [Table(columns, cells)] if cells else []

    def _list_notes(self) -> Sequence[str]:
        f, g = self.layout.names
        rows = sorted(self.rows(), key=_rank, reverse=True)
        if rows and rows[0].introduced > NOISE:
            first = _find_cause(rows)
            largest = "the largest error: " if first is rows[0] else ""
            alone = f"if {g} replaces {f} there alone"
            notes = [
                f"{_name(first)} introduces {largest}{format_number(first.introduced)} ({first.direction}), {alone}."
            ]
            if not largest:
                notes[0] += (
                    f" {_name(rows[0])} introduces {format_number(rows[0].introduced)}: it only computes wider there."
                )
        else:
            notes = [f"No scope introduces more than rounding errors of float32 ({format_number(NOISE)})."]
        if rows and not any(row.path for row in rows):
            notes.append('No module or scope was found. Name the parts: with jax.named_scope("encoder"): ...')
        for output in sorted(self.outputs(), key=lambda output: output.error)[-1:]:
            notes.append(f"Of the outputs, {output.path} differs most: by {format_number(output.error)}.")
        if self.log_probability_gap is not None:
            notes.append(f"Log-probabilities differ by {format_number(self.log_probability_gap)} (root mean square).")
        notes += self._note_left_out(rows, "rows with smaller introduced errors", ".rows()")
        if self.unaligned:
            others = len(self.unaligned) - _MOST_UNALIGNED
            rest = f", and {others} more" if others > 0 else ""
            notes.append(f"Not aligned: {'; '.join(self.unaligned[:_MOST_UNALIGNED])}{rest}.")
        return notes

    @functools.cached_property
    def _rows(self) -> tuple[ScopeErrors, ...]:
        record = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.device_get(self.record))
        calls: dict[tuple[str, str], list[RowLayout]] = {}
        for row in self.layout.rows:
            calls.setdefault(row.plan.scope[:2], []).append(row)
        shown = [
            key for key, rows in calls.items() if key[1] != "recomputed" and any(row.plan.outgoing for row in rows)
        ]
        return tuple(_read_row(record, calls[key], calls.get((key[0], "forward"), ())) for key in _sort(shown))

    def _guess_policy(self) -> str:
        of_g = {row.dtypes[1] for row in self.layout.rows}
        full = "float64" if self._is_from_float64() else "float32"
        lows = ("float16", "bfloat16", "float32") if full == "float64" else ("float16", "bfloat16")
        low = next((name for name in lows if name in of_g), "bfloat16")
        return f"params={full},compute={low},output={full}"

    def _is_from_float64(self) -> bool:
        return any(row.dtypes[0] == "float64" for row in self.layout.rows)


_LOG_PROBABILITY = 0.02
_MOST_UNALIGNED = 6


def _rank(row: ScopeErrors) -> float:
    """Returns the introduced error to sort by: last if a recording cannot tell it."""
    return -1.0 if math.isnan(row.introduced) else row.introduced


def _read_row(record: Any, calls: Sequence[RowLayout], forward: Iterable[RowLayout]) -> ScopeErrors:
    """Reads a row from the calls of a scope in one pass, and in the forward pass."""
    read = lambda name, rows: [
        (_find_measured(record, row, i), row.sizes[i]) for row in rows for i in getattr(row.plan, name)
    ]
    outgoing, introduced = read("outgoing", calls), read("introduced", calls)
    is_known = bool(introduced)  # else a recording does not have the values that the scope reads
    # The backward pass of a loss reads residuals of its own forward pass only.
    incoming = read("incoming", calls) or read("incoming", forward)
    looped = [measured for row in calls if row.loops or row.positions for measured in read("introduced", [row])]
    # All iterations of other loops at a position share its number.
    counts = {calls[0].positions or len(measured) for measured, _ in looped}
    count = counts.pop() if len(counts) == 1 else 0
    # The same path may stand in a loop and around it.
    dtypes = [_choose_narrowest(names) for names in zip(*(row.dtypes for row in calls), strict=True)]
    shapes = [row.shapes[i] for row in calls for i in row.plan.outgoing]
    path, direction = calls[0].plan.scope[:2]
    assert direction != "recomputed"
    return ScopeErrors(
        path,
        direction,
        combine(incoming) if is_known else math.nan,
        combine(outgoing),
        combine(introduced) if is_known else math.nan,
        measure_cosine(outgoing),
        describe_worst(outgoing, shapes),
        " → ".join(dict.fromkeys(filter(None, dtypes))),
        tuple(combine([(measured[i::count], size) for measured, size in looped]) for i in range(count)),
    )


def _choose_narrowest(names: Iterable[str]) -> str:
    return min(filter(None, names), key=lambda name: jnp.dtype(name).itemsize, default="")


def _find_measured(record: Any, row: RowLayout, index: int) -> np.ndarray:
    """Returns the measurements of one comparison, `(iterations, len(Measured._fields))`."""
    for position in row.loops:
        record = record[1][position]
    return record[0][..., index, :].reshape(-1, len(Measured._fields))


def _sort(keys: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Puts each scope after those inside it."""
    last = {
        key: max(i for i, (path, direction) in enumerate(keys) if direction == key[1] and is_inside(path, key[0]))
        for key in keys
    }
    return sorted(keys, key=lambda key: (last[key], -len(key[0])))


def _find_cause(rows: Sequence[ScopeErrors]) -> ScopeErrors:
    """Finds the scope with the largest error. One that computes wider in `g` may follow its inputs."""
    near = [row for row in rows if row.introduced > 0.1 * rows[0].introduced and not _is_wider(row)]
    return near[0] if near else rows[0]


def _is_wider(row: ScopeErrors) -> bool:
    sizes = [jnp.dtype(name).itemsize for name in row.dtype.split(" → ") if name]
    return sizes[-1:] > sizes[:1]


def _name(row: ScopeErrors) -> str:
    return row.path or "(outside)"


def format_number(number: float) -> str:
    return "0" if number == 0 else "-" if math.isnan(number) else f"{number:.2g}"
