"""Policies with float64 parameters on layers of Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from programs import products, walk

import jmp_policy as jmp

MIXED = "params=float64,compute=float32,output=float64"
X = np.linspace(-1.0, 1.0, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def _x64():
    # Norms of Flax multiply statistics in float32 by a scale in float64.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def make_model(api):
    @api.module(body=api.dense, norm=api.norm, head=api.dense)
    class Model:
        def __call__(self, x):
            return self.head(jnp.tanh(self.norm(self.body(x))))

    return Model


def list_dtypes(api, policy):
    """The dtypes of the matmuls, of the reductions of the norm, and of the output."""
    model = api.under(make_model(api), policy)
    program = api.trace(model, X)
    sums = {str(step.results[0].aval.dtype) for step in walk(program.jaxpr) if step.name == "reduce_sum"}
    return [dtype for _, dtype in products(program)], sums, str(api.run(model, X).dtype)


def test_layers_store_float64_and_compute_in_the_compute_dtype(api):
    assert list_dtypes(api, MIXED) == (["float32", "float32"], {"float32"}, "float64")
    stored = api.find_stored_dtypes(api.under(make_model(api), MIXED), X)
    assert set(stored.values()) == {"float64"}
    assert len(stored) == 6


@pytest.mark.parametrize(("path", "matmuls", "sums"), [("head", ["float32", "float64"], "float32"),
                                                       ("norm", ["float32", "float32"], "float64")])  # fmt: skip
def test_a_map_keeps_a_layer_in_float64(api, path, matmuls, sums):
    assert list_dtypes(api, jmp.PolicyMap({path: "float64"}, MIXED)) == (matmuls, {sums}, "float64")


def test_without_x64_it_is_an_error(api):
    model = api.under(make_model(api), MIXED)
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"^The policy 'params=float64,.*jax_enable_x64', True"):
        api.call(model, X)


def test_predict_by_with_policy_finds_what_overflows_float32():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="large", kernel_init=nn.initializers.constant(1e30))(x)
            return jnp.tanh(nn.Dense(4, name="larger", kernel_init=nn.initializers.constant(1e30))(x))

    model = jmp.with_policy(Model(), "float64")
    variables = model.init(jax.random.key(0), X + 2)
    _, stats = jmp.numerics.collect(Model().apply, ["float32"], where="all")(variables, X + 2)
    prediction = jmp.numerics.predict(stats, MIXED, by="with_policy")
    assert prediction.culprits == ("larger", "")
    assert {reason.cure for reason in prediction.reasons} == {"float64"}
