"""The facts of a lock: the dtypes that a program computes in, by scope."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .._base import is_array
from .._jaxpr import (
    DEVICE_SUMS,
    HALF_SUMS,
    MATMULS,
    PRIMITIVES as KNOWN,
    Fact,
    Pass,
    Step,
    find_line,
    find_origin,
    find_sum,
    having,
    shape_of,
    walk_with_kernels,
)
from ..autocast import FULL, SATURATING
from ..loss_scale import LossScale, spell_settings
from ..quant import QuantizedArray
from ._audit import read_precision
from ._audit_report import find_effective_precision
from ._collectives_report import Collective
from ._lock_rows import LockRow, count_bits
from ._traced import PRIMITIVES, FindPlace, count_runs, read_program

OPERATIONS = (FULL.keys() - HALF_SUMS - {"polynomial"}) | SATURATING.keys() | {"sqrt"}
"""Operations that lose digits or overflow in half precision: all that autocast keeps in float32, and more.

JAX 0.12 writes a derivative with a polynomial that JAX 0.10 computes by multiplications.
"""

_ROUNDING = (
    having(Fact.ELEMENTWISE)
    - having(Fact.COMPARES, Fact.ANNOTATES, Fact.KEEPS, Fact.CHOOSES, Fact.EXACT, Fact.BITS)
    - {"add_any"}
)
"""Other arithmetic that rounds. The scope of an `add_any` depends on the order in which layers are called."""

_NO_KERNELS = {"link", "carry", "constant", "debug_callback", "debug_print"}.union(
    KNOWN.keys() - having(Fact.KERNEL, Fact.OUTSIDE), MATMULS
)
"""All other operations count by the dtypes of their arguments, also those of other libraries."""

_SMALL = ("int4", "uint4", "int8", "uint8", "int2", "uint2")


class Described(NamedTuple):
    """One operation in the words of a lock."""

    kind: str  # a key of `_AMOUNTS`
    what: str
    size: int = 0  # elements that it casts, adds to one or makes, or bytes that it sends


class Tally:
    """Facts by place, with counts and sizes added up, and the line of the first operation."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, Described], list[Any]] = {}

    def add(self, path: str, direction: Pass, described: Described, times: int, find_source: Callable[[], str]) -> None:
        kind, what, size = described
        key = path, f"{direction} {kind}", Described(kind, what)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0, 0, 0, find_source()]
        counts[0] += times
        counts[1] += times * size
        counts[2] = max(counts[2], size)

    def list_rows(self) -> list[LockRow]:
        return [
            LockRow(path, fact, what, _AMOUNTS[kind](count, total, largest), source)
            for (path, fact, (kind, what, _)), (count, total, largest, source) in self._counts.items()
        ]


def _times(count: int, *_: int) -> str:
    return f"{count:,} time{'' if count == 1 else 's'}"


def _elements(count: int) -> str:
    return f"{count:,} element{'' if count == 1 else 's'}"


_AMOUNTS: dict[str, Callable[[int, int, int], str]] = {
    "matmul": _times,
    "operation": _times,
    "kernel": _times,
    "cast": lambda count, total, largest: _elements(total),
    "sum": lambda count, total, largest: _times(count) + (f", of up to {_elements(largest)}" if largest > 1 else ""),
    "arithmetic": lambda count, total, largest: f"arrays of up to {_elements(largest)}",
    "collective": lambda count, total, largest: f"{_times(count)}, {total:,} bytes",
}
"""How a lock words the count, the total size and the largest size of each kind of fact."""


def read_rows(program: Jaxpr, find_place: FindPlace, platform: str) -> list[LockRow]:
    """Lists the facts of the operations of a jaxpr, as a platform runs it."""
    tally, communicates = Tally(), False
    for step in walk_with_kernels(program, live_only=True, all_results=False, platform=platform):
        if not step.trips:
            continue
        communicates = communicates or step.name in PRIMITIVES
        described = _describe(step, platform)
        if described is not None:
            find_source = functools.partial(_find_source, step)
            tally.add(*find_place(step.scope), described, count_runs(step), find_source)
    if communicates:
        add_collectives(tally, read_program(program, find_place, platform)[0])
    return tally.list_rows()


def _find_source(step: Step) -> str:
    return find_line(find_origin(step))


