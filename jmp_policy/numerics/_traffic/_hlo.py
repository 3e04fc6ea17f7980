"""A program as XLA's partitioner leaves it, read from its HLO text."""

import contextlib
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

_OPTIONS = {
    "xla_dump_hlo_pass_re": ".*spmd-partitioning",
    "xla_backend_optimization_level": 0,
    "xla_disable_hlo_passes": "all-reduce-promotion",
}
"""What the compiler writes down, and that it need not try hard, since nothing runs what it makes.

The pass that widens sums over devices on CPUs comes later. It would end the process where a shard_map leaves axes to
XLA: there the function that adds two numbers ends in a copy, which the pass takes for the sum."""


def make_unique(fun: Callable[..., Any], name: str) -> tuple[Callable[..., Any], str]:
    """Gives a function a name that no other has, and returns both.

    JAX's persistent cache knows programs by their names and text. It would hand out what was compiled once, and XLA
    would write nothing down.

    Args:
      fun: the function.
      name: how the name begins, for JAX's errors.
    """
    token = f"{name if name.isidentifier() else 'function'}_collectives_{uuid.uuid4().hex}"

    def call_unique(*args: Any) -> Any:
        return fun(*args)

    call_unique.__name__ = call_unique.__qualname__ = token
    return call_unique, token


def partition(lowered: jax.stages.Lowered, token: str) -> str:
    """Compiles a program, and returns the text of what the partitioner made of it.

    Args:
      lowered: the program of a function of a unique name.
      token: the name.

    Raises:
      RuntimeError: the compiler wrote nothing down.
    """
    with tempfile.TemporaryDirectory(prefix="jmp_collectives_", ignore_cleanup_errors=True) as folder:
        try:
            lowered.compile(compiler_options={"xla_dump_to": folder, **_OPTIONS})
        finally:
            _remove_from_cache(token)
        written = sorted(Path(folder).glob("*.after_*spmd-partitioning*.txt"))
        if written:
            return written[-1].read_text(encoding="utf-8")
    raise RuntimeError(
        "The compiler wrote down no program after its pass 'spmd-partitioning', as one in another process, on a remote "
        "machine, may. What the program itself says, in shard_map, can be read without it: "
        "collectives(fun, compiled=False)(*args)."
    )


def _remove_from_cache(token: str) -> None:
    """Takes a program that nobody asks for again out of a persistent cache on this machine's disk."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if folder and Path(folder).is_dir():
        for file in Path(folder).glob(f"*{token}*"):
            with contextlib.suppress(OSError):
                file.unlink()


class Frame(NamedTuple):
    """A frame of a stack, named as the frames of tracebacks are.

    Attributes:
      file_name: the file.
      line_num: the line.
      function_name: the function.
    """

    file_name: str
    line_num: int
    function_name: str


class Array(NamedTuple):
    """The type of an array.

    Attributes:
      dtype: the name that JAX has for its dtype.
      bits: how many bits a number has.
      shape: its shape.
    """

    dtype: str
    bits: int
    shape: tuple[int, ...]


class Reference(NamedTuple):
    """What an instruction reads.

    Attributes:
      name: the instruction that makes it.
      part: which part of the tuple that it makes; `None` for all of it.
    """

    name: str
    part: int | None = None


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      name: its name, without the percent sign.
      type: the type of what it makes, as text.
      opcode: the operation, such as `"all-gather"`.
      operands: what it reads; a constant reads nothing.
      literal: what stands in its parentheses.
      attributes: what stands behind them.
      op_name: the name stack that JAX gave it, or the empty string.
      frame: the number of its stack frame in `Module.frames`; 0 for none.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[Reference, ...]
    literal: str
    attributes: str
    op_name: str
    frame: int

    @property
    def arrays(self) -> list[Array]:
        """The arrays that it makes: several, if it makes a tuple."""
        return [_read_array(*found) for found in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", self.type)]

    @property
    def is_tuple(self) -> bool:
        """Whether it makes a tuple."""
        return self.type.startswith("(")

    def find_called(self, attribute: str) -> str:
        """The computation that an attribute names, or the empty string."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


class Computation(NamedTuple):
    """A function.

    Attributes:
      name: its name.
      instructions: by name, in order.
      root: the name of the instruction whose value it returns.
      parameters: the names of its parameters, by their numbers.
    """

    name: str
    instructions: dict[str, Instruction]
    root: str
    parameters: dict[int, str]


