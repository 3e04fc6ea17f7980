"""Values that consist of a few known numbers: epsilons, bounds, factors, and masks that are added or selected."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from ..interpreter import Body, Kind

Numbers = tuple[float, ...]
"""The numbers that are all elements of a value; empty if they are not known, or too many."""

_MOST = 8

_CHOOSING = frozenset(
    ["broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "expand_dims", "max", "min", "pad", "reduce_max"]
    + ["reduce_min", "reshape", "rev", "select_n", "slice", "split", "squeeze", "stop_gradient", "transpose"]
)
"""Primitives whose results consist of numbers of their operands."""

_COMPUTING: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "mul": operator.mul,
    "neg": operator.neg,
    "sub": operator.sub,
}


def numbers_of(eqn: JaxprEqn, operands: Sequence[Numbers]) -> Numbers:
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
      numbers: those that the operand consists of.
      eqn: the equation.
      position: which of its operands it is.
      dtype: the dtype that the equation would run in.
    """
    name = eqn.primitive.name
    sign = -1 if name == "sub" and position == 1 else 1
    return any(number and np.isfinite(number) and _is_lost(sign * number, name, dtype) for number in numbers)


def _is_lost(number: float, name: str, dtype: np.dtype) -> bool:
    smallest, largest = _range_of(dtype)
    is_in_range = smallest <= abs(number) <= largest  # 1e-8 in float16 is 0, and no longer an epsilon
    if name in _FACTORS:
        return not is_in_range
    if _is_mask(number):
        return False
    if not is_in_range:
        return True
    rounded = _rounded(number, dtype)
    # A bound is a promise about the result, which a rounded one breaks. Elsewhere one rounding is as good as that of
    # any result, but for 1 - 1e-7: its author meant to stay clear of 1, where logarithms and quotients end.
    return rounded != number and (name in _BOUNDS or abs(rounded) == 1)


def _is_mask(number: float) -> bool:
    """Whether a number hides something, for which the largest one of any dtype is as good: far below zero, or a limit.

    A large positive one may be a value.
    """
    return number < -float(jnp.finfo(jnp.float16).max) or number >= float(jnp.finfo(jnp.bfloat16).max)


@functools.cache
def _range_of(dtype: np.dtype) -> tuple[float, float]:
    finfo = jnp.finfo(dtype)
    return float(finfo.smallest_normal), float(finfo.max)


def _rounded(number: float, dtype: np.dtype) -> float:
    with np.errstate(over="ignore"):
        return float(np.asarray(number, np.float32).astype(dtype))


def within(atom: Any, numbers: Numbers, largest: float, eqn: JaxprEqn, body: Body) -> Any:
    """A value whose finite numbers are not above `largest`: what is beyond in a mask becomes the largest number.

    An infinite mask stays infinite.
    """
    if not all(map(np.isfinite, numbers)):
        return atom
    for sign in (1, -1):
        if any(sign * number > largest for number in numbers):
            atom = _bounded(atom, np.float32(sign * largest), eqn, body)
    return atom


def is_exact(numbers: Numbers, dtype: np.dtype) -> bool:
    """Whether a value consists of numbers that a dtype has."""
    return bool(numbers) and all(_rounded(number, dtype) == number for number in numbers)


def _bounded(atom: Any, bound: np.float32, eqn: JaxprEqn, body: Body) -> Any:
    if isinstance(atom, Literal):
        return Literal(bound, atom.aval)
    pattern = _bound(bool(bound > 0))
    clamp = eqn.replace(
        primitive=pattern.primitive, params=pattern.params, effects=pattern.effects, outvars=[type(atom)(atom.aval)]
    )
    [clamped] = body.append(clamp, [atom, Literal(bound, pattern.invars[1].aval)], [Kind(None)])
    return clamped.atom


@functools.cache
def _bound(upper: bool) -> JaxprEqn:
    """An equation that bounds float32 numbers, as JAX would trace it."""
    operation = lax.min if upper else lax.max
    return jax.make_jaxpr(lambda x: operation(x, np.float32(1)))(np.float32(0)).eqns[0]
