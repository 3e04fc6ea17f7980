"""Loss scales, finding one in a state, and checks for finite gradients."""

from ._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    LossScale as LossScale,
    NoOpLossScale as NoOpLossScale,
    StaticLossScale as StaticLossScale,
    register_loss_scales as register_loss_scales,
    spell_settings as spell_settings,
)
from ._scaled_state import (
    ScaledState as ScaledState,
    SkippingState as SkippingState,
    all_finite as all_finite,
    find_nodes as find_nodes,
    find_scaled_state as find_scaled_state,
    get_loss_scale as get_loss_scale,
    has_scaled_state as has_scaled_state,
    list_skipping as list_skipping,
    metrics as metrics,
    select_tree as select_tree,
    stays_finite as stays_finite,
    strip_variables as strip_variables,
    was_step_taken as was_step_taken,
)
