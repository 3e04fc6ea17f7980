"""`contrib.parity`: compares the log-probabilities of a trainer and a sampler, and finds why they differ."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..._base import describe, hide_frames
from ..._jaxpr import check_function
from .._diverge import (
    ComparedSteps,
    Positions,
    Recording,
    Steps,
    Target,
    align_steps,
    diverge_from_steps,
    group_arrays,
    record_steps,
)
from ._causes import Evidence, find_causes, find_reach
from ._report import Parity
from ._search import ComparedFunctions, CompiledFunction
from ._statistics import LogProbs, score, score_given, summarize

_EXAMPLE = "For example: parity(trainer, sampler)(params, tokens)."


def parity(
    trainer: Callable[..., Any],
    sampler: Callable[..., Any] | Recording,
    *,
    cache: Any = None,
    names: Mapping[str, str] | None = None,
    scopes: bool = True,
) -> Callable[..., Parity]:
    """Compares the log-probabilities that a trainer and a sampler give to the same tokens, and finds why they differ.

    The trainer is a teacher-forced pass, and the sampler decodes the same tokens step by step with a cache. Each is
    compiled and runs unchanged. Log-probabilities of the given tokens are compared on the host in float64. Position `t`
    of the logits predicts token `t + 1`. The `Parity` has the statistics of reinforcement learning: ratios of the
    trainer's probabilities to the sampler's, their effective sample size, KL divergence and its estimate k3.

    The values of the scopes (Flax modules and `jax.named_scope`s) of the sampler are then recorded, and their steps are
    aligned with the positions of the trainer. Each scope of the trainer runs on recorded values, and *introduces* the
    error that it makes there, as in `diverge` with a recording. Scopes of the same path are compared, and layers in a
    scan with layers in a Python loop, such as `layers_0`. `unaligned` lists the others.

    Args:
      trainer: `(params, tokens) -> logits`. The logits are floats of shape `(batch, length, vocabulary)`; the last
        position may be missing. `params` may be any tree of arrays, or an nnx module.
      sampler: a function of the same arguments and result that has a scan or a Python loop over decode steps. With
        `cache`, one step: `(params, cache, token) -> (logits, cache)`, for a `token` of shape `(batch,)`, and logits
        `(batch, vocabulary)` or `(batch, 1, vocabulary)`. Or a recording, as of `record`: a mapping or an `.npz` file.
        It has the logits as `"result"`, or the log-probabilities of the tokens as `"log_probs"`. These have the shape
        `(batch, length)`, whose first column does not count, or `(batch, length - 1)`.
      cache: the cache before the first token, for a sampler that is one step.
      names: the name in the trainer for names of the sampler's scopes, such as `{"lm_head": "head"}`.
      scopes: whether to find the scopes that introduce the difference. It records all their values.

    Returns:
      A function `(params, tokens, mask=None)` that returns a `Parity`. `tokens` are integers, `(batch, length)`. `mask`
      has the same shape and is True at real tokens. A token counts if it and the one before it are real. Padding may be
      on the left or right; both functions must mask it out, too.

    Raises:
      TypeError: the trainer is not a function, the sampler neither a function nor a recording, `names` not a mapping;
        or it was called inside of `jax.jit`, or with arguments in another order.
      ValueError: there is a cache for a recording, or none for one step. When called: tokens, mask, logits or
        log-probabilities do not have the shapes above, or no token counts.

    Source: Schulman, Approximating KL Divergence, 2020 (k3).

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def embed(params, tokens):
    ...     with jax.named_scope("embed"):
    ...         return params["embed"][tokens]
    >>> def head(params, x, dtype):
    ...     with jax.named_scope("head"):
    ...         return (x.astype(dtype) @ params["head"].astype(dtype)).astype(jnp.float32)
    >>> def trainer(params, tokens):
    ...     x = embed(params, tokens)
    ...     return head(params, jnp.cumsum(x, 1), jnp.float32)
    >>> def step(params, cache, token):
    ...     cache = cache + embed(params, token)
    ...     return head(params, cache, jnp.bfloat16), cache
    >>> params = {name: jax.random.normal(jax.random.key(0), (8, 8)) for name in ("embed", "head")}
    >>> tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 8)
    >>> parity = jmp.contrib.parity(trainer, step, cache=jnp.zeros((2, 8)))(params, tokens)
    >>> parity.mean > 0, parity.rows()[0].path, parity.rows()[0].dtype
    (True, 'head', 'bfloat16 → float32')
    """
    check_function(trainer, "parity", ", sampler")
    is_recording = isinstance(sampler, Mapping | str | os.PathLike)
    if is_recording and cache is not None:
        raise ValueError(
            f"cache={describe(cache)} belongs to a sampler that is one step, and {describe(sampler)} is a recording. "
            f"{_EXAMPLE}"
        )
    if not is_recording:
        check_function(sampler, "parity", ", trainer")
        if cache is None and _count_arguments(sampler) == 3:
            raise ValueError(
                f"{describe(sampler)} takes three arguments, as one step of a sampler does: pass its cache. "
                "For example: parity(trainer, step, cache=cache)(params, tokens)."
            )
    if names is not None and not isinstance(names, Mapping):
        raise TypeError(f"names={names!r} is not a dictionary. For example: names={{'lm_head': 'head'}}.")
    decode: Any = sampler if is_recording or cache is None else _repeat(sampler, cache)

    @hide_frames
    def compare_runs(params: Any, tokens: Any, mask: Any = None) -> Parity:
        ids = _check_tokens(tokens)
        real = _check_mask(mask, ids)
        args, counted = (params, jnp.asarray(tokens)), real[:, :-1] & real[:, 1:]
        run_trainer = CompiledFunction(trainer, args)
        logits = _check_logits(run_trainer(args), ids, "trainer")
        if is_recording:
            found, reach = _score_recording(logits, decode, names or {}, ids, counted, _make_positions(real)), None
        else:
            run_sampler = CompiledFunction(decode, args)
            sampled = _check_logits(run_sampler(args), ids, "sampler")
            if sampled.shape[-1] != logits.shape[-1]:
                least = min(sampled.shape[-1], logits.shape[-1])
                raise ValueError(
                    f"The trainer has logits of {logits.shape[-1]} tokens, and the sampler of {sampled.shape[-1]}. "
                    f"Compare those that both have. For example: logits[..., :{least}]."
                )
            found = score(logits, sampled, ids, counted)
            reach = find_reach((run_trainer, run_sampler), args, (logits, sampled), real)
        steps, compared = Steps({}), ComparedSteps(None, (), {}, {})
        if scopes:
            steps, compared = _compare_scopes(trainer, decode, names or {}, args, real)
        if scopes and compared.divergence is None and not is_recording and logits.shape[1] < ids.shape[1]:
            # The trainer may compute without the last token: `model(tokens[:, :-1])`.
            shorter = lambda params, tokens: decode(params, tokens[:, :-1])
            steps, compared = _compare_scopes(trainer, shorter, names or {}, args, real[:, :-1])
        causes = find_causes(Evidence(found, compared, steps.closed, reach, params))
        half = next(((known.dtype, path) for path, known in compared.trainer.items() if known.dtype in _HALF), None)
        kept = (None, found.sampler) if is_recording else (decode, None)
        pair = ComparedFunctions(trainer, kept[0], args, counted, kept[1], half)
        shown = {"unaligned": compared.unaligned, "divergence": compared.divergence, "causes": causes, "pair": pair}
        return Parity(**summarize(found), **shown)

    return compare_runs


def _compare_scopes(
    trainer: Callable[..., Any], sampler: Any, names: Mapping[str, str], args: tuple[Any, Any], real: np.ndarray
) -> tuple[Steps, ComparedSteps]:
    """Records a sampler, unless it is a recording, and compares its steps with the trainer."""
    steps = record_steps(sampler)(*args) if callable(sampler) else Steps(_without_log_probs(sampler, names))
    if not steps.arrays:
        return steps, ComparedSteps(None, (), {}, {})
    return steps, diverge_from_steps(trainer, steps, names, _make_positions(real))(*args)


def _make_positions(real: np.ndarray) -> Positions:
    batch, length = real.shape
    return Positions(batch, length, None if real.all() else real)


def _repeat(step: Callable[..., Any], cache: Any) -> Callable[..., Any]:
    """Makes a sampler of one decode step."""

    @functools.wraps(step)
    def decode(params: Any, tokens: jax.Array) -> jax.Array:
        def advance(carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            logits, carry = step(params, carry, token)
            return carry, logits

        logits = lax.scan(advance, cache, tokens.T)[1]
        return jnp.moveaxis(logits.reshape(*logits.shape[:2], logits.shape[-1]), 0, 1)

    return decode


def _count_arguments(fun: Callable[..., Any]) -> int:
    """Counts the positional arguments without a default; 0 if they are not known."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)