def add_collectives(tally: Tally, rows: Iterable[Collective]) -> None:
    for row in (row for row in rows if row.count):
        name = " ".join(filter(None, (row.kind, row.reduction)))
        axes = ", ".join(map(str, row.axes)) or f"{row.devices} devices"
        described = Described("collective", f"{name} in {row.dtype} over {axes}", row.bytes // row.count)
        tally.add(row.path, row.direction, described, row.count, lambda row=row: row.source)


def _describe(step: Step, platform: str) -> Described | None:
    """Describes a step, if its numbers depend on dtypes."""
    name = step.name
    if name == "convert_element_type":
        if step.operands[0].aval.weak_type and not step.operands[0].aval.shape:
            return None  # a Python number
        return describe_cast(_name_dtype(step.operands[0]), _name_dtype(step.results[0]), _max_size(step.results))
    if name in MATMULS:
        return _describe_matmul_step(step, platform)
    dtypes = [dtype for atom in (*step.operands, *step.results) if is_inexact(dtype := _name_dtype(atom))]
    if not dtypes:
        return None
    widest = max(dtypes, key=count_bits)
    if name == "reduce_precision":
        params = step.eqn.params
        return describe_rounding(widest, params["exponent_bits"], params["mantissa_bits"], _max_size(step.results))
    if name in HALF_SUMS:
        found = find_sum(step)
        numbers = 1 if found is None else found.numbers  # a scatter of rows that meet in no element is not counted
        return Described("sum", f"{name} in {widest}", numbers) if found or name.startswith("scatter") else None
    if name in DEVICE_SUMS and all(isinstance(axis, int) for axis in step.eqn.params.get("axes", [""])):
        return Described("sum", f"{name} in {widest}", 1)  # over an axis of vmap
    # An iota in half precision rounds: bfloat16 has no odd integers above 256.
    if name in OPERATIONS or (name == "iota" and count_bits(widest) < 32):
        return Described("operation", f"{name} in {widest}")
    if name not in _NO_KERNELS:
        read, made = (" ".join(map(_name_dtype, atoms)) for atoms in (step.operands, step.results))
        return Described("kernel", f"{name} {read} -> {made}")
    size = _max_size(step.results)
    is_seen = size > 1 or count_bits(widest) < 32
    return Described("arithmetic", f"in {widest}", size) if name in _ROUNDING and is_seen else None


def describe_cast(source: str, target: str, size: int) -> Described | None:
    """Describes a cast from or to a floating dtype. Skips casts of bool, and of wide integers to float32."""
    if source == target or not (is_inexact(source) or is_inexact(target)):
        return None
    is_exact = source == "bool" or (source not in _SMALL and not is_inexact(source) and count_bits(target) > 16)
    return None if is_exact or target == "bool" else Described("cast", f"{source} -> {target}", size)


def describe_rounding(dtype: str, exponent: int, mantissa: int, size: int) -> Described | None:
    """Describes a `reduce_precision`. Skips it where it changes nothing, as what JAX writes into a remat."""
    own = jnp.finfo(dtype)
    is_rounded = exponent < own.nexp or mantissa < own.nmant
    return Described("cast", f"{dtype} -> e{exponent}m{mantissa}", size) if is_rounded else None


def is_inexact(dtype: str) -> bool:
    """True for the names of floating and complex dtypes."""
    return dtype.startswith(("float", "bfloat", "complex")) and dtype != "float0"


def _describe_matmul_step(step: Step, platform: str) -> Described:
    read = map(_name_dtype, step.operands[:2])
    return describe_matmul(read, _name_dtype(step.results[0]), read_precision(step.eqn), platform)


def describe_matmul(operands: Iterable[str], result: str, precision: str | None, platform: str) -> Described:
    """Describes a matmul by the dtypes of its operands, in any order, and what the platform multiplies in."""
    read = sorted(operands)
    dtype = max(read, key=lambda name: (is_inexact(name), count_bits(name)))
    what = f"{' x '.join(read)} -> {result}"
    effective = find_effective_precision(dtype, precision, platform)
    what += f", precision {precision}" if precision else ""
    return Described("matmul", what if effective == dtype else f"{what}, multiplied in {effective}")


def _name_dtype(atom: Any) -> str:
    dtype = getattr(atom.aval, "dtype", None)
    return str(atom.aval) if dtype is None else _spell_dtype(dtype)


_spell_dtype = functools.cache(str)  # which takes longer than all else that is asked of an operation


def _max_size(atoms: Iterable[Any]) -> int:
    return max((math.prod(shape_of(atom)) for atom in atoms), default=0)


def list_argument_rows(arguments: Any, name_path: Callable[[Any], str]) -> Iterator[LockRow]:
    """Yields rows for arrays, quantized weights and loss scales among arguments."""
    is_one = lambda leaf: isinstance(leaf, QuantizedArray | LossScale)
    for path, leaf in jax.tree_util.tree_flatten_with_path(arguments, is_leaf=is_one)[0]:
        if isinstance(leaf, LossScale):
            yield LockRow(name_path(path), "argument scale", type(leaf).__name__, spell_settings(leaf))
        elif isinstance(leaf, QuantizedArray):
            yield LockRow(name_path(path), "argument quantized", f"{leaf.format} of {leaf.dtype}", spell_shape(leaf))
        elif is_array(leaf) and has_precision(leaf.dtype):
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # float32 for float64 without x64
            yield LockRow(name_path(path), "argument", str(dtype), spell_shape(leaf))


def has_precision(dtype: Any) -> bool:
    """True for floating and complex dtypes, and for integers of at most 8 bits, which may be quantized values."""
    return str(dtype) in _SMALL or is_inexact(str(dtype))


def spell_shape(array: Any) -> str:
    return f"shape {'x'.join(map(str, array.shape)) or 'scalar'}"
