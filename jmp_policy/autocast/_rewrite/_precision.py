"""The precision of an operation, and products that return their sums in float32."""

import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._jaxpr import AbstractValue, Atom, Fact, JaxprBuilder, Value, body_of, float_dtype, having, multiplies_only
from ...quant._products import Bilinear, Convolution, Dot, label_convolution, label_dot, wide_product
from . import _tables
from ._place import COMPUTE_DTYPES, EquationPlace, Scope
from ._tables import KEEPING_SUMS, SATURATING, Precision

Numbers = tuple[float, ...]
"""The numbers that are all elements of a value; empty if they are not known, or too many."""

_MOST = 8


class Level(enum.IntEnum):
    """Why a value has its dtype; the greater wins where two meet.

    As in TensorFlow grappler's auto_mixed_precision, an operation stays in float32 because a float32-only operation
    made what it reads. A value that is merely float32, such as a bias, keeps nothing there.
    """

    TRACED = 0  # it came so: an argument, a parameter, a constant
    LOW = 1  # a low operation made it, or one that followed
    SUM = 2  # the same in float32, before it is rounded: what a product hands over under an accumulate dtype
    FULL = 3  # a full operation made it, or one that followed


class CastState(NamedTuple):
    """What autocast knows of a value beside its dtype.

    Attributes:
      level: its level.
      narrow: whether it is a result of a `narrow` function, to be cast where the next operation uses it.
      backward: whether a backward pass made it: a gradient, once something else uses it.
      numbers: the numbers that it consists of, if they are known.
      scope: the scope of the rule that it was made under, which says what it leaves as.
    """

    level: Level
    narrow: bool = False
    backward: bool = False
    numbers: Numbers = ()
    scope: Scope | None = None


def is_sum(kind: AbstractValue) -> bool:
    """Whether a value is the sum of a product in float32, which most of its users take in the compute dtype."""
    return kind.dtype == np.float32 and kind.state.level is Level.SUM


def join_states(kinds: Sequence[AbstractValue]) -> CastState:
    """The state of what is made of several values."""
    states = [kind.state for kind in kinds]
    level = max((state.level for state in states), default=Level.TRACED)
    return CastState(level, any(state.narrow for state in states), any(state.backward for state in states))


_CHOOSING = (having(Fact.MOVES, Fact.ANNOTATES) - {"gather"}) | {"max", "min", "reduce_max", "reduce_min", "select_n"}
"""Primitives whose results consist of elements of their operands. `gather` may fill with nan, which is none of them."""

_COMPUTING: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "mul": operator.mul,
    "neg": operator.neg,
    "sub": operator.sub,
}


def find_numbers(eqn: JaxprEqn, operands: Sequence[Numbers]) -> Numbers:
    """What the results of an equation consist of, where the numbers of its floating operands are known."""
    if not operands or not all(operands):
        return ()
    if eqn.primitive.name in _CHOOSING:
        found = set(itertools.chain(*operands))
    elif eqn.primitive.name in _COMPUTING:
        with np.errstate(all="ignore"):
            compute = _COMPUTING[eqn.primitive.name]
            found = {float(compute(*map(np.float32, numbers))) for numbers in itertools.product(*operands)}
    else:
        return ()
    return tuple(sorted(found)) if len(found) <= _MOST and not any(map(np.isnan, found)) else ()


_BOUNDS = frozenset(("max", "min", "clamp"))
_FACTORS = frozenset(("mul", "div", "rem"))


def is_lost(numbers: Numbers, eqn: JaxprEqn, position: int, dtype: np.dtype) -> bool:
    """Whether a constant operand of an equation would no longer mean in `dtype` what its author wrote it for.

    Args:
      numbers: the numbers that the operand consists of.
      eqn: the equation.
      position: which of its operands it is.
      dtype: the dtype that the equation would run in.
    """
    name = eqn.primitive.name
    sign = -1 if name == "sub" and position == 1 else 1
    return any(number and np.isfinite(number) and _is_lost(sign * number, name, dtype) for number in numbers)


