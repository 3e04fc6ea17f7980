"""`autocast(weights=)` of Equinox and Haiku models, beside their Flax twins."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quantized_models import MLP

from jmp_policy import autocast, explain, with_policy

POLICY = "int8_from_mixed_bfloat16"
STEPS = 200
BATCHES = jax.random.normal(jax.random.key(1), (STEPS, 32, 64))
TARGETS = jnp.tanh(BATCHES @ jax.random.normal(jax.random.key(2), (64, 64)) / 8)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # for the norms of Flax and Haiku
        yield


def list_quantization(fun, *args):
    return {row.path: row.quantization for row in explain(fun, *args).rows}


def train(apply, params, reshape=lambda x: x):
    """Returns the loss of each step."""
    tx = optax.adam(3e-3)

    def step(carry, batch):
        params, opt_state = carry
        x, y = map(reshape, batch)
        loss_fn = lambda params: jnp.mean((apply(params, x).astype(jnp.float32) - y) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    run = jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), (BATCHES, TARGETS))[1])
    return np.array(run(params))


@pytest.mark.slow
def test_an_equinox_model_is_quantized():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Sequential([eqx.nn.Conv2d(64, 64, 3, key=jax.random.key(0)), eqx.nn.Lambda(jnp.ravel)])
    params, static = eqx.partition((model, eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(1))), eqx.is_array)

    def apply(params, images, x):
        convolve, mlp = eqx.combine(params, static)
        return jax.vmap(convolve)(images), jax.vmap(mlp)(x)

    found = list_quantization(autocast(apply, POLICY, weights=0), params, jnp.ones((2, 64, 4, 4)), BATCHES[0])
    assert {name: text for name, text in found.items() if name.endswith("weight")} == {
        "0/0/layers/0/weight": "int8",
        "0/1/layers/0/weight": "int8",
        "0/1/layers/1/weight": "int8",
    }


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "mxfp8"])
def test_an_equinox_mlp_trains_like_its_flax_twin(format):
    """XLA sums in another order over a transposed weight, which may flip the rounding of a later value."""
    eqx, policy = pytest.importorskip("equinox"), f"{format}_from_mixed_bfloat16"
    variables = MLP().init(jax.random.key(0), BATCHES[0])
    layers = [variables["params"][name] for name in ("Dense_1", "Dense_0")]  # the inner one is made last
    mlp = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
    for i, layer in enumerate(layers):
        where = lambda mlp, i=i: (mlp.layers[i].weight, mlp.layers[i].bias)
        mlp = eqx.tree_at(where, mlp, (layer["kernel"].T, layer["bias"]))
    params, static = eqx.partition(mlp, eqx.is_array)
    ours = autocast(lambda params, x: jax.vmap(eqx.combine(params, static))(x), policy, weights=0)
    losses, expected = train(ours, params), train(with_policy(MLP(), policy).apply, variables)
    np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-6 if format == "int8" else 0.03)
    assert losses[-1] < losses[0] / 5


def test_a_haiku_net_is_quantized():
    hk = pytest.importorskip("haiku")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(64)(jax.nn.relu(hk.Conv2D(64, 3)(x)).mean((1, 2)))))
    images = jnp.ones((2, 4, 4, 32))
    params = jax.eval_shape(net.init, jax.random.key(0), images)
    found = list_quantization(autocast(net.apply, POLICY, weights=0), params, images)
    assert found == {"0/conv2_d/w": "int8", "0/linear/w": "int8"}
