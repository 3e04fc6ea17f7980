"""Finds the sums of a gradient program that are widened, from the gradients backwards."""

import enum
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..._jaxpr import MATMULS, Fact, SubJaxpr, float_dtype, having, is_float, sub_jaxprs

PRODUCTS = MATMULS
"""Products of two tensors, which sum over what both have; a `scaled_dot` reads the scales of their blocks as well."""

SUMS = having(Fact.SUMS)
"""Sums over some axes of one tensor."""

SCATTERED_SUM = "scatter-add"
"""The sum of the rows of a table that were read several times: its operands are the table, the places and the rows."""

MULTIPLICATIONS = frozenset({"div", "mul"})
"""One number of a result for one of each operand, and linear in either; only one of them is a cotangent."""

MOVES = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS, Fact.DEVICE_SUMS, Fact.ADDS) | {
    "clamp", "convert_element_type", "max", "min", "neg", "reduce_precision", "scatter", "select_n",
}  # fmt: skip
"""Primitives that move elements, add those in the same place, or bound them; and the collectives of a `shard_map`.

All of them work in the dtype of their operands.
"""

CALLS = having(Fact.CALLS) - {"custom_jvp_call", "custom_vjp_call"}
"""What runs programs, which are looked into."""


def is_pairwise(eqn: JaxprEqn) -> bool:
    """Whether each result is of an operand of its own: of a barrier, or a `psum` of several values.

    >>> import jax
    >>> [is_pairwise(eqn) for eqn in jax.make_jaxpr(jax.lax.optimization_barrier)((1.0, 2.0)).eqns]
    [True]
    """
    return len(eqn.outvars) > 1 and len(eqn.outvars) == len(eqn.invars)


class Origin(enum.IntEnum):
    """What a value is made of; of several origins, the greatest counts."""

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


def find_origins(program: Jaxpr, arguments: Sequence[Origin]) -> dict[Var, Origin]:
    """Finds what the values of a body are made of.

    Arrays that a program closes over count as data: a loss function may close over its batch.

    Args:
      program: the body; the programs inside are looked into, and not listed.
      arguments: what its arguments are made of.

    >>> import jax
    >>> body = jax.make_jaxpr(lambda w, x: (w * 2, w * x))(1.0, 1.0).jaxpr
    >>> origins = find_origins(body, [Origin.PARAMETER, Origin.DATA])
    >>> [origins[var].name for var in body.outvars]
    ['PARAMETER', 'DATA']
    """
    known, key = _ORIGINS.setdefault(program, {}), tuple(arguments)
    if key not in known:
        known[key] = _find(program, key)
    return known[key]


_ORIGINS: weakref.WeakKeyDictionary[Any, dict[tuple[Origin, ...], dict[Var, Origin]]] = weakref.WeakKeyDictionary()


def list_argument_origins(body: SubJaxpr, origins: dict[Var, Origin]) -> tuple[Origin, ...]:
    """What the arguments of a body are made of, in all turns of a loop.

    Args:
      body: the body.
      origins: those of the values around it.
    """
    arguments = [read_origin(outer, origins) for outer, _ in body.inputs]
    while body.carry and body.outputs:
        inside = find_origins(body.program, arguments)
        after = list(arguments)
        for i in body.carry:
            after[i] = max(after[i], read_origin(body.program.outvars[i - body.carry.start], inside))
        if after == arguments:
            break
        arguments = after
    return tuple(arguments)


def read_origin(atom: Var | Literal, origins: dict[Var, Origin]) -> Origin:
    """What a value is made of, in the body whose origins these are."""
    return Origin.CONSTANT if isinstance(atom, Literal) else origins[atom]


def _find(program: Jaxpr, arguments: tuple[Origin, ...]) -> dict[Var, Origin]:
    origins = dict(zip(program.invars, arguments, strict=True)) | dict.fromkeys(program.constvars, Origin.DATA)
    for eqn in program.eqns:
        origins |= _find_results(eqn, origins)
    return origins


def _find_results(eqn: JaxprEqn, origins: dict[Var, Origin]) -> dict[Var, Origin]:
    bodies = [body for body in sub_jaxprs(eqn) if body.outputs]
    if not bodies:
        return dict.fromkeys(eqn.outvars, _join(read_origin(atom, origins) for atom in eqn.invars))
    # A result of several bodies, as of the branches of a cond, may be that of any of them.
    results = dict.fromkeys(eqn.outvars, Origin.CONSTANT)
    if eqn.primitive.name == "cond":
        results = dict.fromkeys(eqn.outvars, read_origin(eqn.invars[0], origins))
    for body in bodies:
        inside = find_origins(body.program, list_argument_origins(body, origins))
        for inner, outer in body.outputs:
            results[outer] = max(results[outer], read_origin(inner, inside))  # type: ignore[index]
    return results


def _join(origins: Iterable[Origin]) -> Origin:
    return max(origins, default=Origin.CONSTANT)