def _is_lost(number: float, name: str, dtype: np.dtype) -> bool:
    smallest, largest = _find_range(dtype)
    is_in_range = smallest <= abs(number) <= largest  # 1e-8 in float16 is 0, and no longer an epsilon
    if name in _FACTORS:
        return not is_in_range
    if _is_mask(number):
        return False
    if not is_in_range:
        return True
    rounded = _round(number, dtype)
    # A bound is a promise about the result, which a rounded one breaks. Elsewhere one rounding does no more harm than
    # the rounding of any result, but for 1 - 1e-7: its author meant to stay clear of 1, where logarithms end.
    return rounded != number and (name in _BOUNDS or abs(rounded) == 1)


def _is_mask(number: float) -> bool:
    """Whether a number hides something, for which the largest one of any dtype is as good: far below zero, or a limit.

    A large positive one may be a value.
    """
    return number < -float(jnp.finfo(jnp.float16).max) or number >= float(jnp.finfo(jnp.bfloat16).max)


@functools.cache
def _find_range(dtype: np.dtype) -> tuple[float, float]:
    finfo = jnp.finfo(dtype)
    return float(finfo.smallest_normal), float(finfo.max)


def _round(number: float, dtype: np.dtype) -> float:
    with np.errstate(over="ignore"):
        return float(np.asarray(number, np.float32).astype(dtype))


def is_exact(numbers: Numbers, dtype: np.dtype) -> bool:
    """Whether a value consists of numbers that a dtype has."""
    return bool(numbers) and all(_round(number, dtype) == number for number in numbers)


def clamp_masks(atom: Atom, numbers: Numbers, largest: float, eqn: JaxprEqn, body: JaxprBuilder) -> Atom:
    """Clamps a value whose finite numbers reach above `largest`: what is beyond in a mask becomes the largest number.

    An infinite mask stays infinite.
    """
    if not all(map(np.isfinite, numbers)):
        return atom
    for sign in (1, -1):
        if any(sign * number > largest for number in numbers):
            atom = _clamp(atom, np.float32(sign * largest), eqn, body)
    return atom


def _clamp(atom: Atom, bound: np.float32, eqn: JaxprEqn, body: JaxprBuilder) -> Atom:
    if isinstance(atom, Literal):
        return Literal(bound, atom.aval)
    pattern = _trace_clamp(bool(bound > 0))
    clamp = eqn.replace(
        primitive=pattern.primitive, params=pattern.params, effects=pattern.effects, outvars=[type(atom)(atom.aval)]
    )
    [clamped] = body.append(clamp, [atom, Literal(bound, pattern.invars[1].aval)], [AbstractValue(None)])
    return clamped.atom


@functools.cache
def _trace_clamp(upper: bool) -> JaxprEqn:
    """An equation that bounds float32 numbers, as JAX would trace it."""
    operation = lax.min if upper else lax.max
    return jax.make_jaxpr(lambda x: operation(x, np.float32(1)))(np.float32(0)).eqns[0]


_ALL_FULL = dict.fromkeys(
    (Precision.LOW, Precision.FULL, Precision.WIDE, Precision.INFER, Precision.CLEAR), Precision.FULL
)
_INSIDE = {
    "full": _ALL_FULL,
    "narrow": _ALL_FULL,
    "infer": {Precision.FULL: Precision.INFER},
    "low": dict.fromkeys((Precision.FULL, Precision.INFER), Precision.LOW),
    "traced": dict.fromkeys(Precision, Precision.TRACED),
}
"""What the classes become inside of a function that is treated as one operation."""


