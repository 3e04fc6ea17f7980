"""Collectives of a program, and their report: tables, sums and assertions."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._base import DTypeLike, did_you_mean, group_by_key, is_floating_dtype, parse_dtype
from .._jaxpr import Pass
from ..report import Plain, Report, Table, format_bytes, indent_lines, make_columns, shorten_dtypes

DIRECTIONS = ("forward", "recomputed", "backward")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
REDUCING = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Collective(Plain):
    """The collectives of one kind, dtype, shape and group of axes from one source line and module.

    Attributes:
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"` or
        `"collective-broadcast"`.
      reduction: `"sum"`, `"max"`, `"min"`, `"and"`, `"or"`, `"product"`, or empty for a collective that does not
        reduce.
      dtype: the dtype that is sent and reduced in.
      axes: the mesh axes along which devices communicate; empty if the groups do not match mesh axes.
      devices: the number of devices in a group.
      shape: the output shape of a gather, or the input shape of any other collective, on one device.
      direction: `"forward"`, `"recomputed"` or `"backward"`, as in `collect`. A sum of gradients is `"backward"`; ops
        after it, such as the check for finite gradients, are `"forward"`.
      is_gradient: True for a sum of gradients of parameters: in the backward pass, only casts and additions read its
        result. Other sums of the backward pass are of activations.
      inserted: True if XLA's partitioner inserted it, False if it is from a `shard_map`.
      source: the user's line, `"train.py:12 (loss)"`.
      path: the module names and `jax.named_scope`s around it, joined by `/`; empty for the root.
      count: the number of arrays, over all iterations of a loop.
      bytes: the total size of `count` arrays of `shape` on one device.

    >>> from jmp_policy.numerics import Collective
    >>> fields = {"direction": "backward", "is_gradient": True, "inserted": False, "source": "train.py:12", "path": ""}
    >>> row = Collective("all-reduce", "sum", "float32", ("data",), 4, (256,), count=2, bytes=2048, **fields)
    >>> row.moved_bytes
    3072
    """

    kind: str
    reduction: str
    dtype: str
    axes: tuple[str, ...]
    devices: int
    shape: tuple[int, ...]
    direction: Pass
    is_gradient: bool
    inserted: bool
    source: str
    path: str
    count: int
    bytes: int

    _properties = ("moved_bytes",)

    @property
    def moved_bytes(self) -> int:
        """Bytes that each device sends with a ring algorithm.

        With n devices `bytes * (n - 1) / n`, twice this for an all-reduce, and `bytes` for a permute or broadcast.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.devices - 1) // self.devices


