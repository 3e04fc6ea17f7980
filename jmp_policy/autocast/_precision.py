"""The precision of an operation, and matmuls that return float32."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._base import at_least_float32
from .._jaxpr import (
    ROUNDED,
    AbstractValue,
    Atom,
    Fact,
    JaxprBuilder,
    Value,
    body_of,
    float_dtype,
    float_dtype_of,
    having,
    multiplies_only,
    shape_of,
)
from ..quant import Bilinear, Convolution, Dot, label_convolution, label_dot, wide_product
from . import _tables
from ._dataflow import is_applied_to_each
from ._place import FLOAT64, EquationPlace
from ._promotion import FULL_LEVEL, TRACED_LEVEL, CastLevel, Numbers, is_sum
from ._tables import KEEPING_SUMS, SATURATING, Precision
from ._weight_products import WideRaggedProduct, describe_wide_ragged_product

_MOST = 8

_CHOOSING = (having(Fact.MOVES, Fact.ANNOTATES) - {"gather"}) | {"max", "min", "reduce_max", "reduce_min", "select_n"}
"""Primitives whose outputs consist of elements of their operands. `gather` may insert nan."""

_COMPUTING: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "div": operator.truediv,
    "mul": operator.mul,
    "neg": operator.neg,
    "sqrt": np.sqrt,
    "sub": operator.sub,
}


def find_numbers(eqn: JaxprEqn, operands: Sequence[Numbers]) -> Numbers:
    """Finds the distinct elements of the outputs, given the elements of all floating operands."""
    if not operands or not all(operands):
        return ()
    if eqn.primitive.name in _CHOOSING:
        found = set(itertools.chain(*operands))
    elif eqn.primitive.name in _COMPUTING:
        with np.errstate(all="ignore"):
            compute, as_number = _COMPUTING[eqn.primitive.name], _choose_number_type(eqn)
            found = {float(compute(*map(as_number, numbers))) for numbers in itertools.product(*operands)}
    else:
        return ()
    return tuple(sorted(found)) if len(found) <= _MOST and not any(map(np.isnan, found)) else ()


def _choose_number_type(eqn: JaxprEqn) -> type:
    return at_least_float32(float_dtype(eqn.invars[0]) or np.dtype(np.float32)).type


_FACTORS = frozenset(("mul", "div", "rem"))
_LARGEST_MASK = -1000.0


def is_lost(numbers: Numbers, eqn: JaxprEqn, position: int, dtype: np.dtype, large: float) -> bool:
    """True if rounding a constant operand to `dtype` would change its purpose, such as an epsilon or a bound."""
    name = eqn.primitive.name
    sign = -1 if name == "sub" and position == 1 else 1
    return any(number and np.isfinite(number) and _is_lost(sign * number, name, dtype, large) for number in numbers)


def _is_lost(number: float, name: str, dtype: np.dtype, large: float) -> bool:
    finfo = jnp.finfo(dtype)
    is_in_range = float(finfo.smallest_normal) <= abs(number) <= float(finfo.max)  # the epsilon 1e-8 is 0 in float16
    if name in _FACTORS:
        return not is_in_range
    # Numbers far below zero, and the maximum of a dtype, mask elements. Other large numbers may be values.
    is_mask = number < -float(jnp.finfo(jnp.float16).max) or number >= float(jnp.finfo(jnp.bfloat16).max)
    is_added = name in ("add", "sub", "add_any")
    if is_mask and not (is_added and dtype == jnp.float16):
        return False
    if not is_in_range:
        return True
    rounded = _round_number(number, dtype)
    if not is_added:  # a bound, which the output may violate, or an element of the output
        return rounded != number
    # A sum with a large number keeps little of the other operand. 1 - 1e-7 avoids 1, where a logarithm of the
    # complement is infinite. Elsewhere, rounding a constant is as harmless as rounding an output.
    return (abs(number) > large and number > _LARGEST_MASK) or (rounded != number and abs(rounded) == 1)


def _round_number(number: float, dtype: np.dtype) -> float:
    with np.errstate(over="ignore"):
        return float(np.asarray(number, np.float64).astype(dtype))


def is_exact(numbers: Numbers, dtype: np.dtype) -> bool:
    """True if `dtype` represents all elements of a value exactly."""
    return bool(numbers) and all(_round_number(number, dtype) == number for number in numbers)


def clamp_masks(atom: Atom, numbers: Numbers, largest: float, eqn: JaxprEqn, body: JaxprBuilder) -> Atom:
    """Clamps a mask to `largest` in magnitude. An infinite mask stays infinite."""
    if not all(map(np.isfinite, numbers)):
        return atom
    for sign in (1, -1):
        if any(sign * number > largest for number in numbers):
            aval: Any = atom.aval
            atom = _clamp(atom, aval.dtype.type(sign * largest), eqn, body)
    return atom


def _clamp(atom: Atom, bound: Any, eqn: JaxprEqn, body: JaxprBuilder) -> Atom:
    if isinstance(atom, Literal):
        return Literal(bound, atom.aval)
    operation = lax.min if bound > 0 else lax.max
    pattern = jax.make_jaxpr(lambda x: operation(x, bound))(bound).eqns[0]
    clamp = eqn.replace(
        primitive=pattern.primitive, params=pattern.params, effects=pattern.effects, outvars=[type(atom)(atom.aval)]
    )
    [clamped] = body.append(clamp, [atom, Literal(bound, pattern.invars[1].aval)], [AbstractValue(None)])
    return clamped.atom


_ALL_FULL = dict.fromkeys(
    (Precision.LOW, Precision.FULL, Precision.WIDE, Precision.INFER, Precision.CLEAR), Precision.FULL
)
_INSIDE = {
    "full": _ALL_FULL,
    "wide": _ALL_FULL,
    "narrow": _ALL_FULL,
    "infer": {Precision.FULL: Precision.INFER},
    "low": dict.fromkeys((Precision.FULL, Precision.INFER), Precision.LOW),
    "traced": dict.fromkeys(Precision, Precision.TRACED),
}
"""Replaces precisions inside a function or scope with a treatment."""


_LOW, _FULL, _, _INFER, _CLEAR, _, _TRACED = Precision


class PrecisionFinder:
    """Finds the precision of each equation. `rows` are the user's primitives and their classes."""

    def __init__(self, rows: tuple[tuple[str, str], ...], compute_dtype: np.dtype, castable: frozenset[np.dtype]):
        found = {name: precision for precision in Precision for name in getattr(_tables, precision.name)}
        if jnp.finfo(compute_dtype).maxexp < 100:
            found |= dict.fromkeys(_tables.FULL_IN_FLOAT16, Precision.FULL)
        if FLOAT64 in castable:
            found |= dict.fromkeys(_tables.FULL_BESIDE_FLOAT64, Precision.FULL)
        self._classes = found | {name: Precision[precision.upper()] for name, precision in rows}
        self._compute, self._castable = compute_dtype, castable
        # A sum with a number of half as many bits as a dtype has keeps half of the bits of the other operand.
        self._large = 4096.0 if FLOAT64 in castable and compute_dtype.itemsize > 2 else 16.0

    def find(self, eqn: JaxprEqn, values: Sequence[Value], place: EquationPlace) -> Precision:
        may_mismatch = FLOAT64 in self._castable or eqn.primitive.name in _tables.LOW
        if not is_castable(eqn, self._castable) or (may_mismatch and _has_complex(eqn)):
            return _TRACED
        is_square = eqn.primitive.name == "mul" and eqn.invars[0] is eqn.invars[1]
        precision = self._classes.get("square" if is_square else eqn.primitive.name, _TRACED)
        # An outer product sums nothing, so it is a multiplication, but for those of a layer.
        if precision is _LOW and multiplies_only(eqn) and not _is_low(values):
            precision = _INFER
        # The enclosing function or scope wins over the tables, and constants that would be lost win over both.
        if place.treatment is not None:
            precision = _INSIDE[place.treatment].get(precision, precision)
        is_following = precision is _INFER or precision is _CLEAR
        return _FULL if is_following and self._needs_full(eqn, values, place) else precision

    def _needs_full(self, eqn: JaxprEqn, values: Sequence[Value], place: EquationPlace) -> bool:
        """True if the compute dtype would lose a constant operand (an epsilon or bound) or saturate the operation."""
        if place.steep and eqn.primitive.name in SATURATING:
            return any(value.kind.dtype == self._compute or is_sum(value.kind) for value in values)
        states = [(i, kind.state) for i, (_, kind) in enumerate(values) if kind.dtype is not None]
        constants = [(i, state.numbers) for i, state in states if state.numbers]
        if not constants or is_applied_to_each(eqn) or all(state.level is TRACED_LEVEL for _, state in states):
            return False
        return any(is_lost(numbers, eqn, i, self._compute, self._large) for i, numbers in constants)


