"""Facts about an array: its bounds, and how it relates to other arrays."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jax.extend.core import JaxprEqn

from ..._base import is_floating_dtype
from ..._jaxpr import Fact, array_dtype, having
from ._faults import Around, Fault
from ._intervals import INF, Interval, hull, next_above

Layout = tuple[int | None, ...]
"""For each axis of an array, the axis of another array that it goes along; None if its elements repeat along it."""


class Relation(NamedTuple):
    """The array bounds the elements x of another array that lie in the same place, up to repetition."""

    # "max": it is the largest of these x, "min": the smallest, "above": at least each of them, "square": at least
    # factor * x**2, "root": at least factor * abs(x), "reciprocal": its magnitude is at most 1 / (factor * abs(x)).
    kind: Literal["max", "min", "above", "square", "root", "reciprocal"]
    term: int  # of the other array
    layout: Layout
    factor: float = 1.0


class Test(NamedTuple):
    """A comparison of the elements of an array with bounds. It holds for the elements that a boolean selects."""

    name: str
    view: tuple[int, Layout]  # of the array; the layout is from the axes of the boolean
    dtype: Any
    computed: Interval
    exact: Interval


Tests = tuple[Sequence[Test], Sequence[Test]]
"""The tests that hold where a boolean is false, and where it is true."""


class FaultOrigin(NamedTuple):
    """The equation that computed an array, and the faults that it may have, by the order of their discovery."""

    eqn: JaxprEqn
    operands: Sequence["Bounds"]  # none if it is not followed
    around: Around
    faults: dict[int, Fault]


class Bounds(NamedTuple):
    """Knowledge of an array. Equal arrays have equal terms. The peaks of the intervals are of slices along `axes`."""

    computed: Interval  # with rounding
    exact: Interval  # for the same inputs, without rounding
    term: int
    shape: tuple[int, ...]
    axes: frozenset[int] = frozenset()
    relation: Relation | None = None
    tests: Tests = ((), ())
    moved: tuple[int, Layout] | None = None  # of an array with the elements of another one in other places: its term
    lost: Fault | None = None  # of a subtraction that may lose all bits, if this is its result times constants
    origin: FaultOrigin | None = None

    def drop_peak(self) -> "Bounds":
        computed, exact = (Interval(one.low, one.high) for one in (self.computed, self.exact))
        return self._replace(computed=computed, exact=exact, axes=frozenset())

    @property
    def view(self) -> tuple[int, Layout]:
        """The term of the array whose elements these are, and which of its axes these axes go along."""
        return self.moved or (self.term, tuple(range(len(self.shape))))

    @property
    def constant(self) -> float | None:
        """The value of an array whose elements are all one known value, else None."""
        value = self.computed.low
        return value if self.computed[:2] == self.exact[:2] == (value, value) else None


def join(values: Sequence[Bounds], term: int, shape: tuple[int, ...]) -> Bounds:
    """Bounds an array that is, or consists of, one of some arrays."""
    computed, exact = hull(*(value.computed for value in values)), hull(*(value.exact for value in values))
    return Bounds(computed, exact, term, shape, lost=find_lost(values)).drop_peak()


def find_alias(eqn: JaxprEqn, operands: Sequence[Bounds]) -> Bounds | None:
    """Returns the operand that an equation returns unchanged, if it does. Of several results, each is an operand."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "select_n" and operands[0].constant is not None:
        return operands[1 + int(operands[0].constant)]
    if name == "convert_element_type":
        old, new = (array_dtype(atom) for atom in (eqn.invars[0], eqn.outvars[0]))
        is_wider = is_floating_dtype(old) and new.name in ("float32", "float64") and new.itemsize > old.itemsize
        return operands[0] if is_wider or old == new else None
    if name in ("add", "sub", "mul", "div"):
        is_neutral = operands[1].constant == (name in ("mul", "div"))
    elif name in ("max", "min"):
        operands = operands if operands[0].constant is None else operands[::-1]
        x, y = operands if name == "max" else operands[::-1]
        is_neutral = x.computed.low >= y.computed.high and x.exact.low >= y.exact.high
    else:
        is_identity = name in _IDENTITIES and len(eqn.outvars) == len(operands)
        is_neutral = is_identity or (name == "integer_pow" and eqn.params["y"] == 1)
    return operands[0] if is_neutral and operands[0].shape == getattr(out, "shape", ()) else None


