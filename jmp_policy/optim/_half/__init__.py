"""Optimizers for half-precision parameters."""

from ._half_parameters import Storage as Storage
from ._kahan import COMPENSATED as COMPENSATED, KahanState as KahanState, kahan as kahan
from ._master_params import master_params as master_params, with_master_params as with_master_params
from ._master_weights import (
    COPIES as COPIES,
    SPLIT as SPLIT,
    MasterWeightsState as MasterWeightsState,
    SplitWeightsState as SplitWeightsState,
    master_weights as master_weights,
)
from ._stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
    check_key as check_key,
    stochastic_rounding as stochastic_rounding,
)
