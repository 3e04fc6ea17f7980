"""The difference of two locks: what changed in each scope, its cause where that is known, and a fix."""

import ast
import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
      notes: function names, settings and package versions that differ, such as `"jax: 0.10.2, now 0.12.0"`.

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
        return f"<LockDiff: {_count_differences(self.rows)} in {self.function}; print it for the list>"

    def __str__(self) -> str:
        head = "\n".join([f"{_count_differences(self.rows)} in {self.function}", *self.notes])
        return "\n\n".join([head, *map(_describe, self.rows)])


def _count_differences(rows: Sequence[Difference]) -> str:
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
    causes = {key: explain.find(*key, *both) for key, both in pairs.items()}
    words = ((key[0], (key[1], *map(_join, both), *causes[key].mask())) for key, both in pairs.items())
    for path, (fact, locked, now, *_) in fold_paths(words):
        paths = [unescape(each) for each in expand_path(path)]
        source = next((row.source for row in pairs[paths[0], fact][1] if row.source), "")
        cause, fix = _spell_causes([causes[each, fact] for each in paths])
        found.append(Difference(path or ROOT, fact, locked, now, source, cause, fix))
    return tuple(found)


def _join(rows: Iterable[LockRow]) -> str:
    return "; ".join(sorted(f"{row.what}: {row.amount}" for row in rows))


class _Cause(NamedTuple):
    """A fix and the text of a cause, around a path."""

    fix: str
    start: str = ""
    place: str = ""
    end: str = ""

    def mask(self) -> tuple[str, ...]:
        """Returns texts that are equal for causes that differ only in the numbers of the path."""
        return self._replace(place=re.sub(r"\d+", "#", self.place))


def _spell_causes(causes: Sequence[_Cause]) -> tuple[str, str]:
    """Returns the text of causes that differ only in the numbers of their paths, and their fix."""
    fix, start, _, end = causes[0]
    places = fold_paths((cause.place, ("",)) for cause in causes)
    return start + ", ".join(unescape(place) for place, _ in places) + end, fix


Pairs = Mapping[tuple[str, str], tuple[Sequence[LockRow], Sequence[LockRow]]]
"""By path and fact: the rows that are gone, and those that have come."""