class Need(enum.IntEnum):
    """Why a value is to be wide; where there are several reasons, the greatest counts."""

    NONE = 0
    SUMMED = 1
    """A gradient is a sum of it: only if it is a sum itself, for this alone, is it widened."""
    PERHAPS = 2
    """A gradient is made of it, which may not be a cotangent: no sum of it is missed, and none asked for."""
    GRADIENT = 3
    """It is a gradient, but for moves, and not summed yet."""


class Place(NamedTuple):
    """What is known of an equation of whose results some are wide.

    Attributes:
      needs: why each result is; of an equation that runs programs, why each result of those is.
      origins: what the arguments of these programs are made of.
      enters: which operands enter these programs as they are, wide or not.
    """

    needs: tuple[Need, ...]
    origins: tuple[Origin, ...] = ()
    enters: tuple[bool, ...] = ()


class Obstacle(NamedTuple):
    """Where the walk ended: at an equation that is opaque, or whose dtype is wider than the one asked for."""

    eqn: JaxprEqn
    dtype: Any
    is_opaque: bool


class Marks(NamedTuple):
    """What was found of a body.

    Attributes:
      places: of each equation, `None` where nothing is wide.
      arguments: why each argument of the body is to be wide.
      obstacles: where walks ended.
    """

    places: list[Place | None]
    arguments: tuple[Need, ...]
    obstacles: tuple[Obstacle, ...]


_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Marks]] = weakref.WeakKeyDictionary()


def find_marks(program: Jaxpr, needs: Sequence[Need], origins: Sequence[Origin], dtype: np.dtype) -> Marks:
    """Finds what of a body is to be wide, once for each combination of arguments.

    Args:
      program: the body.
      needs: why each of its results is to be wide.
      origins: what its arguments are made of.
      dtype: the dtype of reductions.
    """
    known = _KNOWN.setdefault(program, {})
    key = tuple(needs), tuple(origins), dtype
    if key not in known:
        known[key] = _Walk(program, origins, dtype).go_back(needs)
    return known[key]


def is_narrower(dtype: Any, other: np.dtype) -> bool:
    """Whether a floating dtype holds less than another, which holds all of it.

    >>> half, full = np.dtype("float16"), np.dtype("float32")
    >>> is_narrower(half, full), is_narrower(full, full), is_narrower(half, np.dtype("bfloat16"))
    (True, False, False)
    """
    if dtype is None or dtype == other:
        return False
    (mantissa, exponent), (other_mantissa, other_exponent) = _measure(dtype), _measure(other)
    return mantissa <= other_mantissa and exponent <= other_exponent


@functools.cache
def _measure(dtype: Any) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return info.nmant, info.nexp


