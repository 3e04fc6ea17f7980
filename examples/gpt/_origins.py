"""Why a run skipped steps that the search for a loss scale does not explain: printed, and kept beside its metrics.

A skipped step leaves the parameters as they were. So another compiled function can find the origin afterwards, from the
same parameters, batch and loss scale, and a run without such steps compiles nothing for it. Within the step, as
`optim.loss_scaled(..., provenance=True)` has it, tracing and compiling would take several times as long.
"""

import math
from typing import Any

import jax

import jmp_policy as jmp
from jmp_policy.numerics import Provenance
from jmp_policy.optim._steps import is_search

from ._display import TrainDisplay
from ._run_folder import MetricsLog
from ._trainer import Trainer, read_scaling_figures


class SkipInspector:
    """Looks at the steps of a run, and finds out why some were skipped.

    Attributes:
      last: the last step that it found out of; `None` if there was none.
    """

    def __init__(self, trainer: Trainer, log: MetricsLog):
        self.last: jmp.optim.SkippedStep | None = None
        self._trainer, self._log = trainer, log
        self._before = read_scaling_figures(trainer)
        self._said = ""

    def look(
        self, step: int, windows: jax.typing.ArrayLike, loss: float, figures: dict[str, Any], display: TrainDisplay
    ) -> None:
        """Looks at a step that was taken or skipped.

        Args:
          step: its number, from 1.
          windows: its batch.
          loss: its loss, of the parameters before it.
          figures: what `read_scaling_figures` returns after it.
          display: where to print.
        """
        before, self._before = self._before, figures
        if figures["skipped_steps"] == before["skipped_steps"] or not self._is_suspect(loss, before["loss_scale"]):
            return
        scale = self._restore_scale(before["loss_scale"])
        origin = self._trainer.find_origin(windows, scale)
        self.last = jmp.optim.SkippedStep(step, origin, is_search(origin, scale))
        self._log.append({"step": step, **describe_origin(origin)})
        if str(origin) != self._said:  # a run that is stuck has one origin for all of its steps
            self._said = str(origin)
            display.note(str(self.last))

    def _is_suspect(self, loss: float, scale: float) -> bool:
        """Whether a smaller loss scale does not help: the forward pass does not see it, or it cannot fall."""
        known = jmp.get_loss_scale(self._trainer.opt_state)
        floor = known.min_loss_scale if isinstance(known, jmp.DynamicLossScale) else math.inf
        return not math.isfinite(loss) or scale <= floor

    def _restore_scale(self, value: float) -> jmp.LossScale:
        """The loss scale that the skipped step had."""
        known = jmp.get_loss_scale(self._trainer.opt_state)
        return jmp.DynamicLossScale(value) if isinstance(known, jmp.DynamicLossScale) else known


def describe_origin(origin: Provenance) -> dict[str, Any]:
    """An origin as a JSON object."""
    names = ("found", "reproduced", "kind", "primitive", "source", "function", "path", "direction", "argument")
    words = {name: getattr(origin, name) for name in names}
    return words | {"turns": list(origin.turns), "description": origin.describe()}
