"""Which of the values that were measured a policy would have in a narrow format: made there, or cast to it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..._jaxpr import MATMULS, is_backward
from ...policy import MXFP8, BlockFormat, Float8, Int4, KeptNVFP4, Policy, PolicyMap, Quantization, match_policy
from .._stats import ObservedProgram, Row
from ._flow import Operation
from ._layer_rule import HALF
from ._trial import Written


class NarrowValue(NamedTuple):
    """A value in a narrow format.

    Attributes:
      row: its row.
      path: the scope that has it so: what makes it, or what casts it.
      direction: the pass of that.
      format: the format.
      primitive: the operation that makes it or reads it.
      is_cast: whether the scope reads it.
      is_scaled: whether a scale of its own brings it into the format.
    """

    row: int
    path: str
    direction: str
    format: str
    primitive: str
    is_cast: bool = False
    is_scaled: bool = False


def list_narrow_values(
    operations: Sequence[Operation], written: Mapping[tuple[int, ...], Written], rows: Sequence[Row]
) -> list[NarrowValue]:
    """The values in half precision, in the order of the program."""
    found = []
    for operation in operations:
        of_eqn = written.get(operation.chain)
        if of_eqn is None:
            continue
        direction = _find_direction(operation, rows)
        half = None
        for indices, dtype in zip(operation.makes, of_eqn.results, strict=True):
            if dtype in HALF:
                half = dtype
                found += [NarrowValue(i, operation.path, direction, str(dtype), operation.name) for i in indices]
        if half is None:
            continue
        for indices, dtype in zip(operation.reads, of_eqn.operands or [None] * len(operation.reads), strict=True):
            if dtype == np.float32:
                found += [NarrowValue(i, operation.path, direction, str(half), operation.name, True) for i in indices]
    return found


def list_quantized_values(
    operations: Sequence[Operation], observed: ObservedProgram, rows: Sequence[Row], policy: Policy | PolicyMap
) -> list[NarrowValue]:
    """What products by a weight read in a quantized format: weights, activations, and gradients of those that train."""
    types = observed.list_types()
    found, layers = [], set[str]()
    for operation in operations:
        if operation.name not in MATMULS:
            continue
        direction = _find_direction(operation, rows)
        kind = match_policy(policy, operation.path, types).policy.quantization
        weights = [indices for indices in operation.reads if any(rows[i].direction == "argument" for i in indices)]
        if kind is None or isinstance(kind, KeptNVFP4) or not _is_inside(operation.path, types):
            continue
        if weights and max(np.prod(rows[i].shape) for i in weights[0]) < kind.min_size:
            continue
        if weights and direction == "forward":
            layers.add(operation.path)
        if operation.path not in layers:
            continue
        for indices in operation.reads:
            format = _find_format(kind, indices in weights, _find_pass(indices, rows))
            if format and (direction == "forward" or _has_narrow_gradients(kind)):
                where = operation.path, direction, format, operation.name
                found += [NarrowValue(i, *where, is_cast=True, is_scaled=True) for i in indices]
    return found


def _find_format(kind: Quantization, is_weight: bool, direction: str) -> str:
    """The format of an operand, or the empty string where it has none."""
    if isinstance(kind, Float8):
        return "float8_e5m2" if direction == "backward" else "float8_e4m3fn"
    if isinstance(kind, BlockFormat):
        if not is_weight and not kind.activations:
            return ""
        name, slash, block = str(kind).partition("(")[0].partition("/")
        is_e5m2 = isinstance(kind, MXFP8) and kind.gradients == "e5m2" and direction == "backward"
        return f"{name}{'_e5m2' * is_e5m2}{slash}{block}"
    if isinstance(kind, Int4):
        return ("int4" if kind.block_size == 128 else f"int4/{kind.block_size}") if is_weight else ""
    return "int8" if is_weight or kind.activations else ""


def _has_narrow_gradients(kind: Quantization) -> bool:
    """Whether the products of the backward pass are in the format, too."""
    return isinstance(kind, Float8) or (isinstance(kind, BlockFormat) and kind.activations)


def _find_pass(indices: Sequence[int], rows: Sequence[Row]) -> str:
    return rows[indices[0]].direction if indices else "forward"


def _find_direction(operation: Operation, rows: Sequence[Row]) -> str:
    made = [index for indices in operation.makes for index in indices]
    if made:
        return rows[made[0]].direction
    return "backward" if is_backward(operation.scope) else "forward"


def _is_inside(path: str, types: Mapping[str, type]) -> bool:
    return any(path == module or not module or path.startswith(f"{module}/") for module in types)
