"""Rows of statistics: the tensor of each, and its numbers on the host."""

import dataclasses
import itertools
import math
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from .._base import did_you_mean, quote
from ..policy import parse_format
from ..report import Plain
from ._stats_counting import FIRST_COUNTS, HISTOGRAM_BINS
from ._stats_measure import StatsSpec
from ._stats_record import Record

Direction = Literal["forward", "recomputed", "backward", "argument", "result"]

DIRECTIONS: tuple[Direction, ...] = typing.get_args(Direction)


def check_direction(direction: str | None) -> None:
    """Raises a ValueError unless `direction` is one of `DIRECTIONS` or None."""
    if direction is not None and direction not in DIRECTIONS:
        remedy = did_you_mean(direction, DIRECTIONS)
        raise ValueError(f"Unknown direction {direction!r}. {remedy} For example: direction='backward'.")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Static part of a row: the tensor, as known from tracing, with the attributes of `Row`, and its `size`."""

    path: str
    primitive: str
    source: str
    function: str
    direction: Direction
    turn: int | tuple[int, ...] | None
    dtype: str
    size: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        made = f"{self.direction} {self.primitive}".rstrip()
        turn = "" if self.turn is None else f", turn {self.turn}"
        return f"{made} in {self.path!r}{turn}: {self.dtype}{list(self.shape)} of {self.source}"

    @property
    def name(self) -> str:
        """Path, operation, pass and iteration, joined by `/`, for loggers; several tensors may share it."""
        turns = list_turns(self.turn)
        turn = "_".join(["turn", *map(str, turns)]) if turns else ""
        return "/".join(piece for piece in (self.path, self.primitive, self.direction, turn) if piece)


def list_turns(turn: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the iterations of `Row.turn`, outermost loop first."""
    return (turn,) if isinstance(turn, int) else turn or ()


class StatsLayout:
    """The tensors of all rows, `sites`, and their `StatsSpec`, `meter`.

    Equal layouts are one object, also after copying and unpickling, so that `jit` compares and hashes them by identity.

    >>> from jmp_policy.numerics._stats_row import StatsLayout, TensorInfo
    >>> from jmp_policy.numerics._stats_measure import StatsSpec
    >>> info = TensorInfo("head", "dot_general", "train.py:12", "loss", "forward", None, "float32", 8, (2, 4))
    >>> layout = StatsLayout([info], StatsSpec(("float16",)))
    >>> layout is StatsLayout([info], StatsSpec(("float16",))), layout
    (True, StatsLayout(1 row, float16))
    """

    __slots__ = ("__weakref__", "meter", "sites")

    sites: tuple[TensorInfo, ...]
    meter: StatsSpec

    def __new__(cls, sites: "tuple[TensorInfo, ...] | list[TensorInfo]", spec: StatsSpec) -> "StatsLayout":
        """Returns the interned layout."""
        key = (tuple(sites), spec)
        new = object.__new__(cls)
        object.__setattr__(new, "sites", key[0])
        object.__setattr__(new, "meter", spec)
        return _INTERNED.setdefault(key, new)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A StatsLayout cannot be changed: cannot set {name!r}. Make another one.")

    def __reduce__(self) -> tuple:
        return StatsLayout, (self.sites, self.meter)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        rows = f"{len(self.sites)} row{'' if len(self.sites) == 1 else 's'}"
        return f"StatsLayout({', '.join([rows, *self.meter.formats])})"

    def list_names(self) -> list[str]:
        """Returns a unique name for each row: the second `"head/dot_general/forward"` ends in `_1`."""
        taken: dict[str, None] = {}
        for name in (site.name for site in self.sites):
            spellings = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1)))
            taken[next(spelling for spelling in spellings if spelling not in taken)] = None
        return list(taken)

    def describe_difference(self, other: "StatsLayout") -> str:
        """Returns the first difference of two layouts, for an error."""
        for name in ("formats", "histogram", "dtype", "sample"):
            mine, theirs = getattr(self.meter, name), getattr(other.meter, name)
            if mine != theirs:
                return f"the {name} of one {'are' if name == 'formats' else 'is'} {mine}, and of the other {theirs}"
        for index, (mine, theirs) in enumerate(zip(self.sites, other.sites, strict=False)):
            if mine != theirs:
                return f"row {index} of one is {mine}; of the other it is {theirs}"
        return f"one has {len(self)} rows, and the other has {len(other)}"