def _is_low(values: Sequence[Value]) -> bool:
    """True if a low operation computed an operand, and no full one did."""
    levels = [kind.state.level for _, kind in values if kind.dtype is not None]
    return TRACED_LEVEL < max(levels, default=TRACED_LEVEL) < FULL_LEVEL


def is_castable(eqn: JaxprEqn, castable: frozenset[np.dtype]) -> bool:
    """True if an equation has floating arrays, and all are of `castable` dtypes."""
    return _are_castable((*[atom.aval for atom in eqn.invars], *[var.aval for var in eqn.outvars]), castable)


@functools.lru_cache(maxsize=4096)  # a jaxpr has few distinct ones
def _are_castable(avals: tuple[Any, ...], castable: frozenset[np.dtype]) -> bool:
    dtypes = set(map(float_dtype_of, avals)) - {None}
    return bool(dtypes) and dtypes <= castable


def _has_complex(eqn: JaxprEqn) -> bool:
    """True if a cast of the floating operands would not fit the complex ones or the results, as of an FFT."""
    dtypes = (getattr(atom.aval, "dtype", np.int32) for atom in (*eqn.invars, *eqn.outvars))
    return any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)


PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Matmuls of two operands. A `ragged_dot_general` has a third, the sizes of its groups."""


def keeps_sums(eqn: JaxprEqn, values: Sequence[Value]) -> bool:
    """True if an equation that follows its inputs takes float32 matmul outputs uncast."""
    name = eqn.primitive.name
    if name in ("mul", "div"):  # linear if the factor is a number, such as a temperature
        factors = values if name == "mul" else values[1:]
        return any(value.kind.dtype is not None and value.kind.state.numbers for value in factors)
    if name in ("add", "sub", "add_any"):  # a bias, not a residual stream, which norms would keep in float32
        return sum(TRACED_LEVEL < value.kind.state.level < FULL_LEVEL for value in values) == 1
    return name in KEEPING_SUMS


def cast_value(value: Value, kind: AbstractValue, eqn: JaxprEqn, body: JaxprBuilder) -> Value:
    return Value(body.cast_once(value.atom, kind.dtype, eqn), kind)


def round_sum(value: Value, dtype: np.dtype, eqn: JaxprEqn, body: JaxprBuilder) -> Value:
    """Casts the float32 output of a matmul down to `dtype`; returns any other value unchanged."""
    return cast_value(value, as_low(value.kind, dtype), eqn, body) if is_sum(value.kind) else value


def note_rounding(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation for whose sake a rule of the user rounds a value, so that the audit finds the cast."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(ROUNDED)))


def as_low(kind: AbstractValue, dtype: np.dtype) -> AbstractValue:
    """Returns the kind of a value after `round_sum`."""
    return AbstractValue(dtype, kind.state._replace(level=CastLevel.LOW)) if is_sum(kind) else kind


def write_product(
    product: Callable[..., jax.Array],
    eqn: JaxprEqn,
    atoms: Sequence[Atom],
    kind: AbstractValue,
    body: JaxprBuilder,
) -> list[Value]:
    """Writes a hashable function of both operands in the place of a matmul; `kind` is of its output."""
    program = trace_product(product, tuple(atom.aval for atom in atoms), eqn.ctx)
    return [write_program(program, eqn, atoms, body)[0]._replace(kind=kind)]


def write_program(program: Jaxpr, eqn: JaxprEqn, atoms: Sequence[Atom], body: JaxprBuilder) -> list[Value]:
    """Writes the equations of a jaxpr in the place of an equation, whose source line they get."""
    values: dict[Atom, Atom] = dict(zip(program.invars, atoms, strict=True))
    for each in program.eqns:
        source = each.source_info.replace(
            traceback=eqn.source_info.traceback,
            name_stack=eqn.source_info.name_stack + each.source_info.name_stack,
        )
        outvars = [Var(var.aval) for var in each.outvars]
        here = each.replace(outvars=outvars, source_info=source)
        read = [atom if isinstance(atom, Literal) else values[atom] for atom in each.invars]
        results = body.append(here, read, [AbstractValue(float_dtype(var)) for var in outvars])
        values.update((var, result.atom) for var, result in zip(each.outvars, results, strict=True))
    return [Value(values[var], AbstractValue(float_dtype(var))) for var in program.outvars]


@dataclasses.dataclass(frozen=True)
class WideProduct:
    """A matmul as `wide_product`, which rounds float32 operands and has gradients in their dtype."""

    operation: Bilinear
    dtype: np.dtype
    compute_dtype: np.dtype

    def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
        return wide_product(self.operation, left, right, self.dtype, self.compute_dtype)


def make_wide_product(
    eqn: JaxprEqn, dtype: np.dtype, compute_dtype: np.dtype
) -> WideProduct | WideRaggedProduct | None:
    """Returns a matmul with float32 outputs in place of an equation, or None if it has no such form."""
    if eqn.primitive.name not in PRODUCTS:
        return describe_wide_ragged_product(eqn, dtype, compute_dtype)
    params = {key: value for key, value in eqn.params.items() if key != "preferred_element_type"}
    left, right = (len(shape_of(atom)) for atom in eqn.invars)
    if eqn.primitive.name == "dot_general":
        return WideProduct(label_dot(left, right, Dot(**params)), dtype, compute_dtype)
    given = tuple((key, value) for key, value in params.items() if key != "out_sharding" or value is not None)
    return WideProduct(label_convolution(left, Convolution(given)), dtype, compute_dtype)


@functools.lru_cache(maxsize=4096)
def trace_product(product: Callable[..., jax.Array], types: tuple[core.ShapedArray, ...], context: Any) -> Jaxpr:
    # The default precision must not replace the equation's.
    with jax.default_matmul_precision(None):
        if types[0].manual_axis_type.varying:
            return _trace_in_shard_map(product, types)
        with context.manager:
            return jax.make_jaxpr(product)(*types).jaxpr


def _trace_in_shard_map(product: Callable[..., jax.Array], types: Sequence[core.ShapedArray]) -> Jaxpr:
    """Traces a product of device-varying arrays, which exist only inside a `shard_map`."""
    inner = types[0].sharding.mesh
    manual = [name for name, kind in zip(inner.axis_names, inner.axis_types, strict=True) if kind == AxisType.Manual]
    mesh = inner.update_axis_types(dict.fromkeys(manual, AxisType.Auto))
    # The first axis of each operand is split over the devices that it varies over.
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
    program = body_of(eqn.params["jaxpr"])
    return program.replace(eqns=program.eqns[:-1], outvars=program.eqns[-1].invars)  # without `expand_dims`
