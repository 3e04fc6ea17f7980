"""Result of `tune`: a policy map, its trials, and their errors against float32."""

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._base import PyTree, at_least_float32
from ..loss_scale import all_finite
from ..policy import PolicyMap
from ..report import REFERENCE_LINE, Report, Table, find_style, make_columns, make_figure, make_finite
from ._tune_search import Trial, write_code

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CHOSEN: dict[str, Any] = {"s": 130, "facecolors": "none", "edgecolors": "black", "zorder": 3, "label": "the map"}

FLOOR = 0.1
"""A leaf is small if its root mean square is below this fraction of the root mean square of all leaves."""


def list_numbers(tree: PyTree) -> list[jax.Array]:
    """Lists the floating leaves in float32 or wider, complex leaves as two."""
    leaves = jax.tree.leaves(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves if hasattr(leaf, "dtype") or isinstance(leaf, float | complex)]
    parts = [part for leaf in leaves for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))]
    return [part.astype(at_least_float32(part.dtype)) for part in parts if jnp.issubdtype(part.dtype, jnp.floating)]


def measure_largest_error(trees: dict[str, PyTree], reference: dict[str, PyTree]) -> jax.Array:
    """Returns the largest relative error of any leaf, or infinity if any value is not finite."""
    errors = [jnp.float32(0)]
    for name, tree in reference.items():
        errors += _compare_leaves(list_numbers(tree), list_numbers(trees[name]))
    is_finite = all_finite([list_numbers(tree) for tree in trees.values()])
    return jnp.where(is_finite, jnp.max(jnp.stack(errors)), jnp.inf)


def _compare_leaves(wanted: list[jax.Array], got: list[jax.Array]) -> list[jax.Array]:
    """Compares leaf by leaf, in units of the largest element so that squares do not overflow."""
    wanted = [leaf for leaf in wanted if leaf.size]
    got = [leaf for leaf in got if leaf.size]
    if not wanted:
        return []
    widest = max((leaf.dtype for leaf in wanted), key=lambda dtype: dtype.itemsize)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)).astype(widest) for leaf in wanted]))
    unit = jnp.where(largest > 0, largest, 1.0)
    squares = [_sum_squares(leaf, unit) for leaf in wanted]
    mean_square = jnp.sum(jnp.stack(squares)) / sum(leaf.size for leaf in wanted)
    errors = []
    for leaf, other, square in zip(wanted, got, squares, strict=True):
        least = FLOOR**2 * mean_square * leaf.size
        difference = _sum_squares(other - leaf, unit)
        # If the whole reference tree is zero, any difference is an infinite relative error.
        denominator = jnp.maximum(square, least)
        ratio = jnp.sqrt(difference / jnp.where(denominator > 0, denominator, 1.0))
        errors.append(jnp.where(denominator > 0, ratio, jnp.where(difference > 0, jnp.inf, 0.0)))
    return errors