def _check_tokens(tokens: Any) -> np.ndarray:
    if isinstance(tokens, Tracer):
        raise TypeError(
            f"parity compiles both functions and compares them on the host, got traced tokens {tokens.aval}. Call it "
            f"outside of jax.jit. {_EXAMPLE}"
        )
    if isinstance(tokens, Mapping) or not hasattr(tokens, "__len__"):
        raise TypeError(f"parity takes params, then tokens, got {describe(tokens)} as tokens. {_EXAMPLE}")
    ids = np.asarray(tokens)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.shape[1] < 2 or not len(ids):
        raise ValueError(
            f"parity takes tokens as integers of shape (batch, length), with a length of at least 2, got "
            f"{ids.dtype}{list(ids.shape)}. For example: jnp.zeros((4, 16), jnp.int32)."
        )
    return ids


def _check_mask(mask: Any, ids: np.ndarray) -> np.ndarray:
    real = np.ones(ids.shape, bool) if mask is None else np.asarray(mask)
    if real.shape != ids.shape:
        raise ValueError(
            f"The mask has shape {real.shape}, and the tokens {ids.shape}. "
            "For example: jnp.arange(length) < lengths[:, None]."
        )
    if real.dtype != bool and not np.isin(real, (0, 1)).all():
        raise ValueError(
            f"The mask of {real.dtype} has other values than True and False, or 1 and 0, such as "
            f"{real[~np.isin(real, (0, 1))][0]}. For example: jnp.arange(length) < lengths[:, None]."
        )
    real = real.astype(bool)
    if not (real[:, :-1] & real[:, 1:]).any():
        raise ValueError(
            f"The mask of shape {real.shape} has no two real tokens in a row, so that no token is predicted. "
            "For example: jnp.ones(tokens.shape, bool)."
        )
    return real


