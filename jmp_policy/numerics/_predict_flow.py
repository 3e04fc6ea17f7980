"""Dataflow of a measured jaxpr: rounding noise, and the values that a policy would cast down."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._base import group_by_key, is_wider, list_paths_to
from .._jaxpr import (
    CUSTOM,
    HALF,
    MATMULS,
    Fact,
    ModulePaths,
    Step,
    float_dtype,
    having,
    is_backward,
    make_module_finder,
    walk,
)
from ..policy import BlockFormat, Float8, Policy, PolicyMap, find_operand_format, match_policy
from ._predict_losses import CHOOSING
from ._predict_trial import Written
from ._stats_choice import ObservedProgram, identify
from ._stats_row import Row

_MOVES = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS, Fact.DEVICE_CHOOSES, Fact.EXACT) | {"convert_element_type"}

_ADDING = having(Fact.ADDS, Fact.SUMS) | MATMULS
"""Ops in which large values can cancel, so that only rounding error remains."""

_ROUNDING, _ROUNDING_IN_FLOAT64 = 2.0**-18, 2.0**-47
"""A few float32 or float64 roundings relative to the terms of a sum, which are rounded themselves."""


class Operation(NamedTuple):
    """One call of an equation."""

    chain: tuple[int, ...]  # the ids of the equations around it and of itself
    name: str  # its primitive
    path: str  # its module or scope
    scope: str  # its name stack
    reads: tuple[tuple[int, ...], ...]  # for each operand, the rows of the values that it may be; empty if not measured
    makes: tuple[tuple[int, ...], ...]  # for each result, its rows, one per iteration of a loop
    unknown: bool  # True if it reads a floating value that was not measured, such as a constant
    terms: int  # the number of elements that it sums per output element
    is_constant: bool = False  # True if it reads constants alone
    literal: float = 0.0  # the largest magnitude of the numbers in the program that it reads


def list_operations(observed: ObservedProgram) -> list[Operation]:
    rows_of = group_by_key((value, index) for index, value in enumerate(observed.values))
    paths, program = ModulePaths(observed.modules), observed.program
    sources: dict[Any, tuple[int, ...]] = {var: tuple(rows_of.get(((), i), ())) for i, var in enumerate(program.invars)}
    found, constants = [], set[Any]()

    def list_rows(atoms: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        return tuple(() if isinstance(atom, Literal) else sources.get(atom, ()) for atom in atoms)

    for step in walk(program, live_only=True):
        if step.name == "constant":  # an array that a jitted function closes over, such as a weight
            continue
        # The results of a `cond` depend on its predicate.
        may_be = step.name != "carry" and (step.name != "link" or len(step.operands) == 1)
        is_constant = may_be and all(isinstance(x, Literal) or x in constants for x in step.operands)
        (constants.update if is_constant else constants.difference_update)(step.results)
        chain, reads = identify(step.around, step.eqn), list_rows(step.operands)
        joined = tuple(dict.fromkeys(row for rows in reads for row in rows))
        path, name = paths.read_stack(step.scope), step.eqn.primitive.name
        if step.name in ("link", "carry"):
            index = next((i for i, var in enumerate(step.eqn.outvars) if var is step.results[0]), None)
            own = () if index is None else tuple(rows_of.get((chain, index), ()))
            sources[step.results[0]] = own or joined
            if own:  # a function with custom derivatives: its result was measured, the ops inside were not
                makes = tuple(own if i == index else () for i in range(len(step.eqn.outvars)))
                found.append(Operation(chain, name, path, step.scope, list_rows(step.eqn.invars), makes, True, 1))
            continue
        makes = tuple(tuple(rows_of.get((chain, i), ())) for i in range(len(step.results)))
        for var, rows in zip(step.results, makes, strict=True):
            sources[var] = rows or (joined if name in _MOVES else ())
        unknown = any(not rows and float_dtype(atom) for atom, rows in zip(step.operands, reads, strict=True))
        literal = max(map(_measure_literal, step.operands), default=0.0)
        terms = _count_terms(step)
        found.append(Operation(chain, name, path, step.scope, reads, makes, unknown, terms, is_constant, literal))
    return found


def _measure_literal(atom: Any) -> float:
    is_number = isinstance(atom, Literal) and float_dtype(atom) is not None and np.isfinite(atom.val).all()
    return float(np.abs(atom.val).max()) if is_number else 0.0


def find_noise(operations: Sequence[Operation], rows: Sequence[Row]) -> set[int]:
    """Finds rows of rounding error alone, such as the gradient of a bias before a softmax."""
    noise: set[int] = set()
    for operation in operations:
        reads = [list(indices) for indices in operation.reads if indices]
        made = [index for indices in operation.makes for index in indices]
        if not reads or not made:
            continue
        sizes = [max(rows[index].amax for index in indices) for indices in reads]
        noisy = [noise.issuperset(indices) for indices in reads]
        adds, is_matmul = operation.name in _ADDING, operation.name in MATMULS
        is_float64 = all(rows[index].dtype == "float64" for indices in reads for index in indices)
        rounding = _ROUNDING_IN_FLOAT64 if is_float64 else _ROUNDING
        bound = rounding * math.sqrt(operation.terms) * (math.prod(sizes) if is_matmul else max(sizes))
        cancels = adds and not operation.unknown and max(rows[index].amax for index in made) <= bound
        # One noisy operand does not make the result noise. Of custom derivatives, only the results are measured.
        mixes = adds or operation.name in CUSTOM
        if cancels or all(noisy) or (any(noisy) and (is_matmul or not mixes)):
            noise.update(made)
    return noise


def _count_terms(step: Step) -> int:
    sizes = [math.prod(getattr(atom.aval, "shape", ())) for atom in (*step.operands[:1], *step.results[:1])]
    if step.name == "dot_general":
        (contracted, _), _ = step.eqn.params["dimension_numbers"]
        return math.prod(step.operands[0].aval.shape[axis] for axis in contracted)
    return max(1, sizes[0] // max(1, sizes[1])) if len(sizes) == 2 and step.name != "conv_general_dilated" else 1024


class NarrowValue(NamedTuple):
    """A value in a narrower dtype than it was measured in, or in a quantized format.

    `path`, `direction` and `primitive` are of the op that makes it, or of the op that reads and casts it if `is_cast`.
    `is_scaled` is True if the format has a scale per tensor or block. `constant` is not zero for a number in the
    program that the op reads; `row` is then of the op's result.
    """

    row: int
    path: str
    direction: str
    format: str
    primitive: str
    is_cast: bool = False
    is_scaled: bool = False
    constant: float = 0.0


def list_narrow_values(
    operations: Sequence[Operation], written: Mapping[tuple[int, ...], Written], rows: Sequence[Row]
) -> list[NarrowValue]:
    """Lists the values in half precision, and those of float64 in float32, in program order."""
    found, narrows = [], lambda dtype, row: dtype in HALF or (dtype == np.float32 and rows[row].dtype == "float64")
    for operation in operations:
        of_eqn = written.get(operation.chain)
        if of_eqn is None:
            continue
        direction = _find_direction(operation, rows)
        low = None
        for indices, dtype in zip(operation.makes, of_eqn.results, strict=True):
            made = [i for i in indices if narrows(dtype, i)]
            low = dtype if made or dtype in HALF else low
            found += [NarrowValue(i, operation.path, direction, str(dtype), operation.name) for i in made]
        if low is None:
            continue
        made = [index for indices in operation.makes for index in indices]
        if direction == "forward" and operation.literal > float(jnp.finfo(low).max) and operation.name not in CHOOSING:
            where = operation.path, direction, str(low), operation.name
            found += [NarrowValue(i, *where, is_cast=True, constant=operation.literal) for i in made[:1]]
        for indices, dtype in zip(operation.reads, of_eqn.operands or [None] * len(operation.reads), strict=True):
            if dtype is not None and is_wider(dtype, low):
                found += [NarrowValue(i, operation.path, direction, str(low), operation.name, True) for i in indices]
    return found


def list_quantized_values(
    operations: Sequence[Operation], observed: ObservedProgram, rows: Sequence[Row], policy: Policy | PolicyMap
) -> list[NarrowValue]:
    """Lists the quantized operands of matmuls by a weight: weights, activations and gradients."""
    types = observed.list_types()
    find_module = make_module_finder(types)
    found, layers = [], set[str]()
    for operation in operations:
        if operation.name not in MATMULS:
            continue
        direction = _find_direction(operation, rows)
        module = find_module(operation.path)
        kind = match_policy(policy, module, types).policy.quantization
        weights = [indices for indices in operation.reads if any(rows[i].direction == "argument" for i in indices)]
        if kind is None or types.keys().isdisjoint(list_paths_to(module)):
            continue
        if weights and max(np.prod(rows[i].shape) for i in weights[0]) < kind.min_size:
            continue
        if weights and direction == "forward":
            layers.add(operation.path)
        if operation.path not in layers:
            continue
        rounds_inputs = isinstance(kind, Float8) or getattr(kind, "activations", False)
        # The matmuls of the backward pass are quantized too in these formats.
        if direction != "forward" and not (rounds_inputs and isinstance(kind, Float8 | BlockFormat)):
            continue
        for indices in operation.reads:
            if indices and (rounds_inputs or indices in weights):
                format = find_operand_format(kind, is_gradient=rows[indices[0]].direction == "backward")
                where = operation.path, direction, format.name, operation.name
                found += [NarrowValue(i, *where, is_cast=True, is_scaled=True) for i in indices]
    return found


def _find_direction(operation: Operation, rows: Sequence[Row]) -> str:
    made = [index for indices in operation.makes for index in indices]
    if made:
        return rows[made[0]].direction
    return "backward" if is_backward(operation.scope) else "forward"
