"""The dataflow of a jaxpr as integer tables, which a compiled program can search."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._jaxpr import CALLED, ENTERED, RecordedOp, SubJaxpr, array_dtype, float_dtype, sub_jaxprs
from ._extremes import MOST_LOOPS, ExtremesRecorder, find_telling_operand, is_measurable, moves_only
from ._origin import MOST_OPERANDS, MOST_TURNS
from ._remedies import A_CONSTANT, TEXT_LENGTH, Words, describe_code, write_words

NONE, CONSTANT, UNKNOWN = -1, -2, -3
"""Rows of an operand that does not exist, a literal, and a value that is not measured."""

_RECIPROCALS = ("div", "integer_pow", "pow", "rsqrt")

Around = tuple[tuple[JaxprEqn, Jaxpr], ...]


class Graph(NamedTuple):
    """Values (rows of the record) and the values that each was computed from.

    The sources of value `i` are `target[start[i]:start[i + 1]]`. One extra node at the end has edges to the results.
    A merged loop has one row for all its iterations. Integers are int32, other numbers float32.
    """

    start: np.ndarray  # (values + 2,)
    target: np.ndarray  # (edges,)
    common: np.ndarray  # the number of merged loops around both ends of an edge
    carried: np.ndarray  # True if the last of these loops carried the value from the previous iteration
    operands: np.ndarray  # (values, MOST_OPERANDS): rows of the first operands, or `NONE`, `CONSTANT`, `UNKNOWN`
    scales: np.ndarray  # an operand is `scales * value + shifts`
    shifts: np.ndarray  # of a constant, its value
    turns: np.ndarray  # (values, MOST_TURNS): loop iterations, -1 after the last, `-2 - i` for the i-th merged loop
    last: np.ndarray  # (values, MOST_LOOPS): the last iteration of a merged loop that runs in reverse, else -1
    is_half: np.ndarray  # True for float16
    is_reciprocal: np.ndarray  # True if a value may be zero because an operand is infinite, as in a division
    is_constant: np.ndarray  # True for a literal, for a constant array, and for a value computed of them alone
    text: np.ndarray  # the index of each value's text
    texts: np.ndarray  # uint8 of shape (texts, TEXT_LENGTH)
    numbers: np.ndarray  # literals that are not finite: the last values, without a row in the record


class Edge(NamedTuple):
    """A source of a value `scale * source + shift`. `carried` is the merged loop that carried it over, if any."""

    value: int
    carried: int | None = None
    scale: float = 1.0
    shift: float = 0.0


def build_graph(
    program: Jaxpr,
    arguments: Sequence[int],
    lines: Sequence[RecordedOp],
    words: Sequence[Words],
    recorder: ExtremesRecorder,
) -> Graph:
    """Builds the graph of a recorded program. Rows of `arguments` come first, literals last."""
    finder = _EdgeFinder(program, arguments, lines, recorder)
    edges = [[] for _ in arguments] + [finder.find_sources(line) for line in lines]
    results, literals = finder.find_results(), finder.literals
    edges += [[] for _ in literals]
    operands = [[] for _ in arguments] + [finder.list_operands(line) for line in lines] + [[] for _ in literals]
    nowhere: Any = RecordedOp(None, 0), ()  # type: ignore[arg-type]
    values = [nowhere] * len(arguments) + [(line, line.step.around) for line in lines] + [nowhere] * len(literals)
    words = [*words, *literals.values()]
    merged = [[i for i, (eqn, _) in enumerate(around) if finder.is_merged(eqn)] for _, around in values]

    # Edges of all values, then the edges to the results.
    start = np.cumsum([0, *map(len, edges), len(results)])
    common, carried = [], []
    for value, own in enumerate(edges):
        for edge in own:
            shared = _count_shared(values[value], values[edge.value], finder)
            common.append(sum(i < shared for i in merged[value]) if edge.carried is None else edge.carried + 1)
            carried.append(edge.carried is not None)
    flat = [edge.value for own in (*edges, results) for edge in own]
    common += [0] * len(results)
    carried += [False] * len(results)

    distinct = list(dict.fromkeys(words))
    places = {word: i for i, word in enumerate(distinct)}
    loops = [_list_turns(line, around, finder) for line, around in values]
    atoms = [program.invars[i] for i in arguments] + [line.step.eqn.outvars[line.result] for line in lines]
    return Graph(
        start=start.astype(np.int32),
        target=np.array(flat or [0], np.int32),  # not empty, because the traced loop body indexes it
        common=np.minimum(np.array(common or [0], np.int32), MOST_LOOPS),
        carried=np.array(carried or [False], bool),
        operands=_pad([[row for row, _, _ in own] for own in operands], MOST_OPERANDS, NONE, np.int32),
        scales=_pad([[scale for _, scale, _ in own] for own in operands], MOST_OPERANDS, 0, np.float32),
        shifts=_pad([[shift for _, _, shift in own] for own in operands], MOST_OPERANDS, 0, np.float32),
        turns=_pad([row for row, _ in loops], MOST_TURNS, NONE, np.int32),
        last=_pad([row for _, row in loops], MOST_LOOPS, NONE, np.int32),
        is_half=_pad([[float_dtype(atom) == np.float16 for atom in atoms]], len(values), False, bool)[0],
        is_reciprocal=np.array([line is not None and line.name in _RECIPROCALS for (line, *_), _ in values], bool),
        is_constant=_find_constants(words, lines, edges, finder),
        text=np.array([places[word] for word in words], np.int32),
        texts=np.array([write_words(word) for word in distinct], np.uint8).reshape(-1, TEXT_LENGTH),
        numbers=np.array([number for number, _ in literals], np.float32),
    )


class _EdgeFinder:
    """Follows values of a jaxpr back to recorded rows, in and out of sub-jaxprs."""

    def __init__(
        self, program: Jaxpr, arguments: Sequence[int], lines: Sequence[RecordedOp], recorder: ExtremesRecorder
    ):
        self._program, self._recorder = program, recorder
        self._arguments = {id(program.invars[i]): row for row, i in enumerate(arguments)}
        self._rows = {
            (_key(line.step.around), line.turns, id(line.step.eqn.outvars[line.result])): len(arguments) + row
            for row, line in enumerate(lines)
        }
        self._list_makers = functools.cache(_list_makers)
        self._list_bodies = functools.cache(sub_jaxprs)
        self._found: dict[Any, list[Edge]] = {}
        # True to follow integers to the floats that they were computed from, as the scales of a block-scaled format.
        self._reads_bits = False
        self._count = len(arguments) + len(lines)
        self.literals: dict[tuple[float, int], Words] = {}  # by number and equation that reads it

    def is_merged(self, eqn: JaxprEqn) -> bool:
        """True for a loop with one row for all iterations."""
        name = eqn.primitive.name
        return name == "while" or (name == "scan" and not self._recorder.splits(eqn.params["length"]))

    def find_sources(self, line: RecordedOp) -> list[Edge]:
        self._reads_bits = line.step.eqn.primitive.name == "bitcast_convert_type"
        found = _unite_edges(self._follow(atom, line.step.around, line.turns) for atom in line.step.eqn.invars)
        self._reads_bits = False
        return self._put_last(found)

    def find_results(self) -> list[Edge]:
        return self._put_last(_unite_edges(self._follow_end(atom, (), ()) for atom in self._program.outvars))

    def _put_last(self, edges: list[Edge]) -> list[Edge]:
        """Puts literals last: they are in the program whether or not a run reaches them."""
        return sorted(edges, key=lambda edge: edge.value >= self._count)

    def list_operands(self, line: RecordedOp) -> list[tuple[int, float, float]]:
        """Lists rows, scales and shifts of the first operands of a line."""
        found = []
        for atom in [atom for atom in line.step.eqn.invars if is_measurable(atom)][:MOST_OPERANDS]:
            edges = self._follow(atom, line.step.around, line.turns)
            number = None if edges else _read_number(self._find_literal(atom, line.step.around)[0])
            edge = next(iter(edges), None)
            if edge is not None:
                found.append((edge.value, edge.scale, edge.shift))
            else:
                found.append((UNKNOWN, 0.0, 0.0) if number is None else (CONSTANT, 0.0, number))
        return found

    def is_known(self, atom: Any, around: Around, turns: tuple[int, ...]) -> bool:
        """True for a literal, for a boolean, which is finite as a number too, and for a value of rows."""
        is_bool = array_dtype(atom) == np.bool_
        return is_bool or bool(self._follow(atom, around, turns)) or self._find_literal(atom, around)[0] is not None

    def _find_literal(
        self, atom: Any, around: Around, reader: JaxprEqn | None = None
    ) -> tuple[Literal | None, JaxprEqn | None, Around]:
        """Returns the literal that an atom is, also outside the sub-jaxpr, and the place that reads it."""
        reader = around[-1][0] if around and reader is None else reader
        while not isinstance(atom, Literal):
            body = around[-1][1] if around else self._program
            eqn, i = self._list_makers(body).get(atom, (None, 0))
            if eqn is not None and moves_only(eqn):
                atom, reader = eqn.invars[i], eqn
            elif eqn is None and around and around[-1][0].primitive.name in CALLED and atom in body.invars:
                reader, around = around[-1][0], around[:-1]
                atom = reader.invars[body.invars.index(atom)]
            else:
                return None, None, ()
        return atom, reader, around

    def _follow_end(
        self, atom: Any, around: Around, turns: tuple[int, ...], loop: JaxprEqn | None = None
    ) -> list[Edge]:
        """Follows the result of a jaxpr or the start of a loop, which may be a literal that is not finite."""
        edges = self._follow(atom, around, turns)
        literal, eqn, around = (None, None, ()) if edges else self._find_literal(atom, around, loop)
        number = _read_number(literal)
        if number is None or np.isfinite(number):
            return edges
        key = number, id(eqn)
        if key not in self.literals:
            self.literals[key] = Words(argument=A_CONSTANT, **({} if eqn is None else describe_code(eqn, around)))
        return [Edge(self._count + list(self.literals).index(key))]

    def _follow(self, atom: Any, around: Around, turns: tuple[int, ...]) -> list[Edge]:
        """Lists the rows of a value in a sub-jaxpr; empty if it is not measured, like integers."""
        if isinstance(atom, Literal) or not (self._reads_bits or is_measurable(atom)):
            return []
        key = _key(around), turns, id(atom)
        if key in self._rows:
            return [Edge(self._rows[key])]
        key = *key, self._reads_bits
        if key not in self._found:
            self._found[key] = []  # stops at a carry that the loop does not change
            self._found[key] = self._find(atom, around, turns)
        return self._found[key]

    def _find(self, var: Var, around: Around, turns: tuple[int, ...]) -> list[Edge]:
        body = around[-1][1] if around else self._program
        made = self._list_makers(body).get(var)
        if made is not None:
            eqn, i = made
            if not is_measurable(var) and eqn.primitive.name not in ENTERED:
                return _unite_edges(self._follow(atom, around, turns) for atom in eqn.invars)
            telling = find_telling_operand(eqn, i)
            if telling is not None:
                _, scale, shift = telling
                edges = self._follow(eqn.invars[telling.operand], around, turns)
                return [edge._replace(scale=scale * edge.scale, shift=scale * edge.shift + shift) for edge in edges]
            return self._enter(eqn, i, around, turns)
        if not around:
            return [Edge(self._arguments[id(var)])] if id(var) in self._arguments else []
        return self._leave(body.invars.index(var), around, turns) if var in body.invars else []

    def _enter(self, eqn: JaxprEqn, i: int, around: Around, turns: tuple[int, ...]) -> list[Edge]:
        """Continues inside the sub-jaxprs of the equation that made a value as its result `i`."""
        name = eqn.primitive.name
        bodies = [body for body in self._list_bodies(eqn) if body.outputs] if name in ENTERED else []
        after = [turns]
        if name == "scan":
            order, is_carried = _list_order(eqn), i < len(bodies[0].carry)
            if not order:
                return self._follow_end(_find_start(bodies[0], i), around, turns, eqn) if is_carried else []
            if not self.is_merged(eqn):
                after = [(*turns, turn) for turn in (order[-1:] if is_carried else order)]
        found = [
            self._follow_end(body.program.outvars[i], (*around, (eqn, body.program)), inner)
            for body in bodies
            for inner in after
        ]
        start = [self._follow_end(_find_start(bodies[0], i), around, turns, eqn)] if name == "while" else []
        return _unite_edges([*found, *start])

    def _leave(self, i: int, around: Around, turns: tuple[int, ...]) -> list[Edge]:
        """Continues outside a sub-jaxpr, from its argument `i`."""
        (eqn, program), outside = around[-1], around[:-1]
        body = next(body for body in self._list_bodies(eqn) if body.program is program)
        given, is_carry, n = body.inputs[i][0], i in body.carry, i - body.carry.start
        if eqn.primitive.name != "scan" or self.is_merged(eqn):
            if is_carry:
                return _unite_edges([self._carry(n, around, turns), self._follow_end(given, outside, turns, eqn)])
            return self._follow(given, outside, turns)
        order, turn = _list_order(eqn), turns[-1]
        if is_carry and turn != order[0]:
            before = order[order.index(turn) - 1]
            return self._follow(program.outvars[n], around, (*turns[:-1], before))
        if i >= body.carry.stop:
            return self._follow_slice(given, eqn.params["length"], outside, turns)
        if is_carry:
            return self._follow_end(given, outside, turns[:-1], eqn)
        return self._follow(given, outside, turns[:-1])

    def _follow_slice(self, atom: Any, length: int, around: Around, turns: tuple[int, ...]) -> list[Edge]:
        """Follows the slice of an array that iteration `turns[-1]` of a scan reads, through an earlier scan's stack."""
        body = around[-1][1] if around else self._program
        made = None if isinstance(atom, Literal) else self._list_makers(body).get(atom)
        if made is not None and made[0].primitive.name == "scan" and not self.is_merged(made[0]):
            (eqn, i), (inner,) = made, self._list_bodies(made[0])
            if i >= len(inner.carry) and eqn.params["length"] == length:
                return self._follow(inner.program.outvars[i], (*around, (eqn, inner.program)), turns)
        return self._follow(atom, around, turns[:-1])

    def _carry(self, i: int, around: Around, turns: tuple[int, ...]) -> list[Edge]:
        """Follows carry `i` of a merged loop to the previous iteration."""
        level = sum(self.is_merged(eqn) for eqn, _ in around) - 1
        edges = self._follow(around[-1][1].outvars[i], around, turns)
        levels = [level if edge.carried is None else min(edge.carried, level) for edge in edges]
        return [edge._replace(carried=level) for edge, level in zip(edges, levels, strict=True)]


