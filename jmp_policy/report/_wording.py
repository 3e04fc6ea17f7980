"""Short names of dtypes, policies, sizes and modules for tables and notes."""

import re
from collections.abc import Iterable, Sequence

from ..policy import Policy

_PREFIXES = ("k", "M", "G", "T")
_MOST_PLACES = 3


def shorten_dtypes(dtypes: Iterable[str]) -> str:
    """Returns short names of dtypes.

    >>> from jmp_policy import report
    >>> report.shorten_dtypes(["bfloat16", "float8_e4m3fn", "int32", "bool"])
    'bf16 f8_e4m3fn i32 bool'
    """
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}
    return " ".join(re.sub(r"^(b?)float|^(u?)int", lambda found: short[found.group()], dtype) for dtype in dtypes)


def shorten_policy(policy: Policy | None) -> str:
    """Returns a short name of a policy; the format of a quantized one keeps its name.

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
    shorten = lambda key: key if key in ("precision", "cache") else key[0]
    shortened = ",".join(f"{shorten(key)}={shorten_dtypes([value])}" if value else key for key, _, value in parts)
    return "_from_".join([*format, shortened])


def format_bytes(count: int) -> str:
    """Formats a number of bytes to three digits.

    >>> from jmp_policy.report import format_bytes
    >>> format_bytes(0), format_bytes(999), format_bytes(1500), format_bytes(65_536), format_bytes(280_000_000_000)
    ('', '999 B', '1.5 kB', '65.5 kB', '280 GB')
    """
    unit, size = choose_byte_unit(count)
    if size == 1:
        return f"{count} B" if count else ""
    return f"{count / size:.3g} {unit}"


def choose_byte_unit(count: int) -> tuple[str, int]:
    """Returns the largest unit that is not above a number of bytes, and its size: `("kB", 1000)` for 65,536."""
    power = min((len(str(count)) - 1) // 3, len(_PREFIXES))
    return f"{('', *_PREFIXES)[power]}B", 1000**power


def format_count(count: int) -> str:
    """Formats a count to three digits.

    >>> from jmp_policy.report import format_count
    >>> format_count(0), format_count(999), format_count(12_345), format_count(7_200_000_000_000)
    ('', '999', '12.3 k', '7.2 T')
    """
    return format_bytes(count).removesuffix("B").removesuffix(" ")


def name_place(path: str) -> str:
    """Returns the name of a module in a sentence: its path, or "the model itself" for the root."""
    return path or "the model itself"


def list_places(paths: Sequence[str]) -> str:
    """Names several modules in a sentence.

    >>> from jmp_policy import report
    >>> report.list_places(["", "a"]), report.list_places(["a", "b", "c", "d", "e"])
    ('the model itself, a', 'a, b, c and 2 more')
    """
    others = len(paths) - _MOST_PLACES
    return ", ".join(map(name_place, paths[:_MOST_PLACES])) + (f" and {others} more" if others > 0 else "")