# Weak: a layout lives as long as Stats or a compiled function that returns them.
_INTERNED = weakref.WeakValueDictionary[tuple[tuple[TensorInfo, ...], StatsSpec], StatsLayout]()


_LEAST_SHIFT = -1000
"""Terms that are more binades below the largest part of a sum do not change it, and would not fit an exponent."""


@dataclasses.dataclass(frozen=True)
class FormatShares:
    """Losses of a tensor in a format. Shares are of all of its elements, zeros among them.

    Attributes:
      underflow: finite nonzero elements that would become zero.
      subnormal: elements that would be subnormal, and so have fewer bits.
      overflow: finite elements beyond the largest number of the format: they would be infinite, nan, or that number.
      error: the root of the sum of squared cast errors, relative to the elements; an element that is too large
        counts as the largest number.
      scaled_error: the same after scaling by the best power of two, which puts the largest element as high as it fits;
        of floats in blocks, such as `"mxfp8"`, the same as `error`.

    >>> from jmp_policy.numerics import FormatShares
    >>> FormatShares(underflow=0.25, subnormal=0.5, overflow=0.125, error=0.1, scaled_error=0.0).lost
    0.375
    """

    underflow: float
    subnormal: float
    overflow: float
    error: float
    scaled_error: float

    @property
    def lost(self) -> float:
        """Share of elements that become zero or overflow."""
        return self.underflow + self.overflow


