"""Which scopes are the most suspicious, from one run in float32 that is measured."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from .._explain import explain
from .._loss_scale import NoOpLossScale
from .._paths import list_paths_to
from .._policy import Policy
from ..autocast._tables import FULL
from ..interpreter import float_dtype, walk
from ..measurement._what_if import FloatFormat, parse_format
from ..numerics import Row, Stats, collect
from ._subject import Subject

MOST_SCALE = 2.0**15
"""The largest loss scale that is chosen: what dynamic ones start with."""


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The scopes of a function or module, the most suspicious first.

    Attributes:
      scopes: their paths.
      scores: how suspicious each is, without a unit; infinite where numbers overflow or vanish.
      loss_scale: what the loss is multiplied by.
    """

    scopes: tuple[str, ...]
    scores: tuple[float, ...]
    loss_scale: float

    @property
    def likely(self) -> int:
        """How many scopes are thought to be needed."""
        return sum(math.isinf(score) for score in self.scores)


def rank_scopes(subject: Subject, policy: Policy, loss_scale: float | None) -> Ranking:
    """Measures one run in float32, and ranks the scopes by what the policy would do to it.

    First come the scopes in which numbers of the policy's dtype would overflow or vanish. Behind them the score is the
    first order of the error: what rounding does to the values of a scope, times the gradients that arrive there.

    Args:
      subject: what is tuned.
      policy: the policy.
      loss_scale: what the loss is multiplied by; `None` for a power of two with which no gradient overflows.
    """
    half = find_format(policy)
    plain, arrays = subject.make_run(None, NoOpLossScale())
    where = _choose_operations(jax.make_jaxpr(plain)(arrays).jaxpr)
    look = lambda fun: lambda *args: collect(
        fun, [half.name], where=where, of=("forward", "recomputed", "backward"), histogram=False, loops="merge"
    )(*args)[1]
    run, arrays = subject.make_run(None, NoOpLossScale(), look)
    stats: Stats = jax.jit(run)(arrays)
    rows = [row for row in stats.rows() if row.times]
    scopes = list_scopes(subject, policy, [row.path for row in rows])
    by_scope: dict[str, list[Row]] = {scope: [] for scope in scopes}
    for row in rows:
        if subject.is_module or row.primitive not in FULL:  # autocast leaves these in float32 anyway
            by_scope[_find_scope(row.path, by_scope)].append(row)
    scale = _choose_scale(rows, half) if loss_scale is None else loss_scale
    scores = _score(by_scope, half, scale)
    ranked = sorted(scopes, key=lambda scope: -scores[scope])  # stable: equals stay in the order of the program
    return Ranking(tuple(ranked), tuple(scores[scope] for scope in ranked), scale)


def _choose_operations(program: Jaxpr) -> tuple[str, ...]:
    """What is measured: products, and of the other operations as many kinds as compile in a moment.

    Each row is compiled: to measure all operations of a model takes minutes.
    """
    names = [step.name for step in walk(program, live_only=True) if any(map(float_dtype, step.results))]
    chosen, rows = [], sum(name in _PRODUCTS for name in names)
    for name in _SUSPECTS:
        rows += names.count(name)
        if rows > MOST_ROWS:
            break
        if name in names:
            chosen.append(name)
    return ("matmuls", *chosen)


_PRODUCTS = ("dot_general", "conv_general_dilated")
_SUSPECTS = ("integer_pow", "square", "div", "mul", "exp", "rsqrt", "add", "sub", "add_any", "reduce_sum")
"""Operations that lose numbers in half, the most suspicious first."""

MOST_ROWS = 120
"""How many values are measured beside products, at most."""


def find_format(policy: Policy) -> Any:
    """What a policy makes of numbers: its compute dtype, or the format of its quantization."""
    if policy.quantization is None:
        return parse_format(policy.compute_dtype)
    name = str(policy.quantization).partition("(")[0].strip()
    return parse_format("float8_e4m3fn" if name.startswith("float8") else name)


def list_scopes(subject: Subject, policy: Policy, paths: Sequence[str]) -> list[str]:
    """The paths that a rule of a map can tell apart, the root's among them, in the order of the program."""
    if not subject.is_module:
        return list(dict.fromkeys(["", *paths]))
    model = subject.attach(policy)
    inputs = subject.args if subject.holds_variables else subject.args[1:]
    modules = explain(model, *inputs).rows
    if policy.quantization is None:
        return [row.path for row in modules]
    return [row.path for row in modules if row.quantization and not row.quantization.startswith("left")]


def _find_scope(path: str, scopes: Any) -> str:
    """The scope that an operation at a path belongs to: the nearest one around it."""
    return next((outer for outer in reversed(list_paths_to(path)) if outer in scopes), "")


def _choose_scale(rows: Sequence[Row], half: Any) -> float:
    """The largest power of two with which all gradients are finite, up to a usual one; 1 where none is needed."""
    largest = max((row.amax for row in rows if row.direction == "backward"), default=0.0)
    if not isinstance(half, FloatFormat) or half.max_exponent > 100 or not largest:
        return 1.0
    return 2.0 ** max(0, min(math.log2(MOST_SCALE), math.floor(math.log2(half.max / largest)) - 1))


def _score(by_scope: dict[str, list[Row]], half: Any, scale: float) -> dict[str, float]:
    norms = {scope: max(map(_measure_norm, _take(rows, "backward")), default=0.0) for scope, rows in by_scope.items()}
    passes: list[tuple[Sequence[str], Callable[[Row, str], float]]] = [
        (("forward", "recomputed"), lambda row, scope: _measure_error(row, half, 1.0) * (norms[scope] or 1.0)),
        (("backward",), lambda row, _: _measure_error(row, half, scale)),
    ]
    totals = dict.fromkeys(by_scope, 0.0)
    for directions, measure in passes:
        errors = {
            scope: sum(measure(row, scope) for row in _take(rows, *directions)) for scope, rows in by_scope.items()
        }
        whole = sum(error for error in errors.values() if math.isfinite(error)) or 1.0
        totals = {scope: totals[scope] + error / whole for scope, error in errors.items()}
    return totals


def _take(rows: Sequence[Row], *directions: str) -> list[Row]:
    return [row for row in rows if row.direction in directions]


def _measure_norm(row: Row) -> float:
    return row.rms * math.sqrt(row.count)


def _measure_error(row: Row, half: Any, scale: float) -> float:
    """The norm of what a format would do to a tensor; infinite where that breaks it."""
    if not isinstance(half, FloatFormat):
        return row.formats[half.name].error * _measure_norm(row)
    vanishes = row.rms * scale < half.find_thresholds(np.dtype(np.float32))[0]
    if row.amax * scale > half.max or row.nans or row.infs or (row.amax > 0 and vanishes):
        return math.inf
    shares = row.formats[half.name]
    return (shares.error if scale == 1 else shares.scaled_error) * _measure_norm(row)