class _Walk:
    """The walk through one body, from its last equation to its first."""

    def __init__(self, program: Jaxpr, origins: Sequence[Origin], dtype: np.dtype):
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
            self._ask(atom, need)
        places = [self._visit(eqn) for eqn in reversed(self._program.eqns)][::-1]
        arguments = tuple(self._need_of(var) for var in self._program.invars)
        return Marks(places, arguments, tuple(self._obstacles))

    def _ask(self, atom: Var | Literal, need: Need) -> None:
        """Asks for a value to be wide; a constant may be summed over the batch, what parameters make alone may not."""
        if isinstance(atom, Var) and need and is_float(atom) and self._origin(atom) is not Origin.PARAMETER:
            self._needs[atom] = max(need, self._need_of(atom))
            self._asked[atom] = self._asked.get(atom, 0) + 1

    def _origin(self, atom: Var | Literal) -> Origin:
        return read_origin(atom, self._origins)

    def _need_of(self, atom: Any) -> Need:
        return self._needs.get(atom, Need.NONE)

    def _visit(self, eqn: JaxprEqn) -> Place | None:
        """What is wide of an equation, whose readers were all visited; asks for its operands."""
        needs = [self._need_of(var) for var in eqn.outvars]
        need, name = max(needs, default=Need.NONE), eqn.primitive.name
        if need is Need.NONE:
            return None
        if name in CALLS:
            return self._enter(eqn, needs)
        is_alone = all(self._is_read_for_this(var) for var in eqn.outvars)
        if need is Need.SUMMED and not (is_alone and self._leads_to_sum(eqn)):
            return None
        if name in PRODUCTS:
            return self._visit_product(eqn, need)
        if name in SUMS:
            self._ask_all(eqn.invars, Need.SUMMED)
            return self._widen(eqn, needs)
        if name == SCATTERED_SUM:
            table, _, rows = eqn.invars
            self._ask(table, need)
            self._ask(rows, Need.SUMMED)
            return self._widen(eqn, needs)
        if name in MULTIPLICATIONS:
            return self._visit_multiplication(eqn, need)
        if name in MOVES and any(map(is_float, eqn.invars)):
            return self._visit_move(eqn, needs)
        if need is Need.GRADIENT:
            self._check_opaque(eqn)
        return None

    def _widen(self, eqn: JaxprEqn, needs: Sequence[Need]) -> Place:
        """The place of an equation that sums: here it is that the dtype asked for must hold what the program has."""
        for var in eqn.outvars:
            dtype = float_dtype(var)
            if dtype is not None and dtype != self._dtype and not is_narrower(dtype, self._dtype):
                self._obstacles.append(Obstacle(eqn, dtype, is_opaque=False))
        return Place(tuple(needs))

    def _visit_product(self, eqn: JaxprEqn, need: Need) -> Place | None:
        """A product with data sums over it. One with a parameter does not: what it is of may still be a gradient."""
        factors = [atom for atom in eqn.invars[:2] if self._origin(atom) is not Origin.PARAMETER]
        if len(factors) < 2 and need is not Need.GRADIENT:
            return None
        self._ask_all(factors, need if len(factors) == 1 else Need.SUMMED)
        return self._widen(eqn, [need])

    def _visit_multiplication(self, eqn: JaxprEqn, need: Need) -> Place:
        candidates = [atom for atom in eqn.invars if _has_axes(atom) and self._origin(atom) is Origin.DATA]
        self._ask_all(candidates, need if len(candidates) == 1 else min(need, Need.PERHAPS))
        return Place((need,))

    def _visit_move(self, eqn: JaxprEqn, needs: Sequence[Need]) -> Place:
        if is_pairwise(eqn):
            for atom, own in zip(eqn.invars, needs, strict=True):
                self._ask(atom, own)
            return Place(tuple(needs))
        self._ask_all(eqn.invars, max(needs))
        return Place((max(needs),) * len(needs))

    def _enter(self, eqn: JaxprEqn, needs: Sequence[Need]) -> Place | None:
        """What is wide in the programs that an equation runs; around a loop until the carry needs what it gives."""
        bodies = [body for body in sub_jaxprs(eqn) if body.outputs]
        wanted: dict[Any, Need] = dict(zip(eqn.outvars, needs, strict=True))
        wanted = {var: need for var, need in wanted.items() if need > Need.SUMMED or self._is_read_for_this(var)}
        if not bodies or not any(wanted.values()):
            return None
        origins = tuple(map(max, zip(*(list_argument_origins(body, self._origins) for body in bodies), strict=True)))
        inner = [wanted.get(outer, Need.NONE) for _, outer in bodies[0].outputs]
        while True:
            found = [find_marks(body.program, inner, origins, self._dtype) for body in bodies]
            after = _go_around(bodies[0], found[0].arguments, inner)
            if after == inner:
                break
            inner = after
        entering = set()
        for body, marks in zip(bodies, found, strict=True):
            self._obstacles += marks.obstacles
            for (outer, _), need in zip(body.inputs, marks.arguments, strict=True):
                self._ask(outer, need)
                if need is not Need.NONE and isinstance(outer, Var):
                    entering.add(outer)
        return Place(tuple(inner), origins, tuple(isinstance(atom, Var) and atom in entering for atom in eqn.invars))

    def _ask_all(self, atoms: Sequence[Var | Literal], need: Need) -> None:
        for atom in atoms:
            self._ask(atom, need)

    def _is_read_for_this(self, var: Var) -> bool:
        """Whether all that reads a value is what asked for it."""
        return self._asked.get(var, 0) == self._reads.get(var, 0)

    def _leads_to_sum(self, eqn: JaxprEqn) -> bool:
        """Whether an equation sums, or moves what another one sums for it alone."""
        name = eqn.primitive.name
        if name in SUMS or name == SCATTERED_SUM:
            return True
        if name in PRODUCTS:
            return all(self._origin(atom) is not Origin.PARAMETER for atom in eqn.invars[:2])
        if name not in MOVES:
            return False
        read_here: list[Any] = [atom for atom in eqn.invars if isinstance(atom, Var) and self._reads[atom] == 1]
        return any(self._leads_to_sum(self._makers[var]) for var in read_here if var in self._makers)

    def _check_opaque(self, eqn: JaxprEqn) -> None:
        for var in eqn.outvars:
            dtype = float_dtype(var)
            is_gradient = self._need_of(var) is Need.GRADIENT and self._origin(var) is Origin.DATA
            if is_gradient and is_narrower(dtype, self._dtype):
                self._obstacles.append(Obstacle(eqn, dtype, is_opaque=True))


def _go_around(body: SubJaxpr, arguments: Sequence[Need], needs: Sequence[Need]) -> list[Need]:
    """The needs of the results of a body, where those of its carry are what the next turn needs, too."""
    after = list(needs)
    for i in body.carry:
        result = i - body.carry.start
        after[result] = max(after[result], arguments[i])
    return after


def _has_axes(atom: Var | Literal) -> bool:
    aval: Any = atom.aval
    return int(np.prod(aval.shape)) > 1
