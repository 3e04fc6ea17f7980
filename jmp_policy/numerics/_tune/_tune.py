"""`tune`: the smallest set of scopes that must stay out of a policy."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..._base import describe, is_floating
from ...loss_scale import LossScale, NoOpLossScale, StaticLossScale
from ...modules import find_adapter, find_lifting_adapter
from ...policy import BlockFormat, CurrentScaling, Float8, Policy, PolicyMap, PolicySpec, get_policy
from ._ranking import Ranking, find_format, rank_scopes
from ._search import Found, find_smallest
from ._subject import Observed, Subject, is_loss, make_map
from ._trial_log import Show, Trial, TrialLog, show_progress, sum_arrays
from ._tuning import Tuning, list_numbers, measure_error

_EXAMPLE = "For example: tune(loss_fn, (params, batch), 'mixed_float16', tolerance=0.01)."


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
    """Finds the smallest set of scopes whose float32 keeps results within a tolerance of float32.

    A scope is a path: of modules, and in functions of `jax.named_scope`s too. What runs right at a path is a scope of
    its own, so that the root's stands for what is in no other. Each trial runs the function under a `PolicyMap` for
    real, `autocast(fun, policy_map)`, or the module, `with_policy(module, policy_map)`, and compares what it returns
    with float32. Which sets are tried follows a ranking, from one run in float32 that is measured by
    `numerics.collect`: where numbers would overflow or vanish, and what rounding does to values times their gradients.
    A ranking that misleads costs trials and changes nothing else. No scope of the result can be left out, as long as
    keeping more never makes the error larger.

    The error is the largest relative error of a leaf of the outputs or of the gradients, in the norm; a leaf that is
    small beside the others is held against a tenth of their size. A result that is not finite is out of
    any tolerance. Only the results of float32 stay in memory, beside the arguments and one trial.

    With a quantized policy, such as `"int8_from_float32"`, it is the other way round: of a module's layers as few as
    possible stay unquantized, compared with the module without quantization. Float8 is tried with the scales of the
    moment, which need no state and no steps before: what delayed scales are where the last steps were like this one.

    Args:
      fun_or_module: a function that returns a scalar loss, or any tree of arrays; or a module of linen or nnx.
      args: a tuple of its arguments. Of a linen module the variables come first. Of a loss, gradients are with respect
        to the floating arrays of the first one, or to the `nnx.Param`s in it.
      policy: a policy that computes in float16 or bfloat16, or a quantized one, which is for modules. The output dtype
        of a half policy is not for a loss, which leaves in the dtype in which it was computed.
      tolerance: the largest relative error that is accepted.
      metric: what to compare in place of outputs and gradients: `metric(candidate, *args)` is called with the function
        or module under a map, or as it is, and returns a number or a tree of arrays, such as the loss after twenty
        steps of training. It is the caller's to compile what it runs.
      budget: how many trials there may be; as many as it takes if `None`. Each one compiles.
      gradients: whether gradients count. If `None`, those of a scalar loss do, and those of a module, of a fixed random
        projection of its outputs, unless only its weights are rounded, or to integers, which is for inference.
      has_aux: whether the function returns a loss and auxiliary data, which are not compared.
      loss_scale: what the loss is multiplied by for gradients in float16; if `None`, a power of two, at most 2**15,
        with which no gradient of the measured run overflows.
      trials_file: a file that has each trial on a line. If it exists, its trials are not run again: a search that was
        interrupted goes on, and one with another tolerance starts from what is known.
      progress: whether to show a bar; `None` where standard error is a terminal and rich is installed.
      seed: of the projection.

    Returns:
      A `Tuning`: `.policy_map`, `.to_code()`, `.scopes`, `.trials`, `.plot()`, and a table when printed.

    Raises:
      TypeError: the first argument is neither a function nor a module, or `args` is no tuple or list.
      ValueError: the policy is unknown, computes in float32, is a map, is quantized and given to a function, or
        quantizes no layer; the tolerance or the budget is not positive; float32 returns what is not finite, or differs
        from itself by more than the tolerance between two runs; or the file has other trials.

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
    given = _check_policy(policy)
    _check_numbers(tolerance, budget)
    subject = _make_subject(fun_or_module, args, given, gradients, has_aux, seed)
    if not subject.is_module and subject.differentiates:
        given = given.replace(output_dtype=None)
    header = {
        "function": subject.name,
        "policy": str(given),
        "compared": _name_metric(metric) if metric else _COMPARED[subject.differentiates],
        "loss scale": None if loss_scale is None else _read_scale(loss_scale),
        "seed": seed,
        "arguments": sum_arrays(subject.make_run(None, NoOpLossScale())[1]),
        "jax": f"{jax.__version__} on {jax.default_backend()}",
    }
    log = TrialLog(None if trials_file is None else Path(trials_file), header)
    ranking = _recall_ranking(log) or rank_scopes(
        subject, given, None if loss_scale is None else _read_scale(loss_scale)
    )
    tuner = _Tuner(subject, given, metric, ranking, log)
    noise = tuner.measure_noise(tolerance)
    log.start(_store_ranking(ranking))
    with show_progress(subject.name, progress, budget) as show:
        found = tuner.search(tolerance, budget, show)
    return tuner.conclude(found, tolerance, noise)


