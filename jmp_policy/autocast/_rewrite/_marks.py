"""What autocast knows of a value beside its dtype: why it has it, and of which numbers it consists.

Numbers are known of values that consist of a few: epsilons, bounds, factors, and masks that are added or selected.
"""

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from ..._jaxpr import Atom, Body, Fact, Kind, having
from ._scopes import Scope

Numbers = tuple[float, ...]
"""The numbers that are all elements of a value; empty if they are not known, or too many."""

_MOST = 8


class Colour(enum.IntEnum):
    """Why a value has its dtype; the greater wins where two meet.

    As in TensorFlow grappler's auto_mixed_precision, an operation stays in float32 because a float32-only operation
    made what it reads. A value that is merely float32, such as a bias, keeps nothing there.
    """

    TRACED = 0  # it came so: an argument, a parameter, a constant
    LOW = 1  # a low operation made it, or one that followed
    SUM = 2  # the same in float32, before it is rounded: what a product hands over under an accumulate dtype
    FULL = 3  # a full operation made it, or one that followed


class Mark(NamedTuple):
    """What autocast knows of a value beside its dtype.

    Attributes:
      colour: its colour.
      narrow: whether it is a result of a `narrow` function, to be cast where the next operation uses it.
      backward: whether a backward pass made it: a gradient, once something else uses it.
      numbers: the numbers that it consists of, if they are known.
      scope: the scope of the rule that it was made under, which says what it leaves as.
    """

    colour: Colour
    narrow: bool = False
    backward: bool = False
    numbers: Numbers = ()
    scope: Scope | None = None


def is_sum(kind: Kind) -> bool:
    """Whether a value is the sum of a product in float32, which most of its users take in the compute dtype."""
    return kind.dtype == np.float32 and kind.mark.colour is Colour.SUM


def join_marks(kinds: Sequence[Kind]) -> Mark:
    """The mark of what is made of several values."""
    marks = [kind.mark for kind in kinds]
    colour = max((mark.colour for mark in marks), default=Colour.TRACED)
    return Mark(colour, any(mark.narrow for mark in marks), any(mark.backward for mark in marks))


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


def clamp_masks(atom: Atom, numbers: Numbers, largest: float, eqn: JaxprEqn, body: Body) -> Atom:
    """Clamps a value whose finite numbers reach above `largest`: what is beyond in a mask becomes the largest number.

    An infinite mask stays infinite.
    """
    if not all(map(np.isfinite, numbers)):
        return atom
    for sign in (1, -1):
        if any(sign * number > largest for number in numbers):
            atom = _clamp(atom, np.float32(sign * largest), eqn, body)
    return atom


def _clamp(atom: Atom, bound: np.float32, eqn: JaxprEqn, body: Body) -> Atom:
    if isinstance(atom, Literal):
        return Literal(bound, atom.aval)
    pattern = _trace_clamp(bool(bound > 0))
    clamp = eqn.replace(
        primitive=pattern.primitive, params=pattern.params, effects=pattern.effects, outvars=[type(atom)(atom.aval)]
    )
    [clamped] = body.append(clamp, [atom, Literal(bound, pattern.invars[1].aval)], [Kind(None)])
    return clamped.atom


@functools.cache
def _trace_clamp(upper: bool) -> JaxprEqn:
    """An equation that bounds float32 numbers, as JAX would trace it."""
    operation = lax.min if upper else lax.max
    return jax.make_jaxpr(lambda x: operation(x, np.float32(1)))(np.float32(0)).eqns[0]
