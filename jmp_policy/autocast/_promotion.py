"""The dtype of an operation that follows its operands: JAX's promotion, to which constants and biases give way."""

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from .._jaxpr import AbstractValue, Fact, Value, having, shape_of
from ._place import ScopeSettings

Numbers = tuple[float, ...]
"""The distinct elements of a value, if they are known and few; otherwise empty."""


class CastLevel(enum.IntEnum):
    """The reason for the dtype of a value. The highest level of the operands wins.

    As in TensorFlow grappler's auto_mixed_precision, an operation stays in the full dtype, float32 or float64, if its
    input comes from an operation of class full. So it does if an input is wide and given: see `follow_promotion`.
    """

    TRACED = 0  # an argument, a parameter or a constant
    LOW = 1  # comes from a low operation
    SUM = 2  # the float32 output of a matmul under an accumulate dtype, not yet cast down
    FULL = 3  # comes from a full operation


# Attributes of an `Enum` are slow in Python 3.11, and each operation needs them.
TRACED_LEVEL, LOW_LEVEL, SUM_LEVEL, FULL_LEVEL = CastLevel


class CastState(NamedTuple):
    """Autocast's knowledge of a value beside its dtype."""

    level: CastLevel  # the reason for its dtype
    narrow: str = ""  # "table" or "rule", by which the next operation casts an output of a function down
    backward: bool = False  # True if a backward pass computed it
    numbers: Numbers = ()  # its distinct elements, if they are known
    scope: ScopeSettings | None = None  # the scope that it was computed in
    weight: bool = False  # True if it consists of elements of the user's weights
    computed: bool = False  # True if it was computed from arguments in the dtypes that were traced
    row_axes: int = 0  # of an argument with axes put before its own, as for a bias: how many are its own
    bias_axes: int = 0  # of the output of a dense layer's matmul, perhaps moved: how many axes a bias has


def is_given(kind: AbstractValue, wide: Collection[np.dtype]) -> bool:
    """True for a wide value that autocast did not compute, with unknown elements: an argument, a parameter."""
    return kind.dtype in wide and kind.state.level is TRACED_LEVEL and not kind.state.numbers


def follow_promotion(
    eqn: JaxprEqn, kinds: Sequence[AbstractValue], wide: Collection[np.dtype], *, rounds_given: bool
) -> CastState:
    """Finds the level of an operation that follows JAX's promotion. Constants and biases give way to low values.

    With `rounds_given`, all given values do. `wide` are the dtypes of given values.
    """
    level = max([kind.state.level for kind in kinds], default=TRACED_LEVEL)
    if level is TRACED_LEVEL or level is FULL_LEVEL:
        return STATES[level]
    name, given, made = eqn.primitive.name, [], []
    for kind in kinds:
        if kind.state.level is not TRACED_LEVEL:
            made.append(kind.state.bias_axes)
        elif is_given(kind, wide):
            given.append(kind.state.row_axes)
    bias_axes = max(made) if name in _LINEAR else 0
    if given:
        is_bias = name == "add" and all(0 < own <= bias_axes for own in given)
        return STATES[level if is_bias or rounds_given else FULL_LEVEL]
    return STATES[level]._replace(bias_axes=bias_axes) if bias_axes else STATES[level]


STATES = tuple(map(CastState, CastLevel))
"""The states of values by level."""

_LINEAR = having(Fact.MOVES, Fact.ANNOTATES, Fact.ADDS)


def count_row_axes(eqn: JaxprEqn, operand: CastState) -> int:
    """Counts the own axes of an argument, if an equation puts others before them, as NumPy's broadcasting does."""
    if eqn.primitive.name not in ("broadcast_in_dim", "reshape"):
        return 0
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    more = len(new) - len(old)
    is_before = new == (1,) * more + old
    if eqn.primitive.name == "broadcast_in_dim":
        is_before = eqn.params["broadcast_dimensions"] == tuple(range(more, len(new)))
    if not is_before:
        return 0
    return operand.row_axes or (len(old) if more else 0)


def count_bias_axes(eqn: JaxprEqn, values: Sequence[Value], wide: Collection[np.dtype]) -> int:
    """Counts the axes of a bias of a matmul's output: the weight's axes, which are given, but for the summed ones."""
    if eqn.primitive.name != "dot_general":
        return int(eqn.primitive.name == "conv_general_dilated")
    contracted, (batch, _) = eqn.params["dimension_numbers"]
    free = [len(shape_of(value.atom)) - len(own) for value, own in zip(values, contracted, strict=True)]
    weights = [count for count, value in zip(free, values, strict=True) if is_given(value.kind, wide)]
    return 0 if batch else min(weights or free)


def is_sum(kind: AbstractValue) -> bool:
    """True for the float32 output of a matmul, which most operations cast down."""
    return kind.dtype == np.float32 and kind.state.level is SUM_LEVEL
