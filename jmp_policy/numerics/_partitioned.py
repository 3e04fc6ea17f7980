"""Collectives of a partitioned HLO module, and the trip counts of its loops."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .._base import group_by_key
from .._jaxpr import choose_line, drop_repetition, is_backward
from ._collectives_report import KINDS, REDUCING, Collective
from ._hlo import Array, Computation, Instruction, Module, Reference, find_group
from ._traced import PRIMITIVES, FindPlace, Flow, judge

_SAME = ("copy", "bitcast", "convert", "reshape")


def count_iterations(module: Module, loop: Instruction) -> int | None:
    """Returns the trip count of a `while` that counts up from one constant to another, or that XLA notes, else None."""
    if (known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)) is not None:
        return int(known[1])
    test, body = (module.computations.get(loop.find_called(name)) for name in ("condition", "body"))
    compared = None if test is None else module.instructions.get(test.root)
    if body is None or compared is None or compared.opcode != "compare" or compared.find_called("direction") != "LT":
        return None
    index = _find_carried(module, compared.operands[0])
    if index is None:
        return None
    start, step = _read_constant(module, Reference(loop.operands[0].name, index)), _find_step(module, body, index)
    end = _read_end(module, loop, body, compared.operands[1])
    return None if start is None or step is None or end is None else max(0, -(-(end - start) // step))


def _read_end(module: Module, loop: Instruction, body: Computation, last: Reference) -> int | None:
    """Returns the end of a loop: a constant in the condition, or an unchanged carry."""
    if (found := _read_constant(module, last)) is not None:
        return found
    index = _find_carried(module, last)
    if index is None or _find_carried(module, Reference(body.root, index)) != index:
        return None
    return _read_constant(module, Reference(loop.operands[0].name, index))


def _find_step(module: Module, body: Computation, index: int) -> int | None:
    """Returns the sum that one iteration adds to a carry. XLA adds twice if it unrolled the loop by two."""
    step, value = 0, Reference(body.root, index)
    while _find_carried(module, value) != index:
        added = _find_maker(module, value)
        if not isinstance(added, Instruction) or added.opcode != "add":
            return None
        amounts = [_read_constant(module, operand) for operand in added.operands]
        if amounts.count(None) != 1:
            return None
        value = added.operands[amounts.index(None)]
        step += sum(amount for amount in amounts if amount is not None)
    return step if step > 0 else None


def _find_carried(module: Module, reference: Reference) -> int | None:
    """Returns the index of a value in the parameter tuple, or None if it is computed."""
    found = _find_maker(module, reference)
    return found if isinstance(found, int) else None


def _read_constant(module: Module, reference: Reference) -> int | None:
    found = _find_maker(module, reference)
    if not isinstance(found, Instruction) or found.opcode != "constant":
        return None
    return int(found.literal) if found.literal.strip().lstrip("-").isdecimal() else None


def _find_maker(module: Module, reference: Reference) -> Instruction | int | None:
    """Finds the instruction that makes a value, or its index in the parameter, through copies and tuples."""
    name, index = reference
    while (made := module.instructions.get(name)) is not None:
        if made.opcode == "parameter":
            return index
        if made.opcode == "get-tuple-element" and index is None:
            name, index = made.operands[0].name, int(made.find_called("index"))
        elif made.opcode == "tuple" and index is not None:
            name, index = made.operands[index]
        elif made.opcode in _SAME and made.operands:
            name, index = made.operands[0].name, index if made.operands[0].part is None else made.operands[0].part
        else:
            return made if index is None else None
    return None


_START = "-start"  # of an asynchronous collective in an optimized module
_OPCODES = {**{f"{kind}{end}": kind for kind in KINDS for end in ("", _START)}, "ragged-all-to-all": "all-to-all"}
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "product", "and": "and", "or": "or"}
_CALLS = ("to_apply", "calls", "true_computation", "false_computation")


def read_module(
    module: Module, meshes: Sequence[Mapping[str, int]], devices: int, find_place: FindPlace
) -> tuple[list[Collective], list[str]]:
    """Lists the collectives of a partitioned module, as `read_program` does. The meshes name the axes."""
    _complete_names(module)
    reader = Reader(module, meshes, devices, find_place)
    rows: list[Collective] = []
    loops: dict[str, None] = {}
    fused = _list_fused(module)
    owners: dict[str, str] = {}  # of the channels of collectives in fusions: TPUs split one into several fusions
    for instruction, runs, around in list_sites(module, module.computations[module.entry]):
        own = instruction.name
        if own in fused and instruction.opcode in _OPCODES:
            own = owners.setdefault(instruction.find_called("channel_id") or own, own)
        if instruction.opcode in _OPCODES and own == instruction.name:
            rows += reader.describe(instruction, runs)
            for loop in around:
                loops.setdefault(reader.find_line(loop))
    return [row for row in rows if row.devices > 1], list(loops)


def _list_fused(module: Module) -> set[str]:
    """Lists the instructions in fusions."""
    fusions = (made for made in module.instructions.values() if made.opcode == "fusion")
    called = (module.computations[name] for made in fusions for name in _list_called(made, ("calls",)))
    return {name for computation in called for name in computation.names}


def _complete_names(module: Module) -> None:
    """Prepends the outer scopes of each `shard_map` to the op names inside, which XLA prints without them."""
    reached, waiting = {module.entry}, [(module.entry, "")]
    for computation, scope in waiting:
        for name in module.computations[computation].names:
            made = module.instructions[name]
            if scope and made.op_name and made.op_name.partition("/")[0] != scope.partition("/")[0]:
                made = module.instructions[name] = made._replace(op_name=f"{scope}/{made.op_name}")
            inner = made.op_name if made.opcode == "call" else scope
            for called in _list_called(made, (*_CALLS, "condition", "body")):
                if called in module.computations and called not in reached:
                    reached.add(called)
                    waiting.append((called, inner))


def list_sites(
    module: Module, computation: Computation, runs: int = 1, loops: tuple[Instruction, ...] = ()
) -> Iterator[tuple[Instruction, int, tuple[Instruction, ...]]]:
    """Yields each instruction, how often it runs, and the loops around it with an unknown trip count."""
    for instruction in map(module.instructions.__getitem__, computation.names):
        yield instruction, runs, loops
        if instruction.opcode == "while":
            count = count_iterations(module, instruction)
            inside = loops if count is not None else (*loops, instruction)
            for body in _list_called(instruction, ("condition", "body")):
                yield from list_sites(module, module.computations[body], runs * (1 if count is None else count), inside)
        elif instruction.opcode in ("call", "fusion", "conditional", "async-start"):
            for body in _list_called(instruction, _CALLS):
                yield from list_sites(module, module.computations[body], runs, loops)


def _list_called(instruction: Instruction, attributes: Sequence[str]) -> list[str]:
    branches = re.search(r"branch_computations=\{(.*?)\}", instruction.attributes)
    names = re.findall(r"%([\w.\-]+)", branches[1]) if branches else map(instruction.find_called, attributes)
    return [name for name in names if name]


class Reader:
    """Makes rows of the collectives of a module."""

    def __init__(self, module: Module, meshes: Sequence[Mapping[str, int]], devices: int, find_place: FindPlace):
        self._module, self._meshes, self._devices, self._find_place = module, meshes, devices, find_place
        instructions = module.instructions.values()
        self._readers = group_by_key((operand.name, reader) for reader in instructions for operand in reader.operands)
        self._flow = Flow()
        for instruction in module.instructions.values():
            self._follow(instruction)

    def describe(self, instruction: Instruction, runs: int) -> list[Collective]:
        """Makes one row for each array of a collective."""
        kind = _OPCODES[instruction.opcode]
        reduction = self.find_reduction(instruction) if kind in REDUCING else ""
        axes, devices = find_group(instruction.attributes, self._meshes, self._devices)
        line, sent = self.find_line(instruction), _list_sent(instruction, kind, devices)
        rows = []
        for i, (name, array) in enumerate(zip(self._list_names(instruction, len(sent)), sent, strict=True)):
            path, direction = self._find_place(read_stack(name))
            result = Reference(instruction.name, i if instruction.is_tuple else None)
            direction, is_gradient = judge(direction, kind, reduction, instruction.operands[i], result, self._flow)
            how = direction, is_gradient, name.rpartition("/")[2] not in PRIMITIVES, line, path, runs
            size = runs * math.prod(array.shape) * array.bits // 8
            rows.append(Collective(kind, reduction, array.dtype, axes, devices, array.shape, *how, bytes=size))
        return rows

    def _list_names(self, instruction: Instruction, count: int) -> list[str]:
        """Lists the name of each array. XLA joins the names of combined collectives: `jit(f)/(up/add:down/add)`."""
        name = self.find_named(instruction).op_name
        outer, joined, inner = name.removesuffix(")").partition("/(")
        names = [f"{outer}/{each}" for each in inner.split(":")] if joined else [name]
        return names if len(names) == count else names[:1] * count

    def find_line(self, instruction: Instruction) -> str:
        """Returns the user's line of an instruction, or of its nearest reader that has one."""
        return choose_line(self._module.frames.get(self.find_named(instruction).frame, ()))

    def find_named(self, instruction: Instruction) -> Instruction:
        """Returns the instruction if it has a name stack, else its nearest reader with one."""
        seen, waiting = {instruction.name}, [instruction]
        for candidate in waiting:
            if candidate.op_name:
                return candidate
            readers = self._readers.get(candidate.name, [])
            waiting += [reader for reader in readers if reader.name not in seen]
            seen.update(reader.name for reader in readers)
        return instruction

    def find_reduction(self, instruction: Instruction) -> str:
        function = self._module.computations.get(instruction.find_called("to_apply"))
        if function is None:
            return ""
        # In a shard_map with auto axes, the function returns a copy of the sum.
        opcodes = [self._module.instructions[name].opcode for name in function.names]
        return next((_REDUCTIONS[opcode] for opcode in opcodes if opcode in _REDUCTIONS), opcodes[-1])

    def _follow(self, made: Instruction) -> None:
        """Adds an instruction to the dataflow."""
        flow, operands = self._flow, made.operands
        if made.opcode == "tuple":
            for i, operand in enumerate(operands):
                flow.join(Reference(made.name, i), operand)
        elif made.opcode == "get-tuple-element":
            flow.join(Reference(made.name), Reference(operands[0].name, int(made.find_called("index"))))
        elif made.opcode == "while":
            test, body = (self._module.computations[made.find_called(name)] for name in ("condition", "body"))
            for inner in (test, body):
                _join_elements(flow, operands[0], inner.parameters[0], made)
                _join_elements(flow, Reference(body.root), inner.parameters[0], made)
            _join_elements(flow, Reference(body.root), made.name, made)
        elif made.opcode in ("call", "fusion", "conditional"):
            for n, name in enumerate(_list_called(made, _CALLS)):
                body = self._module.computations[name]
                given = [operands[n + 1]] if made.opcode == "conditional" else operands
                for i, operand in enumerate(given):
                    if i in body.parameters:
                        _join_elements(flow, operand, body.parameters[i], self._module.instructions[body.parameters[i]])
                _join_elements(flow, Reference(body.root), made.name, made)
        elif made.opcode != "parameter":
            direction = self._find_place(read_stack(made.op_name))[1] if made.op_name else None
            results = [Reference(made.name, part) for part in _list_elements(made)]
            sizes = 0, 1
            if made.opcode == "reduce":
                name, part = operands[0]
                arrays = self._module.instructions[name].arrays
                sizes = _count_numbers(arrays if part is None else arrays[part : part + 1]), _count_numbers(made.arrays)
            flow.add(made.opcode, direction, results, list(operands), sizes)


