"""Gradients under a loss scale."""

from ._grad import (
    build_value_and_grad as build_value_and_grad,
    check_differentiable as check_differentiable,
    drop_value as drop_value,
    grad as grad,
    scale_loss as scale_loss,
    search_reduce_dtype as search_reduce_dtype,
    unscale_grads as unscale_grads,
    value_and_grad as value_and_grad,
    warn_of_half as warn_of_half,
)