@dataclasses.dataclass(frozen=True, eq=False)
class Row(Plain):
    """Statistics of a tensor, and its losses in each format, as numbers on the host.

    A row that was never measured, such as one in a branch that was not taken, has a count of 0 and zeros otherwise.

    Attributes:
      path: the module names and `jax.named_scope`s around it, or the path of an argument or a result in its tree,
        joined by `/`; the root's is the empty string.
      primitive: the name of the operation that made it; the empty string for an argument.
      source: the user's line that it comes from, `"/home/me/train.py:12"`.
      function: the function around that line.
      direction: `"forward"`, `"recomputed"`, `"backward"`, `"argument"` or `"result"`.
      turn: the iteration of a loop, several for nested loops; `None` outside of loops, and if iterations are merged.
      dtype: the name of its dtype.
      shape: its shape.
      count: the number of elements, in all measurements.
      sampled: the number of elements that `histogram` and `formats` are of; `count` if that was all of them.
      times: the number of measurements.
      amax: the largest finite magnitude.
      min_nonzero: the smallest nonzero finite magnitude; `None` if there is none.
      rms: the root mean square of the finite elements. In it and in errors, subnormal elements count as 0.
      zeros: the share of zeros.
      nans: the number of nan elements.
      infs: the number of infinite elements.
      histogram: int64 of shape `(64,)`: the number of elements at each exponent. Bin `i` counts `2**(i-47) <= |x| <
        2**(i-46)`; the first bin also counts all smaller elements but zeros, the last one all larger finite ones.
        `None` without `histogram=True`. From a sample, numbers are scaled to `count`.
      formats: the losses in each format, by its name. From a sample, an underflow or overflow that the extremes prove
        is at least one element.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> x = jnp.array([0.0, 0.25, 3.0, 300.0])
    >>> _, stats = jmp.numerics.collect(jnp.sum, formats=["float8_e4m3fn", "float8_e3m4"], of="arguments")(x)
    >>> (row,) = stats.rows()
    >>> row.direction, row.amax, row.min_nonzero, row.zeros, row.histogram.sum().item()
    ('argument', 300.0, 0.25, 0.25, 3)
    >>> [row.formats[name].overflow for name in row.formats]
    [0.0, 0.25]
    """

    path: str
    primitive: str
    source: str
    function: str
    direction: Direction
    turn: int | tuple[int, ...] | None
    dtype: str
    shape: tuple[int, ...]
    count: int
    sampled: int
    times: int
    amax: float
    min_nonzero: float | None
    rms: float
    zeros: float
    nans: int
    infs: int
    histogram: np.ndarray | None = dataclasses.field(repr=False)
    formats: Mapping[str, FormatShares]

    @property
    def nonfinite(self) -> float:
        """Share of elements that are nan or infinite."""
        return (self.nans + self.infs) / max(1, self.count)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Row) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def list_scalars(self) -> list[tuple[str, float]]:
        """Returns its finite numbers by name; losses have the name of their format as a prefix."""
        own = ("amax", "min_nonzero", "rms", "zeros", "nans", "infs")
        scalars = [(name, float(value)) for name in own if (value := getattr(self, name)) is not None]
        for name, shares in self.formats.items():
            scalars += [(f"{name.replace('/', '_')}/{key}", value) for key, value in dataclasses.asdict(shares).items()]
        return scalars

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Row":
        """Returns the row that `to_dict` was called on.

        Raises:
          ValueError: a field is missing, unknown, or has another value than `to_dict` returns.
        """
        fields = {"sampled": plain.get("count"), **plain} if isinstance(plain, Mapping) else {}
        if fields.keys() != _FIELDS.keys():
            raise ValueError(f"A row has the fields {[*_FIELDS]}, got {quote(plain)}. For example: row.to_dict().")
        for name, (is_valid, what) in _FIELDS.items():
            if not is_valid(fields[name]):
                raise ValueError(f"{name} of a row is {what}, got {quote(fields[name])}. For example: row.to_dict().")
        if not fields["times"] * math.prod(fields["shape"]) == fields["count"] >= fields["sampled"]:
            raise ValueError(
                f"count of a row is times * the product of shape, and at least sampled, got {quote(plain)}. "
                "For example: row.to_dict()."
            )
        fields["turn"] = tuple(fields["turn"]) if isinstance(fields["turn"], list) else fields["turn"]
        fields["shape"] = tuple(fields["shape"])
        fields["histogram"] = None if fields["histogram"] is None else np.array(fields["histogram"], np.int64)
        fields["formats"] = {name: FormatShares(**shares) for name, shares in fields["formats"].items()}
        return cls(**fields)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_nonnegative(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # pyright: ignore[reportOperatorIssue]


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _is_format(name: object, shares: object) -> bool:
    names = {field.name for field in dataclasses.fields(FormatShares)}
    is_valid = isinstance(shares, Mapping) and shares.keys() == names and all(map(_is_nonnegative, shares.values()))
    return is_valid and parse_format(name).name == name


# Values of `Row.to_dict` by field: a check, and its description.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("path", "primitive", "source", "function", "dtype"), (lambda x: isinstance(x, str), "a string")),
    "direction": (lambda x: x in DIRECTIONS, f"one of {DIRECTIONS}"),
    "turn": (lambda x: x is None or _is_count(x) or _is_list(x), "an iteration, a list of them, or None"),
    "shape": (_is_list, "a list of sizes"),
    **dict.fromkeys(("count", "sampled", "times", "nans", "infs"), (_is_count, "a count")),
    **dict.fromkeys(("amax", "rms"), (_is_nonnegative, "a finite number that is not negative")),
    "zeros": (lambda x: _is_nonnegative(x) and x <= 1, "a share"),
    "min_nonzero": (lambda x: x is None or (_is_nonnegative(x) and x > 0), "a positive number or None"),
    "histogram": (
        lambda x: x is None or (_is_list(x) and len(x) == HISTOGRAM_BINS),
        f"{HISTOGRAM_BINS} counts or None",
    ),
    "formats": (
        lambda x: isinstance(x, Mapping) and all(_is_format(*item) for item in x.items()),
        "the losses of formats by name",
    ),
}