def _check_logits(logits: Any, ids: np.ndarray, name: str) -> np.ndarray:
    shape: tuple[int, ...] = getattr(logits, "shape", ())
    count = ids.shape[1]
    is_right = len(shape) == 3 and shape[0] == len(ids) and shape[1] in (count, count - 1)
    if not is_right or not jnp.issubdtype(logits.dtype, jnp.floating):
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(logits) if hasattr(x, "dtype"))
        found = found if hasattr(logits, "dtype") else f"a {type(logits).__name__} of {found or 'no arrays'}"
        raise ValueError(
            f"The {name} returns {found}, not floating logits of shape (batch, length, vocabulary), here "
            f"({len(ids)}, {count}, ...). For example: lambda params, tokens: model.apply(params, tokens)."
        )
    vocabulary = logits.shape[-1]
    if int(ids.max()) >= vocabulary or int(ids.min()) < 0:
        raise ValueError(
            f"The {name} has logits of {vocabulary} tokens, and the tokens are from {ids.min()} to {ids.max()}. Give "
            "padding a token of the vocabulary, and mask it. For example: jnp.where(mask, tokens, 0)."
        )
    return np.asarray(logits if logits.dtype.itemsize > 2 else logits.astype(jnp.float32))


def _without_log_probs(recording: Recording, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of scopes, and the logits."""
    arrays = group_arrays(recording, {}, ())
    return {name: found for name, found in arrays.items() if names.get(name, name) != _LOG_PROBS}


_LOG_PROBS = "log_probs"
_ROUNDED = 1e-2  # of a log-probability 0 in half precision
_HALF = ("float16", "bfloat16")


def _score_recording(
    logits: np.ndarray,
    recording: Recording,
    names: Mapping[str, str],
    ids: np.ndarray,
    counted: np.ndarray,
    positions: Positions,
) -> LogProbs:
    """Scores the tokens with the recorded logits or, without them, takes the recorded log-probabilities."""
    arrays = group_arrays(recording, {}, ())
    arrays = {names.get(name, name): found for name, found in arrays.items()}
    batch, length = ids.shape
    if "result" in arrays:
        target = Target((batch, length, logits.shape[-1]), is_output=True)
        aligned, problems, _ = align_steps({"result": arrays["result"]}, {"result": [target]}, positions)
        if problems:
            raise ValueError(f"{problems[0]}. Record logits of shape {target.shape}, for example.")
        return score(logits, np.asarray(aligned["result"][0]), ids, counted)
    if _LOG_PROBS not in arrays:
        raise ValueError(
            f"The recording has neither logits, 'result', nor log-probabilities of the tokens, {_LOG_PROBS!r}. It has "
            f"{', '.join(map(repr, arrays)) or 'nothing'}. For example: names={{'logits': 'result'}}."
        )
    given = np.asarray(arrays[_LOG_PROBS][0] if len(arrays[_LOG_PROBS]) == 1 else arrays[_LOG_PROBS])
    if np.shape(given) not in ((batch, length), (batch, length - 1)):
        raise ValueError(
            f"'log_probs' of the recording has shape {np.shape(given)}. It has the log-probability of each token, "
            f"for example: {(batch, length)}."
        )
    if (given[np.isfinite(given)] > _ROUNDED).any():
        raise ValueError(
            f"'log_probs' of the recording has {given.max():.3g}, and a log-probability is at most 0. For example: "
            "np.log(probabilities)."
        )
    return score_given(logits, np.asarray(given, np.float64)[:, 1 - length :], ids, counted)