class PrecisionFinder:
    """Finds the precision of each equation.

    Args:
      rows: the user's primitives, each with its class.
      compute_dtype: the dtype of low operations.
    """

    def __init__(self, rows: tuple[tuple[str, str], ...], compute_dtype: np.dtype):
        self._classes = _classify_primitives(rows, compute_dtype)
        self._compute = compute_dtype

    def find(self, eqn: JaxprEqn, values: Sequence[Value], place: EquationPlace) -> Precision:
        """The precision of an equation that reads certain values in a place."""
        if not is_castable(eqn):
            return Precision.TRACED
        # What the tables say of the operation by itself; an outer product sums nothing, and is a multiplication.
        precision = self._classes.get(_name_operation(eqn), Precision.TRACED)
        if precision is Precision.LOW and multiplies_only(eqn):
            precision = Precision.INFER
        # The function or scope around it is above that, and what its constants must still mean is above both.
        if place.treatment is not None:
            precision = _INSIDE[place.treatment].get(precision, precision)
        if precision in (Precision.INFER, Precision.CLEAR) and self._is_too_fine(eqn, values, place):
            return Precision.FULL
        return precision

    def _is_too_fine(self, eqn: JaxprEqn, values: Sequence[Value], place: EquationPlace) -> bool:
        """Whether an equation that would follow its inputs makes a difference that the compute dtype has not."""
        if place.steep and eqn.primitive.name in SATURATING:
            return any(value.kind.dtype == self._compute or is_sum(value.kind) for value in values)
        states = [(i, value.kind.state) for i, value in enumerate(values) if value.kind.dtype is not None]
        constants = [(i, state.numbers) for i, state in states if state.numbers]
        if not constants or is_applied_to_each(eqn) or all(state.level is Level.TRACED for _, state in states):
            return False
        return any(is_lost(numbers, eqn, i, self._compute) for i, numbers in constants)


def is_castable(eqn: JaxprEqn) -> bool:
    """Whether there are floating arrays, and none that autocast leaves alone: float64, float8."""
    dtypes = {float_dtype(atom) for atom in (*eqn.invars, *eqn.outvars)} - {None}
    return bool(dtypes) and dtypes <= COMPUTE_DTYPES


def is_applied_to_each(eqn: JaxprEqn) -> bool:
    """Whether it does the same to each of several arrays, as barriers, sorts and collectives do."""
    return eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars) > 1


def _name_operation(eqn: JaxprEqn) -> str:
    """The row of the tables that an equation has: a product of a value with itself is its square."""
    is_square = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
    return "square" if is_square else eqn.primitive.name


@functools.cache
def _classify_primitives(rows: tuple[tuple[str, str], ...], compute_dtype: np.dtype) -> Mapping[str, Precision]:
    """The class of each primitive under a user's rows, where the compute dtype is this one."""
    found = {}
    for precision in Precision:
        found |= dict.fromkeys(getattr(_tables, precision.name), precision)
    if jnp.finfo(compute_dtype).maxexp < 100:
        found |= dict.fromkeys(_tables.FULL_IN_FLOAT16, Precision.FULL)
    return found | {name: Precision[precision.upper()] for name, precision in rows}


PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""What has a rule for its sums. A `ragged_dot_general` has none, and hands over its result in the compute dtype."""


def keeps_sums(eqn: JaxprEqn, values: Sequence[Value]) -> bool:
    """Whether an equation that follows its inputs keeps the sums among them as they are."""
    name = eqn.primitive.name
    if name in ("mul", "div"):  # by a number, as of a temperature, it is linear
        factors = values if name == "mul" else values[1:]
        return any(value.kind.dtype is not None and value.kind.state.numbers for value in factors)
    if name in ("add", "sub", "add_any"):  # of a bias; a residual stream would be kept in float32 for norms
        return sum(value.kind.state.level in (Level.LOW, Level.SUM) for value in values) == 1
    return name in KEEPING_SUMS


def is_stored(value: Value) -> bool:
    """Whether a product is to round an operand itself, and its gradient is to be float32: a weight, or data."""
    kind = value.kind
    return kind.dtype == np.float32 and kind.state.level is Level.TRACED and not kind.state.numbers


def round_sum(value: Value, dtype: np.dtype, eqn: JaxprEqn, body: JaxprBuilder) -> Value:
    """A sum in the compute dtype; any other value as it is."""
    if not is_sum(value.kind):
        return value
    return Value(body.cast_once(value.atom, dtype, eqn), as_low(value.kind, dtype))


def as_low(kind: AbstractValue, dtype: np.dtype) -> AbstractValue:
    """The kind of what is rounded to the compute dtype."""
    return AbstractValue(dtype, kind.state._replace(level=Level.LOW)) if is_sum(kind) else kind


def write_product(
    eqn: JaxprEqn, atoms: Sequence[Atom], kind: AbstractValue, compute_dtype: np.dtype, body: JaxprBuilder
) -> list[Value]:
    """Writes a product of operands in the compute dtype, or float32, whose sums and derivative are `wide_product`'s.

    Args:
      eqn: the product as it was traced.
      atoms: its operands; one in float32 is rounded inside, and has a gradient in float32.
      kind: of the result.
      compute_dtype: what both are rounded to.
      body: where it goes.
    """
    types = tuple(atom.aval for atom in atoms)
    product = _trace_product(eqn.primitive.name, tuple(eqn.params.items()), types, kind.dtype, compute_dtype, eqn.ctx)
    here = product.replace(outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx)
    return body.append(here, atoms, [kind])


@functools.lru_cache(maxsize=4096)
def _trace_product(
    name: str,
    params: tuple[tuple[str, Any], ...],
    types: tuple[core.ShapedArray, core.ShapedArray],
    dtype: np.dtype,
    compute_dtype: np.dtype,
    context: Any,
) -> JaxprEqn:
    operation = _describe_product(name, dict(params), types)
    product = lambda left, right: wide_product(operation, left, right, dtype, compute_dtype)
    # The precision is the equation's, whatever the default one is here.
    with jax.default_matmul_precision(None):
        if types[0].manual_axis_type.varying:
            return _trace_in_shard_map(product, types)
        with context.manager:
            [eqn] = jax.make_jaxpr(product)(*types).eqns
            return eqn


def _trace_in_shard_map(product: Callable[..., jax.Array], types: Sequence[core.ShapedArray]) -> JaxprEqn:
    """The equation of a product of values that differ between devices, as only in a `shard_map` JAX writes them."""
    inner = types[0].sharding.mesh
    manual = [name for name, kind in zip(inner.axis_names, inner.axis_types, strict=True) if kind == AxisType.Manual]
    mesh = inner.update_axis_types(dict.fromkeys(manual, AxisType.Auto))
    # Each operand is split along its first axis, over as many devices as it differs on.
    axes = tuple(name for name in manual if name in types[0].manual_axis_type.varying)
    count, split = math.prod(mesh.shape[name] for name in axes), PartitionSpec(axes)
    arguments = [
        type.update(
            shape=(count * type.shape[0], *type.shape[1:]),
            sharding=NamedSharding(mesh, type.sharding.spec),
            manual_axis_type=type.manual_axis_type.update(varying=frozenset()),
        )
        for type in types
    ]
    one = lambda *operands: jnp.expand_dims(product(*operands), 0)
    with jax.sharding.use_abstract_mesh(mesh):
        many = jax.shard_map(one, in_specs=split, out_specs=split, axis_names=set(manual))
        [eqn] = jax.make_jaxpr(many)(*arguments).eqns
    return body_of(eqn.params["jaxpr"]).eqns[0]


def _describe_product(name: str, params: dict[str, Any], types: Sequence[core.ShapedArray]) -> Bilinear:
    params = {key: value for key, value in params.items() if key != "preferred_element_type"}
    if name == "dot_general":
        return label_dot(types[0].ndim, types[1].ndim, Dot(**params))
    given = tuple((key, value) for key, value in params.items() if key != "out_sharding" or value is not None)
    return label_convolution(types[0].ndim, Convolution(given))
