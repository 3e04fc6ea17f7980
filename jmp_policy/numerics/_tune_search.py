"""The tuned function or module with its runs under a policy, and the search for a small set of scopes in float32."""

import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .._base import Args, JsonLog, PyTree, escape_controls, is_floating, list_paths_to, warn_user
from .._jaxpr import HALF, MATMULS, ModulePaths, float_dtype, strip_transformations, take_apart, walk
from ..autocast import FULL, FULL_IN_FLOAT16, INFER, LOW, WIDE, autocast, is_mixed
from ..gradients import value_and_grad
from ..loss_scale import LossScale, StaticLossScale
from ..modules import find_adapter, find_lifting_adapter, with_policy
from ..policy import NumberFormat, Policy, PolicyMap, find_operand_format, parse_format
from ._collect import collect
from ._explain import explain
from ._predict import predict
from ._stats import Stats
from ._stats_choice import find_program
from ._stats_row import Row


def write_code(policy_map: PolicyMap) -> str:
    default = None if policy_map.default is None else str(policy_map.default)
    rules = [f"        {rule.key!r}: {str(rule.policy)!r}," for rule in policy_map.rules]
    body = ["    {", *rules, "    },"] if rules else ["    {},"]
    return "\n".join(["jmp.PolicyMap(", *body, f"    default={default!r},", ")"])


Observed = dict[str, PyTree]
"""Compared results by name: the outputs, and the gradients if any."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function or Flax module with its arguments. `seed` draws the projection of a module's outputs to a loss."""

    target: Any
    args: Args
    differentiates: bool
    has_aux: bool
    seed: int

    @property
    def is_module(self) -> bool:
        return find_adapter(self.target) is not None

    @property
    def holds_variables(self) -> bool:
        """True for an nnx module. A linen module gets its variables as the first argument."""
        return find_lifting_adapter(self.target) is not None

    @property
    def name(self) -> str:
        target = type(self.target) if self.is_module else self.target
        return getattr(target, "__qualname__", None) or type(target).__qualname__

    def attach(self, policy: Policy | PolicyMap | None) -> Any:
        if policy is None:
            return self.target
        return with_policy(self.target, policy) if self.is_module else autocast(self.target, policy)

    def make_run(
        self,
        policy: Policy | PolicyMap | None,
        scale: LossScale | None = None,
        look: Callable[..., Any] = lambda fun: fun,
    ) -> tuple[Callable[..., Any], PyTree]:
        """Returns a function of one tree of arrays, seen through `look`, and that tree. Writes to objects are lost."""
        # Without a scale, the gradients of a model that has a float16 policy would warn of training.
        observe, args = self._make_observed(policy, scale or StaticLossScale(1.0))
        arrays, rebuild = take_apart(args)
        observed = look(observe)
        return lambda arrays: observed(*rebuild(arrays)), arrays

    def make_candidate(self, policy: Policy | PolicyMap | None) -> Args:
        """Returns the arguments of a metric. nnx objects are cloned because a metric may train them."""
        arguments = (self.attach(policy), *self.args)
        if find_lifting_adapter(arguments) is None:
            return arguments
        from flax import nnx

        is_object = lambda leaf: find_lifting_adapter((leaf,)) is not None
        return tuple(nnx.clone(value) if is_object(value) else value for value in arguments)

    def _make_observed(
        self, policy: Policy | PolicyMap | None, scale: LossScale
    ) -> tuple[Callable[..., Observed], Args]:
        attached, args = self.attach(policy), self.args
        if not self.is_module:
            fun = attached
        elif self.holds_variables:
            fun, args = lambda model, *inputs: model(*inputs), (attached, *self.args)
        else:
            fun = attached.apply
        adapter = find_lifting_adapter(args[:1])
        differentiate: Callable[..., Any] = functools.partial(value_and_grad, allow_int=True)
        if adapter is not None and adapter.value_and_grad is not None:
            differentiate = adapter.value_and_grad

        def run(*args: Any) -> PyTree:
            return fun(*args)[0] if self.has_aux else fun(*args)

        def loss_fn(*args: Any) -> tuple[jax.Array, PyTree]:
            out = run(*args)
            return out if is_loss(out) else project(out, self.seed), out

        def observe(*args: Any) -> Observed:
            if not self.differentiates:
                return {"outputs": run(*args)}
            (_, out), grads = differentiate(loss_fn, has_aux=True, loss_scale=scale)(*args)
            return {"outputs": out, "gradients": [leaf for leaf in jax.tree.leaves(grads) if is_floating(leaf)]}

        return observe, args


