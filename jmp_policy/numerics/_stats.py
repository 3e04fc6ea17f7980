"""Statistics of many tensors: a pytree of arrays inside `jit`, and rows on the host."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._base import Uncast, did_you_mean, list_paths_to
from ..report import Report, Table
from ._stats_choice import remember_part
from ._stats_counting import FIRST_EXPONENT
from ._stats_record import Record, fold, merge
from ._stats_report import group_rows, list_notes, make_table, plot_exponents
from ._stats_row import Row, StatsLayout, TensorInfo, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Stats(Report, Uncast):
    """Statistics of tensors, and their losses in number formats.

    A pytree of four arrays, with the tensors of its rows as static data. It passes through `jit`, `scan`, `lax.cond`,
    `vmap`, donation, pickles and checkpoints. `rows()`, iteration and printing read the arrays, and so work outside of
    `jit` only.

    Attributes:
      record: the arrays; leading axes, as of `vmap` or `scan`, are merged where rows are read.
      layout: the tensors of the rows.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> observe = jmp.numerics.collect(lambda x: x @ x, formats=["float16"], of="forward")
    >>> _, stats = observe(jnp.array([[2.0**-15, 0.0], [0.0, 1.0]]))
    >>> stats
    <Stats: 1 row, float16; print it for the table>
    >>> (row,) = stats.merge(stats)
    >>> row.count, row.times, row.amax, row.zeros, row.formats["float16"].underflow
    (8, 2, 1.0, 0.5, 0.25)
    """

    record: Record
    layout: StatsLayout

    def __post_init__(self) -> None:
        serialization = sys.modules.get("flax.serialization")  # Flax may be loaded later than this package
        if serialization is not None and not serialization.is_serializable(Stats):
            serialization.register_serialization_state(Stats, lambda stats: stats.record._asdict(), _load_arrays)

    def merge(self, other: "Stats") -> "Stats":
        """Merges two `Stats` of the same rows: counts and sums add up. Works inside `jit`, too.

        Leading axes stay if both have the same, and are folded before if they differ.

        Args:
          other: statistics of the same rows, such as another step.

        Raises:
          TypeError: `other` is not a `Stats`.
          ValueError: the rows differ; the message has the first difference.
        """
        if not isinstance(other, Stats):
            raise TypeError(f"Only Stats merge with Stats, not a {type(other).__name__}: stats.merge(other_stats).")
        if other.layout is not self.layout:
            difference = self.layout.describe_difference(other.layout)
            raise ValueError(
                f"These Stats are of different programs: {difference}. Stats merge where both come from one collected "
                "function, called with arguments of the same shapes: stats.merge(collected(*other_arguments)[1])."
            )
        mine, theirs = self.record, other.record
        if mine.exponents.shape != theirs.exponents.shape:
            mine, theirs = _fold_batch(mine), _fold_batch(theirs)
        return Stats(_merge(mine, theirs), self.layout)

    def empty(self) -> "Stats":
        """Returns the same rows as if never measured: the initial value of a `scan` that merges.

        It needs shapes alone: `jax.eval_shape(collected, *args)[1].empty()`.
        """
        neutral = self.layout.meter.empty(len(self.layout))
        batch = self.record.exponents.shape[:-1]
        broadcast = (jnp.broadcast_to(leaf, (*batch, *leaf.shape)) for leaf in neutral)
        return Stats(Record(*broadcast), self.layout)

    def rows(self) -> tuple[Row, ...]:
        """Returns the rows as numbers on the host, in the order of the program.

        Raises:
          TypeError: the arrays are tracers, as inside `jit`.
        """
        if not self._has_numbers():
            raise TypeError(
                "The rows of Stats are numbers, and there are none yet: inside jit, grad, vmap or eval_shape arrays "
                "stand for them. Return the Stats from the function, and read its rows outside: "
                "out, stats = jax.jit(collected)(x); stats.rows()."
            )
        return read_rows(self.record, self.layout)

    def __getitem__(self, path: str) -> "Stats":
        """Returns the rows of the module at a path and of those inside it, as Stats."""
        if not isinstance(path, str):
            raise TypeError(f"Stats are indexed by paths, not by {path!r}: stats['blocks/0'], or stats.rows()[0].")
        sites = self.layout.sites
        indices = [index for index, site in enumerate(sites) if path in list_paths_to(site.path)]
        if not indices:
            known = dict.fromkeys(place for site in sites for place in list_paths_to(site.path) if place)
            hint = did_you_mean(path, known) if known else "There is none."
            raise KeyError(f"No row at {path!r} or inside it. {hint}")
        return self._take(indices)

    def select(self, keep: Callable[[TensorInfo], bool]) -> "Stats":
        """Returns the rows that a function accepts, as Stats.

        Args:
          keep: a predicate of the static part of a row, with its `path`, `primitive`, `source`, `function`,
            `direction`, `turn`, `dtype`, `size` and `shape`; `lambda site: site.direction == "backward"` selects
            gradients.
        """
        return self._take([index for index, site in enumerate(self.layout.sites) if keep(site)])

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self.layout)

    def to_dict(self) -> dict[str, Any]:
        """Returns the formats and rows as plain dictionaries, lists, strings, finite numbers and `None`.

        `first_exponent` is the exponent at which the second bin of each histogram begins.
        """
        return {
            "formats": list(self.layout.meter.formats),
            "first_exponent": FIRST_EXPONENT,
            "rows": [row.to_dict() for row in self.rows()],
        }

    def to_json(self) -> str:
        """Returns `to_dict` as strict JSON, without nan and infinity."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def scalars(self, prefix: str = "numerics") -> dict[str, float]:
        """Returns the rows as a flat dictionary of finite floats for TensorBoard and W&B, without histograms.

        Names are unique. A row that was not measured is left out, so that a logger draws no zero for it.

        Args:
          prefix: the first component of each name.

        Returns:
          Floats by names like `"numerics/blocks/3/attention/dot_general/backward/float16/underflow"` and
          `"numerics/blocks/3/attention/dot_general/backward/amax"`. The block of `"int8/64"` is named `int8_64`.
        """
        names = self.layout.list_names()
        return {
            "/".join([*([prefix] if prefix else []), name, key]): value
            for name, row in zip(names, self.rows(), strict=True)
            if row.times
            for key, value in row.list_scalars()
        }

    def plot(self, formats: Sequence[str] | None = None, *, direction: str | None = None) -> "Figure":
        """Draws histograms of the exponents of all elements, and below them the ranges of formats.

        Each pass, and arguments and results, have a histogram. The dark part of a range is its normal numbers, the
        light part its subnormal ones; the loss in the format stands beside it. `stats["blocks/0"].plot()` draws the
        rows of a module.

        Args:
          formats: formats whose ranges to draw; `None` for those that were measured. Block-scaled formats have no
            range.
          direction: the pass to draw, `"backward"` for gradients; `None` for each.

        Returns:
          A `matplotlib.figure.Figure`, which notebooks show and `figure.savefig("exponents.png")` writes.

        Raises:
          ValueError: a format or direction is unknown, or histograms were not collected.
          ImportError: matplotlib is not installed.

        Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
        """
        return plot_exponents(self.rows(), self.layout.meter.formats if formats is None else formats, direction)

    def _summarize(self) -> str:
        return ", ".join([f"{len(self)} row{'' if len(self) == 1 else 's'}", *self.layout.meter.formats])

    def _list_tables(self, width: int | None) -> list[Table]:
        lines = self._keep_largest(group_rows(self.rows()))
        return [make_table(lines, self.layout.meter.formats, width)] if lines else []

    def _list_notes(self) -> list[str]:
        rows = self.rows()
        lines = group_rows(rows)
        left_out = self._note_left_out(lines, "lines of less loss", ".rows()")
        return [*left_out, *list_notes(lines, rows, self.layout.meter.formats)]

    def _has_numbers(self) -> bool:
        arrays = jax.Array | np.ndarray
        return all(isinstance(leaf, arrays) and not isinstance(leaf, Tracer) for leaf in self.record)

    def _take(self, indices: list[int]) -> "Stats":
        """Returns some rows; outside of `jit` the arrays move to the host first, where indexing compiles nothing."""
        start, stop = (indices[0], indices[-1] + 1) if indices else (0, 0)
        where = slice(start, stop) if indices == list(range(start, stop)) else np.array(indices, np.int32)
        counts, extremes, exponents, sums = jax.device_get(tuple(self.record)) if self._has_numbers() else self.record
        record = Record(
            counts[..., where, :, :], extremes[..., where, :], exponents[..., where], sums[..., where, :, :]
        )
        layout = StatsLayout([self.layout.sites[index] for index in indices], self.layout.meter)
        remember_part(layout, self.layout, indices)
        return Stats(record, layout)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], StatsLayout]:
        """Returns the arrays of the record by name, and the layout."""
        keys = map(jax.tree_util.GetAttrKey, Record._fields)
        return tuple(zip(keys, self.record, strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], StatsLayout]:
        """Returns the arrays of the record, and the layout."""
        return tuple(self.record), self.layout

    @classmethod
    def tree_unflatten(cls, layout: StatsLayout, leaves: Any) -> "Stats":
        """Returns Stats of any four leaves."""
        return cls(Record(*leaves), layout)


# Outside of `jit` one compiled program instead of fifty; `inline` leaves no call inside.
_merge, _fold = (jax.jit(function, inline=True) for function in (merge, fold))


def _load_arrays(target: Stats, state: dict[str, Any]) -> Stats:
    wanted, found = (
        {name: getattr(leaf, "shape", None) for name, leaf in sorted(arrays.items())}
        for arrays in (target.record._asdict(), state)
    )
    if found != wanted:
        raise ValueError(
            f"The target is {target!r}, whose arrays have the shapes {wanted}; the saved arrays have {found}. Restore "
            "into Stats of the same collected function."
        )
    return Stats(Record(**state), target.layout)


def _fold_batch(record: Record) -> Record:
    axes = record.exponents.ndim - 1
    batch = math.prod(record.exponents.shape[:-1])
    flat = Record(*(leaf.reshape(batch, *leaf.shape[axes:]) for leaf in record))
    return _fold(flat) if axes else record
