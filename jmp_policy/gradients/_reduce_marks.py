"""Finds the sums of a gradient jaxpr to upcast, from the gradients backwards."""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._jaxpr import ENTERED, MATMULS, Fact, SubJaxpr, float_dtype, having, is_float, remember_by_jaxpr, sub_jaxprs

SUMS = having(Fact.SUMS)
SCATTERED_SUM = "scatter-add"  # operands: the table, the indices and the rows
MULTIPLICATIONS = frozenset({"div", "mul"})  # only one operand is a cotangent
# Primitives that move elements, add elements at the same index, or bound them, and the collectives of a `shard_map`.
# All of them compute in the dtype of their operands.
MOVES = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS, Fact.DEVICE_SUMS, Fact.ADDS) | {
    "clamp", "convert_element_type", "max", "min", "neg", "reduce_precision", "scatter", "select_n",
}  # fmt: skip


def is_pairwise(eqn: JaxprEqn) -> bool:
    """True if each output belongs to one input, as in a barrier or a `psum` of several values."""
    return len(eqn.outvars) > 1 and len(eqn.outvars) == len(eqn.invars)


class Origin(enum.IntEnum):
    """Inputs that a value is made from; the greatest one counts."""

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


@remember_by_jaxpr
def find_origins(program: Jaxpr, arguments: tuple[Origin, ...]) -> dict[Var, Origin]:
    """Finds the origins of the values of a jaxpr, also through its sub-jaxprs, whose values it does not list."""
    # Captured arrays count as data: a loss function may capture its batch.
    origins = dict(zip(program.invars, arguments, strict=True)) | dict.fromkeys(program.constvars, Origin.DATA)
    for eqn in program.eqns:
        # An output may come from any of several sub-jaxprs: the branches of a cond, among which its predicate chooses.
        bodies = [body for body in sub_jaxprs(eqn) if body.outputs]
        read = eqn.invars[:1] if eqn.primitive.name == "cond" else [] if bodies else eqn.invars
        own = max((read_origin(atom, origins) for atom in read), default=Origin.CONSTANT)
        origins |= dict.fromkeys(eqn.outvars, own)
        for body in bodies:
            inside = find_origins(body.program, list_argument_origins(body, origins))
            for inner, outer in body.outputs:
                origins[outer] = max(origins[outer], read_origin(inner, inside))  # type: ignore[index]
    return origins


def list_argument_origins(body: SubJaxpr, origins: dict[Var, Origin]) -> tuple[Origin, ...]:
    """Returns the origins of the inputs of a sub-jaxpr over all iterations of a loop."""
    arguments, before = [read_origin(outer, origins) for outer, _ in body.inputs], list[Origin]()
    while arguments != before:
        before = list(arguments)
        inside = find_origins(body.program, tuple(arguments))
        for outer, i in zip(body.program.outvars, body.carry, strict=False):
            arguments[i] = max(arguments[i], read_origin(outer, inside))
    return tuple(arguments)


def read_origin(atom: Var | Literal, origins: dict[Var, Origin]) -> Origin:
    return Origin.CONSTANT if isinstance(atom, Literal) else origins[atom]


class Need(enum.IntEnum):
    """Reason to upcast a value; the greatest one counts."""

    NONE = 0
    SUMMED = 1  # a gradient is a sum of it; it is upcast only if it is itself a sum, used for nothing else
    PERHAPS = 2  # a gradient is made from it, but it may not be a cotangent: its sums are upcast, and none is required
    GRADIENT = 3  # it is a gradient, up to moves, and not yet summed


class Upcasts(NamedTuple):
    """Upcast outputs of an equation."""

    needs: tuple[Need, ...]  # the reason for each output, or for each output of its sub-jaxprs
    origins: tuple[Origin, ...] = ()  # of the inputs of its sub-jaxprs
    enters: tuple[bool, ...] = ()  # the inputs that enter its sub-jaxprs without a cast


class Obstacle(NamedTuple):
    """End of a walk: an opaque equation, or one with a dtype wider than the reduce dtype."""

    eqn: JaxprEqn
    dtype: Any
    is_opaque: bool


