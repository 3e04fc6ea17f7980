"""Flattens a jaxpr into equations by scope, and finds the values that pass from one scope to another."""

import collections
import dataclasses
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from ..._jaxpr import (
    CALLED,
    MOVING,
    Atom,
    Fact,
    ModulePaths,
    Pass,
    Program,
    body_of,
    find_direction,
    having,
    is_float,
    name_stack,
    scan_parts,
)


class Scope(NamedTuple):
    """One call of a module or named scope, in one pass. It has the equations directly in it."""

    path: str
    direction: Pass
    call: int = 0
    loop: int = -1  # the number of a `scan` that is a scope of its own, because its iterations are aligned


@dataclasses.dataclass(eq=False)
class Node:
    """An equation whose variables are numbers, which do not collide when a jaxpr is inlined twice."""

    eqn: JaxprEqn
    operands: list[int | Literal]
    results: list[int]
    scope: Scope | None  # None for a cast that belongs to the scopes that read its result
    body: "Flat | None" = None  # of a shard_map, or of a scan with iterations


class Flat:
    """A jaxpr without calls: inputs, constants, nodes and outputs."""

    def __init__(self, program: Program, paths: ModulePaths, path: str = "", direction: Pass = "forward"):
        self.types: list[Any] = []  # the abstract value of each value
        self.constants: dict[int, Any] = {}  # arrays that the jaxpr closes over
        self.nodes: list[Node] = []  # the equations that outputs depend on, in order
        self.paths = paths
        self.inputs = [self._add(var) for var in body_of(program).invars]
        self.outputs = self.inline(program, self.inputs, path, direction)
        self.index()

    def index(self) -> None:
        """Drops equations that no output depends on, and numbers the calls of the others."""
        self._drop_unused()
        self.makers = {result: node for node in self.nodes for result in node.results}
        self._number_calls()

    def _add(self, var: Any) -> int:
        self.types.append(var.aval)
        return len(self.types) - 1

    def inline(
        self, program: Program, operands: Sequence[int | Literal], path: str, direction: Pass
    ) -> list[int | Literal]:
        """Appends the equations of a program on these operands, and returns its outputs."""
        jaxpr = body_of(program)
        values: dict[Var, int | Literal] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, constant in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True):
            values[var] = self._add(var)
            self.constants[len(self.types) - 1] = constant

        def read(atoms: Iterable[Atom]) -> list[int | Literal]:
            return [atom if isinstance(atom, Literal) else values[atom] for atom in atoms]

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            inner = self._find_path(path, eqn, direction), find_direction(name_stack(eqn), direction)
            if name in _INLINED:
                values.update(
                    zip(eqn.outvars, self.inline(eqn.params[_INLINED[name]], read(eqn.invars), *inner), strict=True)
                )
            elif eqn.outvars:  # an equation without outputs is a debug callback
                results = [self._add(var) for var in eqn.outvars]
                values.update(zip(eqn.outvars, results, strict=True))
                has_rows = name in ("scan", "shard_map") and eqn.params.get("length") != 0
                body = Flat(eqn.params["jaxpr"], self.paths, *inner) if has_rows else None
                self.nodes.append(Node(eqn, read(eqn.invars), results, Scope(*inner), body))
        return read(jaxpr.outvars)

    def _find_path(self, outer: str, eqn: JaxprEqn, direction: Pass) -> str:
        """Returns the path of an equation. JAX's name stack repeats scopes in the backward pass of some functions."""
        path = self.paths.find(outer, eqn)
        names = path.split("/")[len(outer.split("/")) if outer else 0 :]
        half = len(names) // 2
        if direction == "forward" or not half or names[:half] != names[half:]:
            return path
        return path.removesuffix("/".join(["", *names[half:]]))

    def _drop_unused(self) -> None:
        used, kept = set(self.outputs), list[Node]()
        for node in reversed(self.nodes):
            if not used.isdisjoint(node.results):
                used.update(list_values(node.operands))
                kept.append(node)
        self.nodes = kept[::-1]

    def _number_calls(self) -> None:
        """Numbers the calls of each scope. A call ends where an equation of the same pass is outside of the scope."""
        counts: dict[Scope, int] = {}
        current = set[Scope]()
        for node in self.nodes:
            assert node.scope is not None
            path, direction = node.scope[:2]
            current = {scope for scope in current if scope.direction != direction or is_inside(path, scope.path)}
            if node.scope not in current:
                counts[node.scope] = counts.get(node.scope, -1) + 1
                current.add(node.scope)
            node.scope = node.scope._replace(call=counts[node.scope])

    def count_calls(self) -> collections.Counter[Scope]:
        """Returns the number of calls of each scope."""
        scopes = {node.scope for node in self.nodes if node.scope is not None}
        return collections.Counter(scope._replace(call=0) for scope in scopes)

    def join_calls(self, scopes: Container[Scope]) -> None:
        """Makes one scope of all calls."""
        for node in self.nodes:
            if node.scope is not None and node.scope._replace(call=0) in scopes:
                node.scope = node.scope._replace(call=0)

    def release_casts(self) -> None:
        """Takes casts of values from other scopes out of their scope: their rounding is charged to what reads them."""
        for node in self.nodes:
            if is_cast(node) and self.find_scope(node.operands[0]) != node.scope:
                node.scope = None

    def find_scope(self, value: int | Literal) -> Scope | None:
        """Returns the scope that makes a value; None for an input, a constant and a released cast."""
        maker = None if isinstance(value, Literal) else self.makers.get(value)
        return None if maker is None else maker.scope

    def find_exit(self, value: int) -> tuple[int, list[Node]]:
        """Returns the value that its scope makes, and the released casts between it and `value`."""
        casts = []
        while value in self.makers and self.makers[value].scope is None:
            casts.append(self.makers[value])
            [operand] = list_values(casts[-1].operands)
            value = operand
        return value, casts[::-1]

    def find_origin(self, value: int) -> int:
        """Returns the value before all casts."""
        while value in self.makers and is_cast(self.makers[value]):
            [value] = list_values(self.makers[value].operands)
        return value