def _sum_squares(leaf: jax.Array, unit: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf / unit.astype(leaf.dtype))).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class Tuning(Report):
    """Scopes that must stay out of a policy, found by `tune`. Prints as a table.

    Attributes:
      policy_map: the map, to be applied by the function named in `by`.
      scopes: the paths that stay in the full dtype or unquantized. The root is the empty string.
      candidates: all paths that were considered, the most suspicious first.
      error: the largest relative error under the map, of the jitted function with `loss_scale`. XLA may round
        differently in another compilation.
      tolerance: the largest accepted error.
      trials: all trials, in the order of the search.
      is_minimal: True if no scope can be left out. False if the budget ran out first.
      loss_scale: the loss scale of all trials.
      noise: the error between two runs without the policy.
      name: the name of the function or module.
      low: the dtype or format of the policy, such as `"float16"` or `"int8"`.
      kept: `"float32"`, `"float64"` or `"unquantized"`.
      by: `"autocast"` for a function, `"with_policy"` for a module.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> tuning = jmp.tune(lambda x: x * x, (jnp.float32(2.0),), "mixed_bfloat16", tolerance=0.1)
    >>> tuning.scopes, tuning.is_met
    ((), True)
    """

    policy_map: PolicyMap
    scopes: tuple[str, ...]
    candidates: tuple[str, ...]
    error: float
    tolerance: float
    trials: tuple[Trial, ...]
    is_minimal: bool
    loss_scale: float
    noise: float
    name: str
    low: str
    kept: str
    by: str

    _properties = ("is_met",)

    @property
    def is_met(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance

    @property
    def low_error(self) -> float:
        """The error with no scope kept; nan if that was not tried."""
        return next((trial.error for trial in self.trials if not trial.kept), math.nan)

    def to_code(self) -> str:
        """Returns the map as Python code to paste, one rule per line. `jmp` is the package."""
        return write_code(self.policy_map)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as dictionaries, lists, strings, booleans and finite numbers. Infinity becomes `None`."""
        return make_finite(super().to_dict() | {"code": self.to_code()})

    def plot(self) -> "Figure":
        """Draws the error of each trial against the number of scopes kept.

        Raises:
          ImportError: matplotlib is not installed.
        """
        figure = make_figure(7, 4)
        axes = figure.subplots()
        self._draw(axes)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        return figure

    def _draw(self, axes: "Axes") -> None:
        finite = [trial for trial in self.trials if 0 < trial.error < math.inf]
        errors = [trial.error for trial in finite] + [self.tolerance]
        top = 10 * max(errors)
        color = find_style(self.low).color
        axes.scatter([len(trial.kept) for trial in finite], errors[:-1], color=color, label="a trial")
        broken = [len(trial.kept) for trial in self.trials if not trial.error < math.inf]
        if broken:
            axes.scatter(broken, [top] * len(broken), color=color, marker="x", label="a trial that is not finite")
        if self.error > 0 and math.isfinite(self.error):
            axes.scatter([len(self.scopes)], [self.error], **CHOSEN)
        axes.axhline(self.tolerance, **REFERENCE_LINE, label="tolerance")
        axes.set_yscale("log")
        axes.set(xlabel=f"scopes that are {self._kept_words}, of {len(self.candidates)}", ylabel="relative error")
        axes.locator_params(axis="x", integer=True)
        axes.set_title(f"{self.name} in {self.low}", loc="left")

    def _summarize(self) -> str:
        count = f"{len(self.scopes)} of {len(self.candidates)} scopes {self._kept_words}"
        return f"{count}, error {_spell_error(self.error)}"

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.to_code()}"

    def _repr_html_(self) -> str:
        return f"{super()._repr_html_()}<pre>{escape(self.to_code())}</pre>"

    @property
    def _kept_words(self) -> str:
        return "unquantized" if self.kept == "unquantized" else f"in {self.kept}"

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        ranks = {scope: index + 1 for index, scope in enumerate(self.candidates)}
        rows = [
            (scope or "(outside)", f"{ranks[scope]} of {len(ranks)}", _spell_error(self._find_error_without(scope)))
            for scope in self.scopes
        ]
        return [Table(make_columns(self.kept, "suspicion, error without"), rows)] if rows else []

    def _list_notes(self) -> Sequence[str]:
        count = f"{len(self.trials)} trial{'' if len(self.trials) == 1 else 's'}"
        lines = [f"{self._describe()} {count}."]
        if self.loss_scale != 1:
            lines.append(f"The loss scale was {self.loss_scale:g}.")
        if not self.is_minimal:
            lines.append("The budget ran out before the search ended: this is the best map so far.")
        return [*lines, f"As code, from to_code(), for {self.by}:"]

    def _describe(self) -> str:
        verdict = "within" if self.is_met else "above"
        if self.scopes:
            found = f"{len(self.scopes)} of {len(self.candidates)} scopes of {self.name} stay {self._kept_words}"
        else:
            found = f"All {len(self.candidates)} scopes of {self.name} can go to {self.low}"
        return (
            f"{found}: error {_spell_error(self.error)}, {verdict} the tolerance of {_spell_error(self.tolerance)}. "
            f"With all in {self.low} it is {_spell_error(self.low_error)}."
        )

    def _find_error_without(self, scope: str) -> float:
        """Returns the error of the trial that leaves out a scope and keeps most of the others."""
        others = set(self.scopes) - {scope}
        without = [trial for trial in self.trials if scope not in trial.kept]
        nearest = max(without, key=lambda trial: (len(others.intersection(trial.kept)), len(trial.kept)), default=None)
        return math.nan if nearest is None else nearest.error


def _spell_error(error: float) -> str:
    if math.isnan(error):
        return "not tried"
    return f"{100 * error:.2g} %" if math.isfinite(error) else "not finite"
