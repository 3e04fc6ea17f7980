"""`force_full_precision` around the layers of Flax that have a policy, and around functions that have one."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from flax_apis import F16_INSIDE, LINEN
from programs import products

import jmp_policy as jmp

X = jnp.full((2, 64), 4.0)
ONE_HOT = lambda key, shape, dtype: jnp.zeros(shape, dtype).at[:, 0].set(2.0)
# One column of 64 is 4 * 2 * 64 = 512, and its square 262,144: over the largest float16, 65,504. The mean is 4,096.
MEAN = 4096.0


def make_dense(api):
    return api.dense(64, 64, kernel_init=ONE_HOT)


def make_model(api):
    @api.module(layer=lambda: make_dense(api))
    class Model:
        def __call__(self, x):
            return jmp.force_full_precision(lambda x: jnp.square(self.layer(x)).mean())(x)

    return Model


class LinenOwnParam(nn.Module):
    @nn.compact
    def __call__(self, x):
        declare = lambda: self.param("kernel", ONE_HOT, (64, 64), jnp.float32)
        return jmp.force_full_precision(lambda a: jnp.square(a @ declare()).mean())(x)


class LinenDerived(nn.Dense):
    def __call__(self, x):
        return jmp.force_full_precision(lambda a: jnp.square(nn.Dense.__call__(self, a)).mean())(x)


class NnxOwnParam(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(ONE_HOT(None, (64, 64), jnp.float32))

    def __call__(self, x):
        return jmp.force_full_precision(lambda a: jnp.square(a @ self.kernel).mean())(x)


def assert_is_in_float32(api, kind, policy):
    model, x = jmp.with_policy(api.make_drawn(kind), policy), X.astype(jnp.float16)
    assert api.call(model, x) == MEAN
    loss = lambda x: api.call(model, x).astype(jnp.float32)
    program = jax.make_jaxpr(jax.grad(loss))(x)
    assert {dtype for _, dtype in products(program)} == {"float32"}
    assert str(program).count("precision=(Precision.HIGHEST, Precision.HIGHEST)") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [F16_INSIDE, jmp.PolicyMap({"layer": "p=f32,c=f16,o=f16"}, F16_INSIDE), "p=f32,c=none,o=none"]
)
def test_layers_inside_compute_in_float32_at_highest_precision(api, policy):
    assert_is_in_float32(api, make_model(api), policy)


@pytest.mark.slow
def test_own_parameters_and_methods_of_a_base_do_too(api):
    linen = [LinenOwnParam, lambda: LinenDerived(64, kernel_init=ONE_HOT)]
    for kind in linen if api is LINEN else [NnxOwnParam]:
        assert_is_in_float32(api, kind, F16_INSIDE)


@pytest.mark.slow
def test_linen_model_in_a_bridge_computes_in_float32_inside():
    model = jmp.with_policy(nnx.bridge.ToNNX(make_model(LINEN)(), rngs=nnx.Rngs(0)).lazy_init(X), F16_INSIDE)
    assert model(X.astype(jnp.float16)) == MEAN


def test_layers_outside_keep_their_policy_when_they_are_jitted_once():
    class Jitted(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.jit(nn.Dense)(64, kernel_init=ONE_HOT)
            return jmp.force_full_precision(lambda a: jnp.square(layer(a)).mean())(x), layer(x)

    wide, narrow = LINEN.call(LINEN.under(Jitted, "p=f32,c=f16,o=none"), X)
    assert (wide, wide.dtype, narrow.dtype) == (MEAN, jnp.float16, jnp.float16)


@pytest.mark.slow
def test_policied_models_inside_compute_and_return_in_float32(api):
    model, x = jmp.with_policy(api.make_drawn(lambda: make_dense(api)), "mixed_float16"), X.astype(jnp.float16)
    assert jmp.force_full_precision(lambda x: jnp.square(api.call(model, x)).mean())(x) == MEAN
    assert api.call(model, x).dtype == jnp.float16  # outside, as its policy says


@pytest.mark.parametrize("policy", ["mixed_float16", "p=f32,c=bf16,o=bf16,a=bf16"])
def test_policied_functions_inside_compute_and_return_in_float32(policy):
    call = jmp.with_policy(lambda x: x @ ONE_HOT(None, (64, 64), x.dtype), policy)
    assert jmp.force_full_precision(lambda x: jnp.square(call(x)).mean())(X.astype(jnp.float16)) == MEAN


def test_authors_dtype_stays_and_float64_is_not_narrowed():
    layer = LINEN.under(lambda: nn.Dense(2, dtype=jnp.bfloat16), "p=f32,c=f16,o=none")
    assert jmp.force_full_precision(lambda x: str(LINEN.run(layer, x).dtype))(X) == "bfloat16"
    with jax.enable_x64(True):
        double = jmp.with_policy(lambda x: x, "float64")
        assert jmp.force_full_precision(lambda x: str(double(x).dtype))(X) == "float64"


def test_explain_shows_the_layers_inside(api):
    rows = jmp.explain(api.under(make_model(api), F16_INSIDE), X)
    row = rows["layer"]
    assert (row.rule, row.compute_dtypes) == ("force_full_precision", ("float32",))
    assert row.policy == jmp.Policy("float32", "float32", "float32", precision="highest")
    assert rows[""].rule == "its own policy"
