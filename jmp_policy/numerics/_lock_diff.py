"""The difference of two locks: what changed in each scope, its cause where that is known, and a fix."""

import ast
import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .._base import group_by_key
from ..policy import covers_path
from ..report import Plain, indent_lines
from ._lock_rows import ROOT, LockRow, count_bits, expand_path, fold_paths, unescape

Change = tuple[str, str, str]
"""The name of what changed, its text before and its text after."""


@dataclasses.dataclass(frozen=True)
class Difference(Plain):
    """The facts of one kind that differ in one scope, or in scopes that differ only in a number.

    Attributes:
      path: the scope, such as `"blocks/[0-11]/mlp"`.
      fact: such as `"forward matmul"`.
      locked: the facts of the lock that are gone, or have another amount.
      now: the facts in their place.
      source: the line of the first operation of `now`; empty for arguments and results, and for rows of a file.
      cause: what changed: an argument, shape, precision, policy, platform, version, or the name of the scope; empty if
        unknown.
      fix: how to undo it.

    >>> from jmp_policy.numerics import Difference
    >>> row = Difference("head", "result", "float32, shape 8", "bfloat16, shape 8", "", "", "set output= in the policy")
    >>> row.to_dict()["now"]
    'bfloat16, shape 8'
    """

    path: str
    fact: str
    locked: str
    now: str
    source: str
    cause: str
    fix: str


@dataclasses.dataclass(frozen=True, repr=False)
class LockDiff(Plain):
    """Result of `Lock.diff`: true if a fact differs. Prints each difference with its cause, if known, and a fix.

    Attributes:
      rows: the differences, sorted by path.
      function: the name of the locked function.
      notes: settings and package versions that differ, such as `"jax: 0.10.2, now 0.12.0"`.

    >>> from jmp_policy.numerics import Difference, LockDiff
    >>> fix = "wrap the code in jmp.force_full_precision"
    >>> row = Difference("head", "forward operation", "exp in float32: 1 time", "exp in float16: 1 time", "", "", fix)
    >>> print(LockDiff((row,), "train_step", ("jax: 0.10.2, now 0.12.0",)))
    1 difference in train_step
    jax: 0.10.2, now 0.12.0
    <BLANKLINE>
    head | forward operation
      - exp in float32: 1 time
      + exp in float16: 1 time
      fix: wrap the code in jmp.force_full_precision
    """

    rows: tuple[Difference, ...]
    function: str
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __repr__(self) -> str:
        return f"<LockDiff: {_count(self.rows)} in {self.function}; print it for the list>"

    def __str__(self) -> str:
        head = "\n".join([f"{_count(self.rows)} in {self.function}", *self.notes])
        return "\n\n".join([head, *map(_describe, self.rows)])


def _count(rows: Sequence[Difference]) -> str:
    return f"{len(rows) or 'no'} difference{'' if len(rows) == 1 else 's'}"


def _describe(row: Difference) -> str:
    """Returns a difference as lines."""
    source = f" | {row.source}" if row.source else ""
    texts = {"-": row.locked, "+": row.now}
    lines = [f"{sign} {text}" for sign, joined in texts.items() for text in joined.split("; ") if joined]
    lines += [f"{name}: {text}" for name, text in (("cause", row.cause), ("fix", row.fix)) if text]
    return f"{row.path} | {row.fact}{source}" + indent_lines(lines)


class Changes(NamedTuple):
    """Differences between two locks other than facts."""

    policies: Sequence[Change]  # with rules
    settings: Sequence[Change]  # the platform, and the device that it was compiled for
    versions: Sequence[Change]


def compare_rows(old: Sequence[LockRow], new: Sequence[LockRow], changes: Changes) -> tuple[Difference, ...]:
    """Returns what differs between two lists of rows."""
    before, after = dict.fromkeys(old), dict.fromkeys(new)
    gone, come = (
        group_by_key(((row.path, row.fact), row) for row in rows if row not in others)
        for rows, others in ((before, after), (after, before))
    )
    pairs = {key: (gone.get(key, []), come.get(key, [])) for key in dict.fromkeys((*gone, *come))}
    explain, found = _Explainer((old, new), pairs, changes), list[Difference]()
    words = ((path, (fact, *map(_join, both))) for (path, fact), both in pairs.items())
    for path, (fact, locked, now) in fold_paths(words):
        first = unescape(next(expand_path(path)))  # modules that differ in a number share the cause of the first
        lost, made = pairs[first, fact]
        source = next((row.source for row in made if row.source), "")
        found.append(Difference(path or ROOT, fact, locked, now, source, *explain.find(first, fact, lost, made)))
    return tuple(found)


