"""Result of `parity`: statistics of log-probabilities, the scopes that make them differ, and their causes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...policy import PolicyMap, PolicySpec
from ...report import Report, Table, make_columns, make_figure, make_finite, make_plain
from .._diverge import NOISE, Divergence, ScopeErrors, format_number
from ._search import ComparedFunctions
from ._statistics import CLIP

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Parity(Report):
    """Log-probabilities of a trainer and a sampler, compared by `parity`. Prints as a table.

    With p the probability of a token in the trainer and q in the sampler, a difference is |log p - log q|, and a ratio
    is p / q.

    Attributes:
      count: the number of tokens that count.
      mean: the mean difference.
      median: the median difference.
      percentile_99: the 99th percentile of differences.
      largest: the largest difference. It is infinite if any is not a number.
      kl: the mean of KL(q || p) over the whole vocabulary, in nats; None if the sampler has no logits.
      k3: the mean of p / q - 1 - log(p / q), which estimates it.
      outside: the share of ratios outside of [0.8, 1.2].
      effective_sample_size: the square of the sum of ratios, over the sum of their squares: `count` if all are equal.
      perplexities: the perplexities of the trainer and of the sampler.
      where: the sequence and position of the token with the largest difference.
      by_position: the mean difference at each position from 1; nan where no token counts.
      causes: causes other than rounding, as sentences, first those that are facts.
      unaligned: the scopes and values that could not be aligned, as sentences.
      divergence: the errors of the scopes; None without scopes.
      pair: both functions with their arguments, for `policy_map`. A pickle and `to_dict` do not have it.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> logits, tokens = jax.random.normal(jax.random.key(0), (1, 8, 4)), jnp.zeros((1, 8), int)
    >>> trainer = lambda params, tokens: params * logits
    >>> sampler = lambda params, tokens: params * logits / 0.8
    >>> parity = jmp.contrib.parity(trainer, sampler)(jnp.float32(1), tokens)
    >>> print(parity.causes[0])
    The sampler's logits are 1.25 times the trainer's, as with a temperature of 0.8: not a rounding error.
    >>> parity.assert_within(mean=0.5)
    >>> parity.count, len(parity.by_position)
    (7, 7)
    """

    count: int
    mean: float
    median: float
    percentile_99: float
    largest: float
    kl: float | None
    k3: float
    outside: float
    effective_sample_size: float
    perplexities: tuple[float, float]
    where: tuple[int, int]
    by_position: tuple[float, ...]
    causes: tuple[str, ...]
    unaligned: tuple[str, ...]
    divergence: Divergence | None
    pair: ComparedFunctions | None = None

    @property
    def perplexity_gap(self) -> float:
        """The perplexity of the trainer minus the perplexity of the sampler."""
        return self.perplexities[0] - self.perplexities[1]

    def rows(self) -> tuple[ScopeErrors, ...]:
        """Returns the errors of the scopes: the largest introduced error first, and unknown ones last.

        `row.iterations` has the introduced error at each position. The reference is the sampler.
        """
        rows = () if self.divergence is None else self.divergence.rows()
        return tuple(sorted(rows, key=lambda row: math.inf if math.isnan(row.introduced) else -row.introduced))

    def assert_within(
        self, *, mean: float | None = None, largest: float | None = None, percentile_99: float | None = None
    ) -> None:
        """Raises if the differences of log-probabilities exceed a bound, for tests.

        Args:
          mean: the largest accepted mean difference.
          largest: the largest accepted difference of any token.
          percentile_99: the largest accepted 99th percentile.

        Raises:
          ValueError: no bound is given, or one is not a number above 0.
          AssertionError: a bound is exceeded. The text is the report.
        """
        given = {"mean": mean, "largest": largest, "percentile_99": percentile_99}
        bounds = {name: bound for name, bound in given.items() if bound is not None}
        if not bounds:
            raise ValueError("assert_within() has no bound. For example: assert_within(mean=0.01, largest=0.1).")
        for name, bound in bounds.items():
            _check_number(bound, name, "assert_within(mean=0.01)")
        exceeded = [
            f"The {_TITLES[name]} is {format_number(getattr(self, name))}, more than {bound:g}."
            for name, bound in bounds.items()
            if not getattr(self, name) <= bound
        ]
        if exceeded:
            raise AssertionError("\n".join([*exceeded, "", str(self)]))

    def policy_map(
        self, tolerance: float, policy: PolicySpec = "params=float32,compute=bfloat16,output=float32"
    ) -> PolicyMap:
        """Finds the smallest map for `autocast` with which log-probabilities stay within a tolerance.

        The functions must compute in float32. Each trial runs the trainer and the sampler under `autocast` with a map.
        Its error is the largest mean difference of log-probabilities between the two and the trainer in float32, or
        between the trainer and a recording. First come `policy` for all scopes, then with `accumulate_dtype` float32,
        then both in float16. Last, the best of them keeps as few scopes in float32 as possible, found as by `tune`.

        Args:
          tolerance: the largest accepted mean difference of log-probabilities.
          policy: a policy that computes in float16 or bfloat16.

        Raises:
          ValueError: the tolerance is not positive, the policy is another one or a map, the trainer computes in half
            precision already, no map meets the tolerance, or the report was pickled.
        """
        _check_number(tolerance, "tolerance", "policy_map(0.01)")
        if self.pair is None:
            raise ValueError(
                "A pickled Parity has no functions to run. For example: parity(trainer, sampler)(params, ids)."
            )
        return self.pair.find_map(tolerance, policy)

    def to_dict(self) -> dict[str, Any]:
        """Returns statistics, rows and sentences as plain data. Numbers that are not finite become None."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("divergence", "pair")]
        own = {name: getattr(self, name) for name in (*names, "perplexity_gap")}
        return make_finite(make_plain(own | {"rows": self.rows()}))

    def plot(self) -> "Figure":
        """Draws the mean difference at each position, and the introduced errors of the worst scopes.

        Raises:
          ImportError: matplotlib is not installed.
        """
        chosen = [row for row in self.rows()[:_MOST_LINES] if row.iterations and row.introduced > NOISE]
        figure = make_figure(7, 3.2 * (1 + bool(chosen)))
        panels = figure.subplots(1 + bool(chosen), squeeze=False)[:, 0]
        panels[0].plot(range(1, len(self.by_position) + 1), self.by_position, color="#0072B2", marker=".")
        panels[0].set_ylabel("mean |log p - log q|")
        for row, color in zip(chosen, _COLORS, strict=False):
            errors = [error or math.nan for error in row.iterations]
            panels[1].plot(range(len(errors)), errors, color=color, marker=".", label=row.path or "(outside)")
        for axes in panels[1:]:
            axes.set_yscale("log")
            axes.set_ylabel("introduced error")
            axes.legend(frameon=False, fontsize=8)
        panels[-1].set_xlabel("position")
        return figure

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"pair": None}

    def _summarize(self) -> str:
        return f"{self.count} tokens, mean difference {format_number(self.mean)}"

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        p, q = self.perplexities
        cells = [
            *((title, format_number(getattr(self, name))) for name, title in _TITLES.items()),
            *([] if self.kl is None else [("KL(sampler || trainer)", format_number(self.kl))]),
            ("k3 estimate of it", format_number(self.k3)),
            (f"ratios outside of [{1 - CLIP:g}, {1 + CLIP:g}]", f"{self.outside:.2%}"),
            ("effective sample size", f"{self.effective_sample_size:.1f} of {self.count}"),
            ("perplexity, trainer - sampler", f"{p:.4g} - {q:.4g} = {format_number(p - q)}"),
        ]
        tables = [Table(make_columns("log-probabilities", "value"), cells)]
        scopes = [
            (row.path or "(outside)", row.dtype, format_number(row.introduced), _find_worst_position(row))
            for row in self._list_shown()[: self._MOST_ROWS]
        ]
        columns = make_columns("scope, sampler → trainer", "introduced, worst position")
        return [*tables, Table(columns, scopes)] if scopes else tables

    def _list_shown(self) -> list[ScopeErrors]:
        """Lists the rows with an error, and those that a recording cannot tell."""
        return [row for row in self.rows() if row.introduced > 0 or math.isnan(row.introduced)]

    def _list_notes(self) -> Sequence[str]:
        row, position = self.where
        notes = [f"Sequence {row} has the largest difference, at position {position}."] if self.largest > 0 else []
        known = [row for row in self.rows() if not math.isnan(row.introduced)]
        if known and known[0].introduced > NOISE:
            first = known[0]
            notes.append(
                f"{first.path or '(outside)'} introduces the largest error: {format_number(first.introduced)}."
            )
        elif known:
            is_whole = len(known) == len(self.rows()) and not self.unaligned
            which = "No scope" if is_whole else f"None of the {len(known)} scopes that could be compared"
            notes.append(f"{which} introduces more than rounding errors of float32 ({format_number(NOISE)}).")
        notes += self.causes
        notes += self._note_left_out(self._list_shown(), "rows with smaller introduced errors", ".rows()")
        if self.unaligned:
            others = len(self.unaligned) - _MOST_UNALIGNED
            rest = f"; and {others} more" if others > 0 else ""
            notes.append(f"Not aligned: {'; '.join(self.unaligned[:_MOST_UNALIGNED])}{rest}.")
        return notes


def _check_number(bound: Any, name: str, example: str) -> None:
    is_number = isinstance(bound, int | float | np.number) and not isinstance(bound, bool)
    if not is_number or not 0 < bound < math.inf:
        raise ValueError(
            f"{name} is a difference of log-probabilities, a number above 0, got {bound!r}. For example: {example}."
        )


def _find_worst_position(row: ScopeErrors) -> str:
    if not row.iterations or math.isnan(row.introduced):
        return ""
    return str(max(range(len(row.iterations)), key=lambda i: row.iterations[i]))


_TITLES = {
    "mean": "mean difference",
    "median": "median",
    "percentile_99": "99th percentile",
    "largest": "largest",
}
_COLORS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MOST_LINES = len(_COLORS)
_MOST_UNALIGNED = 6
