"""Which scopes are the most suspicious, from one run in float32 that is measured."""

import dataclasses
import math
import operator
from collections.abc import Collection

import jax
from jax.extend.core import Jaxpr

from ..._base import list_paths_to
from ..._jaxpr import MATMULS, ModulePaths, float_dtype, walk
from ...autocast._rewrite import FULL, FULL_IN_FLOAT16, INFER, LOW, WIDE
from ...loss_scale import NoOpLossScale
from ...policy import Policy
from .._explain import explain
from .._predict import predict
from .._stats import Format, Row, Stats, collect, find_program, parse_format
from ._subject import Subject


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The scopes of a function or module, the most suspicious first.

    Attributes:
      scopes: their paths.
      scores: how suspicious each is, without a unit; infinite where it is predicted to be needed.
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

    First come those that `numerics.predict` names. Behind them the score is the first order of the error: what rounding
    does to the values of a scope, times the gradients that arrive there.

    Args:
      subject: what is tuned.
      policy: the policy.
      loss_scale: what the loss is multiplied by; `None` for the one that is predicted to save the gradients.
    """
    low = find_format(policy)
    modules = list_modules(subject, policy) if subject.is_module else None
    plain, arrays = subject.make_run(None, NoOpLossScale())
    where = _choose_operations(jax.make_jaxpr(plain)(arrays).jaxpr)
    passes = ("forward", "recomputed", "backward", *(["arguments"] if policy.quantization is not None else []))
    look = lambda fun: lambda *args: collect(fun, [low.name], where=where, of=passes, loops="merge")(*args)[1]
    run, arrays = subject.make_run(None, NoOpLossScale(), look)
    stats: Stats = jax.jit(run)(arrays)
    rows = [row for row in stats.rows() if row.times]
    scopes = list_scopes(stats) if modules is None else modules
    by_scope: dict[str, list[Row]] = {scope: [] for scope in scopes}
    for row in rows:
        if subject.is_module or row.primitive not in FULL:  # autocast leaves these in float32 anyway
            by_scope.get(_find_scope(row, by_scope) or "", []).append(row)
    predicted, scale = (), 1.0
    if rows:
        prediction = predict(stats, policy, by="with_policy" if subject.is_module else "autocast")
        predicted, scale = prediction.culprits, prediction.loss_scale or 1.0
    culprits = [scope for scope in predicted if scope in by_scope]
    scores = _score(by_scope, low) | dict.fromkeys(culprits, math.inf)
    others = sorted(set(scopes) - set(culprits), key=lambda scope: (-scores[scope], scopes.index(scope)))
    ranked = [*culprits, *others]
    return Ranking(tuple(ranked), tuple(scores[scope] for scope in ranked), scale if loss_scale is None else loss_scale)


def _choose_operations(program: Jaxpr) -> tuple[str, ...]:
    """What is measured: products, and of the other operations as many kinds as compile in a moment.

    Each row is compiled: to measure all operations of a model takes minutes.
    """
    names = [step.name for step in walk(program, live_only=True) if any(float_dtype(var) for var in step.results)]
    chosen, rows = [], sum(name in MATMULS for name in names)
    for name in _SUSPECTS:
        rows += names.count(name)
        if rows > MOST_ROWS:
            break
        if name in names:
            chosen.append(name)
    return ("matmuls", *chosen)


_SUSPECTS = ("integer_pow", "square", "div", "mul", "exp", "rsqrt", "add", "sub", "add_any", "reduce_sum")
"""Operations that lose numbers in half, the most suspicious first."""

MOST_ROWS = 120
"""How many values are measured beside products, at most."""


def find_format(policy: Policy) -> Format:
    """What a policy makes of numbers: its compute dtype, or the format of its quantization."""
    if policy.quantization is None:
        return parse_format(policy.compute_dtype)
    name = str(policy.quantization).partition("(")[0].strip()
    return parse_format("float8_e4m3fn" if name.startswith("float8") else name)


def list_scopes(stats: Stats) -> list[str]:
    """The paths of all operations that autocast may have in half, measured or not, and the root's, in their order.

    Other paths go along with the one around them. With all of these in float32 everything is.
    """
    observed = find_program(stats.layout)
    if observed is None:
        return [""]
    read = ModulePaths(observed.modules).read_stack
    steps = [step for step in walk(observed.program, live_only=True) if step.name in _LOW]
    return list(dict.fromkeys(["", *(read(step.scope) for step in steps)]))


_LOW = {*LOW, *INFER, *WIDE, *FULL_IN_FLOAT16}


def list_modules(subject: Subject, policy: Policy) -> list[str]:
    """The paths of the modules that a rule of a map can tell apart; under a quantized policy, of its layers.

    Raises:
      ValueError: there is none.
    """
    model = subject.attach(policy)
    inputs = subject.args if subject.holds_variables else subject.args[1:]
    modules = explain(model, *inputs).rows
    if policy.quantization is None:
        return [row.path for row in modules]
    layers = [row.path for row in modules if row.quantization and not row.quantization.startswith("left")]
    if not layers:
        raise ValueError(
            f"No layer of {subject.name} would be quantized by {policy.name!r}: explain(with_policy(model, policy), x) "
            "says why. Small weights, for one, stay as they are, unless the policy has '(min_size=0)' after its format."
        )
    return layers


def _find_scope(row: Row, scopes: Collection[str]) -> str | None:
    """The scope that a row belongs to: the nearest one around it; of an argument, that which its path ends with."""
    if row.direction == "argument":
        names = row.path.split("/")
        paths = ["/".join(names[start:stop]) for start in range(len(names)) for stop in range(len(names), start, -1)]
        return next((path for path in paths if path in scopes), None)
    return next((outer for outer in reversed(list_paths_to(row.path)) if outer in scopes), None)


def _score(by_scope: dict[str, list[Row]], low: Format) -> dict[str, float]:
    """The share of each scope in the errors of values, times the gradients there, and of the gradients themselves."""
    errors = {}
    for scope, rows in by_scope.items():
        gradient = max((_measure_norm(row) for row in rows if row.direction == "backward"), default=1.0)
        of_rows = [(row.direction == "backward", row.formats[low.name], _measure_norm(row)) for row in rows]
        forward = sum(shares.error * norm for is_backward, shares, norm in of_rows if not is_backward)
        backward = sum(shares.scaled_error * norm for is_backward, shares, norm in of_rows if is_backward)
        errors[scope] = forward * gradient, backward
    totals = [sum(parts) or 1.0 for parts in zip(*errors.values(), strict=True)]
    return {scope: sum(map(operator.truediv, parts, totals)) for scope, parts in errors.items()}


def _measure_norm(row: Row) -> float:
    return row.rms * math.sqrt(row.count)