def is_loss(out: PyTree) -> bool:
    """True for a scalar of a real floating dtype."""
    return is_floating(out) and jnp.ndim(out) == 0


def project(out: PyTree, seed: int) -> jax.Array:
    """Returns a float32 loss of any outputs: their sum with random weights drawn from `seed`."""
    total = jnp.zeros((), jnp.float32)
    for index, leaf in enumerate(leaf for leaf in jax.tree.leaves(out) if is_floating(leaf)):
        weights = jax.random.normal(jax.random.fold_in(jax.random.key(seed), index), leaf.shape, jnp.float32)
        total += jnp.sum(leaf.astype(jnp.float32) * weights) / max(1, leaf.size) ** 0.5
    return total


class Ranking(NamedTuple):
    """Scopes of a function or module, the most suspicious first, and the loss scale of the trials."""

    scopes: tuple[str, ...]
    loss_scale: float


def rank_scopes(subject: Subject, policy: Policy, loss_scale: float | None) -> Ranking:
    """Ranks scopes: first the culprits of `predict`, which also chooses a missing loss scale, then by error."""
    low, narrows = find_low_format(policy), narrows_all(policy)
    modules = list_modules(subject, policy) if subject.is_module else None
    plain, arrays = subject.make_run(None)
    program = jax.make_jaxpr(plain)(arrays).jaxpr
    _warn_of_half_reference(subject, policy, program)
    where = _choose_operations(program)
    passes = ("forward", "recomputed", "backward", *(["arguments"] if policy.quantization is not None else []))
    look = lambda fun: (
        lambda *args: collect(fun, [low.name], where=where, of=passes, loops="merge", sample=None)(*args)[1]
    )
    run, arrays = subject.make_run(None, look=look)
    stats: Stats = jax.jit(run)(arrays)
    rows = [row for row in stats.rows() if row.times]
    scopes = list_scopes(stats, narrows) if modules is None else modules
    by_scope: dict[str, list[Row]] = {scope: [] for scope in scopes}
    for row in rows:
        if subject.is_module or narrows or row.primitive not in FULL:  # autocast always runs these in the full dtype
            by_scope.get(_find_scope(row, by_scope) or "", []).append(row)
    predicted, scale = (), 1.0
    if rows:
        tried = wrap_narrow(policy) if narrows else policy
        prediction = predict(stats, tried, by="with_policy" if subject.is_module else "autocast")
        predicted, scale = prediction.culprits, prediction.loss_scale or 1.0
    culprits = [scope for scope in predicted if scope in by_scope]
    scores = _score(by_scope, low)
    others = sorted(set(scopes) - set(culprits), key=lambda scope: (-scores[scope], scopes.index(scope)))
    return Ranking((*culprits, *others), scale if loss_scale is None else loss_scale)


def _warn_of_half_reference(subject: Subject, policy: Policy, program: Jaxpr) -> None:
    """Warns if the function has half-precision matmuls of its own: trials are compared with it."""
    matmuls = (step for step in walk(program, live_only=True) if step.name in MATMULS)
    half = next((dtype for step in matmuls for dtype in map(float_dtype, step.results) if dtype in HALF), None)
    if half is not None and policy.quantization is None:
        warn_user(
            f"{subject.name} multiplies in {half} without the policy of tune, so they are not compared with float32: "
            "does its model have a policy? Pass a model without one. For example: tune(model, (variables, x), ...)."
        )


def _choose_operations(program: Jaxpr) -> tuple[str, ...]:
    """Chooses the measured ops: matmuls, and other kinds up to `MOST_ROWS` rows, since each row takes compile time."""
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
"""Ops that lose values in half precision, the most suspicious first."""

MOST_ROWS = 120
"""Maximum number of measured values."""


