"""Names that changed: the error tells the new one."""

import flax.linen as nn
import optax
import pytest
from flax import nnx

import jmp_policy as jmp

SCALE = jmp.NoOpLossScale()


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        (jmp.optim, "check", "optim.raise_if_stuck"),
        (jmp.optim, "ProvenanceState", "optim.NonfiniteOriginState"),
        (jmp.numerics, "Provenance", "numerics.NonfiniteOrigin"),
        (jmp.nnx, "set_rounding", "nnx.set_rounding_rngs"),
        (jmp.quant, "take", "quant.embedding_lookup"),
    ],
)
def test_an_old_name_is_answered_with_the_new_one(package, old, new):
    with pytest.raises(AttributeError, match=rf"has no attribute '{old}'\. It is jmp_policy\.{new}\."):
        getattr(package, old)
    assert callable(getattr(package, new.split(".")[1]))


@pytest.mark.parametrize(
    ("call", "old", "new"),
    [
        (lambda: jmp.with_policy(nn.Dense(2), "bfloat16", keep=["x"]), "keep", "no_cast"),
        (lambda: jmp.optim.loss_scaled(optax.sgd(1.0), SCALE, provenance=True), "provenance", "debug_nonfinite"),
        (lambda: jmp.optim.skip_nonfinite(optax.sgd(1.0), provenance=True), "provenance", "debug_nonfinite"),
        (lambda: jmp.value_and_grad(sum, loss_scale=SCALE, strict=False), "strict", "on_opaque"),
        (lambda: jmp.grad(sum, loss_scale=SCALE, strict=False), "strict", "on_opaque"),
        (lambda: jmp.nnx.value_and_grad(nnx.Dict, loss_scale=SCALE, strict=False), "strict", "on_opaque"),
        (lambda: jmp.nnx.grad(nnx.Dict, loss_scale=SCALE, strict=False), "strict", "on_opaque"),
        (lambda: jmp.optim.minimize(sum, optax.sgd(1.0), strict=False), "strict", "on_opaque"),
    ],
)
def test_an_old_argument_is_answered_with_the_new_one(call, old, new):
    with pytest.raises(TypeError, match=rf"has no argument '{old}'\. Its name is: {new}"):
        call()


@pytest.mark.parametrize("make", [jmp.value_and_grad, jmp.nnx.grad])
def test_only_two_answers_to_an_opaque_op_are_known(make):
    with pytest.raises(ValueError, match="on_opaque must be 'error' or 'warn', got False"):
        make(sum, loss_scale=SCALE, on_opaque=False)
