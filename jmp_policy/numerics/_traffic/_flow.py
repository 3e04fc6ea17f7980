"""Which collectives sum gradients of parameters: where their results go, and where their operands come from."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from ..._jaxpr import MATMULS, Fact, having
from ._collective import Direction

Node = Hashable
"""A value of a program."""


class Operation(NamedTuple):
    """What is known of the operation that made a value.

    Attributes:
      name: the name of the primitive, or of the HLO operation.
      direction: the pass that it belongs to; `None` where nobody knows.
    """

    name: str
    direction: Direction | None


_CONTRACTING = MATMULS | {
    "reduce_sum", "reduce_window_sum", "custom_vjp_call", "pallas_call",
    "dot", "convolution", "ragged-dot", "scaled-dot", "reduce", "reduce-window", "custom-call",
}  # fmt: skip
"""Of jaxprs, and of HLO. A gradient of an activation gets into one of these, a gradient of a parameter into none."""

_SCATTERING = frozenset({"scatter-add", "scatter"})
"""These sum the gradients of what a table was read for, unless each row was read once: a table of positions."""

_KEEPING = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS, Fact.DEVICE_SUMS, Fact.ADDS) | _SCATTERING | {
    "clamp", "convert_element_type", "div", "max", "min", "mul", "neg", "reduce_precision", "select_n",
    "all-gather", "all-reduce", "all-to-all", "bitcast", "broadcast", "collective-permute", "convert", "divide",
    "dynamic-slice", "dynamic-update-slice", "maximum", "minimum", "multiply", "negate", "optimization-barrier",
    "reduce-precision", "reduce-scatter", "reverse", "select", "subtract",
}  # fmt: skip
"""Operations that move, cast, scale or add what they read: of jaxprs, and of HLO, where the name differs."""


def make_operation(name: str, direction: Direction | None, read: int, made: int) -> Operation:
    """What is known of an operation of so many numbers, which makes so many: a sum along an axis of one sums nothing.

    >>> make_operation("reduce_sum", "backward", 8, 8).name, make_operation("reduce_sum", "backward", 8, 4).name
    ('reshape', 'reduce_sum')
    """
    return Operation("reshape" if name in ("reduce_sum", "reduce") and read == made else name, direction)


class Flow:
    """The values of a program, and which are made of which."""

    def __init__(self) -> None:
        self._sources: dict[Node, list[Node]] = {}
        self._makers: dict[Node, Operation] = {}
        self._feeding: set[Node] | None = None

    def add(self, operation: Operation, results: Iterable[Node], operands: Iterable[Node]) -> None:
        """Notes an operation."""
        read = list(operands)
        for result in results:
            self._makers[result] = operation
            known = self._sources.setdefault(result, [])
            if known != read:  # a body that is called twice is walked twice
                known.extend(read)

    def join(self, result: Node, source: Node) -> None:
        """Notes that a value may be another one, which came through a loop, a call or a tuple."""
        self._sources.setdefault(result, []).append(source)

    def is_summed_on(self, node: Node) -> bool:
        """Whether the backward pass sums a value of its own with others, in a product above all."""
        if self._feeding is None:
            self._feeding = self._find_feeding()
        return node in self._feeding

    def is_gradient(self, node: Node) -> bool:
        """Whether the backward pass made a value, which was at most moved, cast, scaled or added to others since."""
        seen, waiting = set(), [node]
        while waiting:
            node = waiting.pop()
            maker = self._makers.get(node)
            if maker is not None and maker.direction == "backward":
                return True
            if node not in seen and (maker is None or self._keeps(node, maker)):
                waiting += self._sources.get(node, ())
            seen.add(node)
        return False

    def _keeps(self, node: Node, maker: Operation) -> bool:
        """True if an operation returns what it reads, moved or scaled. Rows that tokens choose are activations."""
        is_lookup = maker.name == "gather" and not self._is_fixed(self._sources[node][-1])
        return maker.name in _KEEPING and not is_lookup

    def _find_feeding(self) -> set[Node]:
        """The values that get into a sum of the backward pass, without leaving that pass.

        Without this end, the step before would be among them where a loop runs several steps of training.
        """
        seen: set[Node] = set()
        waiting: list[Node] = []
        for node, maker in self._makers.items():
            if maker.direction == "backward" and self._is_sum(node, maker):
                waiting += self._sources.get(node, ())
        while waiting:
            node = waiting.pop()
            maker = self._makers.get(node)
            inside = maker is None or maker.direction in ("backward", None)
            if node not in seen and inside:
                waiting += self._sources.get(node, ())
            seen.add(node)
        return seen

    def _is_sum(self, node: Node, maker: Operation) -> bool:
        """Whether an operation sums many numbers of what it reads."""
        if maker.name not in _SCATTERING:
            return maker.name in _CONTRACTING
        operands = self._sources.get(node, [])
        return not self._is_fixed(operands[len(operands) // 2])  # the indices stand between the table and the rows

    def _is_fixed(self, node: Node) -> bool:
        """Whether the program makes a value of no argument."""
        seen, waiting = set(), [node]
        while waiting:
            node = waiting.pop()
            if node not in self._makers and node not in self._sources:
                return False
            if node not in seen:
                waiting += self._sources.get(node, ())
            seen.add(node)
        return True
