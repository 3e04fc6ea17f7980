"""`tune`: finds the smallest set of scopes that must stay out of a policy."""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base import describe, hide_frames, is_floating, sum_arrays, sum_code, sum_program
from ..loss_scale import LossScale, StaticLossScale
from ..modules import find_adapter, find_lifting_adapter
from ..policy import BlockFormat, Float8, Policy, PolicyMap, PolicySpec, check_policy_x64, get_policy, make_map
from ..quant import without_state
from ._tune_search import (
    Observed,
    Ranking,
    SearchResult,
    Subject,
    Trial,
    TrialLog,
    find_low_format,
    find_smallest_set,
    is_loss,
    make_kept_policy,
    narrows_all,
    rank_scopes,
    wrap_narrow,
)
from ._tuning import Tuning, list_numbers, measure_largest_error

_EXAMPLE = "For example: tune(loss_fn, (params, batch), 'mixed_float16', tolerance=0.01)."
_IN_FLOAT64 = "For a function of float64 arrays: 'params=float64,compute=float32,output=float64'."


@hide_frames
def tune(
    fun_or_module: Any,
    args: Sequence[Any],
    policy: PolicySpec,
    *,
    tolerance: float,
    metric: Callable[..., Any] | None = None,
    budget: int | None = None,
    gradients: bool | None = None,
    has_aux: bool = False,
    loss_scale: LossScale | float | None = None,
    trials_file: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    seed: int = 0,
) -> Tuning:
    """Finds the smallest set of scopes to keep in float32 so that results stay within a tolerance of float32.

    Of a policy with float64 parameters, float32 stands for float64 here: it finds what may be float32. The policy
    `"float32"`, for a function of float64 arrays, tries all operations of a scope in float32, not the matmuls alone.

    A scope is the path of a module or a `jax.named_scope`. It covers the ops directly at that path; the root covers ops
    outside all others. Each trial runs `autocast(fun, policy_map)` or `with_policy(module, policy_map)` and compares
    with float32. One float32 run measured by `numerics.collect` ranks the scopes by predicted error; a misleading
    ranking only costs trials. No scope of the result can be left out, provided that keeping more scopes never increases
    the error.

    The error is the largest relative error (in the norm) of any output or gradient leaf. A leaf with a small norm is
    compared with 0.1 of the root mean square of all leaves. Any non-finite value makes the error infinite.

    With a quantized policy such as `"int8_from_float32"`, as few layers as possible stay unquantized, and the reference
    is the module without quantization. Float8 trials use current scaling, which needs no state.

    Args:
      fun_or_module: a function that returns a scalar loss or any tree of arrays; or a linen or nnx module.
      args: a tuple of its arguments; for a linen module the variables come first. Gradients of a loss are with respect
        to the floating arrays, or the `nnx.Param`s, in the first argument.
      policy: a policy that computes in float16 or bfloat16, or in float32 with float64 parameters, or a quantized
        policy for a module. The output dtype does not apply to a loss, and not of `"float32"`.
      tolerance: the largest accepted relative error, such as 0.01 for 1 %.
      metric: compares this instead of outputs and gradients. `metric(candidate, *args)` gets the function or module
        under a map (or unchanged) and returns a number or a tree of arrays. It is not jitted.
      budget: the maximum number of trials; unlimited if `None`. Each compiles.
      gradients: whether to compare gradients. If `None`: for a scalar loss and for a module (of a fixed random
        projection of its outputs), unless the policy quantizes only weights or to integers.
      has_aux: whether the function returns a loss and auxiliary data, which is not compared.
      loss_scale: the loss scale for float16 gradients. If `None`, the largest power of two, at most 2**15, with which
        no gradient of the measured run overflows.
      trials_file: a file with one trial per line. Trials in it are not run again, so a search can resume, also with
        another tolerance.
      progress: whether to print a line for each trial on standard error. If `None`, only if that is a terminal.
      seed: the seed of the random projection.

    Returns:
      A `Tuning`, with `.policy_map`, `.to_code()`, `.scopes`, `.trials` and `.plot()`. Prints as a table.

    Raises:
      TypeError: the first argument is not a function or a module, or `args` is not a tuple or list.
      ValueError: the policy is unknown, is a map, computes in its full dtype, is quantized and given to a function, or
        quantizes no layer; the tolerance is not between 0 and 1; the budget is not positive; the float32 results are
        not finite or not reproducible within the tolerance; or the file has trials of something else.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss_fn(weights, x):
    ...     for name in weights:
    ...         with jax.named_scope(name):
    ...             x = jnp.tanh(x @ weights[name] / 1e4)
    ...     return jnp.sum(x)
    >>> weights = {"a": jnp.ones((4, 4)), "b": jnp.full((4, 4), 3e7)}
    >>> tuning = jmp.tune(loss_fn, (weights, jnp.full((2, 4), 3.0)), "mixed_float16", tolerance=0.01)
    >>> print(tuning.to_code())
    jmp.PolicyMap(
        {
            'b': 'params=float32,compute=float32,output=none',
        },
        default='params=float32,compute=float16,output=none',
    )
    """
    given = _check_policy(policy, fun_or_module, args)
    _check_tolerance(tolerance)
    check_budget(budget)
    subject = _make_subject(fun_or_module, args, given, gradients, has_aux, seed)
    if not subject.is_module and (subject.differentiates or narrows_all(given)):
        given = given.replace(output_dtype=None)
    given_scale = loss_scale.loss_scale if isinstance(loss_scale, LossScale) else loss_scale
    scale = None if given_scale is None else float(given_scale)
    compared = "outputs and gradients" if subject.differentiates else "outputs"
    run, arrays = subject.make_run(None)
    header = {
        "function": subject.name,
        "policy": str(given),
        "compared": name_metric(metric) if metric else compared,
        "loss scale": scale,
        "seed": seed,
        "arguments": sum_arrays(arrays),
        "traced program": trials_file and sum_program(run, arrays),
        "code of the metric": metric and sum_code(metric),
        "jax": f"{jax.__version__} on {jax.default_backend()}",
    }
    is_shown = sys.stderr.isatty() if progress is None else progress
    log = TrialLog(None if trials_file is None else Path(trials_file), header, is_shown)
    ranking = log.ranking or rank_scopes(subject, given, scale)
    tuner = _Tuner(subject, given, metric, ranking, log)
    noise = tuner.measure_noise(tolerance)
    log.start(ranking)
    found = tuner.search(tolerance, budget)
    return tuner.conclude(found, tolerance, noise)