class _Tuner:
    """One call of `tune`: runs trials, and knows those that were run."""

    def __init__(self, subject: Subject, policy: Policy, metric: Any, ranking: Ranking, log: TrialLog):
        self._subject, self._policy, self._metric, self._log = subject, policy, metric, log
        self._scopes = ranking.scopes
        self._ranking = ranking
        is_quantized = policy.quantization is not None
        self._kept_policy = policy.replace(**{"quantization": None} if is_quantized else {"compute_dtype": "float32"})
        self._base = self._kept_policy if is_quantized else None
        self._scale = StaticLossScale(ranking.loss_scale) if ranking.loss_scale != 1 else NoOpLossScale()
        self._reference: Observed = {}
        self._compare = jax.jit(measure_error)
        self._trials: list[Trial] = []

    def measure_noise(self, tolerance: float) -> float:
        """Runs without the policy twice, and keeps the results of one; says how far they are apart.

        Raises:
          ValueError: they are not finite, or further apart than the tolerance.
        """
        observe = self._make_observation(self._base, NoOpLossScale())
        self._reference = observe()
        what = _name_metric(self._metric) if self._metric else self._subject.name
        before = "before quantization" if self._base else "in float32"
        if not list_numbers(self._reference):
            raise ValueError(
                f"{what} returns no floating numbers that could be compared, but {self._reference}. {_EXAMPLE}"
            )
        if not math.isfinite(float(self._compare(self._reference, self._reference))):
            raise ValueError(
                f"{what} returns nan or infinity {before}, and nothing can be as good as that. "
                "numerics.first_nonfinite says where it comes from."
            )
        noise = float(self._compare(observe(), self._reference))
        if noise > tolerance:
            raise ValueError(
                f"Two runs of {what} {before} differ by {noise:.3g}, more than the tolerance of {tolerance:g}: no map "
                "can be told from another. Fix the random keys, or take a tolerance well above that."
            )
        return noise

    def search(self, tolerance: float, budget: int | None, show: Show) -> Found:
        """Finds the smallest set."""

        def measure(kept: frozenset[int]) -> float:
            error = self._try(kept)
            show(len(self._trials), len(kept), error)
            return error

        return find_smallest(measure, len(self._scopes), tolerance, likely=self._ranking.likely or None, budget=budget)

    def conclude(self, found: Found, tolerance: float, noise: float) -> Tuning:
        """Makes the result."""
        kept = self._name(found.kept)
        if found.is_minimal:  # all scopes together may not have been tried yet
            error = next((trial.error for trial in self._trials if trial.kept == kept), None)
            error = self._try(found.kept) if error is None else error
        else:
            error = next((trial.error for trial in self._trials if trial.kept == kept), noise)
        return Tuning(
            policy_map=self._make_map(kept, self._policy),
            scopes=kept,
            candidates=self._scopes,
            error=error,
            tolerance=float(tolerance),
            trials=tuple(self._trials),
            is_minimal=found.is_minimal,
            loss_scale=self._ranking.loss_scale,
            noise=noise,
            name=self._subject.name,
            low=find_format(self._policy).name,
            kept="float32" if self._base is None else "unquantized",
            by="with_policy" if self._subject.is_module else "autocast",
        )

    def _try(self, indices: frozenset[int]) -> float:
        """The error where some scopes are kept: from the file, or by a run."""
        kept = self._name(indices)
        trial = self._log.find(kept)
        if trial is None:
            tried = self._make_map(kept, _use_scales_of_the_moment(self._policy))
            try:
                observed = self._make_observation(tried, self._scale)()
            except Exception as error:
                error.add_note(f"This was while tune tried {tried}.")
                raise
            trial = Trial(kept, float(self._compare(observed, self._reference)))
            self._log.add(trial)
        self._trials.append(trial)
        return trial.error

    def _make_observation(self, policy: Policy | PolicyMap | None, scale: LossScale) -> Callable[[], Observed]:
        """A function that runs under a policy, and returns what is compared."""
        if self._metric is None:
            run, arrays = self._subject.make_run(policy, scale)
            compiled = jax.jit(run)
            return lambda: compiled(arrays)
        metric = self._metric
        return lambda: {"metric": metric(*self._subject.make_candidate(policy))}

    def _make_map(self, kept: Sequence[str], policy: Policy) -> PolicyMap:
        return make_map(sorted(self._scopes), kept, policy, self._kept_policy)

    def _name(self, indices: frozenset[int]) -> tuple[str, ...]:
        return tuple(self._scopes[index] for index in sorted(indices))