def _read_number(literal: Literal | None) -> float | None:
    if literal is None or float_dtype(literal) is None:
        return None
    return float(np.asarray(literal.val, np.float32))


def _find_constants(
    words: Sequence[Words], lines: Sequence[RecordedOp], edges: Sequence[Sequence[Edge]], finder: _EdgeFinder
) -> np.ndarray:
    """Finds values that depend on no argument, such as a mask, or the bound of `clip(x, 0, inf)` in half precision.

    An operand that only selects between values may be an argument.
    """
    found = np.array([word.argument == A_CONSTANT for word in words], bool)
    first = next((value for value, word in enumerate(words) if not word.argument), len(words))
    for value, line in enumerate(lines, start=first):
        atoms = line.step.eqn.invars[line.step.name == "select_n" :]
        is_known = all(finder.is_known(atom, line.step.around, line.turns) for atom in atoms)
        found[value] = is_known and all(found[edge.value] for edge in edges[value])
    return found


def _list_makers(body: Jaxpr) -> dict[Var, tuple[JaxprEqn, int]]:
    return {var: (eqn, i) for eqn in body.eqns for i, var in enumerate(eqn.outvars)}


def _unite_edges(found: Iterable[list[Edge]]) -> list[Edge]:
    return list(dict.fromkeys(edge for edges in found for edge in edges))


