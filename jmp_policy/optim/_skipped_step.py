"""A skipped step as a host sees it: its cause, and the parameters that it concerns."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._base import PyTree, is_array, split_state
from ..loss_scale import strip_variables

if TYPE_CHECKING:
    from ..numerics import NonfiniteOrigin
else:
    NonfiniteOrigin = Any  # for `typing.get_type_hints`

Counts = Mapping[str, tuple[int, int]]  # elements that are not finite and all elements of arrays, by path
_MOST_LISTED = 8

NO_STEP_REPAIRS = (
    "No step repairs them: restore a checkpoint. A step with finite gradients can have made them so, if its update "
    "overflowed, which loss_scaled(..., check='updates') skips."
)


@dataclasses.dataclass(frozen=True)
class BadGradient:
    """A parameter whose gradient is not finite.

    Attributes:
      path: the names of the parameter, joined by `/`.
      bad: the number of elements of its gradient that are not finite.
      size: the number of all elements.
      frozen: whether the optimizer does not train it, as `optax.set_to_zero` in `optax.partition`.

    >>> import jmp_policy as jmp
    >>> str(jmp.optim.BadGradient("head/kernel", 2, 8, frozen=True))
    'head/kernel (2 of 8, frozen)'
    """

    path: str
    bad: int
    size: int
    frozen: bool = False

    def __str__(self) -> str:
        return f"{self.path or 'the parameter'} ({self.bad} of {self.size}{', frozen' if self.frozen else ''})"


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A skipped step and its cause; `str` of it is one line.

    Attributes:
      step: the number of the step, from 1. Skipped steps and the microbatches of `optax.MultiSteps` count. `None` if
        the optimizer does not count its steps.
      origin: the origin of its infinities.
      is_search: whether it is part of the search for a loss scale: the step is finite at the floor of a dynamic scale.
      bad_params: the parameters that are not finite themselves, by path, with the number of elements that are not
        finite and of all elements.
      parameters: those whose gradients are not finite, in the order of the backward pass.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx, params = jmp.optim.skip_nonfinite(optax.adam(0.1)), jnp.ones(2)
    >>> find = jmp.optim.find_origin(lambda params, x: jnp.sum(params / x), tx)
    >>> skip = find(params, tx.init(params), jnp.zeros(2))
    >>> skip.step, skip.origin.primitive, skip.is_search
    (1, 'div', False)
    """

    step: int | None
    origin: "NonfiniteOrigin"
    is_search: bool
    bad_params: Counts
    parameters: tuple[BadGradient, ...]

    def __str__(self) -> str:
        search = "; the loss scale was too high, which is normal at the start" if self.is_search else ""
        cause = "" if self.origin.cause is None else f"; made of {self.origin.cause}"
        return f"step{self._number} skipped: {self.origin}{cause}{search}"

    def describe(self) -> str:
        """Returns the number of the step and a paragraph: the op, its elements, parameters, and suggestions."""
        sentences = [f"Step{self._number} was skipped. {self.origin.describe()}"]
        if self.bad_params:
            sentences.append(describe_bad_params(self.bad_params))
        if self.parameters:
            listed = _join_most([str(each) for each in self.parameters], most=5)
            sentences.append(f"Parameters whose gradients are not finite, in the order of the backward pass: {listed}.")
        if any(each.frozen for each in self.parameters):
            sentences.append("A frozen one skips the step too: put jax.lax.stop_gradient around it in the loss.")
        return " ".join(sentences)

    @property
    def _number(self) -> str:
        return "" if self.step is None else f" {self.step:,}"


def count_nonfinite(tree: PyTree) -> PyTree:
    """Counts the elements of each floating array that are not finite, and all its elements. Skips float8 state."""
    rest, _ = split_state(tree)
    inexact = lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    count = lambda x: (jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32), jnp.uint32(x.size)) if inexact(x) else None
    return jax.tree.map(count, strip_variables(rest))


def read_counts(counts: PyTree) -> Counts:
    is_count = lambda node: isinstance(node, tuple) and len(node) == 2 and all(map(is_array, node))
    keyed = jax.tree_util.tree_leaves_with_path(counts, is_leaf=is_count)
    return {_name_path(path): (int(bad), int(size)) for path, (bad, size) in keyed if int(bad)}


def list_names(tree: PyTree) -> list[str]:
    return [_name_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _name_path(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _join_most(listed: list[str], most: int) -> str:
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if listed[most:] else "")


def describe_bad_params(counts: Counts) -> str:
    listed = [f"{name or 'the parameter'} ({bad} of {size})" for name, (bad, size) in counts.items()]
    return f"Parameters that are not finite themselves: {_join_most(listed, _MOST_LISTED)}. {NO_STEP_REPAIRS}"