_IDENTITIES = having(Fact.ANNOTATES) | {"copy", "copy_p"}


def relate_operands(eqn: JaxprEqn, operands: Sequence[Bounds]) -> Interval | None:
    """Bounds a result by the relation of two operands, which intervals alone do not know."""
    name = eqn.primitive.name
    if len(operands) != 2:
        return None
    x, y = operands
    if x.term == y.term and x.shape == y.shape and name in _OF_ITSELF:
        return _OF_ITSELF[name]
    for one, other in ((x, y), (y, x)):
        relation, (term, layout) = other.relation, one.view
        if relation is None or relation.term != term or not _is_aligned(relation.layout, layout):
            continue
        if name == "sub" and relation.kind in ("max", "min", "above"):
            is_positive = (relation.kind != "min") == (one is y)
            has_peak = relation.kind == "max" and one is x
            return Interval(0.0, INF) if is_positive else Interval(-INF, 0.0, 0.0 if has_peak else -INF)
        if (name, relation.kind) == ("mul", "reciprocal") or ((name, relation.kind) == ("div", "root") and one is x):
            return Interval(-1 / relation.factor, 1 / relation.factor)
    return None


_OF_ITSELF = {
    "sub": Interval(0.0, 0.0), "div": Interval(1.0, 1.0), "mul": Interval(0.0, INF),
    **dict.fromkeys(("ne", "lt", "gt"), Interval(0.0, 0.0)), **dict.fromkeys(("eq", "le", "ge"), Interval(1.0, 1.0)),
}  # fmt: skip


def _is_aligned(layout: Layout, other: Layout) -> bool:
    return all(axis is None or axis == along for axis, along in zip(layout, other, strict=False))


def refine(value: Bounds, tests: Sequence[Test], places: Layout) -> Bounds:
    """Narrows the bounds of an array to its elements that pass tests. `places`: the axes of the tests in it."""
    view = move_view(value.view, places)
    for test in tests:
        if test.view == view:
            limit = functools.partial(next_above, test.dtype)
            computed = _refine(value.computed, test.name, test.computed, limit)
            exact = _refine(value.exact, test.name, test.exact, float)
            if (computed[:2], exact[:2]) != (value.computed[:2], value.exact[:2]):
                value = value._replace(computed=computed, exact=exact, axes=frozenset())
    return value


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _refine(x: Interval, name: str, bound: Interval, find_above: Callable[[float], float]) -> Interval:
    low, high = x.low, x.high
    if name in ("gt", "ge", "eq"):
        low = max(low, find_above(bound.low) if name == "gt" else bound.low)
    if name in ("lt", "le", "eq"):
        high = min(high, -find_above(-bound.high) if name == "lt" else bound.high)
    if name == "ne":
        low = find_above(low) if low == bound.low == bound.high else low
        high = -find_above(-high) if high == bound.low == bound.high else high
    return Interval(low, high) if low <= high else x


def keep_one_peak(eqn: JaxprEqn, operands: Sequence[Bounds]) -> list[Bounds]:
    """Drops all peaks but the first one, and that one too if a reduction keeps axes of its slices."""
    axes = set(eqn.params["axes"]) if eqn.primitive.name in _REDUCTIONS else None
    kept = [one for one in operands if one.axes and (axes is None or one.axes <= axes)][:1]
    return [one if kept and one is kept[0] else one.drop_peak() for one in operands]


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")


def describe(eqn: JaxprEqn, operands: Sequence[Bounds], result: Bounds, eps: float) -> Bounds:
    """Adds to the intervals of a result what else is known. `eps`: relative error of rounding it."""
    layouts = [find_layout(eqn, one, result.shape) for one in operands]
    axes = _find_axes(operands, layouts, len(result.shape)) if result.computed.peak > -INF else frozenset()
    result = result._replace(axes=axes) if axes else result.drop_peak()
    moved = None
    if eqn.primitive.name in MOVING and layouts[0] is not None:
        moved = move_view(operands[0].view, layouts[0])
    relation = _relate(eqn, operands, layouts, eps)
    return result._replace(
        relation=relation, tests=_find_tests(eqn, operands, layouts), moved=moved, lost=_keep_lost(eqn, operands)
    )


