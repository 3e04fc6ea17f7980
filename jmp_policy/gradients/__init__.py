"""Gradients under a loss scale."""

from ._grad import (
    differentiate_scaled as differentiate_scaled,
    drop_value as drop_value,
    grad as grad,
    make_reducer as make_reducer,
    read_scale_at_call as read_scale_at_call,
    scale_loss as scale_loss,
    unscale_grads as unscale_grads,
    value_and_grad as value_and_grad,
    warn_of_half as warn_of_half,
)
