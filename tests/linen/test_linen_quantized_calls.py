"""The ways to call linen modules under quantized policies, and the tools that look into them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from programs import products

import jmp_policy as jmp
from jmp_policy import quant

INT8 = "int8(min_size=0)_from_mixed_bfloat16"
KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)


@pytest.fixture(scope="module")
def dense():
    """The variables of a Dense layer, and what it computes with them by itself."""
    variables = jax.jit(nn.Dense(8).init)(KEY, X)
    return variables, nn.Dense(8).apply(variables, X)


@pytest.mark.slow
def test_each_policy_of_one_jitted_function_has_its_own_program(dense):
    variables, plain = dense
    specs = [INT8, "int4/4(min_size=0)_from_float32", "int8(activations=false,min_size=0)_from_float32", "float32"]
    models = [nn.Dense(8), *(jmp.with_policy(nn.Dense(8), spec) for spec in specs)]
    apply = jax.jit(lambda model, variables: model.apply(variables, X), static_argnums=0)
    first, again = ([apply(model, variables) for model in models] for _ in range(2))
    errors = [float(jnp.abs(out.astype(jnp.float32) - plain).max()) for out in first]
    assert errors[0] == errors[4] == 0.0
    assert len({*errors[:4]}) == 4
    assert all((x == y).all() for x, y in zip(first, again, strict=True))


def test_jitted_siblings_have_the_format_of_their_own_rule():
    class Siblings(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(nn.Dense)(8, name="left")(x), nn.jit(nn.Dense)(8, name="right")(x)

    model = jmp.with_policy(Siblings(), jmp.PolicyMap({"left": "mixed_bfloat16"}, INT8))
    variables = jax.eval_shape(model.init, KEY, X)
    found = products(jax.make_jaxpr(model.apply)(variables, X))
    assert [dtype for _, dtype in found] == ["bfloat16", "int8"]


@pytest.mark.exhaustive
def test_attention_decodes_into_its_cache():
    layer = nn.MultiHeadDotProductAttention(2, decode=True)
    model = jmp.with_policy(layer, INT8)
    variables = jax.jit(model.init)(KEY, X)
    step = jax.jit(lambda variables: model.apply(variables, X[:, :1], mutable=["cache"]))
    in_training, quantized = step(variables), step(quant.quantize(variables, INT8))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), in_training, quantized)
    assert quantized[1]["cache"]["cached_key"].dtype == jnp.bfloat16


@pytest.mark.exhaustive
def test_submodule_with_a_policy_of_its_own_is_quantized_alone():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="plain")(jmp.with_policy(nn.Dense(8, name="quantized"), INT8)(x))

    with jax.numpy_dtype_promotion("standard"):  # as everywhere in the code of a model without a policy
        variables = jax.jit(Outer().init)(KEY, X)
    made = quant.quantize(variables, jmp.PolicyMap({"quantized": INT8}, "float32"))
    assert type(made["params"]["plain"]["kernel"]) is type(variables["params"]["plain"]["kernel"])
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(Outer().apply(made, X), Outer().apply(variables, X))


@pytest.mark.slow
def test_audit_shows_integer_products_forward_and_half_ones_backward(dense):
    model = jmp.with_policy(nn.Dense(8), INT8)

    def loss(variables):
        return jnp.sum(model.apply(variables, X).astype(jnp.float32))

    report = jmp.numerics.audit(jax.value_and_grad(loss))(dense[0])
    found = [(matmul.dtypes, matmul.dtype, matmul.backward) for matmul in report.matmuls]
    assert found == [(("int8",), "int32", False), (("bfloat16",), "bfloat16", True)]


@pytest.mark.slow
def test_autocast_around_a_quantized_model_leaves_its_numbers(dense):
    model = jmp.with_policy(nn.Dense(8), INT8)
    for variables in (dense[0], quant.quantize(dense[0], INT8)):
        both = jax.jit(lambda v: (jmp.autocast(model.apply, "mixed_bfloat16")(v, X), model.apply(v, X)))
        np.testing.assert_array_equal(*both(variables))


@pytest.mark.slow
def test_tools_of_flax_work_on_a_quantized_model(dense):
    model = jmp.with_policy(nn.Dense(8), INT8)
    quantized = quant.quantize(dense[0], INT8)
    out, state = model.apply(quantized, X, capture_intermediates=True)
    np.testing.assert_array_equal(state["intermediates"]["__call__"][0], out)
    np.testing.assert_array_equal(model.bind(quantized)(X), out)
    assert "Total Parameters: 72" in model.tabulate(KEY, X)


@pytest.mark.slow
def test_casts_and_checks_of_trees_leave_integers_alone(dense):
    quantized = quant.quantize(dense[0], INT8)
    cast = jmp.get_policy("bfloat16").cast_to_param(quantized)
    kernel = quantized["params"]["kernel"]
    assert cast["params"]["kernel"] is kernel
    assert cast["params"]["bias"].dtype == jnp.bfloat16
    assert bool(jmp.all_finite(quantized))
    assert kernel.nbytes == 8 * 8 + 4 * 8


@pytest.mark.slow
def test_plain_function_under_a_quantized_policy_is_cast_and_no_more():
    with pytest.warns(UserWarning, match="has no effect, because only the layers of a model are quantized"):
        fun = jmp.with_policy(lambda x: x @ x.T, INT8)
    assert fun(X[0]).dtype == jnp.bfloat16