def compose(outer: Layout, layout: Layout) -> Layout:
    return tuple(None if axis is None else outer[axis] for axis in layout)


def find_layout(eqn: JaxprEqn, x: Bounds, shape: tuple[int, ...]) -> Layout | None:
    """Finds the axes of an operand that the axes of a result go along; None if it moves elements otherwise."""
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim":
        axes = {out: i for i, out in enumerate(params["broadcast_dimensions"]) if x.shape[i] == shape[out]}
        return tuple(axes.get(i) for i in range(len(shape)))
    if name == "transpose":
        return tuple(params["permutation"])
    if name in _REDUCTIONS:
        return tuple(axis for axis in range(len(x.shape)) if axis not in params["axes"])
    if name in ("reshape", "squeeze"):
        old, new = ([i for i, size in enumerate(sizes) if size != 1] for sizes in (x.shape, shape))
        if [x.shape[i] for i in old] != [shape[i] for i in new]:
            return None
        axes = dict(zip(new, old, strict=True))
        return tuple(axes.get(i) for i in range(len(shape)))
    if name in _ELEMENTWISE and not x.shape:
        return (None,) * len(shape)
    if name in _ELEMENTWISE and len(x.shape) == len(shape):
        return tuple(i if size == shape[i] else None for i, size in enumerate(x.shape))
    return None


_ELEMENTWISE = having(Fact.ELEMENTWISE) - having(Fact.BITS)


def _find_axes(operands: Sequence[Bounds], layouts: Sequence[Layout | None], ndim: int) -> frozenset[int]:
    """Finds the axes of the slices with a peak: of the operand with one, or of a maximum that was subtracted."""
    for one, layout in zip(operands, layouts, strict=True):
        if one.axes:
            return frozenset(i for i, axis in enumerate(layout or ()) if axis in one.axes)
    layout = next(one.relation.layout for one in operands[::-1] if one.relation)
    return frozenset(range(ndim)).difference(i for i, axis in enumerate(layout) if axis is not None)


def _relate(eqn: JaxprEqn, operands: Sequence[Bounds], layouts: Sequence[Layout | None], eps: float) -> Relation | None:
    """Finds how a result bounds the elements of an array that it was computed from."""
    name = eqn.primitive.name
    if not operands:
        return None
    x, (term, here) = operands[0], operands[0].view
    is_product = name == "mul" and x.term == operands[1].term and x.shape == operands[1].shape
    if is_product or name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
        return Relation("square", term, here, 1 - eps)
    if name == "abs":
        return Relation("root", term, here)
    if name in ("reduce_max", "reduce_min") and not (x.relation and x.relation.kind == "root"):
        return Relation("max" if name == "reduce_max" else "min", term, compose(here, layouts[0] or ()))
    for i, (one, layout) in enumerate(zip(operands, layouts, strict=True)):
        if one.relation is not None and layout is not None:
            others = [*operands[:i], *operands[i + 1 :]]
            return _follow(eqn, one, others, i, compose(one.relation.layout, layout), eps)
    if name == "max" and layouts[0] is not None:
        return Relation("above", term, compose(here, layouts[0]))
    return None


