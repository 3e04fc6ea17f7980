"""Optimizers in mixed precision: skipping what overflowed, and saying so when nothing else happens."""

from .._scaled_state import LossScaledState as LossScaledState
from ._check import check as check
from ._loss_scaled import loss_scaled as loss_scaled, skip_nonfinite as skip_nonfinite
from ._step import step as step
