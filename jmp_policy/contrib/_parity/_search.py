"""Finds the smallest policy map with which log-probabilities stay within a tolerance."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import take_apart
from ...autocast import autocast
from ...numerics import find_smallest_set
from ...policy import Policy, PolicyMap, PolicySpec, get_policy, make_map
from .._diverge import diverge
from ._statistics import score


class CompiledFunction:
    """A compiled function of arguments that may have nnx modules."""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...]):
        _, rebuild = take_apart(args)
        self._run = jax.jit(lambda arrays: fun(*rebuild(arrays)))

    def __call__(self, args: tuple[Any, ...]) -> Any:
        return self._run(take_apart(args)[0])


@dataclasses.dataclass(frozen=True, eq=False)
class ComparedFunctions:
    """A trainer and a sampler with their arguments, to run again under policy maps.

    Attributes:
      trainer: the teacher-forced pass.
      sampler: the decode loop; None for a recording.
      args: the arguments of both.
      counted: True for the tokens that count.
      recorded: the log-probabilities of a recording.
      half: float16 or bfloat16 with the path of a scope, if a scope of the unchanged trainer computes in it.
    """

    trainer: Callable[..., Any]
    sampler: Callable[..., Any] | None
    args: tuple[Any, Any]
    counted: np.ndarray
    recorded: np.ndarray | None
    half: tuple[str, str] | None

    def find_map(self, tolerance: float, policy: PolicySpec) -> PolicyMap:
        """Tries policies for all scopes, and then sets of scopes in float32."""
        low = get_policy(policy)
        dtype = str(low.compute_dtype) if isinstance(low, Policy) and low.quantization is None else None
        if not isinstance(low, Policy) or dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"policy_map takes a policy that computes in float16 or bfloat16, got {low!r}. For example: "
                "'params=float32,compute=bfloat16,output=float32'."
            )
        if self.half is not None:
            raise ValueError(
                f"The trainer computes in {self.half[0]} without a map, in {self.half[1] or 'code outside of scopes'}: "
                "there is nothing to compare with. Pass functions in float32. For example: "
                "parity(model.apply, step, cache=cache)."
            )
        errors: dict[Policy, float] = {}
        for tried in _list_policies(low):
            errors[tried] = self._measure(PolicyMap({}, tried))
            if errors[tried] <= tolerance:
                return PolicyMap({}, tried)
        base = min(errors, key=lambda tried: errors[tried])
        scopes = self._rank(base)
        make = lambda kept: make_map(
            sorted(scopes), [scopes[i] for i in kept], base, base.replace(compute_dtype="float32")
        )
        measure = functools.cache(lambda kept: self._measure(make(kept)))
        found = find_smallest_set(measure, len(scopes), tolerance)
        chosen, error = make(found.kept), measure(found.kept)
        if not error <= tolerance:
            raise ValueError(
                f"No map meets {tolerance:g}: with all scopes in float32, the mean difference of log-probabilities is "
                f"{error:.2g}. Its cause is not rounding, or the sampler rounds. For example: print the report."
            )
        return chosen

    def _rank(self, base: Policy) -> list[str]:
        """Lists scopes, first those that introduce the largest errors in the trainer."""
        divergence = diverge(self.trainer, autocast(self.trainer, base))(*self.args)
        rows = sorted(divergence.rows(), key=lambda row: -row.introduced)
        return list(dict.fromkeys(row.path for row in rows))

    def _measure(self, tried: PolicyMap) -> float:
        """Returns the largest mean difference of log-probabilities between any two runs."""
        runs = [self._score(autocast(fun, tried)) for fun in (self.trainer, self.sampler) if fun is not None]
        runs.append(self._score(self.trainer) if self.recorded is None else self.recorded)
        pairs = [(a, b) for i, a in enumerate(runs) for b in runs[:i]]
        sizes = [np.abs(a - b)[self.counted].mean() for a, b in pairs]
        return max(math.inf if math.isnan(size) else float(size) for size in sizes)

    def _score(self, fun: Callable[..., Any]) -> np.ndarray:
        logits = np.asarray(CompiledFunction(fun, self.args)(self.args).astype(jnp.float32))
        return score(logits, logits, np.asarray(self.args[1]), self.counted).trainer


def _list_policies(low: Policy) -> Iterator[Policy]:
    yield low
    yield low.replace(accumulate_dtype="float32")
    if str(low.compute_dtype) == "bfloat16":
        yield low.replace(compute_dtype="float16")
        yield low.replace(compute_dtype="float16", accumulate_dtype="float32")
