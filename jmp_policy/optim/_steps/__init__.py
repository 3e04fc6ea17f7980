"""Optimizer steps that skip non-finite gradients."""

from ._gradients import (
    accumulate as accumulate,
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
)
from ._loss_scaled import loss_scaled as loss_scaled, skip_nonfinite as skip_nonfinite
from ._minimize import minimize as minimize
from ._skipped_step import SkippedStep as SkippedStep, find_origin as find_origin, raise_if_stuck as raise_if_stuck
from ._step import (
    fill_zeros as fill_zeros,
    keep_dtypes as keep_dtypes,
    overwrite_state as overwrite_state,
    step as step,
    warn_of_half_params as warn_of_half_params,
)
from ._transformation import (
    LossScaledState as LossScaledState,
    ParameterUpdate as ParameterUpdate,
    Transformation as Transformation,
    check_not_loss_scaled as check_not_loss_scaled,
    check_not_outermost as check_not_outermost,
    check_transformation as check_transformation,
    with_extra_args as with_extra_args,
)
