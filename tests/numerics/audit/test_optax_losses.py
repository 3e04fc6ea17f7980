"""Every loss of optax is found where it is computed in half precision, and is no finding in float32."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from planted import bf16, f32, ints

from jmp_policy.numerics import audit

NO_LOSSES = {"smooth_labels", "make_fenchel_young_loss"}  # labels; a function that makes a loss
LOSSES = sorted(
    name
    for name, function in vars(optax.losses).items()
    if callable(function) and not name.startswith("_") and name not in NO_LOSSES
)

# The arguments of those that take others than scores and targets of one shape.
ARGUMENTS = {
    "ctc_loss": lambda half: (half(2, 5, 3), half(2, 5), ints(2, 4), half(2, 4)),
    "ctc_loss_with_forward_probs": lambda half: (half(2, 5, 3), half(2, 5), ints(2, 4), half(2, 4)),
    "multiclass_hinge_loss": lambda half: (half(4, 5), ints(4)),
    "multiclass_perceptron_loss": lambda half: (half(4, 5), ints(4)),
    "multiclass_sparsemax_loss": lambda half: (half(4, 5), ints(4)),
    "ntxent": lambda half: (half(4, 5), ints(4)),
    "softmax_cross_entropy_with_integer_labels": lambda half: (half(4, 5), ints(4)),
    "triplet_margin_loss": lambda half: (half(4, 5), half(4, 5), half(4, 5)),
}


def found(name, half):
    loss = getattr(optax.losses, name)
    args = ARGUMENTS.get(name, lambda half: (half(4, 5), half(4, 5)))(half)
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of losses that have got another name
        report = audit(lambda *args: jax.tree.map(lambda x: jnp.sum(x.astype(jnp.float32)), loss(*args)))(*args)
    return {finding.id for finding in report.findings}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_in_half_is_found_and_in_float32_is_not(name):
    assert "half-logits" in found(name, bf16)
    assert found(name, f32) == set()


def test_labels_that_are_smoothed_in_half_are_no_loss():
    assert audit(lambda labels: optax.smooth_labels(labels, 0.1))(bf16(4, 5)).findings == ()
