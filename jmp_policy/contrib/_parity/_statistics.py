"""Statistics of the log-probabilities of two runs, on the host in float64."""

import dataclasses
from typing import Any

import numpy as np

CLIP = 0.2
"""Ratios outside [1 - CLIP, 1 + CLIP] are counted: the clip range of PPO."""


@dataclasses.dataclass(frozen=True, eq=False)
class LogProbs:
    """Log-probabilities of given tokens, each predicted from those before it.

    Attributes:
      trainer: `(batch, length - 1)`, in float64.
      sampler: the same of the sampler.
      divergence: the Kullback-Leibler divergence at each position; None if the sampler has no logits.
      counted: True for the tokens that count.
      slope: the factor between the logits of both, without their means; None without logits.
      unexplained: the share of their difference that this factor does not explain.
    """

    trainer: np.ndarray
    sampler: np.ndarray
    divergence: np.ndarray | None
    counted: np.ndarray
    slope: float | None = None
    unexplained: float = 1.0


def score(trainer: Any, sampler: Any, tokens: np.ndarray, counted: np.ndarray) -> LogProbs:
    """Scores tokens with the logits of both runs, `(batch, length - 1 or length, vocabulary)`, sequence by sequence."""
    made: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    sums = np.zeros(3)  # of squares of the trainer's logits, of products with the difference, and of its squares
    numbers = 0
    count = tokens.shape[1] - 1
    for row in range(len(tokens)):
        p, q = (_normalize_logits(np.asarray(x[row, :count], np.float64)) for x in (trainer, sampler))
        with np.errstate(invalid="ignore"):
            terms = np.where(np.isneginf(q), 0.0, np.exp(q) * (q - p))
        # Tokens without a probability, such as padding of the vocabulary, may have any logit.
        p_known, q_known = p[counted[row]], q[counted[row]]
        known = np.isfinite(p_known) & np.isfinite(q_known) & (np.maximum(p_known, q_known) > _LEAST)
        a, b = (_center(x, known) for x in (p_known, q_known))
        sums += np.sum(a * a), np.sum(a * (b - a)), np.sum((b - a) ** 2)
        numbers += int(known.sum()) - len(known)
        index = np.arange(count), tokens[row, 1:]
        made.append((p[index], q[index], terms.sum(-1)))
    square, product, difference = sums
    is_known = numbers >= _FEWEST and square > 0 and difference > 0
    slope = float(1 + product / square) if is_known else None
    unexplained = float(1 - product**2 / square / difference) if is_known else 1.0
    p, q, divergence = (np.stack(found) for found in zip(*made, strict=True))
    return LogProbs(p, q, divergence, counted, slope, unexplained)


def score_given(trainer: Any, sampler: np.ndarray, tokens: np.ndarray, counted: np.ndarray) -> LogProbs:
    """Scores tokens with the logits of the trainer, against given log-probabilities, `(batch, length - 1)`."""
    count = tokens.shape[1] - 1
    index = np.arange(count)
    made = [
        _normalize_logits(np.asarray(row[:count], np.float64))[index, own[1:]]
        for row, own in zip(trainer, tokens, strict=True)
    ]
    return LogProbs(np.stack(made), np.asarray(sampler, np.float64), None, counted)


_LEAST = -100.0
_FEWEST = 16
"""A factor between fewer numbers may be chance."""


def _center(x: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Subtracts the mean of the known elements; the others become 0."""
    kept = np.where(known, x, 0.0)
    mean = kept.sum(-1, keepdims=True) / np.maximum(known.sum(-1, keepdims=True), 1)
    return np.where(known, kept - mean, 0.0)


def _normalize_logits(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # infinite logits make nan
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def summarize(found: LogProbs) -> dict[str, Any]:
    """Returns the statistics of a `Parity`, of the tokens that count. A difference that is not a number is infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratios = found.trainer - found.sampler
        sizes = np.where(np.isnan(log_ratios), np.inf, np.abs(log_ratios))
        counts, totals = found.counted.sum(0), np.where(found.counted, sizes, 0.0).sum(0)
        place = np.unravel_index(np.argmax(np.where(found.counted, sizes, -1.0)), sizes.shape)
        chosen, log_ratio = sizes[found.counted], log_ratios[found.counted]
        is_finite = bool(np.isfinite(chosen).all())
        weights = np.exp(log_ratio - log_ratio.max()) if log_ratio.max() < np.inf else np.isinf(log_ratio) * 1.0
        perplexities = [float(np.exp(-x[found.counted].mean())) for x in (found.trainer, found.sampler)]
        return {
            "count": chosen.size,
            "mean": float(chosen.mean()),
            "median": float(np.median(chosen)),
            "percentile_99": float(np.percentile(chosen, 99, method="linear" if is_finite else "higher")),
            "largest": float(chosen.max()),
            "kl": None if found.divergence is None else float(found.divergence[found.counted].mean()),
            "k3": float((np.expm1(log_ratio) - log_ratio).mean()),
            "outside": float((~(np.abs(np.expm1(log_ratio)) <= CLIP)).mean()),
            "effective_sample_size": float(weights.sum() ** 2 / (weights**2).sum()),
            "perplexities": (perplexities[0], perplexities[1]),
            "where": (int(place[0]), int(place[1]) + 1),
            "by_position": tuple(float(t / n) if n else float("nan") for t, n in zip(totals, counts, strict=True)),
        }