@dataclasses.dataclass(frozen=True, repr=False)
class Collectives(Report):
    """Result of `numerics.collectives`. Prints as a table.

    Attributes:
      rows: one for each kind, dtype, shape, line and module, in program order.
      devices: the number of devices.
      axes: the names of the mesh axes.
      compiled: True if read from the output of XLA's partitioner, False if read from the jaxpr.
      uncounted_loops: the lines of loops with an unknown trip count, which count as one iteration.

    >>> from jmp_policy.numerics import Collective, Collectives
    >>> fields = {"direction": "backward", "is_gradient": True, "inserted": True, "source": "train.py:9", "path": "up"}
    >>> row = Collective("all-reduce", "sum", "bfloat16", ("data",), 4, (8, 8), count=3, bytes=384, **fields)
    >>> report = Collectives((row,), 4, ("data",), compiled=True)
    >>> report
    <Collectives: 3 collectives of 384 B on 4 devices; print it for the table>
    >>> report.total_bytes(axis="data"), report.select(kind="all-gather").rows
    (384, ())
    >>> report.assert_reduced_in("float32", of="gradients")
    Traceback (most recent call last):
    AssertionError: 3 of 3 reductions of gradients are not in float32:
      train.py:9: backward all-reduce in up of bfloat16[8,8] over data, 3 times
    """

    rows: tuple[Collective, ...]
    devices: int
    axes: tuple[str, ...]
    compiled: bool
    uncounted_loops: tuple[str, ...] = ()

    _MOST_ROWS = 40

    def select(
        self,
        *,
        kind: str | None = None,
        dtype: DTypeLike | None = None,
        axis: str | None = None,
        direction: str | None = None,
        gradients: bool | None = None,
    ) -> "Collectives":
        """Returns a report with the matching rows.

        Args:
          kind: such as `"all-reduce"`.
          dtype: a floating dtype in any spelling, or the name of another dtype, such as `"int32"`.
          axis: a mesh axis along which they communicate, alone or with others.
          direction: `"forward"`, `"recomputed"` or `"backward"`.
          gradients: the value of `Collective.is_gradient`.

        Raises:
          ValueError: the kind, dtype or direction is unknown, or no mesh has the axis.
        """
        _check_name("kind", kind, KINDS)
        _check_name("direction", direction, DIRECTIONS)
        if axis is not None and axis not in self.axes:
            known = f"Its axes are {', '.join(map(repr, self.axes))}." if self.axes else _ONE_DEVICE
            raise ValueError(f"No mesh of the program has an axis {axis!r}. {known}")
        name = dtype if dtype is None or dtype in _OTHER_DTYPES else str(parse_dtype(dtype))

        def is_selected(row: Collective) -> bool:
            return (
                kind in (None, row.kind)
                and name in (None, row.dtype)
                and (axis is None or axis in row.axes)
                and direction in (None, row.direction)
                and gradients in (None, row.is_gradient)
            )

        return dataclasses.replace(self, rows=tuple(filter(is_selected, self.rows)))

    def total_bytes(self, **selection: Any) -> int:
        """Sums `Collective.bytes` over all rows, or over the rows that `select` would return."""
        return sum(row.bytes for row in self.select(**selection).rows)

    def total_moved_bytes(self, **selection: Any) -> int:
        """Sums `Collective.moved_bytes` over all rows, or over the rows that `select` would return."""
        return sum(row.moved_bytes for row in self.select(**selection).rows)

    def total_count(self, **selection: Any) -> int:
        """Counts all collectives, or those that `select` would return."""
        return _count(self.select(**selection).rows)

    def assert_reduced_in(self, dtype: DTypeLike, *, of: str = "gradients", axis: str | None = None) -> None:
        """Asserts the dtype of sums over devices.

        Gradients are recognized by the ops that read the result (`Collective.is_gradient`). To include all of them, use
        an axis along which only the batch is sharded: `of="all", axis="data"`.

        Args:
          dtype: any floating dtype spec of `get_policy`.
          of: `"gradients"` of parameters, `"activations"` (all other sums) or `"all"`.
          axis: the name of a mesh axis; by default all axes.

        Raises:
          AssertionError: a sum has another floating dtype (the message has its line), or none was found.
          ValueError: `dtype` is not a floating dtype, `of` is unknown, or no mesh has the axis.
        """
        _check_name("of", of, tuple(_OF))
        summed = [row for row in self.select(axis=axis, gradients=_OF[of]).rows if row.reduction == "sum"]
        name = "reductions" if of == "all" else f"reductions of {of}"
        _assert_dtype(summed, dtype, name + (f" over {axis}" if axis else ""))

    def assert_gathered_in(self, dtype: DTypeLike, *, axis: str | None = None) -> None:
        """Asserts the dtype of all-gathers, such as of sharded parameters.

        Args:
          dtype: any floating dtype spec of `get_policy`.
          axis: the name of a mesh axis; by default all axes.

        Raises:
          AssertionError: an all-gather has another floating dtype, or there are none. The message has the lines, and
            says where `jax.lax.optimization_barrier` goes: XLA moves gathers before casts.
          ValueError: `dtype` is not a floating dtype, or no mesh has the axis.
        """
        rows = self.select(kind="all-gather", axis=axis).rows
        _assert_dtype(rows, dtype, "all-gathers" + (f" over {axis}" if axis else ""), _explain_gathers)

    def assert_no(self, **selection: Any) -> None:
        """Asserts the absence of collectives, or of those that `select` would return.

        Raises:
          AssertionError: there are; the message has their lines.
          ValueError: an argument of `select` is wrong.
        """
        found = self.select(**selection).rows
        if found:
            raise AssertionError(f"{_count(found)} collectives:{indent_lines(map(_describe_collective, found))}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and totals as dictionaries, lists, strings and numbers."""
        totals = {"count": self.total_count(), "bytes": self.total_bytes(), "moved_bytes": self.total_moved_bytes()}
        return super().to_dict() | totals

    def _summarize(self) -> str:
        amount = f"{self.total_count()} collectives of {format_bytes(self.total_bytes()) or '0 B'}"
        return f"{amount} on {_spell_devices(self.devices)}"

    def _list_tables(self, width: int | None) -> list[Table]:
        largest = self._keep_largest(self.rows, lambda row: row.bytes)
        return [_make_sums_table(self.rows), _make_collective_table(largest)] if self.rows else []

    def _list_notes(self) -> list[str]:
        if self.devices == 1:
            return ["no collectives: one device", _UNSHARDED]
        notes = [f"no collectives on {self.devices} devices"] if not self.rows else [_LEGEND]
        notes += self._note_left_out(self.rows, "rows with fewer bytes")
        notes += [f"{line}: the body of this loop counts once, because its trip count is unknown."
                  for line in self.uncounted_loops]  # fmt: skip
        return [*notes, _COMPILED if self.compiled else _TRACED]


_OF = {"gradients": True, "activations": False, "all": None}
_LEGEND = (
    "bytes: on one device, gathered arrays and what goes into the others; sent: what it sends in a ring. "
    "gradient: a sum of gradients of parameters."
)
_ONE_DEVICE = "It runs on one device, without a mesh."
_UNSHARDED = (
    "A mesh comes with the arguments, jax.device_put(x, NamedSharding(mesh, spec)) or "
    "jax.ShapeDtypeStruct(..., sharding=), with jax.jit(..., in_shardings=), or with jax.shard_map."
)
_COMPILED = "Read after XLA's partitioner, before later passes combine, widen or re-form collectives."
_TRACED = "Read off the program's shard_maps: what XLA inserts by itself is not counted."


def _count(rows: Iterable[Collective]) -> int:
    return sum(row.count for row in rows)


def _spell_devices(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _check_name(argument: str, value: str | None, names: Sequence[str]) -> None:
    if value is not None and value not in names:
        raise ValueError(
            f"Unknown {argument} {value!r}. {did_you_mean(value, names)} For example: {_EXAMPLES[argument]}."
        )


_EXAMPLES = {
    "kind": "report.select(kind='all-reduce')",
    "direction": "report.select(direction='backward')",
    "of": "report.assert_reduced_in('float32', of='gradients')",
}


_OTHER_DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)))