class _Tuner:
    """One call of `tune`. Runs trials and remembers them."""

    def __init__(self, subject: Subject, policy: Policy, metric: Any, ranking: Ranking, log: TrialLog):
        self._subject, self._policy, self._metric, self._log = subject, policy, metric, log
        self._scopes, self._loss_scale = ranking
        self._kept_policy = make_kept_policy(policy)
        self._base = None if policy.quantization is None else self._kept_policy
        self._scale = StaticLossScale(self._loss_scale)
        self._reference: Observed = {}
        self._compare = jax.jit(measure_largest_error)
        self._trials: list[Trial] = []

    def measure_noise(self, tolerance: float) -> float:
        """Runs twice without the policy. Keeps one result as the reference and returns the error between the two."""
        observe = self._make_observation(self._base, None)
        self._reference = observe()
        name = name_metric(self._metric) if self._metric else self._subject.name
        before = "before quantization" if self._base else f"in {self._kept_policy.compute_dtype}"
        if not list_numbers(self._reference):
            raise ValueError(f"{name} returns no floating-point values to compare, got {self._reference}. {_EXAMPLE}")
        if not math.isfinite(float(self._compare(self._reference, self._reference))):
            raise ValueError(
                f"{name} returns nan or infinity {before}, so nothing can be compared with it. "
                "Find its origin with numerics.first_nonfinite."
            )
        noise = float(self._compare(observe(), self._reference))
        if noise > tolerance:
            raise ValueError(
                f"Two runs of {name} {before} differ by {noise:.3g}, more than the tolerance of {tolerance:g}, so maps "
                "cannot be compared. Fix the random keys, or set a tolerance well above the difference."
            )
        return noise

    def search(self, tolerance: float, budget: int | None) -> SearchResult:
        def measure(kept: frozenset[int]) -> float:
            error = self._try(kept)
            trial = f"trial {len(self._trials)}, {len(kept)} kept, error {error:.2g}"
            self._log.show(f"tuning {self._subject.name}: {trial}")
            return error

        return find_smallest_set(measure, len(self._scopes), tolerance, budget=budget)

    def conclude(self, found: SearchResult, tolerance: float, noise: float) -> Tuning:
        kept = self._name(found.kept)
        error = next((trial.error for trial in self._trials if trial.kept == kept), None)
        if error is None:  # the search never tries to keep all scopes
            error = self._try(found.kept) if found.is_minimal else noise
        return Tuning(
            policy_map=self._make_map(kept, self._policy),
            scopes=kept,
            candidates=self._scopes,
            error=error,
            tolerance=float(tolerance),
            trials=tuple(self._trials),
            is_minimal=found.is_minimal,
            loss_scale=self._loss_scale,
            noise=noise,
            name=self._subject.name,
            low=find_low_format(self._policy).name,
            kept=str(self._kept_policy.compute_dtype) if self._base is None else "unquantized",
            by="with_policy" if self._subject.is_module else "autocast",
        )

    def _try(self, indices: frozenset[int]) -> float:
        """Returns the error with some scopes kept, from the log or by running a trial."""
        kept = self._name(indices)
        trial = self._log.find(kept)
        if trial is None:
            quantization = self._policy.quantization and without_state(self._policy.quantization)
            tried = self._make_map(kept, self._policy.replace(quantization=quantization))
            try:
                observed = self._make_observation(tried, self._scale)()
            except Exception as error:
                error.add_note(f"Raised while tune tried {tried}.")
                raise
            trial = Trial(kept, float(self._compare(observed, self._reference)))
            self._log.add(trial)
        self._trials.append(trial)
        return trial.error

    def _make_observation(self, policy: Policy | PolicyMap | None, scale: LossScale | None) -> Callable[[], Observed]:
        """Makes a function without arguments that runs under a policy and returns the compared results."""
        if self._metric is None:
            run, arrays = self._subject.make_run(policy, scale)
            compiled = jax.jit(run)
            return lambda: compiled(arrays)
        metric = self._metric
        return lambda: {"metric": metric(*self._subject.make_candidate(policy))}

    def _make_map(self, kept: Sequence[str], policy: Policy) -> PolicyMap:
        found = make_map(sorted(self._scopes), kept, policy, self._kept_policy)
        return wrap_narrow(policy) if narrows_all(policy) and not kept else found

    def _name(self, indices: frozenset[int]) -> tuple[str, ...]:
        return tuple(self._scopes[index] for index in sorted(indices))