def read_rows(record: Record, layout: StatsLayout) -> tuple[Row, ...]:
    """Returns the rows of a record, with its leading axes merged.

    Counts are exact. Sums are added in float64, in units of the largest binade, so that none overflows or vanishes.
    """
    all_counts, all_extremes, all_exponents, all_sums = map(np.asarray, jax.device_get(tuple(record)))
    rows, batch = len(layout), math.prod(all_exponents.shape[:-1])
    words = all_counts.reshape(batch, rows, 2, all_counts.shape[-1]).astype(np.uint64)
    counts = (words[:, :, 0] + (words[:, :, 1] << np.uint64(32))).sum(0)
    extremes = all_extremes.reshape(batch, rows, 2).astype(np.float64)
    amax, least = extremes[..., 0].max(0, initial=0.0), extremes[..., 1].min(0, initial=math.inf)
    exponents = all_exponents.reshape(batch, rows).astype(np.int64)
    unit = exponents.max(0, initial=np.iinfo(np.int32).min)
    parts = all_sums.reshape(batch, rows, all_sums.shape[-2], 2).astype(np.float64).sum(-1)
    sums = np.ldexp(parts, np.maximum(2 * (exponents - unit), _LEAST_SHIFT)[..., None]).sum(0)
    numbers = zip(
        layout.sites, counts.tolist(), amax.tolist(), least.tolist(), unit.tolist(), sums.tolist(), strict=True
    )
    return tuple(_convert_row(layout, *of_row) for of_row in numbers)


def _convert_row(
    layout: StatsLayout, site: TensorInfo, counts: list[int], amax: float, least: float, unit: int, sums: list[float]
) -> Row:
    formats = layout.meter.formats
    times, zeros, nans, infs = counts[:FIRST_COUNTS]
    count, sampled = times * site.size, times * layout.meter.count_sampled(site.shape)
    shares = np.array(counts[FIRST_COUNTS : FIRST_COUNTS + 3 * len(formats)], np.float64).reshape(-1, 3)
    shares /= max(1, sampled)
    bins = np.array(counts[-HISTOGRAM_BINS:], np.int64)
    if sampled < count:
        _raise_proven(shares, formats, amax, least, 1 / count)
        bins = np.rint(bins * (count / sampled)).astype(np.int64)
    square, *errors = sums
    relative = [math.sqrt(error / square) if square > 0 else 0.0 for error in errors]
    fields_of_formats = ([*lost, *relative[2 * n : 2 * n + 2]] for n, lost in enumerate(shares.tolist()))
    return Row(
        site.path, site.primitive, site.source, site.function, site.direction, site.turn, site.dtype, site.shape,
        count=count,
        sampled=sampled,
        times=times,
        amax=amax,
        min_nonzero=None if math.isinf(least) else least,
        rms=_take_root(square, count - nans - infs, unit, amax),
        zeros=zeros / max(1, count),
        nans=nans,
        infs=infs,
        histogram=bins if layout.meter.histogram else None,
        formats={name: FormatShares(*fields) for name, fields in zip(formats, fields_of_formats, strict=True)},
    )  # fmt: skip


def _raise_proven(shares: np.ndarray, formats: tuple[str, ...], amax: float, least: float, share: float) -> None:
    """Raises shares of underflow and overflow to at least `share` where the exact extremes are lost."""
    for of_format, known in zip(shares, map(parse_format, formats), strict=True):
        if not known.block:
            to_zero, _, to_finite = known.find_thresholds(np.dtype(np.float64))
            of_format[0] = max(of_format[0], share * (least <= to_zero))
            of_format[2] = max(of_format[2], share * (amax > to_finite))


def _take_root(square: float, count: float, unit: int, amax: float) -> float:
    """Returns the root mean square of squares in units of `4**unit`; rounding never makes it exceed the amax."""
    if square <= 0 or count <= 0:
        return 0.0
    return math.ldexp(min(math.sqrt(square / count), math.ldexp(amax, -unit)), unit)
