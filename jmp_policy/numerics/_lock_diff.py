"""The difference of two locks: what changed in each scope, its cause where that is known, and a fix."""

import ast
import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from .._base import group_by_key
from ..policy import covers_path
from ..report import Plain, indent_lines
from ._lock_rows import ROOT, LockRow, fold_paths

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
      cause: an argument, a precision, a policy or a version that changed; empty where none is known.
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
      versions: sentences about packages whose versions differ.

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
    versions: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __repr__(self) -> str:
        return f"<LockDiff: {_count(self.rows)} in {self.function}; print it for the list>"

    def __str__(self) -> str:
        head = "\n".join([f"{_count(self.rows)} in {self.function}", *self.versions])
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


def compare_rows(
    old: Sequence[LockRow], new: Sequence[LockRow], policies: Sequence[Change], settings: Sequence[Change]
) -> tuple[Difference, ...]:
    """Returns what differs between two lists of rows. `policies` and `settings` changed from one lock to the other."""
    before, after = ({row: row for row in rows} for rows in (old, new))  # which keeps the source of each
    gone, come = (
        group_by_key(((row.path, row.fact), row) for row in rows if row not in others)
        for rows, others in ((before, after), (after, before))
    )
    pairs = {key: (gone.get(key, []), come.get(key, [])) for key in dict.fromkeys((*gone, *come))}
    explain = _Explainer(pairs, policies, settings)
    texts = {(path, (fact, _join(lost), _join(made))): explain.find(path, fact, lost, made)
             for (path, fact), (lost, made) in pairs.items()}  # fmt: skip
    advice, sources = dict[tuple[str, ...], tuple[str, str]](), dict[tuple[str, ...], str]()
    for (path, words), found in texts.items():  # modules that differ in a number share the words of the first
        advice.setdefault(words, found)
        made = pairs[path, words[0]][1]
        sources.setdefault(words, next((row.source for row in made if row.source), ""))
    return tuple(
        Difference(path or ROOT, fact, locked, now, sources[words], *advice[words])
        for path, words in fold_paths(texts)
        for fact, locked, now in [words]
    )


def _join(rows: Iterable[LockRow]) -> str:
    return "; ".join(sorted(f"{row.what}: {row.amount}" for row in rows))


Pairs = Mapping[tuple[str, str], tuple[Sequence[LockRow], Sequence[LockRow]]]
"""By path and fact: the rows that are gone, and those that have come."""