def _make_subject(target: Any, args: Any, policy: Policy, gradients: bool | None, has_aux: bool, seed: int) -> Subject:
    is_module = find_adapter(target) is not None
    if isinstance(target, type) or not (is_module or callable(target)):
        raise TypeError(f"tune takes a function or a Flax module, got {describe(target)}. {_EXAMPLE}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"tune takes a tuple of arguments, got {describe(args)}. {_EXAMPLE}")
    if policy.quantization is not None and not is_module:
        example = "(variables, x)" if find_lifting_adapter(args) is None else "(x,)"
        raise ValueError(
            f"The policy {policy.name!r} quantizes the weights of modules, but {describe(target)} is a function. "
            f"Tune the module itself. For example: tune(model, {example}, 'int8_from_float32', tolerance=0.01)."
        )
    subject = Subject(target, tuple(args), False, has_aux, seed)
    compared = _has_gradients(subject, policy) if gradients is None else gradients
    return dataclasses.replace(subject, differentiates=compared)


def _has_gradients(subject: Subject, policy: Policy) -> bool:
    """Default of `gradients`."""
    if subject.is_module:
        format = policy.quantization
        return format is None or isinstance(format, Float8) or (isinstance(format, BlockFormat) and format.activations)
    run, arrays = subject.make_run(None)
    if not is_loss(jax.eval_shape(run, arrays)["outputs"]):
        return False
    first = subject.args[:1]
    return find_lifting_adapter(first) is not None or any(map(is_floating, jax.tree.leaves(first)))


def _check_policy(spec: PolicySpec, target: Any, args: Any) -> Policy:
    policy = get_policy(spec)
    if not isinstance(policy, Policy):
        raise ValueError(f"tune takes one policy and finds the map, got {policy!r}. {_EXAMPLE}")
    check_policy_x64(policy)
    arrays = [] if find_adapter(target) is not None else filter(is_floating, jax.tree.leaves(args))
    is_narrow = policy.compute_dtype == np.float32 and any(array.dtype == np.float64 for array in arrays)
    if narrows_all(policy) and not is_narrow:
        computes = f"computes in {policy.compute_dtype}" if policy.compute_dtype else "has no compute dtype"
        raise ValueError(f"Nothing to tune: the policy {policy.name!r} {computes}. {_EXAMPLE} {_IN_FLOAT64}")
    return policy


def _check_tolerance(tolerance: Any) -> None:
    is_number = isinstance(tolerance, int | float | np.number) and not isinstance(tolerance, bool)
    if not is_number or not 0 < tolerance <= 1:
        raise ValueError(f"The tolerance must be a relative error above 0 and at most 1, got {tolerance!r}. {_EXAMPLE}")


def check_budget(budget: Any) -> None:
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise ValueError(f"The budget must be an integer of at least 1, got {budget!r}. For example: budget=20.")


def name_metric(metric: Any) -> str:
    return getattr(metric, "__qualname__", type(metric).__qualname__)
