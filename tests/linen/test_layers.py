"""Every layer under every policy is the layer with its dtypes written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_layers import LAYERS
from programs import assert_costs_no_more, cost

import jmp_policy as jmp

POLICIES = ["mixed_bfloat16", "mixed_float16", "float32", "params=float32,compute=bfloat16,output=float32"]
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def _programs(name, spec):
    """The layer under a policy and the layer by hand, as functions of variables and inputs."""
    layer, policy = LAYERS[name], jmp.get_policy(spec)
    ours, by_hand = jmp.with_policy(layer.make(None), policy), layer.make(policy.compute_dtype)

    def apply_ours(variables, *inputs):
        return ours.apply(variables, *inputs, mutable=["batch_stats"], rngs=RNGS, **layer.kwargs)

    def apply_by_hand(variables, *inputs):
        out, updated = by_hand.apply(
            variables, *policy.cast_to_compute(inputs), mutable=["batch_stats"], rngs=RNGS, **layer.kwargs
        )
        return policy.cast_to_output(out), updated

    return layer, ours, apply_ours, apply_by_hand


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # norms with dtype=bfloat16 promote their own float32 statistics
        yield


def _identical(ours, by_hand):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), ours, by_hand)


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_the_program_by_hand(name, spec):
    layer, ours, apply_ours, apply_by_hand = _programs(name, spec)
    variables = ours.init(RNGS, *layer.inputs, **layer.kwargs)
    _identical(variables, layer.make(None).init(RNGS, *layer.inputs, **layer.kwargs))
    _identical(jax.jit(apply_ours)(variables, *layer.inputs), jax.jit(apply_by_hand)(variables, *layer.inputs))

    def gradients(apply):
        def loss(params):
            out, _ = apply(variables | {"params": params}, *layer.inputs)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss)

    params = variables.get("params", {})
    assert_costs_no_more(cost(gradients(apply_ours), params), cost(gradients(apply_by_hand), params))
    jax.tree.map(lambda p, g: np.testing.assert_equal(g.dtype, p.dtype), params, gradients(apply_ours)(params))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Dropout"])
def test_parameters_are_drawn_in_the_authors_dtype_and_stored_in_param_dtype(name):
    layer = LAYERS[name]
    model = jmp.with_policy(layer.make(None), "bfloat16")
    plain = layer.make(None).init(RNGS, *layer.inputs, **layer.kwargs)
    variables = jax.jit(lambda: model.init(RNGS, *layer.inputs, **layer.kwargs))()
    _identical(variables.pop("params"), jmp.cast_floating(plain.pop("params"), "bfloat16"))
    _identical(variables, plain)  # running statistics are never narrowed