def _join(rows: Iterable[LockRow]) -> str:
    return "; ".join(sorted(f"{row.what}: {row.amount}" for row in rows))


Pairs = Mapping[tuple[str, str], tuple[Sequence[LockRow], Sequence[LockRow]]]
"""By path and fact: the rows that are gone, and those that have come."""


class _Explainer:
    """Finds causes and fixes of differences."""

    def __init__(self, locks: tuple[Sequence[LockRow], Sequence[LockRow]], pairs: Pairs, changes: Changes):
        self._policies, self._settings, self._versions = changes
        self._old, self._new = ({row.path for row in rows} for rows in locks)
        again = [{row.path for row in rows if row.fact.startswith("recomputed")} for rows in locks]
        self._remat = again[0] ^ again[1]
        self._forward = {path for path, fact in pairs if fact.startswith("forward")}
        self._moved = _find_moved(pairs)
        self._dtypes, self._shapes = _compare_arguments(pairs)

    def find(self, path: str, fact: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> tuple[str, str]:
        """Returns the cause of a difference, or an empty string, and a fix."""
        direction, _, kind = fact.rpartition(" ")
        has_other_amounts = {row.what for row in lost} == {row.what for row in made}
        if self._settings:
            name, old, new = self._settings[0]
            return f"{name}: {old}, now {new}", _FIXES["settings"]
        if (path, fact) in self._moved:
            return self._moved[path, fact], _FIXES["moved"]
        if path not in self._old or path not in self._new:
            return f"{path or ROOT} is {'new' if path in self._new else 'gone'}", _FIXES["new"]
        if fact.startswith("argument") or kind == "scale":
            return "", _FIXES["shape" if has_other_amounts and kind != "scale" else kind]
        if has_other_amounts and self._shapes:
            name, old, new = self._shapes[0]
            return f"argument {name} has {new}, was {old}", _FIXES["shape"]
        if kind == "matmul" and lost and not has_other_amounts and _count_dtypes(lost) == _count_dtypes(made):
            return "its precision changed", _FIXES["precision"]
        if direction == "recomputed" and path in self._remat:
            return f"{'less' if lost else 'more'} is recomputed in the backward pass", _FIXES["remat"]
        if direction in ("backward", "recomputed") and path in self._forward and kind != "collective":
            return "the forward pass of this scope differs", _FIXES["forward"]
        guess = next((f"perhaps {name} {new}, was {old}" for name, old, new in self._versions), "")
        return self._find_argument(path, made) or self._find_policy(path) or (guess, _find_fix(kind, lost, made))

    def _find_argument(self, path: str, made: Sequence[LockRow]) -> tuple[str, str] | None:
        """Finds the parameter of the module at a path whose dtype changed, or else an argument that is one array."""
        own = [change for change in self._dtypes if path and f"/{path}/" in f"/{change[0]}/"]
        others = [change for change in self._dtypes if "/" not in change[0]]
        for name, old, new in [*own, *others][:1]:
            is_sure = len(own) == 1 and any(new in row.what for row in made)
            return f"{'' if is_sure else 'perhaps '}argument {name} is {new}, was {old}", _FIXES["argument"]
        return None

    def _find_policy(self, path: str) -> tuple[str, str] | None:
        """Finds a policy or rule that covers a scope, or else the only one that changed, which is a guess."""
        texts = []
        for name, old, new in self._policies:
            place, _, rule = name.partition(" rule ")
            place = place.removeprefix(ROOT)
            what = f"{f'rule {rule} of ' if rule else ''}the policy{f' of {place}' if place else ''}"
            texts.append(f"{what} is {new}, was {old}")
            if _is_inside(path, place, rule):
                return texts[-1], _FIXES["policy"]
        return (f"perhaps {texts[0]}", _FIXES["policy"]) if len(texts) == 1 else None


def _find_moved(pairs: Pairs) -> dict[tuple[str, str], str]:
    """Finds renamed scopes: all their facts are gone, and have come in as many others."""
    scopes = group_by_key((path, (fact, rows)) for (path, fact), rows in pairs.items())
    ends = [
        group_by_key(
            (tuple(sorted((fact, _join(rows[side])) for fact, rows in facts)), path)
            for path, facts in scopes.items()
            if not any(rows[1 - side] for _, rows in facts)
        )
        for side in (0, 1)
    ]
    moved = dict[tuple[str, str], str]()
    for facts in ends[0].keys() & ends[1].keys():
        if len(ends[0][facts]) == len(ends[1][facts]):
            for old, new in zip(ends[0][facts], ends[1][facts], strict=True):
                moved |= {(old, fact): f"it is in {new or ROOT} now" for fact, _ in facts}
                moved |= {(new, fact): f"it was in {old or ROOT}" for fact, _ in facts}
    return moved


_ARRAYS = ("argument", "argument quantized")


def _compare_arguments(pairs: Pairs) -> tuple[list[Change], list[Change]]:
    """Lists the arguments with other dtypes, and those with other shapes."""
    dtypes, shapes = list[Change](), list[Change]()
    arguments = group_by_key((path, rows) for (path, fact), rows in pairs.items() if fact in _ARRAYS)
    for path, groups in arguments.items():
        lost, made = ([row for rows in groups for row in rows[side]] for side in (0, 1))
        for old, new in zip(lost[:1], made[:1], strict=False):
            if old.what != new.what:
                dtypes.append((path, old.what, new.what))
            if old.amount != new.amount:
                shapes.append((path, old.amount, new.amount))
    return dtypes, shapes


def _count_dtypes(rows: Iterable[LockRow]) -> dict[str, int]:
    """Counts matmuls by dtypes, of any precision."""
    counts = collections.Counter[str]()
    for row in rows:
        counts[row.what.partition(", ")[0]] += int(re.sub(r"\D", "", row.amount))
    return counts


def _is_inside(path: str, place: str, rule: str) -> bool:
    """True for a scope inside of a module, and of a pattern of its map if `rule` is one. False for rules of types."""
    if place and not f"{path}/".startswith(f"{place}/"):
        return False
    if not rule:
        return True
    inside = path.removeprefix(place).strip("/")
    return rule.startswith(("'", '"')) and covers_path(ast.literal_eval(rule), inside) is not None


def _find_fix(kind: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> str:
    whats = [{row.what for row in rows} for rows in (lost, made)]
    if kind in _FIXES:
        return _FIXES[kind]
    if whats[0] == whats[1]:
        return _FIXES["count"]
    if kind == "collective" and made and _list_bits(made) < _list_bits(lost):
        return _FIXES["sent"]
    if kind == "collective":
        return _FIXES["gather" if any("all-gather" in what for what in whats[0] | whats[1]) else "reduction"]
    if kind == "cast":
        directions = {_compare_ends(row) for row in made}
        return _FIXES[directions.pop() if len(directions) == 1 else "round trip" if made else "casts"]
    if not (lost and made):
        return _FIXES["count"]
    if kind == "matmul" and _list_operands(lost) == _list_operands(made):
        return _FIXES["result of matmul"]
    before, after = (_list_bits(rows) for rows in (lost, made))
    return _FIXES["other" if before == after else "narrower" if after < before else "wider"]


def _list_operands(rows: Iterable[LockRow]) -> set[str]:
    return {row.what.partition(" -> ")[0] for row in rows}


def _compare_ends(row: LockRow) -> str:
    source, target = (count_bits(dtype) for dtype in row.what.split(" -> "))
    return "other" if source == target else "narrower" if target < source else "wider"


def _list_bits(rows: Iterable[LockRow]) -> list[int]:
    """Lists the bits of the dtypes that rows name, the narrowest first."""
    texts = (row.what.partition(", ")[0] for row in rows)
    return sorted({count_bits(name) for text in texts for name in re.findall(r"(?:float|int)\d+", text)}) or [64]


_FIXES = {
    "argument": "cast the argument back, for example with jmp.cast_floating",
    "casts": "see the other differences of this scope",
    "count": "find the operation that was added or removed",
    "forward": "fix the forward pass of this scope first",
    "gather": "cast before the gather; if XLA inserted it, put jax.lax.optimization_barrier after the cast",
    "moved": "restore the old name, or regenerate the lock",
    "new": "regenerate the lock if that is meant",
    "narrower": "wrap the code in jmp.force_full_precision, or give its path a float32 rule",
    "other": "set compute= of the policy, or the dtype of the layer",
    "policy": "change the policy back",
    "precision": "set precision= of the policy or of the call, or jax_default_matmul_precision",
    "quantized": "pass quant.quantize the format of the lock",
    "reduction": "set reduce= of the policy, or reduce_dtype= of value_and_grad",
    "remat": "check which functions jax.checkpoint wraps, and its policy",
    "result": "cast what the function returns, or set output= of the policy",
    "result of matmul": "set preferred_element_type= of the matmul, or accumulate= of the policy",
    "round trip": "remove the casts down and up again, or see the other differences of this scope",
    "sent": "send the array in the dtype of the lock, and cast it afterwards",
    "scale": "restore the settings of the loss scale",
    "settings": "make both locks with the same platform= and compiled=",
    "shape": "call the function with the shapes of the lock",
    "update": "keep the dtype of the array that the function writes to",
    "wider": "cast the float32 array, parameter or constant that promotes it, or give the layer a dtype",
}
"""How to undo a difference."""