RESIDUAL = "residual"
"""The label of an output of a scan that only its backward pass reads."""

Source = tuple[Flat, int]
"""The jaxpr of another loop, and the value in it that is an input of an iteration."""


class Side:
    """One program, with the values that leave its scopes, and their readers."""

    def __init__(self, flat: Flat, labels: Sequence[Hashable]):
        self.flat, self.labels = flat, list(labels)
        self.readers: dict[int, set[Any]] = {}  # by origin, the value before all casts
        self.exits: dict[int, list[int]] = {}  # by origin: the values that other scopes read, before or after a cast
        self.reads: dict[Scope, list[int]] = {}  # values that a scope reads from elsewhere
        self.nodes: dict[Scope, list[Node]] = {}
        self.sources: Mapping[Any, Source] = {}
        for node in flat.nodes:
            if node.scope is not None:
                self.nodes.setdefault(node.scope, []).append(node)
                for value in list_values(node.operands):
                    self._add_read(value, node.scope)
        for value, label in zip(flat.outputs, labels, strict=True):
            if not isinstance(value, Literal):
                self._add_read(value, label)
        self.made: dict[Scope, list[int]] = {}  # origins that a scope makes and others read, in order
        for origin in flat.makers:
            scope = flat.find_scope(origin)
            if origin in self.readers and scope is not None:
                self.made.setdefault(scope, []).append(origin)

    def _add_read(self, value: int, reader: Any) -> None:
        origin = self.flat.find_origin(value)
        is_scope = isinstance(reader, Scope)
        if is_scope and self.flat.find_scope(origin) == reader:
            return
        self.readers.setdefault(origin, set()).add((reader.path, reader.direction) if is_scope else reader)
        exit, _ = self.flat.find_exit(value)
        exits = self.exits.setdefault(origin, [])
        if exit not in exits:
            exits.append(exit)
        if is_scope and value not in self.reads.setdefault(reader, []):
            self.reads[reader].append(value)

    def list_shared(self, scope: Scope) -> list[int]:
        """Lists the values that leave a scope, except residuals that only other passes of it read."""
        others = {(scope.path, name) for name in ("forward", "recomputed", "backward") if name != scope.direction}
        return [value for value in self.made.get(scope, []) if not self.readers[value] <= others]

    def computes(self, scope: Scope) -> bool:
        """True if a scope does more than move the elements of arrays."""
        return any(not moves(node) for node in self.nodes[scope])

    def is_residual(self, origin: int, scope: Scope) -> bool:
        """True for a value that another pass of the same scope made."""
        maker = self.find_maker(origin)
        return maker is not None and maker.path == scope.path and maker.direction != scope.direction

    def find_maker(self, origin: int) -> Scope | None:
        """Returns the scope that makes a value, which may be in an iteration of another loop."""
        flat, value = self.sources.get(origin, (self.flat, origin))
        return flat.find_scope(value)

    def name_stacked(self, node: Node, scope: Scope, i: int) -> str:
        """Labels an output of all iterations: a residual if other passes alone read it."""
        readers = self.readers.get(node.results[i], set())
        is_residual = all(isinstance(reader, tuple) and reader[1] != scope.direction for reader in readers)
        return RESIDUAL if is_residual else "stacked"

    def hash_values(self, scope: Scope, tokens: Mapping[int, Hashable]) -> dict[int, int]:
        """Hashes the computation of each value of a scope, without dtypes and constants."""
        hashes: dict[int, int] = {}
        flat = self.flat

        def look_up(operand: int | Literal) -> Hashable:
            if isinstance(operand, Literal):
                return "literal"
            origin = flat.find_origin(operand)
            return tokens.get(origin) or hashes.get(origin) or ("outside", flat.types[origin].shape)

        for node in self.nodes[scope]:
            operands = [hash(look_up(operand)) for operand in node.operands]
            if node.eqn.primitive.name in ("add", "mul", "add_any", "max", "min"):
                operands.sort()
            start = node.eqn.params.get("start_indices")
            for i, result in enumerate(node.results):
                hashes[result] = hash((node.eqn.primitive.name, i, start, *operands))
        return hashes