def _join_elements(flow: Flow, value: Reference, name: str, typed: Instruction) -> None:
    """Joins a value to the same value under another name, element by element of a tuple."""
    for part in _list_elements(typed):
        flow.join(Reference(name, part), Reference(value.name, value.part if part is None else part))


def _list_elements(made: Instruction) -> Iterable[int | None]:
    return range(len(made.arrays)) if made.is_tuple else (None,)


def _count_numbers(arrays: Iterable[Array]) -> int:
    return sum(math.prod(array.shape) for array in arrays)


def _list_sent(instruction: Instruction, kind: str, devices: int) -> list[Array]:
    """Lists the arrays of a collective on one device: outputs of a gather, inputs of any other."""
    arrays = instruction.arrays
    if kind == "all-gather" and instruction.opcode.endswith(_START):  # the inputs, and then the outputs
        return arrays[len(arrays) // 2 :]
    if kind == "all-to-all" and instruction.is_tuple:  # one part of the array per device
        return [arrays[0]._replace(shape=(len(arrays), *arrays[0].shape))]
    if kind == "collective-permute":
        return arrays[:1]
    if kind != "reduce-scatter":
        return arrays
    found = re.search(r"dimensions=\{(\d+)\}", instruction.attributes)
    along = int(found[1]) if found else 0
    return [
        array._replace(shape=tuple(size * devices if i == along else size for i, size in enumerate(array.shape)))
        for array in arrays
    ]


def read_stack(op_name: str) -> str:
    """Returns the name stack of an XLA op name, without jitted functions, loops and the primitive.

    >>> read_stack("jit(step)/jit(main)/transpose(jvp(Net))/while/body/closed_call/dense/dot_general")
    'transpose(jvp(Net))/dense'
    >>> read_stack("jit(step)/transpose(jvp(jit(loss)))/shard_map/jit(relu)/max")
    'transpose(jvp())'
    """
    names = op_name.partition(";")[0].split("/")[:-1]
    stack = "/".join(re.sub(r"\bjit\([^()]*\)", "", name) for name in names)
    stack = re.sub(_STRUCTURE, "", f"/{stack}/").strip("/")
    return drop_repetition(stack) if is_backward(stack) else stack


_STRUCTURE = re.compile(
    r"(?<=/)(?:while/(?:body|cond)/|cond/branch_\d+_fun/|(?:closed_call|eval_jaxpr|core_call|shard_map|shmap_body|pjit|"
    r"remat2?|custom_jvp_call|custom_vjp_call)/)+"
)
