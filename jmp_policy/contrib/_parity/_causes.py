"""Finds causes of a difference other than rounding: facts first, and suspicions that the errors suggest."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._base import is_floating, list_paths_to
from .._diverge import NOISE, ComparedSteps, ScopeErrors
from ._statistics import LogProbs


class Reach(NamedTuple):
    """The largest change of the logits with one token, in units of the largest logit.

    Attributes:
      where: the position of the token.
      trainer: the change at each position of its sequence.
      sampler: the same of the sampler.
      others: the change in other sequences, of the trainer and the sampler.
    """

    where: int
    trainer: np.ndarray
    sampler: np.ndarray
    others: tuple[float, float]


class Evidence(NamedTuple):
    """All that is known of a difference."""

    found: LogProbs
    compared: ComparedSteps
    closed: Sequence[Any]  # the arrays that the sampler closes over
    reach: Reach | None
    params: Any


def find_reach(
    runs: Sequence[Callable[..., Any]], args: tuple[Any, Any], logits: Sequence[np.ndarray], real: np.ndarray
) -> Reach:
    """Runs the trainer and the sampler again with another token in the middle of a sequence."""
    params, tokens = args
    where, vocabulary = tokens.shape[1] // 2, logits[0].shape[-1]
    row = int(np.argmax(real[:, where]))
    changed = tokens.at[row, where].set((tokens[row, where] + 1) % vocabulary)
    reached, largest = [], 1e-30
    for run, before in zip(runs, logits, strict=True):
        after = np.asarray(run((params, changed)).astype(before.dtype))
        likely = before > before.max(-1, keepdims=True) - 100.0  # not padding of the vocabulary
        chosen = real[:, : before.shape[1], None] & np.isfinite(before) & likely
        with np.errstate(invalid="ignore"):
            reached.append(np.max(np.abs(after - before), axis=2, initial=0.0, where=chosen))
        largest = max(largest, float(np.max(np.abs(before), initial=0.0, where=chosen)))
    count = min(sizes.shape[1] for sizes in reached)
    trainer, sampler = (sizes[:, :count] / largest for sizes in reached)
    others = [float(np.delete(sizes, row, 0).max(initial=0.0)) for sizes in (trainer, sampler)]
    return Reach(where, trainer[row], sampler[row], (others[0], others[1]))


def find_causes(evidence: Evidence) -> tuple[str, ...]:
    """Lists causes as sentences, facts first, unless the log-probabilities are equal but for rounding of float32."""
    found = evidence.found
    for name, own in (("trainer", found.trainer), ("sampler", found.sampler)):
        broken = np.argwhere(np.isnan(own) & found.counted)
        if len(broken):
            row, position = broken[0]
            return (f"The {name}'s logits are not finite for sequence {row}, position {position + 1}.",)
    sizes = np.abs(found.trainer - found.sampler)[found.counted]
    if sizes.mean() <= NOISE:
        return ()
    truncated = int(np.isposinf(found.trainer - found.sampler)[found.counted].sum())
    if truncated:
        return (
            f"The sampler gives a probability of 0 to {truncated} of {sizes.size} tokens, as top-k or top-p sampling "
            "does. This is not a rounding error.",
        )
    reach = [*_read_reach(evidence)]
    facts = [*_read_temperature(evidence), *_read_random(evidence), *_read_weights(evidence)]
    return (*reach, *facts, *(() if facts else _read_rows(evidence)))


def _read_temperature(evidence: Evidence) -> Iterator[str]:
    slope = evidence.found.slope
    if slope is None or evidence.found.unexplained > _UNEXPLAINED or abs(slope - 1) < _SMALLEST_FACTOR:
        return
    rows = [] if evidence.compared.divergence is None else evidence.compared.divergence.rows()
    size, path = max(((row.introduced, row.path) for row in rows if row.path and row.introduced > 0), default=(0.0, ""))
    why = f"as with a temperature of {1 / slope:.4g}"
    if size > abs(slope - 1) / 4:
        why = f"and {path} introduces {size:.2g}: its scale is another one"
    yield f"The sampler's logits are {slope:.4g} times the trainer's, {why}: not a rounding error."


def _read_reach(evidence: Evidence) -> Iterator[str]:
    reach = evidence.reach
    if reach is None:
        return
    # The scale of an int8 tensor reaches all positions, too, but moves them by rounding errors.
    scopes = [*evidence.compared.trainer.values(), *evidence.compared.sampler.values()]
    limit = max((_ROUNDINGS * _find_unit(known.dtype) for known in scopes if known.dtype), default=_UNKNOWN)
    limit = max(limit, NOISE)
    runs = {"trainer": reach.trainer, "sampler": reach.sampler}
    if abs(reach.others[0] - reach.others[1]) > limit:
        name = "trainer" if reach.others[0] > reach.others[1] else "sampler"
        yield (
            f"The {name}'s logits change with a token of another sequence: statistics of the batch, as of a batch norm "
            "in training mode, or experts with a capacity. This is not a rounding error."
        )
        return
    for name, changes in runs.items():
        other = runs["sampler" if name == "trainer" else "trainer"]
        early = ((changes > limit) & (np.abs(changes - other) > limit))[: reach.where]
        if early.any():
            yield (
                f"The {name}'s logits at position {int(np.argmax(early))} change with the token at position "
                f"{reach.where}: its mask is not causal, or it norms over positions. This is not a rounding error."
            )
            return
    for name, other in (("trainer", "sampler"), ("sampler", "trainer")):
        found = np.flatnonzero((runs[name] > limit) & (runs[other] == 0))
        if len(found):
            end = "a mask, a window or a cache"
            if found[0] == reach.where and (runs[other][reach.where + 1 :] > limit).any():
                end = "its logits are those of the next position, or its mask leaves out the token itself"
            yield (
                f"The {name}'s logits at position {found[0]} change with the token at position {reach.where}, and the "
                f"{other}'s do not: {end}. This is not a rounding error."
            )
            return


def _read_random(evidence: Evidence) -> Iterator[str]:
    for name, facts in (("sampler", evidence.compared.sampler), ("trainer", evidence.compared.trainer)):
        for path, known in facts.items():
            if known.primitives & _RANDOM:
                place = path or "code outside of all scopes"
                yield (
                    f"In the {name}, {place} draws random numbers, as dropout does that was left on. This is not a "
                    "rounding error."
                )


def _read_weights(evidence: Evidence) -> Iterator[str]:
    """Compares the arrays that the sampler closes over with the parameters that it was given."""
    given = [leaf for leaf in jax.tree.leaves(evidence.params) if is_floating(leaf) and np.size(leaf) > 1]
    closed = [leaf for leaf in evidence.closed if is_floating(leaf) and np.ndim(leaf) > 0]
    rounded, stale = set[str](), list[float]()
    for leaf in given:
        alike = [array for array in closed if leaf.shape == array.shape]
        names = [_find_rounding(leaf, array) for array in alike]
        sizes = [_measure_distance(leaf, array) for array in alike]
        if any(names):
            rounded.update(filter(None, names))
        elif sizes and 0 < min(sizes) < 0.5:
            stale.append(min(sizes))
    if stale and 2 * len(stale) >= len(given):
        yield (
            f"The sampler closes over {len(stale)} arrays of weights that differ from the given ones, by up to "
            f"{max(stale):.2g}: from another update, which is not a rounding error, unless they are quantized."
        )
    elif rounded:
        yield f"The sampler closes over the given weights, rounded to {' and '.join(sorted(rounded))}."


def _find_rounding(given: Any, closed: Any) -> str:
    """Returns the half-precision dtype in which an array is another one, or ""."""
    own = np.asarray(closed.astype(jnp.float32))
    same = lambda name: np.array_equal(np.asarray(given.astype(name).astype(jnp.float32)), own)
    return next((name for name in ("bfloat16", "float16") if same(name) and not same("float32")), "")


def _measure_distance(given: Any, closed: Any) -> float:
    a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (given, closed))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30))


def _read_rows(evidence: Evidence) -> Iterator[str]:
    """Suspects scopes whose error is larger than their dtype explains."""
    if evidence.compared.divergence is None:
        return
    rows = [row for row in evidence.compared.divergence.rows() if not math.isnan(row.introduced)]
    limits = {row.path: _find_limit(row, evidence) for row in rows}
    large = [row for row in rows if row.introduced > limits[row.path]]
    if not large:
        return
    primitives = {path: known.primitives for path, known in evidence.compared.trainer.items()}
    has = lambda row, names: bool(primitives.get(row.path, frozenset()) & names)
    weighted = [row for row in rows if has(row, _WEIGHTED)]
    changed = [row for row in weighted if row in large]
    if len(changed) >= _FEWEST_SCOPES and len(changed) >= _MOST_SCOPES * len(weighted):
        yield (
            f"{len(changed)} of {len(weighted)} scopes with matmuls or embeddings introduce more than rounding "
            "explains: their weights may be from another update."
        )
        return
    worst = max(large, key=lambda row: row.introduced)
    size, limit = f"{worst.introduced:.2g}", f"{limits[worst.path]:.1g}"
    place = worst.path or "Code outside of all scopes"
    text = f"{place} introduces {size}, more than rounding in its dtypes explains ({limit})"
    if has(worst, _CHOOSING):
        text += ": it chooses experts or tokens, and a near tie is decided the other way by any rounding."
    elif has(worst, {"exp"}) and has(worst, {"dot_general"}):
        early = _begins_early(worst, limits[worst.path])
        text += ", and that at the first position, too: it has other heads, keys or values, or" if early else ": it"
        text += " weighs positions differently, as with another mask, window, rotation, scale or slot of the cache."
    else:
        text += ": it computes something else, such as another epsilon, axis, mask or position."
    yield text


def _find_limit(row: ScopeErrors, evidence: Evidence) -> float:
    """Returns the largest error that rounding is likely to introduce in a scope, in code around it and inside."""
    if not evidence.compared.sampler:
        return _ROUNDINGS * _find_unit("int8")  # a recording does not tell in which dtypes it was computed
    outer, names = list_paths_to(row.path), [name for name in row.dtype.split(" → ") if name]
    for scopes in (evidence.compared.trainer, evidence.compared.sampler):
        near = (path for path in scopes if path in outer or path.startswith(f"{row.path}/"))
        names += [scopes[path].dtype for path in near if scopes[path].dtype]
    # A scope of the sampler alone, such as a cache in 8 bits, may feed any other one.
    alone = (known for path, known in evidence.compared.sampler.items() if path not in evidence.compared.trainer)
    names += [known.dtype for known in alone if known.dtype]
    return max([NOISE, *(_ROUNDINGS * _find_unit(name) for name in names)])


def _find_unit(name: str) -> float:
    """Returns the unit roundoff of a dtype; of integers, of the largest one."""
    # TPUs round operands of float32 matmuls to bfloat16, and GPUs to TF32, which has the mantissa of float16.
    dtype = jnp.dtype(_FLOAT32_ON.get(jax.default_backend(), name) if name == "float32" else name)
    if jnp.issubdtype(dtype, jnp.floating):
        return float(jnp.finfo(dtype).eps) / 2
    return 0.5 / jnp.iinfo(dtype).max


def _begins_early(row: ScopeErrors, limit: float) -> bool:
    return bool(row.iterations) and row.iterations[0] > limit


_SMALLEST_FACTOR = 0.01  # a scale of logits that is rounded to bfloat16 differs by up to 0.004
_FLOAT32_ON = {"tpu": "bfloat16", "gpu": "float16"}
_UNKNOWN = 2.0**-5  # the limit of changes, without scopes
_UNEXPLAINED = 0.05
_ROUNDINGS = 16
_FEWEST_SCOPES = 3
_MOST_SCOPES = 0.75
_RANDOM = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
_CHOOSING = frozenset({"top_k", "approx_top_k", "argmax", "argmin", "sort"})
_WEIGHTED = frozenset({"dot_general", "conv_general_dilated", "gather", "ragged_dot", "ragged_dot_general"})
