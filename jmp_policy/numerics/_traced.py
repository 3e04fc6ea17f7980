"""Collectives of a jaxpr, and the dataflow that shows which of them sum gradients of parameters."""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from .._jaxpr import MATMULS, Fact, Pass, Step, find_line, find_origin, having, split_axes, walk
from ._collectives_report import REDUCING, Collective

Node = Hashable
"""A value of a jaxpr or an HLO module."""


Maker = tuple[str, Pass | None]
"""Primitive or HLO opcode that makes a value, and the pass if known."""

_CONTRACTING = MATMULS | {
    "reduce_sum", "reduce_window_sum", "custom_vjp_call", "pallas_call",
    "dot", "convolution", "ragged-dot", "scaled-dot", "reduce", "reduce-window", "custom-call",
}  # fmt: skip
"""Ops (of jaxprs and HLO) that the backward pass applies to gradients of activations, not of parameters."""

_SCATTERING = frozenset({"scatter-add", "scatter"})
"""Ops that sum gradients of a lookup, unless each row was read once (a table of positions)."""

_KEEPING = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS, Fact.DEVICE_SUMS, Fact.ADDS) | _SCATTERING | {
    "clamp", "convert_element_type", "div", "max", "min", "mul", "neg", "reduce_precision", "select_n",
    "all-gather", "all-reduce", "all-to-all", "bitcast", "broadcast", "collective-permute", "convert", "divide",
    "dynamic-slice", "dynamic-update-slice", "maximum", "minimum", "multiply", "negate", "optimization-barrier",
    "reduce-precision", "reduce-scatter", "reverse", "select", "subtract",
}  # fmt: skip
"""Ops (of jaxprs, and of HLO if the name differs) that move, cast, scale or add their operands."""


