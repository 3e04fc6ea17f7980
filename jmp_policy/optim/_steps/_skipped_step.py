"""A skipped step as a host sees it: its cause, and the parameters that it concerns."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base import PyTree, is_array, split_state
from ...loss_scale import DynamicLossScale, LossScale, strip_variables

if TYPE_CHECKING:
    from ...numerics import NonfiniteOrigin
else:
    NonfiniteOrigin = Any  # for `typing.get_type_hints`

Counts = Mapping[str, tuple[int, int]]  # elements that are not finite and all elements of arrays, by path
_MOST_LISTED = 8


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A skipped step and its cause; `str` of it is one line.

    Attributes:
      step: the number of the step, from 1. Skipped steps and the microbatches of `optax.MultiSteps` count. `None` if
        the optimizer does not count its steps.
      origin: the origin of its infinities.
      is_search: whether it is part of the search for a loss scale, which the next step may end: the backward pass
        overflowed, under a dynamic scale that can still fall.
      bad_params: the parameters that are not finite themselves, by path, with the number of elements that are not
        finite and of all elements.
      bad_grads: likewise the parameters whose gradients are not finite.

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
    bad_grads: Counts

    def __str__(self) -> str:
        search = "; the loss scale was too high, which is normal at the start" if self.is_search else ""
        cause = "" if self.origin.cause is None else f"; made of {self.origin.cause}"
        return f"step{self._number} skipped: {self.origin}{cause}{search}"

    def describe(self) -> str:
        """Returns the number of the step and a paragraph: the op, its elements, parameters, and suggestions."""
        sentences = [f"Step{self._number} was skipped. {self.origin.describe()}"]
        if self.bad_params:
            sentences.append(describe_bad_params(self.bad_params))
        if self.bad_grads:
            sentences.append(
                f"Parameters whose gradients are not finite: {_list_counts(self.bad_grads)}. Each of them skips the "
                "step, also one that the optimizer does not train: for that one, jax.lax.stop_gradient in the loss."
            )
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
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in keyed)
    return {name: (int(bad), int(size)) for name, (_, (bad, size)) in zip(names, keyed, strict=True) if int(bad)}


def _list_counts(counts: Counts) -> str:
    listed = [f"{name or 'the parameter'} ({bad} of {size})" for name, (bad, size) in counts.items()]
    return ", ".join(listed[:_MOST_LISTED]) + (
        f" and {len(listed) - _MOST_LISTED} more" if listed[_MOST_LISTED:] else ""
    )


def describe_bad_params(counts: Counts) -> str:
    return (
        f"Parameters that are not finite themselves: {_list_counts(counts)}. No step repairs them: restore a "
        "checkpoint. A step with finite gradients can have made them so, if its update overflowed."
    )


def is_search(origin: "NonfiniteOrigin", scale: LossScale) -> bool:
    """True if a skipped step is part of the search for a loss scale; see `SkippedStep`."""
    if not isinstance(scale, DynamicLossScale) or float(scale.loss_scale) <= np.float32(scale.min_loss_scale):
        return False
    from ...numerics._nonfinite import has_pole

    root = origin.cause or origin
    overflowed = root.kind == "inf" and not has_pole(root.primitive, root.operands, root.dtype)
    return overflowed and root.direction == "backward"
