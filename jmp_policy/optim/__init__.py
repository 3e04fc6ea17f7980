"""Optimizers in mixed precision: skipping what overflowed, and training parameters that are half precision."""

from .._scaled_state import LossScaledState as LossScaledState
from ._cast_state import cast_state as cast_state
from ._combine import accumulate as accumulate, global_norm as global_norm, pmean as pmean
from ._kahan import KahanState as KahanState, kahan as kahan
from ._loss_scaled import check as check, loss_scaled as loss_scaled, skip_nonfinite as skip_nonfinite
from ._master_params import master_params as master_params, with_master_params as with_master_params
from ._master_weights import (
    MasterWeightsState as MasterWeightsState,
    SplitWeightsState as SplitWeightsState,
    master_weights as master_weights,
)
from ._minimize import minimize as minimize
from ._step import step as step
from ._stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
    stochastic_rounding as stochastic_rounding,
)
