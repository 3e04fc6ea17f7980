"""Aligns the scopes and values of two programs of one model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from ..._base import is_floating_dtype
from ..._jaxpr import split_axes
from ._scopes import RESIDUAL, Flat, Node, Scope, Side, Source, is_inside, list_values, moves, split_loop
from ._unroll import unroll_loops


class Alignment:
    """Two programs, the reference `f` and `g`, with pairs of values and scopes."""

    def __init__(self, f: Side, g: Side, inputs: Mapping[int, int]):
        self.f, self.g = f, g
        self.pairs = dict(inputs)  # of inputs of `g`, and values that leave its scopes, before casts: the value of `f`
        # of a scan of `g`: its node in `f`, in `g`, and the alignment of one iteration
        self.bodies: dict[Scope, tuple[Node, Node, Alignment]] = {}
        self.scopes: list[Scope] = []  # in the order in which `g` ends them, with scans and scopes that only `f` has
        # of a scope of `g` and a value that it reads: the value of `f` that it would read there
        self.replaced: dict[tuple[Scope, int], int] = {}
        # of a scope that passes on a value in `f` alone: the value, and the one that `g` has instead
        self.skipped: dict[Scope, list[tuple[int, int]]] = {}
        self.unaligned: list[str] = []  # the parts without a counterpart, as sentences

    def is_own_residual(self, value: int) -> bool:
        """True for an input of an iteration of `g` that was made in another pass of the scope that reads it."""
        maker = self.g.find_maker(value)
        if maker is None or value in self.pairs:
            return maker is not None
        for _, loop, inner in self.bodies.values():
            inputs = zip(inner.g.flat.inputs, loop.operands, strict=True)
            if not all(inner.is_own_residual(x) for x, operand in inputs if operand == value):
                return False
        return {reader[0] for reader in self.g.readers.get(value, ()) if isinstance(reader, tuple)} <= {maker.path}


Labels = Sequence[Hashable]


def align(
    f: Flat, g: Flat, inputs: Mapping[int, int], labels: tuple[Labels, Labels], sources: Mapping[Any, Source]
) -> Alignment:
    """Aligns scopes by path, pass and call, and the values that leave them by computation, readers and shape.

    Args:
      f: the reference program.
      g: the other program.
      inputs: the input of `f` for inputs of `g`.
      labels: a name for each output of both.
      sources: by input of `g`.
    """
    unroll_loops(f, g)
    unroll_loops(g, f)
    mine, theirs = f.count_calls(), g.count_calls()
    for flat in (f, g):
        flat.join_calls((mine - theirs) | (theirs - mine))
    _match_loops(f, g)
    for flat in (f, g):
        flat.release_casts()
    alignment = Alignment(Side(f, labels[0]), Side(g, labels[1]), inputs)
    alignment.g.sources = sources
    _Aligner(alignment).run()
    return alignment


def _match_loops(f: Flat, g: Flat) -> None:
    """Makes each scan and `shard_map` that both programs have a scope of its own."""
    found: list[dict[Any, list[Node]]] = [{}, {}]
    for flat, loops in zip((f, g), found, strict=True):
        for node in flat.nodes:
            if node.body is not None:
                params = node.eqn.params
                axes = split_axes(params) if node.eqn.primitive.name == "shard_map" else None
                key = node.scope, axes, *(params.get(name) for name in ("length", "reverse", "mesh"))
                loops.setdefault(key, []).append(node)
    matched = [key for key in found[0] if len(found[0][key]) == len(found[1].get(key, ()))]
    numbered = [(found[0][key][i], found[1][key][i]) for key in matched for i in range(len(found[0][key]))]
    for number, pair in enumerate(numbered):
        for node in pair:
            assert node.scope is not None
            node.scope = node.scope._replace(loop=number)


class _Aligner:
    """Aligns scope by scope, in the order in which the scopes of `g` end."""

    def __init__(self, alignment: Alignment):
        self._to, self._sides = alignment, (alignment.f, alignment.g)
        self._tokens: tuple[dict[int, Hashable], dict[int, Hashable]] = {}, {}  # equal for aligned values
        for value, partner in alignment.pairs.items():
            self._pair(partner, value)

    def run(self) -> None:
        to, (f, g) = self._to, self._sides
        last = {node.scope: i for i, node in enumerate(g.flat.nodes) if node.scope is not None}
        for scope in sorted(last, key=lambda scope: last[scope]):
            # A program without a remat has computed these values in its forward pass.
            own = scope if scope in f.nodes else scope._replace(direction="forward")
            if own not in f.nodes or own.direction != scope.direction != "recomputed":
                if g.computes(scope):
                    to.unaligned.append(describe(scope, "is only in the second function"))
                to.scopes.append(scope)
                continue
            self._match_reads(own, scope)
            to.scopes.append(scope)
            if scope.loop >= 0:
                self._align_loop(scope, own)
            else:
                self._align_values(own, scope)
        for i, label in enumerate(g.labels):
            if isinstance(label, int) and label in f.labels:
                mine, theirs = f.flat.outputs[f.labels.index(label)], g.flat.outputs[i]
                if not (isinstance(mine, Literal) or isinstance(theirs, Literal)):
                    self._match_read(f.flat.find_origin(mine), g.flat.find_origin(theirs), None)
        missing = [scope for scope in f.nodes if scope not in g.nodes and scope.direction != "recomputed"]
        to.unaligned += [describe(scope, "is only in the first function") for scope in missing if f.computes(scope)]

    def _match_reads(self, own: Scope, scope: Scope) -> None:
        """Pairs the one value of a type that a scope reads in both programs, if it is not aligned yet.

        One of the programs has another scope there, such as a multiplication that the other one has not.
        """
        f, g = self._sides
        reads = [
            {side.flat.find_origin(value) for value in side.reads.get(place, ())}
            for side, place in zip(self._sides, (own, scope), strict=True)
        ]
        known = {self._to.pairs[value] for value in reads[1] if value in self._to.pairs}
        mine = [value for value in reads[0] - known if not f.is_residual(value, own)]
        theirs = [value for value in reads[1] if self._to.pairs.get(value) not in reads[0]]
        theirs = [value for value in theirs if not g.is_residual(value, scope)]
        # Another scope may have shown already which value stands for which.
        shown = {other: value for (_, other), value in self._to.replaced.items() if other in theirs and value in mine}
        for other, value in shown.items():
            self._match_read(value, other, scope)
        mine = [value for value in mine if value not in shown.values()]
        theirs = [other for other in theirs if other not in shown]
        for value in mine:
            kind = _by_pass(f, value)
            found = [other for other in theirs if _by_pass(g, other) == kind]
            if len(found) == 1 == sum(_by_pass(f, other) == kind for other in mine):
                self._match_read(value, found[0], scope)

    def _match_read(self, value: int, other: int, scope: Scope | None) -> None:
        f, g = self._sides
        maker = f.flat.find_scope(value)
        if other not in self._to.pairs:
            if other in g.flat.makers and _by_type(f, value, {}) == _by_type(g, other, {}):
                self._pair(value, other)
        elif self._to.pairs[other] != value and maker is not None:
            if maker in g.nodes and not (_holds(maker, scope) or _holds(maker, g.flat.find_scope(other))):
                return
            if maker not in self._to.skipped:
                self._to.scopes.append(maker)
            pairs = self._to.skipped.setdefault(maker, [])
            if (value, other) not in pairs:
                pairs.append((value, other))
            if scope is not None:
                self._to.replaced[scope, other] = value

    def _align_values(self, own: Scope, scope: Scope) -> None:
        """Pairs the values that leave a scope, by ever weaker criteria. Groups of different sizes stay unpaired."""
        sides, places = self._sides, (own, scope)
        left = [side.list_shared(place) for side, place in zip(sides, places, strict=True)]
        hashes = [
            side.hash_values(place, tokens) for side, place, tokens in zip(sides, places, self._tokens, strict=True)
        ]
        for key in (_by_hash, _by_primitive, _by_readers, _by_type):
            groups: list[dict[Hashable, list[int]]] = [{}, {}]
            for side, values, known, group in zip(sides, left, hashes, groups, strict=True):
                for value in values:
                    if side.readers[value] == {RESIDUAL} and key is not _by_hash:
                        continue  # a wrong pair would be charged to the scope
                    group.setdefault(key(side, value, known), []).append(value)
            for name in groups[1]:
                mine, theirs = groups[0].get(name, ()), groups[1][name]
                if len(mine) == len(theirs):
                    for value, other in zip(mine, theirs, strict=True):
                        self._pair(value, other)
                        left[0].remove(value)
                        left[1].remove(other)
        count = max(self._count_made(i, values) for i, values in enumerate(left))
        if count and scope.direction != "recomputed":
            self._to.unaligned.append(describe(scope, f"has {count} {'outputs' if count > 1 else 'output'} unaligned"))

    def _count_made(self, i: int, values: Sequence[int]) -> int:
        """Counts values except slices of aligned ones, and residuals of a scan, which its backward pass alone reads."""
        side = self._sides[i]
        return sum(side.readers[value] != {RESIDUAL} and not self._is_moved(i, value) for value in values)

    def _is_moved(self, i: int, value: int) -> bool:
        """True for elements of aligned values and inputs."""
        flat = self._sides[i].flat
        if value in self._tokens[i] or value not in flat.makers:
            return True
        maker = flat.makers[value]
        return moves(maker) and all(self._is_moved(i, operand) for operand in list_values(maker.operands))

    def _pair(self, value: int, other: int) -> None:
        self._to.pairs[other] = value
        self._tokens[1][other] = self._tokens[0].setdefault(value, ("pair", len(self._tokens[0])))

    def _align_loop(self, own: Scope, scope: Scope) -> None:
        """Aligns the iterations of a scan, and then its outputs."""
        [mine], [theirs] = self._sides[0].nodes[own], self._sides[1].nodes[scope]
        f, g = mine.body, theirs.body
        assert f is not None
        assert g is not None
        inputs = self._pair_operands(mine, theirs)
        first, (start, end) = split_loop(mine)[0], split_loop(theirs)
        carried = {partner - first: i - start for i, partner in inputs.items() if start <= i < end}
        nodes = mine, theirs
        stacked = _list_stacked(mine), _list_stacked(theirs)
        names = [
            {i: side.name_stacked(node, place, i) for i in found}
            for side, node, place, found in zip(self._sides, nodes, (own, scope), stacked, strict=True)
        ]
        if mine.eqn.primitive.name == "shard_map":
            carried = _pair_outputs(nodes, names)
        labels = (
            [carried.get(i, names[0].get(i, "carried")) for i in range(len(mine.results))],
            [i if i in carried.values() else names[1].get(i, i) for i in range(len(theirs.results))],
        )
        sources = self._find_sources(theirs, g)
        inner = align(f, g, {g.inputs[i]: f.inputs[partner] for i, partner in inputs.items()}, labels, sources)
        self._to.bodies[scope] = mine, theirs, inner
        self._to.unaligned += inner.unaligned
        for partner, i in carried.items():
            self._pair(mine.results[partner], theirs.results[i])
        made = {_find_output(f, i): i for i in stacked[0]}
        for i in stacked[1]:
            output = _find_output(g, i)
            if output is not None and inner.pairs.get(output) in made:
                self._pair(mine.results[made[inner.pairs[output]]], theirs.results[i])

    def _find_sources(self, loop: Node, body: Flat) -> dict[int, Source]:
        sources, flat = self._to.g.sources, self._to.g.flat
        found = [sources.get(operand, (flat, operand)) for operand in loop.operands]
        made = [_list_made(flat).get(value) for flat, value in found]
        return {value: source for value, source in zip(body.inputs, made, strict=True) if source is not None}

    def _pair_operands(self, mine: Node, theirs: Node) -> dict[int, int]:
        """Pairs the operands of two scans: carried ones by type and position, others if their values are aligned."""
        pairs: dict[int, int] = {}
        for kind in range(3):
            groups: list[dict[Hashable, list[int]]] = [{}, {}]
            for node, side, tokens, group in zip((mine, theirs), self._sides, self._tokens, groups, strict=True):
                bounds = 0, *split_loop(node), len(node.operands)
                for i in range(bounds[kind], bounds[kind + 1]):
                    operand = node.operands[i]
                    known = None if isinstance(operand, Literal) else tokens.get(side.flat.find_origin(operand))
                    name = _read_type(node.eqn.invars[i].aval) if kind == 1 else known
                    if name is not None:
                        group.setdefault(name, []).append(i)
            for name, found in groups[1].items():
                if len(groups[0].get(name, ())) == len(found):
                    pairs.update(zip(found, groups[0][name], strict=True))
        return pairs


def _holds(outer: Scope, scope: Scope | None) -> bool:
    """True if `scope` is inside `outer`, which then decides which values it reads and passes on."""
    if scope is None or scope.direction != outer.direction or outer.loop >= 0:
        return False
    return scope.path != outer.path and is_inside(scope.path, outer.path)


def describe(scope: Scope, words: str) -> str:
    place = scope.path or "(outside)"
    return f"{place} {words} ({scope.direction})"


def _list_stacked(node: Node) -> range:
    """Returns the positions of the results of a scan that are not carried."""
    start, end = split_loop(node)
    return range(end - start, len(node.results))


def _list_made(flat: Flat) -> dict[Any, Source]:
    """Lists the values of iterations that loops stack, by result."""
    loops = [(node, node.body, i) for node in flat.nodes if node.body is not None for i in _list_stacked(node)]
    outputs = [(node.results[i], body, _find_output(body, i)) for node, body, i in loops]
    return {result: (body, output) for result, body, output in outputs if output is not None}


def _pair_outputs(nodes: tuple[Node, Node], names: Sequence[Mapping[int, str]]) -> dict[int, int]:
    """Pairs the outputs of two `shard_map`s by position, without residuals, if their types are the same."""
    kinds = [
        {i: _read_type(node.eqn.outvars[i].aval) for i, name in found.items() if name != RESIDUAL}
        for node, found in zip(nodes, names, strict=True)
    ]
    is_same = [*kinds[0].values()] == [*kinds[1].values()]
    return dict(zip(*kinds, strict=True)) if is_same else {}


def _find_output(flat: Flat, i: int) -> int | None:
    output = flat.outputs[i]
    return None if isinstance(output, Literal) else flat.find_origin(output)


_Key = Callable[[Side, int, Mapping[int, int]], Hashable]


def _by_hash(side: Side, value: int, hashes: Mapping[int, int]) -> Hashable:
    return hashes[value], _by_type(side, value, hashes)


def _by_primitive(side: Side, value: int, hashes: Mapping[int, int]) -> Hashable:
    return side.flat.makers[value].eqn.primitive.name, _by_readers(side, value, hashes)


def _by_readers(side: Side, value: int, hashes: Mapping[int, int]) -> Hashable:
    return frozenset(side.readers[value]), _by_type(side, value, hashes)


def _by_type(side: Side, value: int, hashes: Mapping[int, int]) -> Hashable:
    return _read_type(side.flat.types[value])


def _by_pass(side: Side, value: int) -> Hashable:
    """Tells gradients from weights and activations of the same type, which a backward pass reads, too."""
    maker = side.flat.find_scope(value)
    return maker is not None and maker.direction == "backward", _by_type(side, value, {})


def _read_type(aval: Any) -> Hashable:
    dtype = getattr(aval, "dtype", None)
    return getattr(aval, "shape", None), "float" if is_floating_dtype(dtype) else getattr(dtype, "kind", None)
