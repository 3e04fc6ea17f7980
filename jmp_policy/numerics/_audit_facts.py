"""The facts that an audit keeps of each value: its origin and its kind."""

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal, Var

from .._jaxpr import DEVICE_SUMS, HALF, MOVING, Atom, Step, array_dtype, count_scattered_rows, float_dtype, is_float

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class Sign(enum.Flag):
    """The signs that a value is known not to have; zero has neither."""

    UNKNOWN = 0
    NOT_NEGATIVE = enum.auto()
    NOT_POSITIVE = enum.auto()
    ZERO = NOT_NEGATIVE | NOT_POSITIVE


class ValueFacts(NamedTuple):
    """Facts of a value."""

    # Where it comes from, if the program computed it from no floating argument: `ARGUMENT` for an argument itself, at
    # most moved or converted, `CONSTANT` or `OWN`; the empty string otherwise.
    given: str = ""
    constants: tuple[Any, ...] = ()  # the arrays and numbers that are among its elements, or were added to them
    widening: Step | None = None  # the conversion that widened it; it was at most moved since
    made: str = ""  # its name in the language of losses and norms, such as `"sum of exp"`, or the empty string
    narrowest: np.dtype | None = None  # the narrowest dtype in which that was made
    is_gradient: bool = False  # whether a backward pass made it; it was at most moved, converted or scaled since
    of_gradient: bool = False  # whether it was computed from what a backward pass made
    # The step of a backward pass that added it up in half precision; it was at most moved or converted since.
    summed: Step | None = None
    # The step that added a value computed from gradients to an argument in half precision; it was at most moved since.
    updated: Step | None = None
    carried: Jaxpr | None = None  # the body of the loop that carries it
    parts: tuple["Part", ...] = ()  # the only parts of it that are not zero, if it is known to be padded with zeros
    sign: Sign = Sign.UNKNOWN


Part = tuple[range, ...]
"""The indices of a part of an array, by axis."""

ARGUMENT, CONSTANT = "a parameter or argument", "a constant"
OWN = "an array that the program makes itself"
"""The program makes it of constants, keys and whole numbers: a range, noise, a table of angles, a mask."""

UNKNOWN = ValueFacts()


def is_lower(dtype: np.dtype | None, wide: np.dtype | None) -> bool:
    """True for half precision beside float32 or float64, and for float32 beside float64."""
    return dtype in (HALF if wide in {FLOAT32} else {*HALF, FLOAT32} if wide in {FLOAT64} else ())


def find_fact(atom: Atom, environment: dict[Var, ValueFacts]) -> ValueFacts:
    if isinstance(atom, Literal):
        sign = _read_sign(float(atom.val)) if is_float(atom) and np.ndim(atom.val) == 0 else Sign.UNKNOWN
        return ValueFacts(given=CONSTANT, constants=(atom.val,) if is_float(atom) else (), sign=sign)
    return environment.get(atom, UNKNOWN)


def describe_constant(value: Any) -> ValueFacts:
    if isinstance(value, Tracer) or not hasattr(value, "dtype"):
        return ValueFacts(given=ARGUMENT)
    return ValueFacts(given=CONSTANT, constants=(value,))