def _assert_dtype(
    rows: Iterable[Collective],
    dtype: DTypeLike,
    name: str,
    explain: Callable[[Sequence[Collective], str], str] = lambda rows, wanted: "",
) -> None:
    wanted = str(parse_dtype(dtype))
    floating = [row for row in rows if is_floating_dtype(row.dtype)]
    if not floating:
        raise AssertionError(
            f"Found no {name}, in {wanted} or any other floating dtype. XLA drops what no output needs: return the "
            "gradients or the new parameters from the function, in nnx nnx.state((model, optimizer))."
        )
    others = [row for row in floating if row.dtype != wanted]
    if others:
        lines = indent_lines(map(_describe_collective, others))
        counts = f"{_count(others)} of {_count(floating)}"
        raise AssertionError(f"{counts} {name} are not in {wanted}:{lines}{explain(others, wanted)}")


def _explain_gathers(rows: Sequence[Collective], wanted: str) -> str:
    """Returns the fix of gathers in another dtype: by XLA's partitioner, or in a shard_map."""
    inserted = next((row for row in rows if row.inserted), None)
    if inserted is None:
        return f"\nCast before the gather, or pass a policy. For example: sharding.all_gather(x, axis, {wanted!r})."
    return (
        f"\nIf the code casts to {wanted}, XLA has moved the gather before the cast, to the array of "
        f"{inserted.source.partition(' (')[0]}. Put a barrier right after the cast, before the result is used or "
        "its sharding is constrained (jax issue 23543). "
        f"For example: x = jax.lax.optimization_barrier(x.astype({wanted!r}))."
    )


def _describe_collective(row: Collective) -> str:
    where = f" in {row.path}" if row.path else ""
    array = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    times = f", {row.count} times" if row.count > 1 else ""
    return f"{row.source}: {row.direction} {_name_kind(row)}{where} of {array} over {_name_axes(row)}{times}"


def _name_kind(row: Collective) -> str:
    return row.kind if row.reduction in ("", "sum") else f"{row.kind} {row.reduction}"


def _name_axes(row: Collective) -> str:
    return ",".join(row.axes) or _spell_devices(row.devices)


def _name_pass(row: Collective) -> str:
    return "gradient" if row.is_gradient else row.direction


def _make_sums_table(rows: Sequence[Collective]) -> Table:
    """Makes a table with one row per kind, dtype, axes and pass."""
    cells = []
    name = lambda row: (_name_kind(row), *shorten_dtypes([row.dtype]).split(), _name_axes(row), _name_pass(row))
    for key, group in group_by_key((name(row), row) for row in rows).items():
        sizes = sum(row.bytes for row in group), sum(row.moved_bytes for row in group)
        cells.append((*key, str(_count(group)), *(format_bytes(size) or "0 B" for size in sizes)))
    return Table(make_columns("collective, dtype, axes, pass", "count, bytes, sent"), cells)


def _make_collective_table(rows: Iterable[Collective]) -> Table:
    cells = [
        (
            os.path.basename(row.source.partition(" (")[0]),
            _name_kind(row),
            *shorten_dtypes([row.dtype]).split(),
            "x".join(map(str, row.shape)),
            _name_pass(row),
            row.path,
            str(row.count),
        )
        for row in rows
    ]
    return Table(make_columns("line, collective, dtype, shape, pass, module", "count"), cells)