class _Explainer:
    """Finds causes and fixes of differences."""

    def __init__(self, locks: tuple[Sequence[LockRow], Sequence[LockRow]], pairs: Pairs, changes: Changes):
        self._policies, self._settings, self._versions = changes
        self._old, self._new = ({row.path for row in rows} for rows in locks)
        forward = [(path, both) for (path, fact), both in pairs.items() if fact.startswith("forward")]
        self._forward = {(path, _list_whats(lost) == _list_whats(made)) for path, (lost, made) in forward}
        self._remat, self._moved = _find_remat(pairs), _find_moved(pairs)
        self._dtypes, self._shapes = _compare_arguments(pairs)
        self._users = group_by_key((user, name) for name in self._dtypes for user in _list_users(name))

    def find(self, path: str, fact: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> _Cause:
        """Returns the cause of a difference, if it is known, and a fix."""
        direction, _, kind = fact.rpartition(" ")
        has_other_amounts = _list_whats(lost) == _list_whats(made)
        for name, old, new in self._settings[:1]:
            before, after = (re.sub(r", multiplied in \w+", "", _join(rows)) for rows in (lost, made))
            return _Cause(_FIXES["settings"], f"{'' if before == after else 'perhaps '}{name}: {old}, now {new}")
        if (path, fact) in self._moved:
            return self._moved[path, fact]
        if path not in self._old:
            return _Cause(_FIXES["new"], "the lock has no facts of ", path or _ROOT)
        if path not in self._new:
            return _Cause(_FIXES["new"], "", path or _ROOT, " has no facts now")
        if kind == "scale":
            return _Cause(_FIXES[kind])
        if fact in _ARRAYS:
            return _Cause(_FIXES["shape"] if has_other_amounts else self._find_argument_fix(path))
        if has_other_amounts and self._shapes:
            name, old, new = self._shapes[0]
            return _Cause(_FIXES["shape"], "perhaps argument ", name, f" has {new}, was {old}")
        if kind == "matmul" and lost and not has_other_amounts and _count_dtypes(lost) == _count_dtypes(made):
            return _Cause(_FIXES["precision"], "its precision changed")
        if (path, fact) in self._remat:
            return _Cause(_FIXES["remat"], f"{self._remat[path, fact]} is recomputed in the backward pass")
        if direction == "forward" and (path, "") in self._remat and not _is_replaced(lost, made):
            return _Cause(_FIXES["remat"], f"perhaps {self._remat[path, '']} is recomputed in the backward pass")
        is_new_forward = (path, False) in self._forward or (has_other_amounts and (path, True) in self._forward)
        if direction in ("backward", "recomputed") and is_new_forward and kind != "collective":
            return _Cause(_FIXES["forward"], "the forward pass of this scope differs")
        causes = [*self._find_argument(path, lost, made), *self._find_policies(path, lost, made)]
        guess = next((f"perhaps {name} {new}, was {old}" for name, old, new in self._versions), "")
        causes.append(_Cause(_find_fix(kind, lost, made), guess))
        return min(causes, key=lambda cause: cause.start.startswith("perhaps ") or not cause.start)

    def _find_argument(self, path: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> Iterator[_Cause]:
        """Finds the argument of a module or result whose dtype changed, or else any, which is a guess."""
        own = self._users.get(path) or self._users.get(re.sub("^result/[^/]+", "result", path), [])
        for name in [*own, *self._dtypes][:1]:
            old, new = self._dtypes[name]
            is_sure = len(own) == 1 and _appears({new}, lost, made)
            start = f"{'' if is_sure else 'perhaps '}argument "
            yield _Cause(self._find_argument_fix(name), start, name, f" is {new}, was {old}")

    def _find_argument_fix(self, name: str) -> str:
        is_floating = all(re.fullmatch(r"(b?float|complex)\w+", dtype) for dtype in self._dtypes.get(name, ()))
        return _FIXES["argument" if is_floating else "quantized"]

    def _find_policies(self, path: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> Iterator[_Cause]:
        """Finds policies and rules that cover a scope, or else the only one that changed, which is a guess."""
        for name, old, new in self._policies:
            place, _, rule = name.partition(" rule ")
            place = place.removeprefix(ROOT)
            before, after = (set(text.replace("_from_", ",").split(",")) for text in (old, new))
            dtypes = {field.rpartition("=")[2].partition("/")[0] for field in after - before}
            is_inside = _is_inside(path, place, rule)
            is_sure = is_inside and _appears(dtypes, lost, made)
            start = f"{'' if is_sure else 'perhaps '}{f'rule {rule} of ' if rule else ''}the policy"
            if is_inside or len(self._policies) == 1:
                yield _Cause(_FIXES["policy"], f"{start} of " if place else start, place, f" is {new}, was {old}")


_ROOT = "the root"


def _list_whats(rows: Iterable[LockRow]) -> set[str]:
    return {row.what for row in rows}


def _appears(dtypes: set[str], lost: Sequence[LockRow], made: Sequence[LockRow]) -> bool:
    """True if a dtype is in a row that has come, other than with another amount, and not in all that are gone."""
    whats = _list_whats(lost), _list_whats(made) - _list_whats(lost)
    before, after = ([set(re.findall(r"\w+", what)) for what in each] for each in whats)
    return bool(before and after and dtypes & set.union(*after) - set.intersection(*before))


def _list_users(name: str) -> Iterator[str]:
    """Yields the scopes and results that an argument may belong to, by its name."""
    parts = name.split("/")
    yield from {"/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    yield from (f"result/{tail}" for tail in {name, "/".join(parts[1:])} if re.search(r"[^\d/]", tail))


def _find_remat(pairs: Pairs) -> dict[tuple[str, str], str]:
    """Finds recomputed facts, and their scopes, that came ("more") or went ("less") unlike their forward facts."""
    found = dict[tuple[str, str], str]()
    others = {path for (path, fact), both in pairs.items() if fact.startswith("forward") and _is_replaced(*both)}
    for (path, fact), (lost, made) in pairs.items():
        if fact.startswith("recomputed") and not (lost and made) and path not in others:
            forward = pairs.get((path, fact.replace("recomputed", "forward")), ([], []))[bool(made)]
            if _list_whats(lost or made) - _list_whats(forward):
                found[path, fact] = found[path, ""] = "less" if lost else "more"
    return found


def _is_replaced(lost: Sequence[LockRow], made: Sequence[LockRow]) -> bool:
    return bool(lost and made) and _list_whats(lost) != _list_whats(made)


def _find_moved(pairs: Pairs) -> dict[tuple[str, str], _Cause]:
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
    moved = dict[tuple[str, str], _Cause]()
    for facts in ends[0].keys() & ends[1].keys():
        if len(ends[0][facts]) == len(ends[1][facts]):
            for old, new in zip(ends[0][facts], ends[1][facts], strict=True):
                moved |= {(old, fact): _Cause(_FIXES["moved"], "it is in ", new or _ROOT, " now") for fact, _ in facts}
                moved |= {(new, fact): _Cause(_FIXES["moved"], "it was in ", old or _ROOT) for fact, _ in facts}
    return moved


_ARRAYS = ("argument", "argument quantized")


def _compare_arguments(pairs: Pairs) -> tuple[dict[str, tuple[str, str]], list[Change]]:
    """Returns the arguments with other dtypes, by path, the shortest first, and lists those with other shapes."""
    dtypes, shapes = dict[str, tuple[str, str]](), list[Change]()
    arguments = group_by_key((path, rows) for (path, fact), rows in pairs.items() if fact in _ARRAYS)
    for path, groups in sorted(arguments.items(), key=lambda pair: pair[0].count("/")):
        lost, made = ([row for rows in groups for row in rows[side]] for side in (0, 1))
        for old, new in zip(lost[:1], made[:1], strict=False):
            if old.what != new.what:
                dtypes[path] = old.what, new.what
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
    if kind in _FIXES:
        return _FIXES[kind]
    if _list_whats(lost) == _list_whats(made):
        return _FIXES["count"]
    before, after = (_list_bits(rows) for rows in (lost, made))
    if kind == "collective" and any("reduc" in row.what for row in (*lost, *made)):
        return _FIXES["sent" if made and after < before else "reduction"]
    if kind == "cast" and not (lost and made):
        directions = {_compare_ends(row) for row in made}
        return _FIXES[directions.pop() if len(directions) == 1 else "round trip" if made else "casts"]
    if not (lost and made) or (kind not in ("cast", "matmul") and _list_starts(lost, " ") != _list_starts(made, " ")):
        return _FIXES["count"]
    if kind == "collective":
        return _FIXES["gather" if after > before and any("all-gather" in row.what for row in made) else "sent"]
    if kind == "matmul" and _list_starts(lost, " -> ") == _list_starts(made, " -> "):
        return _FIXES["result of matmul"]
    return _FIXES["other" if before == after else "narrower" if after < before else "wider"]


def _list_starts(rows: Iterable[LockRow], end: str) -> set[str]:
    return {row.what.partition(end)[0] for row in rows}


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
    "count": "find the operation that was added, removed, or runs in another dtype",
    "forward": "fix the forward pass of this scope first",
    "gather": "cast before the gather; if XLA inserted it, put jax.lax.optimization_barrier after the cast",
    "moved": "restore the old name, or regenerate the lock",
    "new": "regenerate the lock if that is meant",
    "narrower": "wrap the code in jmp.force_full_precision, or give its module or scope a float32 rule",
    "other": "set compute= of the policy, or the dtype of the layer",
    "policy": "change the policy back",
    "precision": "set precision= of the policy or of the call, or jax_default_matmul_precision",
    "quantized": "quantize the weights as in the lock, for example with quant.quantize",
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
    "wider": "cast the float32 array, parameter or constant that promotes it, or set the dtype of the layer",
}
"""How to undo a difference."""
