"""How often the loops of a program of XLA's turn, where their counters are written in it."""

from ._hlo import Computation, Instruction, Module, Reference

_SAME = ("copy", "bitcast", "convert", "reshape")


def count_turns(module: Module, around: Computation, loop: Instruction) -> int | None:
    """How often a `while` turns: from a first number to a last one by a step; `None` where any of them is unknown.

    >>> from jmp_policy.numerics._traffic._hlo import parse_module
    >>> module = parse_module('''HloModule jit_f
    ... %body (p: (s32[])) -> (s32[]) {
    ...   %p = (s32[]) parameter(0)
    ...   %i = s32[] get-tuple-element(%p), index=0
    ...   %two = s32[] constant(2)
    ...   %next = s32[] add(%i, %two)
    ...   ROOT %out = (s32[]) tuple(%next)
    ... }
    ... %test (q: (s32[])) -> pred[] {
    ...   %q = (s32[]) parameter(0)
    ...   %j = s32[] get-tuple-element(%q), index=0
    ...   %end = s32[] constant(5)
    ...   ROOT %less = pred[] compare(%j, %end), direction=LT
    ... }
    ... ENTRY %main () -> (s32[]) {
    ...   %zero = s32[] constant(0)
    ...   %first = (s32[]) tuple(%zero)
    ...   ROOT %loop = (s32[]) while(%first), condition=%test, body=%body
    ... }''')
    >>> count_turns(module, module.computations["main"], module.computations["main"].instructions["loop"])
    3
    """
    test = module.computations.get(loop.find_called("condition"))
    body = module.computations.get(loop.find_called("body"))
    if test is None or body is None:
        return None
    compared = test.instructions.get(test.root)
    if compared is None or compared.opcode != "compare" or len(compared.operands) != 2:
        return None
    index, direction = _find_carried(test, compared.operands[0]), compared.find_called("direction")
    last = compared.operands[1]
    if index is None:
        index, last, direction = _find_carried(test, last), compared.operands[0], _TURNED.get(direction, direction)
    if index is None:
        return None
    start = _read_constant(around, Reference(loop.operands[0].name, index))
    step = _find_step(body, index)
    end = _read_end(around, loop, test, body, last)
    return None if start is None or not step or end is None else _count(start, end, step, direction)


_TURNED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def _count(start: int, end: int, step: int, direction: str) -> int | None:
    if direction in ("LE", "GE"):
        end += 1 if direction == "LE" else -1
    upwards = {"LT": True, "LE": True, "GT": False, "GE": False, "NE": end > start}.get(direction)
    if upwards is None or (step > 0) != upwards or (direction == "NE" and (end - start) % step):
        return None
    return max(0, -(-(end - start) // step))


def _read_end(
    around: Computation, loop: Instruction, test: Computation, body: Computation, last: Reference
) -> int | None:
    """The number that a counter is compared with: it stands in the test, or goes around unchanged."""
    if (found := _read_constant(test, last)) is not None:
        return found
    index = _find_carried(test, last)
    if index is None or _find_carried(body, Reference(body.root, index)) != index:
        return None
    return _read_constant(around, Reference(loop.operands[0].name, index))


def _find_step(body: Computation, index: int) -> int | None:
    """What a turn adds to a number that the loop carries; XLA adds twice where it makes one turn of two."""
    step, value = 0, Reference(body.root, index)
    while _find_carried(body, value) != index:
        added = _find_maker(body, value)
        if not isinstance(added, Instruction) or added.opcode not in ("add", "subtract"):
            return None
        value, amount = added.operands[0], _read_constant(body, added.operands[1])
        if amount is None and added.opcode == "add":
            value, amount = added.operands[1], _read_constant(body, added.operands[0])
        if amount is None:
            return None
        step += amount if added.opcode == "add" else -amount
    return step


def _find_carried(computation: Computation, reference: Reference) -> int | None:
    """Which part of the computation's tuple a value is; `None` for one that it makes."""
    found = _find_maker(computation, reference)
    return found if isinstance(found, int) else None


def _read_constant(computation: Computation, reference: Reference) -> int | None:
    found = _find_maker(computation, reference)
    if not isinstance(found, Instruction) or found.opcode != "constant":
        return None
    return int(found.literal) if found.literal.strip().lstrip("-").isdecimal() else None


def _find_maker(computation: Computation, reference: Reference) -> Instruction | int | None:
    """The instruction that makes a value, through copies and tuples, or the part of the parameter that it is."""
    name, index = reference
    while (made := computation.instructions.get(name)) is not None:
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
