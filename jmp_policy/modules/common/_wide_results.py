"""The sums that results of layers were before they were rounded, for the boundary that hands one of them over."""

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..._base import PyTree, cast_floating
from ...policy import Policy
from .._adapter import is_flax_object


class WideResults:
    """What each result was that a layer rounded while the call of one boundary runs.

    A result is known as the object that it is: one that was computed with, or went through a `jit`, is another. What it
    was is kept for as long as anything else keeps the result.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, jax.Array]] = {}  # by the id of the result

    def remember(self, narrow: jax.Array, wide: jax.Array) -> None:
        """Remembers what a result was."""
        key = id(narrow)
        self._known[key] = weakref.ref(narrow, lambda _: self._known.pop(key, None)), wide

    def find(self, x: Any) -> jax.Array | None:
        """What a result was; `None` of anything else."""
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def restore(self, policy: Policy, out: PyTree) -> Any:
        """What a boundary returns, in which the results that it casts are what they were before they were rounded."""
        if not self._known or policy.output_dtype is None:
            return out
        return jax.tree.map(lambda x: self._restore_leaf(x, policy.output_dtype), out, is_leaf=is_flax_object)

    def _restore_leaf(self, x: Any, dtype: np.dtype | None) -> Any:
        wide = self.find(x)
        return x if wide is None or x.dtype == dtype else wide


_RESULTS: contextvars.ContextVar[WideResults | None] = contextvars.ContextVar("_RESULTS", default=None)


@contextlib.contextmanager
def keep_wide_results() -> Iterator[WideResults]:
    """A context in which the layers inside of a boundary say what their results were before they were rounded."""
    results = WideResults()
    token = _RESULTS.set(results)
    try:
        yield results
    finally:
        _RESULTS.reset(token)


def round_result(wide: Any, dtype: Any) -> Any:
    """Casts what a layer computed to the dtype that it returns; a boundary around it still knows what it was.

    Args:
      wide: what the layer computed.
      dtype: what it returns; `None` for what it computed.
    """
    narrow = cast_floating(wide, dtype)
    results = _RESULTS.get()
    if results is not None and narrow is not wide and isinstance(narrow, jax.Array):
        results.remember(narrow, wide)
    return narrow


def read_wide(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """What a layer inside computed before it was rounded, or else a cast of what it returned."""
    results = _RESULTS.get()
    wide = None if results is None else results.find(x)
    return cast_floating(x, dtype) if wide is None else wide.astype(dtype)