def moves(node: Node) -> bool:
    makes_numbers = any(has_floats(var.aval) for var in node.eqn.outvars)
    return node.eqn.primitive.name in MOVING or is_cast(node) or not makes_numbers


def split_loop(node: Node) -> tuple[int, int]:
    """Returns the number of constants, and of constants and carried values, of a scan. A `shard_map` has none."""
    if node.eqn.primitive.name == "shard_map":
        return 0, 0
    consts, carried = scan_parts(node.eqn)
    return consts, consts + carried


def has_floats(aval: Any) -> bool:
    """True for an array of floating or complex numbers."""
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.inexact)) and aval.size > 0


def has_values(aval: Any) -> bool:
    """True for any array of numbers or booleans."""
    is_whole = hasattr(aval, "dtype") and (aval.dtype == bool or jnp.issubdtype(aval.dtype, jnp.integer))
    return has_floats(aval) or (bool(is_whole) and aval.size > 0)


def is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}/")


def list_values(atoms: Iterable[int | Literal]) -> list[int]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_cast(node: Node) -> bool:
    """True for an equation that returns its one floating operand, possibly in another dtype or sharding."""
    eqn = node.eqn
    if eqn.primitive.name not in _CASTS or len(eqn.invars) != 1 or isinstance(node.operands[0], Literal):
        return False
    return is_float(eqn.invars[0]) and is_float(eqn.outvars[0])


_CASTS = having(Fact.ANNOTATES) | {"convert_element_type", "reduce_precision", "copy"}
_INLINED = {name: key for name, key in CALLED.items() if name != "shard_map"} | {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
