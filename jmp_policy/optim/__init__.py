"""Optimizers in mixed precision: skipping non-finite steps, and training half-precision parameters.

Non-finite steps:

- `loss_scaled` carries a loss scale and skips steps; its state is a `LossScaledState`.
- `skip_nonfinite` skips steps without a scale.
- `step` updates and applies, `minimize` builds a whole training step.
- `raise_if_stuck` raises an error if training is stuck.
- `find_origin` finds the origin of a skipped step on the host, as a `SkippedStep`.

Gradients:

- `accumulate` sums microbatches, `global_norm` measures, `clip_by_global_norm` clips; `sharding.pmean` averages.

Half-precision parameters:

- `master_weights` keeps float32 copies or the missing bits, `kahan` compensates rounding, `stochastic_rounding` rounds
  at random.
- `master_params` and `with_master_params` read and write the float32 values.
- `cast_state` stores moments in other dtypes, `quantize_state` in 8 bits. `state_report` lists the bytes of moments, a
  `MomentRow` each.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily
from ._steps import (
    LossScaledState as LossScaledState,
    SkippedStep as SkippedStep,
    accumulate as accumulate,
    clip_by_global_norm as clip_by_global_norm,
    find_origin as find_origin,
    global_norm as global_norm,
    loss_scaled as loss_scaled,
    minimize as minimize,
    raise_if_stuck as raise_if_stuck,
    skip_nonfinite as skip_nonfinite,
    step as step,
)

if _typing.TYPE_CHECKING:
    from ._half import (
        KahanState as KahanState,
        MasterWeightsState as MasterWeightsState,
        SplitWeightsState as SplitWeightsState,
        StochasticRoundingState as StochasticRoundingState,
        kahan as kahan,
        master_params as master_params,
        master_weights as master_weights,
        stochastic_rounding as stochastic_rounding,
        with_master_params as with_master_params,
    )
    from ._moments import (
        QuantizedMomentsState as QuantizedMomentsState,
        cast_state as cast_state,
        quantize_state as quantize_state,
    )
    from ._state_report import MomentRow as MomentRow, StateReport as StateReport, state_report as state_report
else:  # most training loops need only the steps
    _SOURCES = {
        "_half": "KahanState MasterWeightsState SplitWeightsState StochasticRoundingState kahan master_params "
        "master_weights stochastic_rounding with_master_params",
        "_moments": "QuantizedMomentsState cast_state quantize_state",
        "_state_report": "MomentRow StateReport state_report",
    }
    __getattr__, __dir__ = _load_lazily(
        __name__,
        _SOURCES,
        globals(),
        unlisted="KahanState LossScaledState MasterWeightsState MomentRow QuantizedMomentsState SkippedStep "
        "SplitWeightsState StateReport StochasticRoundingState",
        elsewhere={"pmean": "sharding.pmean"},
    )
