"""Watching what enters the integer products of a model."""

import contextvars
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from .._adapter import ModuleCall
from .._trees import Args, Kwargs
from ._input_statistics import InputStatistics

# No context of JAX's, part of the key of every jit cache: each calibration would compile all operations anew.
_CALIBRATION: "contextvars.ContextVar[Calibration | None]" = contextvars.ContextVar("_CALIBRATION", default=None)


class Calibration:
    """What was seen of the inputs of each layer, over all batches.

    Attributes:
      layers: by path, the statistics of the layers whose inputs had numbers.
    """

    def __init__(self) -> None:
        self.layers: dict[str, InputStatistics] = {}
        self._traced: dict[str, None] = {}
        self._path = ""

    def run(self, call: Callable[[], Any]) -> None:
        """Calls a model with a batch, one operation after the other, and looks at what enters its products.

        Without `jit` the body of a scan, too, is called with numbers, once for each turn.
        """
        token = _CALIBRATION.set(self)
        try:
            with jax.disable_jit():
                call()
        finally:
            _CALIBRATION.reset(token)

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method of a module, whose own products are told of under its path."""
        outer, self._path = self._path, call.path
        try:
            return next_fun(*args, **kwargs)
        finally:
            self._path = outer

    def add(self, x: jax.Array, axes: tuple[int, ...]) -> None:
        """Takes the input of a product into account."""
        if isinstance(x, Tracer):
            self._traced[self._path] = None
        elif x.size:
            self.layers.setdefault(self._path, InputStatistics(self._path)).add(x, axes)

    @property
    def unseen(self) -> list[str]:
        """The layers whose inputs never had numbers."""
        return [path for path in self._traced if path not in self.layers]


def observe_input(x: jax.Array, axes: tuple[int, ...]) -> None:
    """Tells the calibration that is being made, if there is one, what enters a product.

    Args:
      x: the left operand of an integer product.
      axes: those that are summed over, which share a scale.
    """
    calibration = _CALIBRATION.get()
    if calibration is not None:
        calibration.add(x, axes)
