"""What the cells of an explanation's table say, and the notes below it: the same in a terminal and in a notebook."""

import re
from collections.abc import Iterable

from .._policy import Policy
from ._explanation import Explanation, Row
from ._half_sums import REMEDY

_PREFIXES = ("k", "M", "G", "T")


def short(dtypes: Iterable[str]) -> str:
    """The names of dtypes, short.

    >>> short(["bfloat16", "float8_e4m3fn", "int32", "bool"])
    'bf16 f8_e4m3fn i32 bool'
    """
    return " ".join(re.sub(r"^(b?)float|^(u?)int", _initials, dtype) for dtype in dtypes)


def short_policy(policy: Policy | None) -> str:
    """A policy's name, short; that of the format of a quantized one is as it is.

    >>> short_policy(Policy("float32", "bfloat16", "float32")), short_policy(Policy("float32", "float16", "float16"))
    ('p=f32,c=bf16,o=f32', 'mixed_float16')
    """
    if policy is None:
        return ""
    *format, source = policy.name.split("_from_")
    parts = (part.partition("=") for part in source.split(","))
    shortened = ",".join(f"{key[0]}={short([value])}" if value else key for key, _, value in parts)
    return "_from_".join([*format, shortened])


def place(path: str) -> str:
    """A path in a sentence, the root's as well."""
    return path or "the model itself"


def size(count: int) -> str:
    """A number of bytes to three digits.

    >>> size(0), size(999), size(1500), size(65_536), size(280_000_000_000)
    ('', '999 B', '1.5 kB', '65.5 kB', '280 GB')
    """
    if count < 1000:
        return f"{count} B" if count else ""
    power = min((len(str(count)) - 1) // 3, len(_PREFIXES))
    return f"{count / 1000**power:.3g} {_PREFIXES[power - 1]}B"


def has_quantization(explanation: Explanation) -> bool:
    """Whether there is anything to say of the quantization of its modules."""
    return any(row.quantization for row in explanation.rows)


def notes(explanation: Explanation) -> list[str]:
    """What to say below the table: totals, leaks, sums in half precision, idle rules and unknown places."""
    told = _totals(explanation), *_leaks(explanation), *_half_sums(explanation)
    return [*told, *explanation.unused, *explanation.unknown]


def _totals(explanation: Explanation) -> str:
    total, float32 = explanation.total_bytes, explanation.float32_bytes
    if not float32:
        return "no parameters"
    return f"parameters: {size(total)}, {total / float32:.0%} of what they would take in float32"


def _leaks(explanation: Explanation) -> list[str]:
    """A sentence for each rule whose modules leak."""
    by_rule: dict[tuple[str, Policy | None], list[Row]] = {}
    for row in explanation.rows:
        if row.leaks_into:
            by_rule.setdefault((row.rule, row.policy), []).append(row)
    return [_leak(explanation, rows) for rows in by_rule.values()]


def _leak(explanation: Explanation, rows: list[Row]) -> str:
    first, others = rows[0], len(rows) - 1
    places = list(dict.fromkeys(place for row in rows for place in row.leaks_into))
    who = f"{first.path} (!)" + (f" and {others} more" if others else "")
    spread = f"{who} {'leak' if others else 'leaks'} {short(first.output_dtypes)} into the code of {_listed(places)}"
    meant = explanation[places[0]].policy
    if first.policy is None or meant is None or first.rule == "author's dtype":
        return f"{spread}; cast what it returns, where that is not meant"
    return f"{spread}; '{first.policy.with_output_dtype(meant.compute_dtype)}' does not"


def _half_sums(explanation: Explanation) -> list[str]:
    """A sentence for each sum."""
    by_sum: dict[str, list[str]] = {}
    for row in explanation.rows:
        for taken in row.half_sums:
            by_sum.setdefault(taken, []).append(row.path)
    growing = "whose error grows with their count"
    return [f"{_listed(paths)} (!): {taken}, {growing}; {REMEDY}" for taken, paths in by_sum.items()]


def _listed(paths: list[str]) -> str:
    names = list(map(place, paths))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _initials(found: re.Match[str]) -> str:
    name = found.group()
    return {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}[name]