def find_low_format(policy: Policy) -> NumberFormat:
    """Returns the quantized format of a policy, or else the format of its compute dtype."""
    quantization = policy.quantization
    return parse_format(policy.compute_dtype) if quantization is None else find_operand_format(quantization)


def narrows_all(policy: Policy) -> bool:
    """True for the policy `"float32"`, under which all operations of a float64 function are tried in float32."""
    return policy.quantization is None and not is_mixed(policy)


def make_kept_policy(policy: Policy) -> Policy:
    """Returns the policy of scopes that are kept out of one."""
    if policy.quantization is not None:
        return policy.replace(quantization=None)
    if narrows_all(policy):
        return policy.replace(param_dtype="float64", compute_dtype="float64")
    return policy.replace(compute_dtype=policy.full_dtype)


def wrap_narrow(policy: Policy) -> PolicyMap:
    """Makes the map with which all operations of a float64 function run in float32, as only beside float64 they do."""
    return PolicyMap([("", policy.replace(output_dtype=None))], make_kept_policy(policy))


def list_scopes(stats: Stats, narrows: bool) -> list[str]:
    """Lists the root and the paths of all ops that autocast may run in a lower dtype, measured or not."""
    observed = find_program(stats.layout)
    if observed is None:
        return [""]
    read = ModulePaths(observed.modules).read_stack
    steps = walk(observed.program, live_only=True)
    steps = [step for step in steps if step.name in _LOW or (narrows and any(map(float_dtype, step.results)))]
    paths = {step.scope: read(step.scope) for step in steps}
    # JAX moves what does not depend on the carry out of a scan, and forgets the scopes around the scan.
    roots = observed.modules.roots
    whole = {path for stack, path in paths.items() if not roots.isdisjoint(strip_transformations(stack).split("/"))}
    is_end = lambda path: "/" in path and path not in whole and any(other.endswith(f"/{path}") for other in whole)
    return [path for path in dict.fromkeys(["", *paths.values()]) if not is_end(path)]


_LOW = {*LOW, *INFER, *WIDE, *FULL_IN_FLOAT16}


def list_modules(subject: Subject, policy: Policy) -> list[str]:
    """Lists the paths of all modules, or of the quantized layers under a quantized policy."""
    model = subject.attach(policy)
    inputs = subject.args if subject.holds_variables else subject.args[1:]
    modules = explain(model, *inputs).rows
    if policy.quantization is None:
        return [row.path for row in modules]
    layers = [row.path for row in modules if row.quantization and not row.quantization.startswith("left")]
    if not layers:
        raise ValueError(
            f"The policy {policy.name!r} would not quantize any layer of {subject.name}: "
            "explain(with_policy(model, policy), x) shows the reasons. Small weights are not quantized, for example, "
            "unless the policy has '(min_size=0)' after its format."
        )
    return layers


def _find_scope(row: Row, scopes: Collection[str]) -> str | None:
    """Finds the scope of a row: the innermost one around it, or for an argument a scope that its path contains."""
    if row.direction == "argument":
        names = row.path.split("/")
        paths = ["/".join(names[start:stop]) for start in range(len(names)) for stop in range(len(names), start, -1)]
        return next((path for path in paths if path in scopes), None)
    return next((outer for outer in reversed(list_paths_to(row.path)) if outer in scopes), None)


def _score(by_scope: dict[str, list[Row]], low: NumberFormat) -> dict[str, float]:
    """Scores scopes: the share of forward error times gradient norm, plus the share of backward error."""
    errors = {}
    for scope, rows in by_scope.items():
        measured = [(row.direction == "backward", row.formats[low.name], row.rms * row.count**0.5) for row in rows]
        gradient = max((norm for is_backward, _, norm in measured if is_backward), default=1.0)
        forward = sum(shares.error * norm for is_backward, shares, norm in measured if not is_backward)
        backward = sum(shares.scaled_error * norm for is_backward, shares, norm in measured if is_backward)
        errors[scope] = forward * gradient, backward
    totals = [sum(parts) or 1.0 for parts in zip(*errors.values(), strict=True)]
    return {scope: sum(map(operator.truediv, parts, totals)) for scope, parts in errors.items()}


