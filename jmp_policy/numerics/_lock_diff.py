"""The difference of two locks: what changed in each scope, its cause where that is known, and a fix."""

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


def compare_rows(old: Sequence[LockRow], new: Sequence[LockRow], policies: Sequence[Change]) -> tuple[Difference, ...]:
    """Returns what differs between two lists of rows. `policies`: policies and rules that changed."""
    before, after = ({(row.path, row.fact, row.what): row for row in rows} for rows in (old, new))
    gone, come = (
        group_by_key(((row.path, row.fact), row) for key, row in rows.items() if others.get(key) != row)
        for rows, others in ((before, after), (after, before))
    )
    pairs = {key: (gone.get(key, []), come.get(key, [])) for key in dict.fromkeys((*gone, *come))}
    explain = _Explainer(pairs, policies)
    differences: dict[tuple[str, tuple[str, ...]], str] = {}
    for (path, fact), (lost, made) in pairs.items():
        texts = fact, _join(lost), _join(made), *explain.find(path, fact, lost, made)
        differences[path, texts] = next((row.source for row in made if row.source), "")
    sources = {texts: source for (_, texts), source in reversed(differences.items())}  # of the first of each
    return tuple(
        Difference(path or ROOT, fact, locked, now, sources[texts], cause, fix)
        for path, texts in fold_paths(differences)
        for fact, locked, now, cause, fix in [texts]
    )


def _join(rows: Iterable[LockRow]) -> str:
    return "; ".join(sorted(f"{row.what}: {row.amount}" for row in rows))


class _Explainer:
    """Finds causes and fixes of differences."""

    def __init__(
        self, pairs: Mapping[tuple[str, str], tuple[list[LockRow], list[LockRow]]], policies: Sequence[Change]
    ):
        self._policies = policies
        self._forward = {path for path, fact in pairs if fact.startswith("forward")}
        self._arguments = [  # whose dtype changed
            (path, lost[0].what, made[0].what)
            for (path, fact), (lost, made) in pairs.items()
            if fact.startswith("argument") and lost and made and lost[0].what != made[0].what
        ]

    def find(self, path: str, fact: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> tuple[str, str]:
        """Returns the cause of a difference, or an empty string, and a fix."""
        direction, _, kind = fact.rpartition(" ")
        whats = [{row.what for row in rows} for rows in (lost, made)]
        if kind == "matmul" and whats[0] != whats[1] and _list_dtypes(lost) & _list_dtypes(made):
            return "its precision changed", _FIXES["precision"]
        fix = _find_fix(kind, lost, made)
        if fact.startswith("argument"):
            return "", fix
        if direction in ("backward", "recomputed") and path in self._forward:
            return "the forward pass of this scope differs", "see there"
        if direction == "recomputed" and not (lost and made):
            return f"{'less' if lost else 'more'} is recomputed in the backward pass", _FIXES["remat"]
        return self._find_argument(path) or self._find_policy(path), fix

    def _find_argument(self, path: str) -> str:
        """Finds a parameter of the module at a path, or else an argument that is one array."""
        own = (change for change in self._arguments if path and f"/{path}/" in f"/{change[0]}/")
        whole = (change for change in self._arguments if "/" not in change[0])
        name, old, new = next(own, None) or next(whole, ("", "", ""))
        return f"argument {name} is {new}, was {old}" if name else ""

    def _find_policy(self, path: str) -> str:
        for name, old, new in self._policies:
            place, _, rule = name.partition(" rule ")
            if _is_inside(path, place.removeprefix(ROOT), rule):
                return f"{f'rule {rule} of ' if rule else ''}the policy of {_name(place)} is {new}, was {old}"
        return ""


def _list_dtypes(rows: Iterable[LockRow]) -> set[str]:
    """Lists the dtypes of matmuls without their precisions."""
    return {row.what.partition(", ")[0] for row in rows}


def _name(place: str) -> str:
    return "the function" if place == ROOT else place


def _is_inside(path: str, place: str, rule: str) -> bool:
    """True for a scope inside of a module, and of a pattern of its map if `rule` is one."""
    if place and not f"{path}/".startswith(f"{place}/"):
        return False
    inside = path.removeprefix(place).strip("/")
    return not rule.startswith(("'", '"')) or covers_path(rule[1:-1], inside) is not None


def _find_fix(kind: str, lost: Sequence[LockRow], made: Sequence[LockRow]) -> str:
    whats = [{row.what for row in rows} for rows in (lost, made)]
    if kind == "collective":
        return _FIXES["gather" if any("all-gather" in what for what in whats[0] | whats[1]) else "reduction"]
    if kind in _FIXES:
        return _FIXES[kind]
    if kind == "matmul" and lost and _list_operands(lost) == _list_operands(made):
        return _FIXES["result of matmul"]
    if whats[0] == whats[1]:
        return _FIXES["count"]
    if kind == "cast":
        is_narrower = any(map(_casts_down, made)) or (not made and not any(map(_casts_down, lost)))
    else:
        is_narrower = _find_narrowest(made) < (_find_narrowest(lost) if lost else 32)
    return _FIXES["narrower" if is_narrower else "wider"]


def _list_operands(rows: Iterable[LockRow]) -> set[str]:
    return {row.what.partition(" -> ")[0] for row in rows}


def _casts_down(row: LockRow) -> bool:
    source, target = (_count_bits(dtype) for dtype in row.what.split(" -> "))
    return target < source


def _find_narrowest(rows: Iterable[LockRow]) -> int:
    """Returns the bits of the narrowest dtype that rows name, or 64."""
    names = (name for row in rows for name in re.findall(r"(?:float|int)\d+", row.what))
    return min(map(_count_bits, names), default=64)


def _count_bits(dtype: str) -> int:
    return int("".join(re.findall(r"\d+", dtype)[:1]) or 0)


_FIXES = {
    "argument": "give the function an array of the dtype before, as jmp.cast_floating does",
    "result": "cast what the function returns, or set output= of the policy",
    "quantized": "set the format of the policy that quant.quantize was given",
    "scale": "make the loss scale with the settings before",
    "precision": "set precision= of the policy or of the call, or jax_default_matmul_precision",
    "result of matmul": "set preferred_element_type= of the matmul, or accumulate= of the policy",
    "gather": "put jax.lax.optimization_barrier right after the cast whose result is gathered",
    "reduction": "set reduce= of the policy, or reduce_dtype= of value_and_grad",
    "narrower": "wrap the code in jmp.force_full_precision, or give its path a float32 rule",
    "wider": "cast the float32 array, parameter or constant that promotes it, or give the layer a dtype",
    "remat": "see what jax.checkpoint is around, and its policy",
    "count": "see which operations the line has more or fewer of",
}
"""How to undo a difference."""