def _find_start(body: SubJaxpr, i: int) -> Any:
    """Returns the value of carry `i` of a loop before the first iteration."""
    return body.inputs[body.carry[i]][0]


def _key(around: Around) -> tuple[tuple[int, int], ...]:
    return tuple([(id(eqn), id(body)) for eqn, body in around])


def _list_order(eqn: JaxprEqn) -> range:
    """Returns the iterations of a scan in execution order."""
    turns = range(eqn.params["length"])
    return turns[::-1] if eqn.params["reverse"] else turns


def _count_shared(one: tuple[RecordedOp, Around], other: tuple[RecordedOp, Around], finder: _EdgeFinder) -> int:
    """Counts the outer equations that two values share, in the same iterations."""
    turns = iter(zip(one[0].turns, other[0].turns, strict=False))
    count = 0
    for mine, theirs in zip(one[1], other[1], strict=False):
        if mine[0] is not theirs[0] or mine[1] is not theirs[1]:
            break
        if mine[0].primitive.name == "scan" and not finder.is_merged(mine[0]):
            turn, its = next(turns)
            if turn != its:
                break
        count += 1
    return count


def _list_turns(line: RecordedOp, around: Around, finder: _EdgeFinder) -> tuple[list[int], list[int]]:
    """Returns the entries of `Graph.turns` and `Graph.last`."""
    own, turns, last = iter(line.turns), [], []
    for eqn, _ in around:
        if finder.is_merged(eqn):
            turns.append(-2 - len(last))
            is_backward = eqn.primitive.name == "scan" and eqn.params["reverse"]
            last.append(eqn.params["length"] - 1 if is_backward else NONE)
        elif eqn.primitive.name == "scan":
            turns.append(next(own))
    return turns, last


def _pad(rows: Sequence[Sequence[Any]], width: int, fill: int, dtype: Any) -> np.ndarray:
    return np.array([[*row[:width], *[fill] * (width - len(row))] for row in rows], dtype).reshape(len(rows), width)