Oracle = Callable[[frozenset[int]], float]
"""Returns the error with a set of items kept. Keeping more items must not make it larger."""


class SearchResult(NamedTuple):
    kept: frozenset[int]  # the smallest accepted set found, or all items if no smaller set was accepted
    is_minimal: bool  # True if no item can be left out. False if the budget ran out first
    trials: int  # the number of calls of the oracle


def find_smallest_set(oracle: Oracle, count: int, tolerance: float, *, budget: int | None = None) -> SearchResult:
    """Finds an accepted set from which no item can be left out. Item 0 is the most suspicious; nan is rejected.

    Each trial keeps a prefix of the undecided items and leaves the others out. If the error stays within the tolerance,
    these are not needed. Otherwise a binary search finds the last item that is needed. Prefix lengths are split at
    their geometric mean, because the ranking puts needed items first. All items together are taken as accepted.

    Source: delta debugging after Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.
    """
    needed: frozenset[int] = frozenset()
    enough, short = count, -1  # lengths of the shortest accepted prefix and of the longest rejected one, if any
    size, dropped = count, 0  # how many items to leave out next, and how many were since the last needed item
    trials = 0
    while enough:
        if trials == budget:
            return SearchResult(needed.union(range(enough)), False, trials)
        if short < 0:
            tried = max(0, enough - size)
        else:
            tried = min(max(short + 1, math.isqrt((short + 1) * (enough + 1))), enough - 1)
        trials += 1
        if oracle(needed.union(range(tried))) <= tolerance:
            size, dropped, enough = 4 * (enough - tried), dropped + enough - tried, tried
        else:
            short = tried
        if short == enough - 1 >= 0:
            enough, short = short, -1
            needed |= {enough}
            size, dropped = max(1, min(2 * dropped, enough // 2)), 0
    return SearchResult(needed, True, trials)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of one run under a map.

    Attributes:
      kept: the scopes kept out of the policy; of `contrib.tune_bits`, `path=format` for each layer with a format
        other than the smallest.
      error: the largest relative error, or the relative increase of the loss; infinite if any result was not finite.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> tuning = jmp.tune(lambda x: x * x, (jnp.float32(2.0),), "mixed_bfloat16", tolerance=0.1)
    >>> tuning.trials
    (Trial(kept=(), error=0.0),)
    """

    kept: tuple[str, ...]
    error: float


class TrialLog:
    """Known trials and the ranking of an earlier run, stored in a file that `header` identifies, and the progress."""

    def __init__(self, path: Path | None, header: dict[str, Any], is_shown: bool, caller: str = "tune"):
        self._is_shown = is_shown
        self._known: dict[frozenset[str], Trial] = {}
        self.ranking: Ranking | None = None
        self._file = JsonLog(path, header, "trials", f"{caller}(..., trials_file={{!r}})", caller)
        stored = self._file.read(_parse_trials)
        if stored is not None:
            self.ranking, trials = stored
            self._known = {frozenset(trial.kept): trial for trial in trials}

    def find(self, kept: Iterable[str]) -> Trial | None:
        return self._known.get(frozenset(kept))

    def start(self, ranking: Ranking) -> None:
        """Writes the first line of a new file."""
        if self.ranking is None:
            self._file.start(ranking=ranking._asdict())
        self.ranking = ranking

    def show(self, line: str) -> None:
        """Prints a line on standard error, if the user wants to see the progress."""
        if self._is_shown:
            print(escape_controls(line), file=sys.stderr)

    def add(self, trial: Trial) -> None:
        self._known[frozenset(trial.kept)] = trial
        error = trial.error if math.isfinite(trial.error) else None
        self._file.add({"kept": list(trial.kept), "error": error})


def _parse_trials(header: dict[str, Any], lines: list[dict[str, Any]]) -> tuple[Ranking, list[Trial]]:
    stored = header["ranking"]
    errors = [math.inf if line["error"] is None else float(line["error"]) for line in lines]
    trials = [Trial(tuple(line["kept"]), error) for line, error in zip(lines, errors, strict=True)]
    return Ranking(tuple(stored["scopes"]), stored["loss_scale"]), trials
