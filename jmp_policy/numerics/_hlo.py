"""Compiles a program up to XLA's SPMD partitioner, and parses its HLO text."""

import dataclasses
import math
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

# all-reduce-promotion runs after the partitioner on CPUs. It aborts the process on a shard_map with auto axes, where it
# takes the copy at the end of a reduction function for the sum.
_OPTIONS = {
    "xla_dump_hlo_pass_re": ".*spmd-partitioning",
    "xla_backend_optimization_level": 0,
    "xla_disable_hlo_passes": "all-reduce-promotion",
}


def make_unique(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Gives a function a unique name, so that JAX's persistent cache does not skip the compilation and its dump."""

    def call_unique(*args: Any) -> Any:
        return fun(*args)

    token = f"{name if name.isidentifier() else 'function'}_collectives_{uuid.uuid4().hex}"
    call_unique.__name__ = call_unique.__qualname__ = token
    return call_unique


def partition(lowered: jax.stages.Lowered) -> str:
    """Compiles a program and returns the HLO text after the partitioner."""
    # `Compiled.as_text` shows the program after later passes that combine, upcast and re-form collectives.
    with tempfile.TemporaryDirectory(prefix="jmp_collectives_", ignore_cleanup_errors=True) as folder:
        lowered.compile(compiler_options={"xla_dump_to": folder, **_OPTIONS})
        written = sorted(Path(folder).glob("*.after_*spmd-partitioning*.txt"))
        if written:
            return written[-1].read_text(encoding="utf-8")
    raise RuntimeError(
        "The compiler did not write the program after its pass 'spmd-partitioning'. It may run in another process "
        "or on a remote machine. Read only the collectives in shard_map instead. For example: "
        "collectives(fun, compiled=False)(*args)."
    )


class Frame(NamedTuple):
    """A stack frame, with the attributes of a JAX traceback frame."""

    file_name: str
    line_num: int
    function_name: str


class Array(NamedTuple):
    """Type of an array: JAX's name of the dtype, bits per element, shape."""

    dtype: str
    bits: int
    shape: tuple[int, ...]


class Reference(NamedTuple):
    """The output of an instruction, or element `part` of its output tuple."""

    name: str
    part: int | None = None


class Instruction(NamedTuple):
    name: str  # its name, without the percent sign
    type: str  # the output type as text
    opcode: str  # such as `"all-gather"`
    operands: tuple[Reference, ...]  # the inputs; none for a constant
    literal: str  # the text in its parentheses
    attributes: str  # the text after the parentheses
    op_name: str  # the name stack from JAX, or an empty string
    frame: int  # the key in `Module.frames`; 0 for none

    @property
    def arrays(self) -> list[Array]:
        """Output arrays: several for a tuple."""
        return [_read_array(*found) for found in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", self.type)]

    @property
    def is_tuple(self) -> bool:
        return self.type.startswith("(")

    def find_called(self, attribute: str) -> str:
        """Returns the name in an attribute such as `to_apply`, or an empty string."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass
class Computation:
    """Names of the instructions of a computation in order, of its root, and of its parameters by number."""

    names: list[str] = dataclasses.field(default_factory=list)
    root: str = ""
    parameters: dict[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Module:
    """An HLO module, in which XLA makes the names of instructions unique."""

    frames: dict[int, tuple[Frame, ...]]  # stacks by frame id, innermost frame first
    entry: str = ""
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)


def parse_module(text: str) -> Module:
    module, current = Module(_read_frames(text)), None
    for line in text.splitlines():
        if (header := _HEADER.match(line)) is not None:
            current = module.computations[header[2]] = Computation()
            module.entry = header[2] if header[1] else module.entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            made = _read_instruction(line)
            module.instructions[made.name] = made
            current.names.append(made.name)
            if line.lstrip().startswith("ROOT "):
                current.root = made.name
            if made.opcode == "parameter":
                current.parameters[int(made.literal)] = made.name
    return module


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_COMMENT = re.compile(r"/\*.*?\*/")


def _read_instruction(line: str) -> Instruction:
    left, _, right = _COMMENT.sub("", line).partition(" = ")
    name = left.split("%")[-1].strip().removeprefix("ROOT ")
    type, rest = _split_type(right)
    opcode, _, rest = rest.partition("(")
    literal, attributes = _split_closing(rest)
    op_name, frame = _OP_NAME.search(attributes), _FRAME.search(attributes)
    operands = tuple(Reference(to, int(index) if index else None) for to, index in _OPERAND.findall(literal))
    stack, frame_id = op_name[1] if op_name else "", int(frame[1]) if frame else 0
    return Instruction(name, type, opcode.strip(), operands, literal, attributes, stack, frame_id)


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
"""JAX 0.12 writes an element of a tuple as `%x#0`. Earlier versions use a get-tuple-element instruction."""


def _split_type(text: str) -> tuple[str, str]:
    """Splits off a type: a tuple ends at its closing parenthesis, an array at a space."""
    if not text.startswith("("):
        type, _, rest = text.partition(" ")
        return type, rest
    inside, rest = _split_closing(text[1:])
    return f"({inside})", rest.lstrip()


def _split_closing(text: str) -> tuple[str, str]:
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return text[: found.start()], text[found.end() :]
    return text, ""


def _read_array(dtype: str, shape: str) -> Array:
    sizes = tuple(int(size.removeprefix("<=")) for size in shape.split(",") if size)
    found = re.fullmatch(r"([a-z]+?)(\d+)(\w*)", dtype)
    if found is None:
        return Array("bool", 8, sizes) if dtype == "pred" else Array(dtype, 0, sizes)
    kind, bits, variant = found.groups()
    return Array(f"{_KINDS.get(kind, kind)}{bits}{variant and '_'}{variant}", int(bits), sizes)


_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def _read_frames(text: str) -> dict[int, tuple[Frame, ...]]:
    """Parses stack frames from the tables before the computations, if there are any."""
    files, functions = (
        {int(i): _unescape(name) for i, name in _read_table(text, table, r'(\d+) "(.*)"')}
        for table in ("FileNames", "FunctionNames")
    )
    pattern = r"(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+).*\}"
    locations = {
        int(i): Frame(files.get(int(file), ""), int(line), functions.get(int(function), ""))
        for i, file, function, line in _read_table(text, "FileLocations", pattern)
    }
    entries = list(_read_table(text, "StackFrames", r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}"))
    # The first frame has no parent. The id printed there shows whether ids start at 0 or 1.
    none = int(entries[0][2] or 0) if entries else 0
    stacks: dict[int, tuple[Frame, ...]] = {}
    for i, location, parent in entries:
        above = stacks.get(int(parent or 0) - none, ())
        stacks[int(i)] = (locations.get(int(location), Frame("", 0, "")), *above)
    return stacks


def _unescape(name: str) -> str:
    r"""Undoes XLA's escapes: doubled backslashes, and octal for bytes beyond ASCII.

    >>> _unescape(r"D:\\b\303\274cher\\train.py")
    'D:\\bücher\\train.py'
    """
    return name.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def _read_table(text: str, table: str, pattern: str) -> Iterator[tuple[str, ...]]:
    found = re.search(rf"^{table}\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    for line in found[1].splitlines() if found else ():
        if (entry := re.match(pattern, line)) is not None:
            yield entry.groups()


def find_group(attributes: str, meshes: Iterable[Mapping[str, int]], devices: int) -> tuple[tuple[str, ...], int]:
    """Finds the mesh axes of a device group and its size in the attributes of an instruction.

    The first mesh (sizes by axis) that fits names the axes. There are none if the group does not match mesh axes.
    """
    pairs = re.search(r"source_target_pairs=(\{[\d{},]*\})", attributes)
    groups = _read_groups(attributes, devices) if pairs is None else _read_lists(pairs[1])
    members = {number for group in groups for number in group}
    for mesh in meshes if members else ():
        sizes = list(mesh.values())
        if max(members) >= math.prod(sizes):
            continue
        coordinates = [np.transpose(np.unravel_index(group, sizes)) for group in groups]
        axes = [i for i in range(len(sizes)) if any(np.ptp(group[:, i]) for group in coordinates)]
        count = math.prod(sizes[i] for i in axes)
        # A permute may leave out devices. Any other group must have all devices along its axes.
        if pairs is not None or all(len(group) == count for group in groups):
            return tuple(list(mesh)[i] for i in axes), count
    return (), len(members) if pairs is not None else len(groups[0])


def _read_groups(attributes: str, devices: int) -> list[list[int]]:
    everyone = [list(range(devices))]
    if (found := re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", attributes)) is not None:
        return _read_mesh_groups(*found.groups()) or everyone
    if (found := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\])(?:T\(([\d,]+)\))?", attributes)) is not None:
        return _read_iota(found[1], found[2], found[3])
    found = re.search(r"replica_groups=(\{[\d{},]*\})", attributes)
    return (_read_lists(found[1]) if found else []) or everyone


def _read_lists(text: str) -> list[list[int]]:
    return [[int(number) for number in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]


def _read_iota(groups: str, sizes: str, order: str | None) -> list[list[int]]:
    """Parses groups written as a transposed and reshaped iota."""
    dimensions = _find_integers(sizes)
    numbers = np.arange(math.prod(dimensions)).reshape(dimensions)
    if order:
        numbers = numbers.transpose(_find_integers(order))
    return numbers.reshape(_find_integers(groups)).tolist()


def _read_mesh_groups(mesh: str, order: str, axes: str) -> list[list[int]]:
    """Parses groups along named axes; `'x':(2)4` is a sub-axis of size 4, with 2 before it."""
    sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", mesh)}
    numbers = np.arange(math.prod(sizes.values()))
    if (found := re.search(r"(?:\[[\d,]+\]<=)?(\[[\d,]+\])(?:T\(([\d,]+)\))?", order)) is not None:
        numbers = np.array(_read_iota(f"[{numbers.size}]", found[1], found[2]))
    elif (found := re.search(r"\(([\d,]+)\)", order)) is not None:
        numbers = np.array(_find_integers(found[1]))
    chosen, dimensions = [], []
    parts = {name: (before, size) for name, before, size in re.findall(r"'(.*?)'(?::\((\d+)\)(\d+))?", axes)}
    for name, size in sizes.items():
        before, own = (int(n or 1) for n in parts.get(name, ("", "")))
        if name in parts:
            own = own if parts[name][1] else size
            chosen.append(len(dimensions) + 1)
            dimensions += [before, own, size // (before * own)]
        else:
            dimensions.append(size)
    others = [i for i in range(len(dimensions)) if i not in chosen]
    count = math.prod(dimensions[i] for i in chosen)
    return numbers.reshape(dimensions).transpose(others + chosen).reshape(-1, count).tolist()


def _find_integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