class Flow:
    """Dataflow of a program."""

    def __init__(self) -> None:
        self._sources: dict[Node, list[Node]] = {}
        self._makers: dict[Node, Maker] = {}

    def add(
        self,
        name: str,
        direction: Pass | None,
        results: Iterable[Node],
        operands: Sequence[Node],
        sizes: tuple[int, int] = (0, 1),
    ) -> None:
        """Adds an op. `sizes` are the element counts of its first operand and result."""
        if name in ("reduce_sum", "reduce") and sizes[0] == sizes[1]:  # over axes of size 1
            name = "reshape"
        for result in results:
            self._makers[result] = name, direction
            known = self._sources.setdefault(result, [])
            if known != operands:  # a sub-jaxpr that is called twice is walked twice
                known.extend(operands)

    def join(self, result: Node, source: Node) -> None:
        """Adds an alias: `result` may be `source`, through a loop, a call or a tuple."""
        self._sources.setdefault(result, []).append(source)

    def is_gradient(self, node: Node) -> bool:
        """True if the backward pass made a value, and it was only moved, cast, scaled or added since."""
        return any(
            node in self._makers and self._makers[node][1] == "backward" for node in self._trace([node], self._keeps)
        )

    def _trace(self, nodes: Iterable[Node], goes_on: Callable[[Node], bool]) -> Iterator[Node]:
        """Yields nodes and the nodes that they are made of, each once, and not beyond nodes that do not go on."""
        waiting = dict.fromkeys(nodes)
        seen: set[Node] = set()
        while waiting:
            node, _ = waiting.popitem()
            seen.add(node)
            yield node
            if goes_on(node):
                waiting.update(dict.fromkeys(source for source in self._sources.get(node, ()) if source not in seen))

    def _keeps(self, node: Node) -> bool:
        """True if an op moves, casts, scales or adds. False for an embedding lookup, whose result is an activation."""
        if node not in self._makers:
            return True
        name, _ = self._makers[node]
        is_lookup = name == "gather" and not self._is_fixed(self._sources[node][-1])
        return name in _KEEPING and not is_lookup

    @functools.cached_property
    def summed_on(self) -> set[Node]:
        """The values that reach a sum of the backward pass within that pass, not in an earlier training step."""
        sums = [node for node, (_, direction) in self._makers.items() if direction == "backward" and self._is_sum(node)]
        operands = [source for node in sums for source in self._sources.get(node, ())]
        return set(self._trace(operands, lambda node: self._makers.get(node, ("", None))[1] in ("backward", None)))

    def _is_sum(self, node: Node) -> bool:
        """True if an op sums elements of an operand."""
        name, _ = self._makers[node]
        if name not in _SCATTERING:
            return name in _CONTRACTING
        operands = self._sources.get(node, [])
        return not self._is_fixed(operands[len(operands) // 2])  # operands: table, indices, rows

    def _is_fixed(self, node: Node) -> bool:
        """True if a value does not depend on any argument."""
        return all(node in self._makers or node in self._sources for node in self._trace([node], lambda _: True))


_COLLECTIVES = {
    ("all-reduce", "sum"): "psum psum_invariant unreduced_psum",
    ("all-reduce", "max"): "pmax unreduced_pmax",
    ("all-reduce", "min"): "pmin unreduced_pmin",
    ("all-gather", ""): "all_gather all_gather_invariant all_gather_reduced",
    ("reduce-scatter", "sum"): "reduce_scatter unreduced_reduce_scatter",
    ("all-to-all", ""): "all_to_all ragged_all_to_all",
    ("collective-permute", ""): "ppermute",
    ("collective-broadcast", ""): "pbroadcast pbroadcast_dynamic",
}
PRIMITIVES = {name: made for made, names in _COLLECTIVES.items() for name in names.split()}
"""HLO name and reduction by JAX primitive."""


FindPlace = Callable[[str], tuple[str, Pass]]
"""Reads the module path and the pass of an op from its name stack."""


def read_program(
    program: Jaxpr, find_place: FindPlace, platform: str | None = None
) -> tuple[list[Collective], list[str]]:
    """Lists the collectives in the shard_maps of a jaxpr, and the lines of loops with an unknown trip count."""
    steps = list(walk(program, live_only=True, all_results=False, platform=platform))
    flow = _build_flow(program, steps, find_place)
    rows: list[Collective] = []
    loops: dict[str, None] = {}
    for step in steps:
        if step.name in PRIMITIVES and (runs := count_runs(step)):
            found = list(_make_rows(step, runs, flow, find_place))
            rows += found
            for n, (eqn, _) in enumerate(step.around):
                if found and eqn.primitive.name == "while":
                    loops.setdefault(find_line(find_origin(Step("while", (), (), eqn, "", step.around[:n]))))
    return rows, list(loops)


def _build_flow(program: Jaxpr, steps: Iterable[Step], find_place: FindPlace) -> Flow:
    flow = Flow()
    flow.add("constant", None, map(id, program.constvars), [])
    for step in steps:
        results, operands = [id(var) for var in step.results], [id(var) for var in step.operands]
        literals = [id(atom) for atom in step.operands if isinstance(atom, Literal)]
        flow.add("constant", None, literals, [])
        if step.name == "constant":
            flow.add("constant", None, results, [])
        elif step.name in ("link", "carry"):
            for operand in operands:
                flow.join(results[0], operand)
        else:
            sizes = [getattr(atom.aval, "size", 0) for atom in (*step.operands[:1], *step.results[:1])]
            flow.add(step.name, find_place(step.scope)[1], results, operands, (sizes[0], sizes[-1]))
        if step.again is not None:
            flow.join(results[0], id(step.again))
    return flow


def _make_rows(step: Step, runs: int, flow: Flow, find_place: FindPlace) -> Iterator[Collective]:
    """Makes one row for each array of a collective, unless its group is one device."""
    axes, devices = _find_group(step)
    if devices == 1:
        return
    kind, reduction = PRIMITIVES[step.name]
    (path, own), line = find_place(step.scope), find_line(find_origin(step))
    for operand, result in zip(step.operands, step.results, strict=False):
        aval = result.aval if kind == "all-gather" else operand.aval
        direction, is_gradient = judge(own, kind, reduction, id(operand), id(result), flow)
        size = math.prod(aval.shape) * aval.dtype.itemsize
        what = kind, reduction, str(aval.dtype), axes, devices, tuple(aval.shape)
        yield Collective(*what, direction, is_gradient, False, line, path, count=runs, bytes=runs * size)


def judge(direction: Pass, kind: str, reduction: str, operand: Node, result: Node, flow: Flow) -> tuple[Pass, bool]:
    """Returns the pass of a collective, which for gradients is backward also after `jax.grad`, and `is_gradient`."""
    if kind not in REDUCING or reduction != "sum":
        return direction, False
    if direction == "forward" and flow.is_gradient(operand):
        direction = "backward"
    return direction, direction == "backward" and result not in flow.summed_on


def _find_group(step: Step) -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes and the size of a device group."""
    names = step.eqn.params.get("axes", step.eqn.params.get("axis_name", ()))
    listed = (names,) if isinstance(names, str) else tuple(names)
    sizes = {axis: size for eqn in _list_shard_maps(step) for axis, size in eqn.params["mesh"].shape.items()}
    axes = tuple(axis for axis in listed if axis in sizes)  # an integer is an axis of vmap
    groups = step.eqn.params.get("axis_index_groups")
    return axes, len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)


def _list_shard_maps(step: Step) -> list[Any]:
    return [eqn for eqn, _ in step.around if eqn.primitive.name == "shard_map"]


def count_runs(step: Step) -> int:
    """Returns how often a step runs on each device; `trips` counts all devices."""
    devices = (eqn.params["mesh"].shape[axis] for eqn in _list_shard_maps(step) for axis in split_axes(eqn.params))
    return step.trips // math.prod(devices)