def _use_scales_of_the_moment(policy: Policy) -> Policy:
    """The same policy; in float8 without a history, which would have to be filled first."""
    format = policy.quantization
    if not isinstance(format, Float8):
        return policy
    kept = {"margin": format.margin, "weight_grad": format.weight_grad, "min_size": format.min_size}
    recipe = format.recipe if isinstance(format.recipe, CurrentScaling) else "current"
    return policy.replace(quantization=Float8(recipe, **kept))


_COMPARED = {True: "outputs and gradients", False: "outputs"}


def _make_subject(target: Any, args: Any, policy: Policy, gradients: bool | None, has_aux: bool, seed: int) -> Subject:
    """Checks what is tuned, and decides whether gradients count."""
    is_module = find_adapter(target) is not None
    if isinstance(target, type) or not (is_module or callable(target)):
        raise TypeError(f"tune takes a function or a module of Flax, got {describe(target)}. {_EXAMPLE}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"tune takes a tuple of arguments, got {describe(args)}. {_EXAMPLE}")
    if policy.quantization is not None and not is_module:
        raise ValueError(
            f"The policy {policy.name!r} quantizes the weights of modules, and {describe(target)} is a function. "
            "Tune the module itself: tune(model, (variables, x), 'int8_from_float32', tolerance=0.01)."
        )
    subject = Subject(target, tuple(args), False, has_aux, seed)
    if gradients is None:
        gradients = _has_gradients(subject, policy)
    return Subject(target, tuple(args), gradients, has_aux, seed)


def _has_gradients(subject: Subject, policy: Policy) -> bool:
    """Whether gradients count where nobody said so."""
    if subject.is_module and policy.quantization is not None:
        format = policy.quantization
        return isinstance(format, Float8) or (isinstance(format, BlockFormat) and format.activations)
    if subject.is_module:
        return True
    run, arrays = subject.make_run(None, NoOpLossScale())
    if not is_loss(jax.eval_shape(run, arrays)["outputs"]):
        return False
    first = subject.args[:1]
    return find_lifting_adapter(first) is not None or any(map(is_floating, jax.tree.leaves(first)))


def _check_policy(spec: PolicySpec) -> Policy:
    """Reads the policy.

    Raises:
      ValueError: it is a map, or has nothing to tune.
    """
    policy = get_policy(spec)
    if not isinstance(policy, Policy):
        raise ValueError(f"tune finds a map by itself, and takes one policy, not {policy!r}. {_EXAMPLE}")
    if policy.quantization is None and policy.compute_dtype not in _LOW:
        computes = f"computes in {policy.compute_dtype}" if policy.compute_dtype else "names no compute dtype"
        raise ValueError(f"There is nothing to tune: the policy {policy.name!r} {computes}. {_EXAMPLE}")
    return policy


_LOW = frozenset(map(np.dtype, ("float16", jax.numpy.bfloat16)))


def _check_numbers(tolerance: Any, budget: Any) -> None:
    is_number = isinstance(tolerance, int | float | np.number) and not isinstance(tolerance, bool)
    if not is_number or not 0 < tolerance < math.inf:
        raise ValueError(f"The tolerance is a relative error above 0, got {tolerance!r}. {_EXAMPLE}")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise ValueError(f"The budget is a number of trials of at least 1, got {budget!r}. For example: budget=20.")


def _read_scale(scale: LossScale | float) -> float:
    return float(scale.loss_scale if isinstance(scale, LossScale) else scale)


def _name_metric(metric: Any) -> str:
    return getattr(metric, "__qualname__", type(metric).__qualname__)


def _store_ranking(ranking: Ranking) -> dict[str, Any]:
    scores = [score if math.isfinite(score) else None for score in ranking.scores]
    return {"scopes": list(ranking.scopes), "scores": scores, "loss_scale": ranking.loss_scale}


def _recall_ranking(log: TrialLog) -> Ranking | None:
    if log.ranking is None:
        return None
    scores = [math.inf if score is None else score for score in log.ranking["scores"]]
    return Ranking(tuple(log.ranking["scopes"]), tuple(scores), log.ranking["loss_scale"])