def derive_facts(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Sequence[ValueFacts]:
    if step.name == "optimization_barrier":  # as many as there are operands; newer JAX drops references
        kept = [fact for fact, atom in zip(facts, step.operands, strict=True) if array_dtype(atom) is not None]
        return facts if len(facts) == len(step.results) else kept
    if step.name in DEVICE_SUMS:
        kept = ("made", "narrowest", "is_gradient", "of_gradient")
        return [ValueFacts(**{name: getattr(fact, name) for name in kept}) for fact in facts]
    return [_derive_fact(step, facts, backward)] * len(step.results)


def _derive_fact(step: Step, facts: Sequence[ValueFacts], backward: bool) -> ValueFacts:
    if step.name == "convert_element_type":
        return _follow_conversion(step, facts[0])
    if step.name in MOVING:
        return _follow_move(step, facts)._replace(parts=_find_parts(step, facts))
    made, narrowest = _MAKING[step.name](step, facts) if step.name in _MAKING else "", None
    if made:
        dtypes = [float_dtype(atom) for atom in step.operands if not isinstance(atom, Literal)]
        narrowest = find_narrowest_dtype([*dtypes, *(fact.narrowest for fact in facts if fact.made)])
    gradient = backward or (step.name in ("mul", "div", "add") and any(fact.is_gradient for fact in facts))
    return ValueFacts(
        given=OWN if all(fact.given in (CONSTANT, OWN) for fact in facts) else "",
        constants=_join_constants(facts) if step.name in ("add", "sub") else (),
        made=made,
        narrowest=narrowest,
        is_gradient=gradient,
        of_gradient=backward or any(fact.of_gradient for fact in facts),
        summed=_find_half_sum(step, facts) if backward and step.name in _SUMS else None,
        parts=_join_parts(facts) if step.name == "add_any" else (),
        updated=step if not backward and _is_half_update(step, facts) else None,
        sign=_SIGNS[step.name](step, [fact.sign for fact in facts]) if step.name in _SIGNS else Sign.UNKNOWN,
    )


def _read_sign(number: float) -> Sign:
    return (Sign.NOT_NEGATIVE if number >= 0 else Sign.UNKNOWN) | (Sign.NOT_POSITIVE if number <= 0 else Sign.UNKNOWN)


def _join_signs(signs: Sequence[Sign]) -> Sign:
    return functools.reduce(operator.and_, signs)


def _negate(sign: Sign) -> Sign:
    return sign if sign in (Sign.UNKNOWN, Sign.ZERO) else sign ^ Sign.ZERO


def _multiply_signs(step: Step, signs: Sequence[Sign]) -> Sign:
    if step.operands[0] is step.operands[1]:
        return Sign.NOT_NEGATIVE
    if Sign.UNKNOWN in signs:
        return Sign.UNKNOWN
    return signs[0] if Sign.NOT_NEGATIVE in signs[1] else _negate(signs[0])


_SIGNS: dict[str, Callable[[Step, Sequence[Sign]], Sign]] = {
    **dict.fromkeys(("abs", "exp", "exp2", "logistic", "sqrt", "square"), lambda step, signs: Sign.NOT_NEGATIVE),
    **dict.fromkeys(("add", "reduce_max", "reduce_min", "reduce_sum"), lambda step, signs: _join_signs(signs)),
    **dict.fromkeys(("mul", "div"), _multiply_signs),
    "integer_pow": lambda step, signs: signs[0] if step.eqn.params["y"] % 2 else Sign.NOT_NEGATIVE,
    # One operand bounds the result from one side.
    "max": lambda step, signs: _join_signs(signs) | (signs[0] | signs[1]) & Sign.NOT_NEGATIVE,
    "min": lambda step, signs: _join_signs(signs) | (signs[0] | signs[1]) & Sign.NOT_POSITIVE,
    "neg": lambda step, signs: _negate(signs[0]),
    "sub": lambda step, signs: signs[0] & _negate(signs[1]),
}
"""By primitive: the sign of its result, given those of its operands."""


def find_narrowest_dtype(dtypes: Sequence[np.dtype | None]) -> np.dtype | None:
    """The dtype of the fewest bytes."""
    return min((dtype for dtype in dtypes if dtype is not None), key=lambda dtype: dtype.itemsize, default=None)


_SUMS = ("add_any", "scatter-add", "scatter_add")
"""How gradients of several uses become one. XLA adds them in their own dtype, where it reduces in a wider one."""


def _find_half_sum(step: Step, facts: Sequence[ValueFacts]) -> Step | None:
    """Returns the step that first summed this gradient in half precision: later casts cannot restore the bits."""
    # A scatter sums rows of an activation's gradient, which is already a sum wherever a residual stream forks, so its
    # inputs do not count. A scatter of one row, or in order, sums nothing, because each row was looked up once.
    scatters = step.name.startswith("scatter")
    in_order = scatters and (facts[1].made == "iota" or count_scattered_rows(step.eqn) == 1)
    # The gradients of `w[0]` and `w[1]`, padded with zeros, share no element.
    is_exact = in_order or (step.name == "add_any" and _join_parts(facts))
    if float_dtype(step.results[0]) in HALF and not is_exact:
        return step
    return None if scatters else next((fact.summed for fact in facts if fact.summed is not None), None)


def _find_parts(step: Step, facts: Sequence[ValueFacts]) -> tuple[Part, ...]:
    """Returns the part of an array that was padded with zeros, as the gradient of a slice is."""
    if step.name == "link":  # a scan stacks results, and a cond has one for each branch
        is_same = len(facts) == 1 and step.operands[0].aval.shape == step.results[0].aval.shape
        return facts[0].parts if is_same else ()
    if step.name != "pad" or not isinstance(step.operands[1], Literal) or step.operands[1].val != 0:
        return ()
    sides = zip(step.operands[0].aval.shape, step.eqn.params["padding_config"], strict=True)
    return (tuple(range(low, low + size * (inner + 1), inner + 1) for size, (low, _, inner) in sides),)


def _join_parts(facts: Sequence[ValueFacts]) -> tuple[Part, ...]:
    """Returns the parts of the sum of two padded arrays, or none if one of each may share an element."""
    first, second = (fact.parts for fact in facts)
    is_joint = any(not any(map(_is_apart, *pair)) for pair in itertools.product(first, second))
    return () if is_joint or not (first and second) else first + second


def _is_apart(one: range, other: range) -> bool:
    """True if two ranges of indices are known to have none in common."""
    interleave = one.step == other.step and (one.start - other.start) % one.step != 0
    return one.stop <= other.start or other.stop <= one.start or interleave


def _is_half_update(step: Step, facts: Sequence[ValueFacts]) -> bool:
    """True if a step adds a value that was computed from gradients to an argument in half precision."""
    if step.name not in ("add", "sub") or not any(fact.of_gradient for fact in facts):
        return False
    pairs = zip(step.operands, facts, strict=True)
    params = (
        atom if fact.widening is None else fact.widening.operands[0]
        for atom, fact in pairs
        if fact.given == ARGUMENT or (fact.carried and count_uses(atom, fact.carried) != 1)  # 1: a running sum
    )
    return any(float_dtype(atom) in HALF for atom in params)


def count_uses(atom: Atom, program: Jaxpr) -> int:
    """Counts the operands of equations that a value is, without those of sub-jaxprs."""
    return sum(atom is other for eqn in program.eqns for other in eqn.invars)


def _follow_conversion(step: Step, fact: ValueFacts) -> ValueFacts:
    source, target = float_dtype(step.operands[0]), float_dtype(step.results[0])
    # Whole numbers and masks become floating: they keep their origin, and a mask is remembered as one.
    if source is None:
        return ValueFacts(given=fact.given, made="truth" if step.operands[0].aval.dtype == bool else fact.made)
    narrowest = find_narrowest_dtype([fact.narrowest, target]) if fact.made else None
    # An upcast loses nothing. It is remembered, to find values that are cast down again or were upcast to compute with.
    if is_lower(source, target):
        return fact._replace(widening=step)
    return fact._replace(widening=None if source != target else fact.widening, narrowest=narrowest)


def _follow_move(step: Step, facts: Sequence[ValueFacts]) -> ValueFacts:
    pairs = zip(step.operands, facts, strict=True)
    floats = [fact for atom, fact in pairs if is_float(atom)]
    if not floats:
        made = "iota" if any(fact.made == "iota" for fact in facts) else ""
        # A carry may depend on more values in later iterations.
        return ValueFacts(given="" if step.name == "carry" else _join_origins(facts), made=made)
    if step.name == "carry":
        of_gradient = any(fact.of_gradient for fact in floats)
        return ValueFacts(constants=floats[0].constants, of_gradient=of_gradient, carried=step.around[-1][1])
    if len(floats) == 1:
        return floats[0]
    # Of several values that become one, a computed value says more than an argument.
    first = next((fact for fact in floats if not fact.given), floats[0])
    # One that was wide already keeps the others from being narrow.
    was_narrow = all(fact.widening is not None or fact.given == CONSTANT for fact in floats)
    return first._replace(
        given=_join_origins(floats),
        constants=_join_constants(floats),
        widening=first.widening if was_narrow else None,
        sign=_join_signs([fact.sign for fact in floats]),
    )


def _join_origins(facts: Sequence[ValueFacts]) -> str:
    kinds = {fact.given for fact in facts}
    return next((kind for kind in ("", ARGUMENT, OWN, CONSTANT) if kind in kinds), "")


def _join_constants(facts: Sequence[ValueFacts]) -> tuple[Any, ...]:
    return tuple(constant for fact in facts for constant in fact.constants)[:8]  # a few suffice


def _recognize_quotient(step: Step, facts: Sequence[ValueFacts]) -> str:
    above, below = facts
    if below.made == "sum of exp" and above.made == "exp":
        return "softmax"
    if below.made == "one and exp" and (above.given or above.made == "exp"):
        return "sigmoid"
    return _recognize_kept(step, facts)


def _recognize_kept(step: Step, facts: Sequence[ValueFacts]) -> str:
    """Keeps the name of an operand that is summed, negated, or added to or scaled by a constant or mask."""
    known = [fact for fact in facts if fact.made in _KEPT]
    kinds = {fact.made for fact in known if not fact.given} or {fact.made for fact in known}
    others = (fact for fact in facts if fact.made not in kinds)
    if len(kinds) != 1 or not all(fact.given or fact.made in ("square", "truth") for fact in others):
        return ""
    return kinds.pop()


_KEPT = frozenset(("softmax", "sigmoid", "sum of exp", "sum of squares", "iota"))

_TOTALS = {"exp": "sum of exp", "square": "sum of squares"}

_KEEPING = ("reduce_max", "reduce_min", "neg", "abs", "sub", "max", "min", "clamp")

_MAKING: dict[str, Callable[[Step, Sequence[ValueFacts]], str]] = {
    **dict.fromkeys(_KEEPING, _recognize_kept),
    **dict.fromkeys(
        ("reduce_sum", "reduce_window_sum"),
        lambda step, facts: _TOTALS.get(facts[0].made, "") or _recognize_kept(step, facts[:1]),
    ),
    **dict.fromkeys(("exp", "exp2"), lambda step, facts: "exp"),
    "iota": lambda step, facts: "iota",
    "logistic": lambda step, facts: "sigmoid",
    "square": lambda step, facts: "square",
    "integer_pow": lambda step, facts: "square" if step.eqn.params["y"] == 2 else "",
    "mul": lambda step, facts: "square" if step.operands[0] is step.operands[-1] else _recognize_kept(step, facts),
    "div": _recognize_quotient,
    "add": lambda step, facts: (
        "one and exp"
        if any(fact.made == "exp" for fact in facts) and any(fact.given and not fact.made for fact in facts)
        else _recognize_kept(step, facts)
    ),
}
"""By primitive: how to tell what a step makes, if an audit has a name for it."""