class Marks(NamedTuple):
    """Result for one jaxpr: the place of each equation (or None), the need of each input, and the ends of walks."""

    places: list[Upcasts | None]
    arguments: tuple[Need, ...]
    obstacles: tuple[Obstacle, ...]


@remember_by_jaxpr
def find_marks(program: Jaxpr, needs: tuple[Need, ...], origins: tuple[Origin, ...], dtype: np.dtype) -> Marks:
    """Finds the values of a jaxpr to upcast to `dtype`, from the needs of its outputs and the origins of its inputs."""
    return _Walk(program, origins, dtype).go_back(needs)


def is_narrower_dtype(dtype: Any, other: np.dtype) -> bool:
    """True if a floating dtype is a proper subset of another."""
    if dtype is None or dtype == other:
        return False
    info, other_info = jnp.finfo(dtype), jnp.finfo(other)
    return info.nmant <= other_info.nmant and info.nexp <= other_info.nexp


class _Walk:
    """Walks through one jaxpr, from its last equation to its first."""

    def __init__(self, program: Jaxpr, origins: tuple[Origin, ...], dtype: np.dtype):
        self._program, self._dtype = program, dtype
        self._origins = find_origins(program, origins)
        self._makers = {var: eqn for eqn in program.eqns for var in eqn.outvars}
        self._reads: dict[Var, int] = {}
        for atom in (*(atom for eqn in program.eqns for atom in eqn.invars), *program.outvars):
            if isinstance(atom, Var):
                self._reads[atom] = self._reads.get(atom, 0) + 1
        self._needs: dict[Var, Need] = {}
        self._asked: dict[Var, int] = {}
        self._obstacles: list[Obstacle] = []

    def go_back(self, needs: Sequence[Need]) -> Marks:
        for atom, need in zip(self._program.outvars, needs, strict=True):
            self._ask(need, atom)
        places = [self._visit(eqn) for eqn in reversed(self._program.eqns)][::-1]
        arguments = tuple(self._need_of(var) for var in self._program.invars)
        return Marks(places, arguments, tuple(self._obstacles))

    def _ask(self, need: Need, *atoms: Var | Literal) -> None:
        """Requests upcasts of values. Those made from parameters alone are not summed over the batch, and stay."""
        for atom in atoms:
            if isinstance(atom, Var) and need and is_float(atom) and self._origin(atom) is not Origin.PARAMETER:
                self._needs[atom] = max(need, self._need_of(atom))
                self._asked[atom] = self._asked.get(atom, 0) + 1

    def _origin(self, atom: Var | Literal) -> Origin:
        return read_origin(atom, self._origins)

    def _need_of(self, atom: Any) -> Need:
        return self._needs.get(atom, Need.NONE)

    def _visit(self, eqn: JaxprEqn) -> Upcasts | None:
        """Decides which outputs of `eqn` to upcast, after all its consumers, and propagates this to its inputs."""
        needs = [self._need_of(var) for var in eqn.outvars]
        need, name = max(needs, default=Need.NONE), eqn.primitive.name
        if need is Need.NONE:
            return None
        if name in ENTERED:
            return self._enter(eqn, needs)
        is_alone = all(self._is_read_for_this(var) for var in eqn.outvars)
        if need is Need.SUMMED and not (is_alone and self._leads_to_sum(eqn)):
            return None
        if name in MATMULS:
            return self._visit_product(eqn, need)
        if name in SUMS:
            self._ask(Need.SUMMED, *eqn.invars)
            return self._widen(eqn, needs)
        if name == SCATTERED_SUM:
            table, _, rows = eqn.invars
            self._ask(need, table)
            self._ask(Need.SUMMED, rows)
            return self._widen(eqn, needs)
        if name in MULTIPLICATIONS:
            return self._visit_multiplication(eqn, need)
        if name in MOVES and any(map(is_float, eqn.invars)):
            return self._visit_move(eqn, needs)
        if need is Need.GRADIENT:
            self._check_opaque(eqn)
        return None

    def _widen(self, eqn: JaxprEqn, needs: Sequence[Need]) -> Upcasts:
        """Returns the place of an equation that sums. A reduce dtype that is narrower than its dtype is an obstacle."""
        for var in eqn.outvars:
            dtype = float_dtype(var)
            if dtype is not None and dtype != self._dtype and not is_narrower_dtype(dtype, self._dtype):
                self._obstacles.append(Obstacle(eqn, dtype, is_opaque=False))
        return Upcasts(tuple(needs))

    def _visit_product(self, eqn: JaxprEqn, need: Need) -> Upcasts | None:
        """Visits a matmul. With data it sums over the batch; with a parameter, the other operand may be a gradient."""
        factors = [atom for atom in eqn.invars[:2] if self._origin(atom) is not Origin.PARAMETER]
        if len(factors) < 2 and need is not Need.GRADIENT:
            return None
        self._ask(need if len(factors) == 1 else Need.SUMMED, *factors)
        return self._widen(eqn, [need])

    def _visit_multiplication(self, eqn: JaxprEqn, need: Need) -> Upcasts:
        candidates: list[Any] = [atom for atom in eqn.invars if self._origin(atom) is Origin.DATA]
        candidates = [atom for atom in candidates if math.prod(atom.aval.shape) > 1]
        self._ask(need if len(candidates) == 1 else min(need, Need.PERHAPS), *candidates)
        return Upcasts((need,))

    def _visit_move(self, eqn: JaxprEqn, needs: Sequence[Need]) -> Upcasts:
        if is_pairwise(eqn):
            for atom, own in zip(eqn.invars, needs, strict=True):
                self._ask(own, atom)
            return Upcasts(tuple(needs))
        self._ask(max(needs), *eqn.invars)
        return Upcasts((max(needs),) * len(needs))

    def _enter(self, eqn: JaxprEqn, needs: Sequence[Need]) -> Upcasts | None:
        """Visits an equation with sub-jaxprs, with a fixed point over the carry of a loop."""
        bodies = [body for body in sub_jaxprs(eqn) if body.outputs]
        pairs = zip(eqn.outvars, needs, strict=True)
        inner = [need if need > Need.SUMMED or self._is_read_for_this(var) else Need.NONE for var, need in pairs]
        if not bodies or not any(inner):
            return None
        origins = tuple(map(max, zip(*(list_argument_origins(body, self._origins) for body in bodies), strict=True)))
        carry, before, found = bodies[0].carry, list[Need](), list[Marks]()
        while inner != before:
            before = list(inner)
            found = [find_marks(body.program, tuple(inner), origins, self._dtype) for body in bodies]
            for n, i in enumerate(carry):  # the needs of carry inputs are needs of carry outputs
                inner[n] = max(inner[n], found[0].arguments[i])
        entering = set()
        for body, marks in zip(bodies, found, strict=True):
            self._obstacles += marks.obstacles
            for (outer, _), need in zip(body.inputs, marks.arguments, strict=True):
                self._ask(need, outer)
                if need is not Need.NONE and isinstance(outer, Var):
                    entering.add(outer)
        return Upcasts(tuple(inner), origins, tuple(isinstance(atom, Var) and atom in entering for atom in eqn.invars))

    def _is_read_for_this(self, var: Var) -> bool:
        """True if all consumers of a value requested the upcast."""
        return self._asked.get(var, 0) == self._reads.get(var, 0)

    def _leads_to_sum(self, eqn: JaxprEqn) -> bool:
        """True if an equation sums, or moves the output of a sum that has no other consumer."""
        name = eqn.primitive.name
        if name in SUMS or name == SCATTERED_SUM:
            return True
        if name in MATMULS:
            return all(self._origin(atom) is not Origin.PARAMETER for atom in eqn.invars[:2])
        if name not in MOVES:
            return False
        read_here: list[Any] = [atom for atom in eqn.invars if isinstance(atom, Var) and self._reads[atom] == 1]
        return any(self._leads_to_sum(self._makers[var]) for var in read_here if var in self._makers)

    def _check_opaque(self, eqn: JaxprEqn) -> None:
        for var in eqn.outvars:
            dtype = float_dtype(var)
            is_gradient = self._need_of(var) is Need.GRADIENT and self._origin(var) is Origin.DATA
            if is_gradient and is_narrower_dtype(dtype, self._dtype):
                self._obstacles.append(Obstacle(eqn, dtype, is_opaque=True))
