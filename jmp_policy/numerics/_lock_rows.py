"""Rows of a lock, and their lines: sorted, and one line for modules that differ only in a number."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence

from .._base import group_by_key
from ..report import Plain


@dataclasses.dataclass(frozen=True)
class LockRow(Plain):
    """One fact of a `Lock`.

    Attributes:
      path: the module names and `jax.named_scope`s, or the path of an argument or result, joined by `/`.
      fact: such as `"forward matmul"`, `"backward cast"` or `"argument"`.
      what: dtypes and operations, such as `"float32 -> bfloat16"`.
      amount: counts, elements or a shape, such as `"2 times"`.
      source: the line of the first such operation; empty in a file.

    >>> from jmp_policy.numerics import LockRow
    >>> print(LockRow("blocks/0/mlp", "forward cast", "float32 -> bfloat16", "4,096 elements"))
    blocks/0/mlp | forward cast | float32 -> bfloat16 | 4,096 elements
    """

    path: str
    fact: str
    what: str
    amount: str
    source: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        return write_lines([self])[0]

    @property
    def _texts(self) -> tuple[str, ...]:
        return self.fact, self.what, self.amount


ROOT = "."
"""The path of the root, in a file."""

IN_KEYS = r"[:%\x00-\x1f\x7f-\x9f\u2028\u2029]"
_IN_TEXTS, _IN_PATHS = r"[|%\x00-\x1f\x7f-\x9f\u2028\u2029]", r"[|%\[\]\s\x00-\x1f\x7f-\x9f]|^\.$"


def escape(text: str, pattern: str = _IN_TEXTS) -> str:
    """Writes characters that a line of a lock has another meaning for as `%` and their code."""
    return re.sub(pattern, lambda found: f"%{ord(found[0]):04x}", text)


def unescape(text: str) -> str:
    return re.sub(r"%([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), text)


def write_lines(rows: Iterable[LockRow]) -> list[str]:
    """Returns the sorted lines of rows.

    >>> print(*write_lines(LockRow(f"blocks_{i}/mlp", "forward cast", "float32 -> int8", "8") for i in range(12)))
    blocks_[0-11]/mlp | forward cast | float32 -> int8 | 8
    """
    folded = fold_paths((row.path, row._texts) for row in rows)
    return [" | ".join((path or ROOT, *map(escape, texts))) for path, texts in folded]


def fold_paths(pairs: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Sorts pairs of a path and texts, and joins paths with equal texts that differ in one number of each part."""
    found = [(tuple(escape(path, _IN_PATHS).split("/")), texts) for path, texts in pairs]
    for i in range(max((len(parts) for parts, _ in found), default=0)):
        groups = group_by_key((_mask(parts, i, texts), parts) for parts, texts in found)
        found = [(_join_parts(members, i), texts) for (_, texts), members in groups.items()]
    found.sort(key=lambda pair: (_sort_key(pair[0]), _PASSES.get(pair[1][0].split(" ")[0], 3), pair[1]))
    return [("/".join(parts), texts) for parts, texts in found]


_PASSES = {"forward": 0, "recomputed": 1, "backward": 2}
"""The order of passes."""


def _mask(parts: tuple[str, ...], i: int, texts: tuple[str, ...]) -> tuple[tuple, tuple[str, ...]]:
    """Returns a path and its texts, with None for the number in part `i`."""
    found = _NUMBERED.fullmatch(parts[i]) if i < len(parts) else None
    return (parts if found is None else (*parts[:i], (found[1], None, found[3]), *parts[i + 1 :])), texts


_NUMBERED = re.compile(r"([^\[]*?)(0|[1-9][0-9]*)([^0-9\[]*)")
"""A name with a number; the last one, if there are several."""


def _join_parts(members: Sequence[tuple[str, ...]], i: int) -> tuple[str, ...]:
    """Joins paths that differ in the number in part `i` alone."""
    if len(set(members)) == 1:
        return members[0]
    found = [_NUMBERED.fullmatch(parts[i]) for parts in members]
    numbers = sorted({int(each[2]) for each in found if each is not None})
    start, end = (found[0][1], found[0][3]) if found[0] is not None else ("", "")
    return (*members[0][:i], f"{start}{_spell_range(numbers)}{end}", *members[0][i + 1 :])


def _spell_range(numbers: list[int]) -> str:
    """Spells sorted numbers as in `[0-3,5]`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"[{','.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else str(run[0]) for run in runs)}]"


def _sort_key(parts: tuple[str, ...]) -> list:
    """Sorts names with numbers by number, and a range by its first number."""
    return [
        [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", part)] for part in parts
    ]


def is_row_line(line: str) -> bool:
    """True for a line that `read_line` takes."""
    path, *texts = line.split(" | ")
    return len(texts) == 3 and all(texts) and re.fullmatch(_PATH, path) is not None


_PATH = r"(?:[^\[\]]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
"""A path with ranges, such as `blocks/[0-3,5]/mlp`."""


def read_line(line: str) -> list[LockRow]:
    """Returns the rows of a line."""
    path, *texts = line.split(" | ")
    paths = [""] if path == ROOT else expand_path(path)
    return [LockRow(unescape(path), *map(unescape, texts)) for path in paths]


def expand_path(path: str) -> Iterator[str]:
    """Yields the paths that a line with ranges stands for."""
    before, bracket, rest = path.partition("[")
    if not bracket:
        yield path
        return
    ranges, _, after = rest.partition("]")
    for run in ranges.split(","):
        first, _, last = run.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{before}{number}{end}" for end in expand_path(after))


@functools.cache
def count_bits(dtype: str) -> int:
    """Returns the first number in the name of a dtype, or 0."""
    found = re.search(r"[0-9]+", dtype)
    return int(found[0]) if found else 0
