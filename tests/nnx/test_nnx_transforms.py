"""Policied modules under the transforms of nnx and JAX, and inside those that their own methods use."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, Net, X, is_bfloat16, rngs

import jmp_policy as jmp


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_methods_that_are_transforms_keep_parameters_as_they_are_stored(transform):
    class Transformed(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.scale = nnx.Param(jnp.float32(1.001) * jnp.ones(4))

        __call__ = transform(lambda self, x: self.linear(x) * self.scale)

    model = jmp.with_policy(Transformed(rngs=rngs()), BF16_INSIDE)
    before = model.scale[...]
    out = model(X)
    assert is_bfloat16(out)
    np.testing.assert_array_equal(model.scale[...], before, strict=True)  # not rounded on the way back
    assert nnx.grad(lambda m: m(X).sum())(model)["scale"][...].dtype == jnp.float32


def test_intermediates_are_captured():
    class Sower(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = nnx.Param(jnp.ones(4, jnp.float32))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "hidden", x * self.scale)
            return x

    out, captured = nnx.capture(jmp.with_policy(Sower(rngs=rngs()), BF16_INSIDE), nnx.Intermediate)(X)
    assert captured["hidden"].get_value()[0].dtype == jnp.bfloat16
    assert out.dtype == jnp.float32


def test_modes_of_nnx_reach_policied_modules():
    model = jmp.with_policy(nnx.Sequential(nnx.Dropout(0.5, rngs=rngs())), BF16_INSIDE)
    model.eval()
    assert is_bfloat16(model(X))


@pytest.mark.slow
def test_array_references_as_values_of_variables():
    with nnx.var_defaults(ref=True):
        model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
        assert model(X).dtype == jnp.float32
    assert model.scale.read == "bfloat16"
