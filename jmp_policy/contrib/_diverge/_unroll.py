"""Unrolls the scans of one program whose iterations are layers of their own in another one."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from ..._jaxpr import Pass
from ._scopes import Flat, Node, is_inside, list_values, split_loop


def unroll_loops(flat: Flat, other: Flat) -> None:
    """Replaces each scan whose iterations are scopes of the other program, until there is none."""
    scanned, called = _list_paths(other)
    loops: dict[Node, tuple[str, Sequence[str]]] = {}
    for node in flat.nodes:
        if node.body is not None:
            assert node.scope is not None
            paths = set[str]().union(*_list_paths(node.body)) - {node.scope.path}
            found = None if paths & scanned else _find_iterations(node, node.scope.path, paths, called)
            if found is not None:
                loops[node] = found
    if loops:
        _Unroller(flat).run(loops)
        unroll_loops(flat, other)


def _list_paths(flat: Flat) -> tuple[set[str], set[str]]:
    """Lists the paths of scopes in scans, and of the others."""
    scanned = set[str]().union(
        *(path for node in flat.nodes if node.body is not None for path in _list_paths(node.body))
    )
    return scanned, {node.scope.path for node in flat.nodes if node.scope is not None}


def _find_iterations(node: Node, outer: str, paths: set[str], called: set[str]) -> tuple[str, Sequence[str]] | None:
    """Finds the path of the body of a scan, and the paths of its iterations in another program."""
    length = node.eqn.params.get("length")  # None for a `shard_map`
    if paths & called and length:
        return outer, [outer] * length
    numbered: dict[str, dict[int, str]] = {}  # "layers_": {0: "layers_0", 1: "layers_1"}
    for path in called:
        for match in re.finditer(r"(\d+)(?=/|$)", path):
            numbered.setdefault(path[: match.start()], {})[int(match[0])] = path[: match.end()]
    families = [[family[i] for i in sorted(family)] for family in numbered.values() if len(family) == length]
    path = min(paths, default=outer, key=len)
    bases = [path[:end] for end in (*(match.start() for match in re.finditer("/", path)), len(path))]
    bases = [base for base in ("", *bases) if is_inside(base, outer) and all(is_inside(path, base) for path in paths)]
    chosen = max(
        ((_count_common(base, paths, names, called), base, names) for base in bases for names in families), default=None
    )
    return chosen[1:] if chosen is not None and chosen[0] > 0 else None


def _count_common(base: str, paths: Iterable[str], names: Sequence[str], called: Iterable[str]) -> int:
    """Counts the scopes that an iteration of a scan and one of another program share. Their name counts as one."""
    inner, others = (
        {path[len(outer) :].strip("/") for path in some if is_inside(path, outer) and path != outer}
        for some, outer in ((paths, base), (called, names[0]))
    )
    return len(inner & others) + (re.sub(r"[/_]?\d+$", "", names[0]) in (base, base.removesuffix("s")))


class _Unroller:
    """Unrolls scans. A residual that its backward pass slices is the value of that iteration."""

    def __init__(self, flat: Flat):
        self._flat = flat
        self._elements: dict[int, Sequence[int | Literal]] = {}  # of the stacked outputs of unrolled scans

    def run(self, loops: Mapping[Node, tuple[str, Sequence[str]]]) -> None:
        """Replaces scans, each with the path of its body and the paths of its iterations."""
        flat, values = self._flat, dict[int, int | Literal]()
        nodes, flat.nodes = flat.nodes, []
        for node in nodes:
            node.operands = _substitute(node.operands, values)
            if node in loops:
                values.update(zip(node.results, self._unroll(node, *loops[node]), strict=True))
            else:
                flat.nodes.append(node)
        flat.outputs = _substitute(flat.outputs, values)
        flat.index()

    def _unroll(self, node: Node, base: str, names: Sequence[str]) -> list[int | Literal]:
        assert node.scope is not None
        path, direction = node.scope[:2]
        start, end = split_loop(node)
        carry, stacked = node.operands[start:end], list_values(node.operands[end:])
        step = -1 if node.eqn.params["reverse"] else 1
        made: list[Sequence[int | Literal]] = []
        for i in range(len(names))[::step]:
            xs = [self._take(x, i, names[i], direction) for x in stacked]
            body = Flat(node.eqn.params["jaxpr"], self._flat.paths, path, direction)
            _rename(body, base, names[i])
            outputs = self._inline(body, [*node.operands[:start], *carry, *xs])
            carry = outputs[: end - start]
            made.append(outputs[end - start :])
        columns = [*zip(*made[::step], strict=True)]
        results = [self._call(_stack, column, path, direction) for column in columns]
        self._elements.update(zip(results, columns, strict=True))
        return [*carry, *results]

    def _take(self, value: int, i: int, path: str, direction: Pass) -> int | Literal:
        if value in self._elements:
            return self._elements[value][i]
        return self._call(functools.partial(lax.index_in_dim, index=i, keepdims=False), [value], path, direction)

    def _call(self, fun: Callable[..., Any], operands: Sequence[int | Literal], path: str, direction: Pass) -> int:
        avals = [atom.aval if isinstance(atom, Literal) else self._flat.types[atom] for atom in operands]
        [result] = list_values(self._flat.inline(jax.make_jaxpr(fun)(*avals), operands, path, direction))
        return result

    def _inline(self, body: Flat, operands: Sequence[int | Literal]) -> list[int | Literal]:
        flat, first = self._flat, len(self._flat.types)
        flat.types += body.types
        flat.constants |= {first + value: constant for value, constant in body.constants.items()}
        values = {i: first + i for i in range(len(body.types))} | dict(zip(body.inputs, operands, strict=True))
        for node in body.nodes:
            results = [first + result for result in node.results]
            flat.nodes.append(Node(node.eqn, _substitute(node.operands, values), results, node.scope, node.body))
        return _substitute(body.outputs, values)


def _rename(flat: Flat, base: str, name: str) -> None:
    """Renames the scope `base`, and those inside it."""
    for node in flat.nodes:
        assert node.scope is not None
        if is_inside(node.scope.path, base):
            inner = node.scope.path[len(base) :].strip("/")
            node.scope = node.scope._replace(path=f"{name}/{inner}".strip("/"))
        if node.body is not None:
            _rename(node.body, base, name)


def _substitute(atoms: Sequence[int | Literal], values: Mapping[int, int | Literal]) -> list[int | Literal]:
    return [atom if isinstance(atom, Literal) else values.get(atom, atom) for atom in atoms]


def _stack(*xs: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(x, (0,)) for x in xs], 0)