def _follow(
    eqn: JaxprEqn, x: Bounds, others: Sequence[Bounds], place: int, layout: Layout, eps: float
) -> Relation | None:
    """Derives the relation of a result from the relation of one operand."""
    name, relation = eqn.primitive.name, x.relation
    if relation is None:
        return None
    moved, y = relation._replace(layout=layout), others[0] if others else x
    if name in MOVING:
        return moved
    if relation.kind in ("max", "above") and name == "add" and min(y.computed.low, y.exact.low) >= 0:
        return moved._replace(kind="above")
    if relation.kind == "reciprocal" and name == "mul":
        largest = max(map(abs, (*y.computed[:2], *y.exact[:2])))
        return moved._replace(factor=relation.factor * (1 - eps) / largest) if largest else None
    if relation.kind not in ("square", "root") or x.computed.low < 0:
        return None
    if name in ("reduce_sum", "reduce_max", "max"):
        return moved  # a sum of positive terms is at least each term, with rounding too
    if name in ("sqrt", "rsqrt") and relation.kind == "square":
        kind = "root" if name == "sqrt" else "reciprocal"
        return moved._replace(kind=kind, factor=math.sqrt(relation.factor) * (1 - eps))
    factor = relation.factor * (1 - eps)
    if name == "convert_element_type" or (name == "add" and min(y.computed.low, y.exact.low) >= 0):
        return moved._replace(factor=factor)
    if name == "mul" and min(y.computed.low, y.exact.low) > 0:
        return moved._replace(factor=factor * min(y.computed.low, y.exact.low))
    if name == "div" and place == 0 and min(y.computed.low, y.exact.low) > 0:
        return moved._replace(factor=factor / max(y.computed.high, y.exact.high))
    return None


MOVING = having(Fact.KEEPS)


def is_followed(eqn: JaxprEqn) -> bool:
    """True if the operands of an equation matter only for the elements of its result that matter."""
    name = eqn.primitive.name
    return (name in MOVING or name in _ELEMENTWISE) and len(eqn.outvars) == 1


def _find_tests(eqn: JaxprEqn, operands: Sequence[Bounds], layouts: Sequence[Layout | None]) -> Tests:
    """Finds the tests of other arrays that hold where a boolean is false, and where it is true."""
    name, first = eqn.primitive.name, layouts[0] if layouts else None
    if name in _MIRRORED and first is not None and (second := layouts[1]) is not None:
        x = operands[0]._replace(moved=move_view(operands[0].view, first))
        y = operands[1]._replace(moved=move_view(operands[1].view, second))
        pairs, dtype = [(name, x, y), (_MIRRORED[name], y, x)], array_dtype(eqn.invars[0])
        fails = [_find_test(_OPPOSITE[how], one, other, dtype) for how, one, other in pairs]
        return fails, [_find_test(how, one, other, dtype) for how, one, other in pairs]
    sides = [move_tests(one.tests, layout) for one, layout in zip(operands, layouts, strict=True)]
    if name == "not":
        return sides[0][1], sides[0][0]
    if name in ("and", "or"):
        both = [*sides[0][name == "and"], *sides[1][name == "and"]]
        return ((), both) if name == "and" else (both, ())
    return sides[0] if name in MOVING else ((), ())


def _find_test(name: str, x: Bounds, y: Bounds, dtype: Any) -> Test:
    if name == "ne" and min(x.computed.low - y.computed.high, x.exact.low - y.exact.high) >= 0:
        name = "gt"
    if name == "ne" and min(y.computed.low - x.computed.high, y.exact.low - x.exact.high) >= 0:
        name = "lt"
    return Test(name, x.view, dtype, y.computed, y.exact)


def move_view(view: tuple[int, Layout], layout: Layout) -> tuple[int, Layout]:
    return view[0], compose(view[1], layout)


def move_tests(tests: Tests, layout: Layout | None) -> Tests:
    """Returns the tests of a boolean whose elements were moved."""
    if layout is None:
        return ((), ())
    no, yes = ([test._replace(view=move_view(test.view, layout)) for test in side] for side in tests)
    return no, yes


def _keep_lost(eqn: JaxprEqn, operands: Sequence[Bounds]) -> Fault | None:
    """Returns the fault of a lost difference if a result has no other terms or factors than constants."""
    name = eqn.primitive.name
    others = [one for one in operands if one.lost is None]
    scales = name in ("mul", "div") and all(one.constant is not None for one in others)
    return find_lost(operands) if scales or name in _KEEPING_LOST else None


_KEEPING_LOST = having(Fact.MOVES, Fact.KEEPS) | {
    "select_n", "convert_element_type", "neg", "abs", "square", "integer_pow", "reduce_max", "reduce_min",
}  # fmt: skip


def find_lost(operands: Sequence[Bounds]) -> Fault | None:
    """Returns the fault of the first operand that is a lost difference."""
    return next((one.lost for one in operands if one.lost), None)
