"""What tables and notes call a dtype, a policy, a size and a place."""

import re
from collections.abc import Iterable, Sequence

from ..policy import Policy

_PREFIXES = ("k", "M", "G", "T")
_MOST_PLACES = 3
"""A sentence names so many places, and counts the others."""


def shorten_dtypes(dtypes: Iterable[str]) -> str:
    """The names of dtypes, short.

    >>> from jmp_policy import report
    >>> report.shorten_dtypes(["bfloat16", "float8_e4m3fn", "int32", "bool"])
    'bf16 f8_e4m3fn i32 bool'
    """
    return " ".join(re.sub(r"^(b?)float|^(u?)int", _shorten_kind, dtype) for dtype in dtypes)


def shorten_policy(policy: Policy | None) -> str:
    """The name of a policy, short; the format of a quantized one keeps its name.

    >>> import jmp_policy as jmp
    >>> from jmp_policy import report
    >>> mixed, half = jmp.Policy("float32", "bfloat16", "float32"), jmp.Policy("float32", "float16", "float16")
    >>> report.shorten_policy(mixed), report.shorten_policy(half)
    ('p=f32,c=bf16,o=f32', 'mixed_float16')
    """
    if policy is None:
        return ""
    *format, source = policy.name.split("_from_")
    parts = (part.partition("=") for part in source.split(","))
    shortened = ",".join(f"{key[0]}={shorten_dtypes([value])}" if value else key for key, _, value in parts)
    return "_from_".join([*format, shortened])


def format_bytes(count: int) -> str:
    """A number of bytes to three digits.

    >>> from jmp_policy.report import format_bytes
    >>> format_bytes(0), format_bytes(999), format_bytes(1500), format_bytes(65_536), format_bytes(280_000_000_000)
    ('', '999 B', '1.5 kB', '65.5 kB', '280 GB')
    """
    unit, size = choose_byte_unit(count)
    if size == 1:
        return f"{count} B" if count else ""
    return f"{count / size:.3g} {unit}"


def choose_byte_unit(count: int) -> tuple[str, int]:
    """The largest unit of which a number of bytes is at least one, and how many bytes that is.

    >>> from jmp_policy import report
    >>> report.choose_byte_unit(0), report.choose_byte_unit(65_536)
    (('B', 1), ('kB', 1000))
    """
    power = min((len(str(count)) - 1) // 3, len(_PREFIXES))
    return f"{('', *_PREFIXES)[power]}B", 1000**power


def format_count(count: int) -> str:
    """A count to three digits.

    >>> from jmp_policy.report import format_count
    >>> format_count(0), format_count(999), format_count(12_345), format_count(7_200_000_000_000)
    ('', '999', '12.3 k', '7.2 T')
    """
    return format_bytes(count).removesuffix("B").removesuffix(" ")


def name_place(path: str) -> str:
    """What a sentence calls the module at a path.

    >>> from jmp_policy import report
    >>> report.name_place("blocks/0"), report.name_place("")
    ('blocks/0', 'the model itself')
    """
    return path or "the model itself"


def list_places(paths: Sequence[str]) -> str:
    """What a sentence calls several modules.

    >>> from jmp_policy import report
    >>> report.list_places(["", "a"]), report.list_places(["a", "b", "c", "d", "e"])
    ('the model itself, a', 'a, b, c and 2 more')
    """
    others = len(paths) - _MOST_PLACES
    return ", ".join(map(name_place, paths[:_MOST_PLACES])) + (f" and {others} more" if others > 0 else "")


def _shorten_kind(found: re.Match[str]) -> str:
    name = found.group()
    return {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}[name]
