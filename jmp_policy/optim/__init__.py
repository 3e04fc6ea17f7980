"""Optimizers in mixed precision: skipping what overflowed, and training parameters that are half precision.

Steps that overflow:

- `loss_scaled` carries a loss scale and skips steps; its state is a `LossScaledState`.
- `skip_nonfinite` skips steps without a scale.
- `step` updates and applies, `minimize` makes a whole training step.
- `check` raises when training is stuck.
- `last_skip` says why a step was skipped: a `SkippedStep`. A `ProvenanceState` carries what it needs.

Gradients:

- `accumulate` sums microbatches, `pmean` averages over devices, `global_norm` measures, `clip_by_global_norm` clips.

Half-precision parameters:

- `master_weights` keeps float32 copies (`MasterWeightsState`), or the bits that are missing (`SplitWeightsState`).
- `kahan` compensates rounding (`KahanState`), `stochastic_rounding` rounds by chance (`StochasticRoundingState`).
- `master_params` and `with_master_params` read and write their float32 values.
- `cast_state` stores moments in dtypes of their own, `quantize_state` in 8 bits (`QuantizedMomentsState`).
- `state_report` says what moments take: a `StateReport` with a `MomentRow` for each.
"""

from .._scaled_state import LossScaledState as LossScaledState
from ._cast_state import cast_state as cast_state
from ._check import SkippedStep as SkippedStep, check as check, last_skip as last_skip
from ._combine import (
    accumulate as accumulate,
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
    pmean as pmean,
)
from ._kahan import KahanState as KahanState, kahan as kahan
from ._loss_scaled import loss_scaled as loss_scaled, skip_nonfinite as skip_nonfinite
from ._master_params import master_params as master_params, with_master_params as with_master_params
from ._master_weights import (
    MasterWeightsState as MasterWeightsState,
    SplitWeightsState as SplitWeightsState,
    master_weights as master_weights,
)
from ._minimize import minimize as minimize
from ._provenance import ProvenanceState as ProvenanceState
from ._quantize_state import quantize_state as quantize_state
from ._quantized_update import QuantizedMomentsState as QuantizedMomentsState
from ._state_report import MomentRow as MomentRow, StateReport as StateReport, state_report as state_report
from ._step import step as step
from ._stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
    stochastic_rounding as stochastic_rounding,
)
