"""Optimizers for half-precision parameters."""

from ._half_parameters import Storage as Storage, widen_half as widen_half
from ._master_weights import (
    COPIES as COPIES,
    SPLIT as SPLIT,
    MasterWeightsState as MasterWeightsState,
    SplitWeightsState as SplitWeightsState,
    master_params as master_params,
    master_weights as master_weights,
    with_master_params as with_master_params,
)
from ._stochastic_rounding import (
    COMPENSATED as COMPENSATED,
    KahanState as KahanState,
    StochasticRoundingState as StochasticRoundingState,
    check_key as check_key,
    fold_in_devices as fold_in_devices,
    kahan as kahan,
    stochastic_rounding as stochastic_rounding,
)