class _Explainer:
    """Finds causes and fixes of differences."""

    def __init__(self, pairs: Pairs, policies: Sequence[Change], settings: Sequence[Change]):
        self._policies, self._settings = policies, settings
        self._forward = {path for path, fact in pairs if fact.startswith("forward")}
        self._moved = _find_moved(pairs)
        changed = {path: _compare_arguments(pairs, path) for path, fact in pairs if fact.startswith("argument")}
        self._arguments = [(path, *dtypes) for path, (dtypes, _) in changed.items() if dtypes]
        self._shapes = [(path, *shapes) for path, (_, shapes) in changed.items() if shapes]

    def find(self, path: str, fact: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> tuple[str, str]:
        """Returns the cause of a difference, or an empty string, and a fix."""
        direction, _, kind = fact.rpartition(" ")
        whats = [{row.what for row in rows} for rows in (lost, made)]
        if self._settings:
            name, old, new = self._settings[0]
            return f"{name}: {old}, now {new}", _FIXES["settings"]
        if (path, fact) in self._moved:
            return self._moved[path, fact], _FIXES["moved"]
        if whats[0] == whats[1]:  # other counts or sizes
            shape = next((f"argument {name} has {new}, was {old}" for name, old, new in self._shapes), "")
            if shape and not fact.startswith("argument"):
                return shape, _FIXES["shape"]
            if kind in ("argument", "quantized"):
                return "", _FIXES["shape"]
        if fact.startswith("argument"):
            return "", _FIXES[kind]
        if kind == "matmul" and lost and _count_dtypes(lost) == _count_dtypes(made):
            return "its precision changed", _FIXES["precision"]
        if direction == "recomputed" and not (lost and made):
            return f"{'less' if lost else 'more'} is recomputed in the backward pass", _FIXES["remat"]
        if direction in ("backward", "recomputed") and path in self._forward and kind != "collective":
            return "the forward pass of this scope differs", "see there"
        own = self._find_argument(path)
        cause = own or self._find_policy(path)
        if cause and not cause.startswith("perhaps"):
            return cause, _FIXES["argument" if own else "policy"]
        return cause, _find_fix(kind, lost, made)

    def _find_argument(self, path: str) -> str:
        """Finds a parameter of the module at a path, or else an argument that is one array, which is a guess."""
        for name, old, new in self._arguments:
            if path and f"/{path}/" in f"/{name}/":
                return f"argument {name} is {new}, was {old}"
        whole = (f"perhaps argument {name}: {new}, was {old}" for name, old, new in self._arguments if "/" not in name)
        return next(whole, "")

    def _find_policy(self, path: str) -> str:
        """Finds a policy or rule that covers a scope, or else the only one that changed, which is a guess."""
        texts = []
        for name, old, new in self._policies:
            place, _, rule = name.partition(" rule ")
            what = f"rule {rule} of the policy" if rule else "the policy"
            text = f"{what} is {new}, was {old}"
            if _is_inside(path, place.removeprefix(ROOT), rule):
                return text
            texts.append(f"perhaps {text}")
        return texts[0] if len(texts) == 1 else ""


def _find_moved(pairs: Pairs) -> dict[tuple[str, str], str]:
    """Finds facts that are gone in one scope and have come in another, as where a module was renamed."""
    ends = [
        {(fact, _join(rows[side])): (path, fact) for (path, fact), rows in pairs.items() if not rows[1 - side]}
        for side in (0, 1)
    ]
    moved = dict[tuple[str, str], str]()
    for key in ends[0].keys() & ends[1].keys():
        moved[ends[0][key]] = f"it is in {ends[1][key][0] or ROOT} now"
        moved[ends[1][key]] = f"it was in {ends[0][key][0] or ROOT}"
    return moved


def _compare_arguments(pairs: Pairs, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the dtypes of an argument before and after, and its shapes, if they differ."""
    groups = [rows for (name, fact), rows in pairs.items() if name == path and fact.startswith("argument")]
    lost, made = ([row for rows in groups for row in rows[side]] for side in (0, 1))
    if not (lost and made):
        return (), ()
    whats, amounts = (lost[0].what, made[0].what), (lost[0].amount, made[0].amount)
    return whats if whats[0] != whats[1] else (), amounts if amounts[0] != amounts[1] else ()


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
    if kind == "collective":
        return _FIXES["gather" if any("all-gather" in what for what in whats[0] | whats[1]) else "reduction"]
    if kind in _FIXES:
        return _FIXES[kind]
    if whats[0] == whats[1]:
        return _FIXES["count"]
    if kind == "matmul" and lost and _list_operands(lost) == _list_operands(made):
        return _FIXES["result of matmul"]
    if kind == "cast":
        directions = {_compare_ends(row) for row in made}
        return _FIXES[directions.pop() if len(directions) == 1 else "casts"]
    before, after = (_list_bits(rows) for rows in (lost, made))
    if not (lost and made):
        return _FIXES["narrower" if (min(after) < 32 if made else min(before) >= 32) else "wider"]
    return _FIXES["other" if before == after else "narrower" if after < before else "wider"]


def _list_operands(rows: Iterable[LockRow]) -> set[str]:
    return {row.what.partition(" -> ")[0] for row in rows}


def _compare_ends(row: LockRow) -> str:
    source, target = (_count_bits(dtype) for dtype in row.what.split(" -> "))
    return "other" if source == target else "narrower" if target < source else "wider"


def _list_bits(rows: Iterable[LockRow]) -> list[int]:
    """Lists the bits of the dtypes that rows name, the narrowest first."""
    texts = (row.what.partition(", ")[0] for row in rows)
    return sorted({_count_bits(name) for text in texts for name in re.findall(r"(?:float|int)\d+", text)}) or [64]


def _count_bits(dtype: str) -> int:
    return int("".join(re.findall(r"\d+", dtype)[:1]) or 0)


_FIXES = {
    "moved": "name it as before",
    "shape": "give the function arguments of the shapes before",
    "policy": "change the policy back",
    "casts": "see the other differences of this scope",
    "settings": "compare with a lock of the same platform, also compiled or not",
    "argument": "give the function an array of the dtype before, as jmp.cast_floating does",
    "update": "keep the dtype of the array that the function writes to",
    "result": "cast what the function returns, or set output= of the policy",
    "quantized": "set the format of the policy that quant.quantize was given",
    "scale": "make the loss scale with the settings before",
    "precision": "set precision= of the policy or of the call, or jax_default_matmul_precision",
    "result of matmul": "set preferred_element_type= of the matmul, or accumulate= of the policy",
    "gather": "put jax.lax.optimization_barrier right after the cast whose result is gathered",
    "reduction": "set reduce= of the policy, or reduce_dtype= of value_and_grad",
    "narrower": "wrap the code in jmp.force_full_precision, or give its path a float32 rule",
    "wider": "cast the float32 array, parameter or constant that promotes it, or give the layer a dtype",
    "other": "set compute= of the policy, or the dtype of the layer",
    "remat": "see what jax.checkpoint is around, and its policy",
    "count": "see which operations the line has more or fewer of",
}
"""How to undo a difference."""