class Module(NamedTuple):
    """A program.

    Attributes:
      computations: by name.
      entry: the name of the one that runs first.
      frames: by number, the stack of each frame, innermost first.
    """

    computations: dict[str, Computation]
    entry: str
    frames: dict[int, tuple[Frame, ...]]


def parse_module(text: str) -> Module:
    """Reads the text of a program.

    >>> module = parse_module('''HloModule jit_f
    ... ENTRY %main.1 (x: bf16[8,4]) -> bf16[8,8] {
    ...   %x = bf16[8,4]{1,0} parameter(0)
    ...   ROOT %all = bf16[8,8]{1,0} all-gather(%x), replica_groups={{0,1}}, metadata={op_name="jit(f)/dot_general"}
    ... }''')
    >>> root = module.computations[module.entry].instructions["all"]
    >>> root.opcode, root.arrays, root.op_name
    ('all-gather', [Array(dtype='bfloat16', bits=16, shape=(8, 8))], 'jit(f)/dot_general')
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if (header := _HEADER.match(line)) is not None:
            current = Computation(header[2], {}, "", {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}") and current is not None:
            computations[current.name] = current
            current = None
        elif current is not None and " = " in line:
            current = _add_instruction(current, line)
    return Module(computations, entry, _read_frames(text))


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_COMMENT = re.compile(r"/\*.*?\*/")


def _add_instruction(computation: Computation, line: str) -> Computation:
    left, _, right = _COMMENT.sub("", line).partition(" = ")
    is_root, name = "ROOT " in left, left.split("%")[-1].strip().removeprefix("ROOT ")
    type, rest = _split_type(right)
    opcode, _, rest = rest.partition("(")
    literal, attributes = _split_closing(rest)
    op_name, frame = _OP_NAME.search(attributes), _FRAME.search(attributes)
    operands = [Reference(to, int(index) if index else None) for to, index in _OPERAND.findall(literal)]
    computation.instructions[name] = Instruction(
        name,
        type,
        opcode.strip(),
        tuple(operands),
        literal,
        attributes,
        op_name[1] if op_name else "",
        int(frame[1]) if frame else 0,
    )
    if opcode.strip() == "parameter":
        computation.parameters[int(literal)] = name
    return computation._replace(root=name) if is_root else computation


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
"""JAX 0.12 writes the part of a tuple as `%x#0`; before, an instruction of its own took it."""


def _split_type(text: str) -> tuple[str, str]:
    """A type, and what follows it: a tuple goes up to its closing parenthesis, an array up to a space."""
    if not text.startswith("("):
        type, _, rest = text.partition(" ")
        return type, rest
    inside, rest = _split_closing(text[1:])
    return f"({inside})", rest.lstrip()


def _split_closing(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes one, and what stands behind it."""
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
        return Array(*_NOT_NUMBERS.get(dtype, (dtype, 0)), sizes)
    kind, bits, variant = found.groups()
    return Array(f"{_KINDS.get(kind, kind)}{bits}{variant and '_'}{variant}", int(bits), sizes)


_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
_NOT_NUMBERS = {"pred": ("bool", 8)}


def _read_frames(text: str) -> dict[int, tuple[Frame, ...]]:
    """The stacks of frames, out of the tables before the computations; empty where there are none."""
    files, functions = (
        {int(i): _unescape(name) for i, name in _list_entries(text, table, r'(\d+) "(.*)"')}
        for table in ("FileNames", "FunctionNames")
    )
    pattern = r"(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+).*\}"
    locations = {
        int(i): Frame(files.get(int(file), ""), int(line), functions.get(int(function), ""))
        for i, file, function, line in _list_entries(text, "FileLocations", pattern)
    }
    entries = list(_list_entries(text, "StackFrames", r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}"))
    # The first frame has no parent: what is printed there says what stands for none, and so how the others count.
    none = int(entries[0][2] or 0) if entries else 0
    stacks: dict[int, tuple[Frame, ...]] = {}
    for i, location, parent in entries:
        above = stacks.get(int(parent or 0) - none, ())
        stacks[int(i)] = (locations.get(int(location), Frame("", 0, "")), *above)
    return stacks


def _unescape(name: str) -> str:
    r"""A name as it was before XLA wrote it: with backslashes doubled, and bytes beyond ASCII in octal.

    >>> _unescape(r"D:\\b\303\274cher\\train.py")
    'D:\\bücher\\train.py'
    """
    return name.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def _list_entries(text: str, table: str, pattern: str) -> Iterator[tuple[str, ...]]:
    found = re.search(rf"^{table}\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    for line in found[1].splitlines() if found else ():
        if (entry := re.match(pattern, line)) is not None:
            yield entry.groups()
