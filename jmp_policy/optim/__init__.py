"""Optimizers in mixed precision: skipping non-finite steps, and training half-precision parameters.

Non-finite steps:

- `loss_scaled` carries a loss scale and skips steps; its state is a `LossScaledState`. - `skip_nonfinite` skips steps
without a scale. - `step` updates and applies, `minimize` builds a whole training step. - `check` raises an error if
training is stuck. - `last_skip` returns the last skipped step and its cause, a `SkippedStep`, from a `ProvenanceState`.

Gradients:

- `accumulate` sums microbatches, `pmean` averages over devices, `global_norm` measures, `clip_by_global_norm` clips.

Half-precision parameters:

- `master_weights` keeps float32 copies (`MasterWeightsState`), or the missing bits (`SplitWeightsState`). - `kahan`
compensates rounding (`KahanState`), `stochastic_rounding` rounds at random (`StochasticRoundingState`). -
`master_params` and `with_master_params` read and write their float32 values. - `cast_state` stores moments in other
dtypes, `quantize_state` in 8 bits (`QuantizedMomentsState`). - `state_report` lists the bytes of moments: a
`StateReport` with a `MomentRow` for each.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily
from ..loss_scale import LossScaledState as LossScaledState
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
from ._steps import (
    ProvenanceState as ProvenanceState,
    SkippedStep as SkippedStep,
    accumulate as accumulate,
    check as check,
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
    last_skip as last_skip,
    loss_scaled as loss_scaled,
    minimize as minimize,
    pmean as pmean,
    skip_nonfinite as skip_nonfinite,
    step as step,
)

if _typing.TYPE_CHECKING:
    from ._state_report import MomentRow as MomentRow, StateReport as StateReport, state_report as state_report
else:  # loads the package that draws tables
    __getattr__, __dir__ = _load_lazily(__name__, {"_state_report": "MomentRow StateReport state_report"}, globals())
