"""`gather_params` on explicit axes of a mesh, where arrays say themselves how they are sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from test_gather_params import GRADIENT_BOUND

import jmp_policy as jmp

POLICY = "params=float32,compute=bfloat16,output=float32,reduce=float32"
SPECS = {"w": P("d", None), "v": P(None, "d"), "table": P("d", None), "b": P("d")}
IDS = np.arange(8) % 4


def make_explicit(*names):
    return make_mesh((4,) * len(names), names, axis_types=(AxisType.Explicit,) * len(names))


def make_params():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"w": (8, 16), "v": (16, 8), "table": (4, 8), "b": (16,)}
    return {name: jax.random.normal(key, shapes[name]) / 4 for name, key in zip(SPECS, keys, strict=True)}


def loss_fn(params, ids, x):
    half = {name: p.astype(jnp.bfloat16) for name, p in params.items()}
    looked_up = half["table"].at[ids].get(out_sharding=jax.typeof(x).sharding)
    h = (x.astype(jnp.bfloat16) + looked_up) @ half["w"] + half["b"]
    return jnp.mean((jax.nn.relu(h) @ half["v"] @ half["w"]).astype(jnp.float32) ** 2)


def loss_of_shards(shards, ids, x):
    fun = lambda params: loss_fn(params, ids, x)
    return fun(jmp.sharding.gather_params(shards, POLICY, SPECS, reduce_axes="d", fun=fun))


def place(params, x):
    return jax.device_put((params, IDS, x), (SPECS, P("d"), P("d", None)))


@pytest.mark.slow
def test_gradients_are_those_of_one_device():
    value_and_grad = functools.partial(jmp.value_and_grad, loss_scale=jmp.NoOpLossScale())
    params, x = make_params(), jax.random.normal(jax.random.key(1), (8, 8))
    with jax.set_mesh(make_explicit("d")):
        given = place(params, x)
        loss, grads = jax.jit(value_and_grad(loss_of_shards))(*given)
        assert {name: jax.typeof(grad).sharding.spec for name, grad in grads.items()} == SPECS
    with jax.set_mesh(make_mesh((1,), ("one",), axis_types=(AxisType.Explicit,))):
        expected_loss, expected = jax.jit(jax.value_and_grad(loss_fn))(params, IDS, x)
    assert abs(float(loss) - float(expected_loss)) <= 2.0**-10 * float(expected_loss)
    for grad, right in zip(*map(jax.tree.leaves, jax.device_get((grads, expected))), strict=True):
        assert np.abs(grad - right).max() <= GRADIENT_BOUND * np.abs(right).max()


def test_products_of_gathered_parameters_hand_over_their_sums_in_the_reduce_dtype():
    """The policy is met by the function that takes gradients, whatever JAX knows of arrays that are not reduced yet."""
    params, x = make_params(), jnp.ones((8, 8))
    with jax.set_mesh(make_explicit("d")):
        given = place(params, x)
        grad = jmp.grad(loss_of_shards, loss_scale=jmp.NoOpLossScale())
        program = str(jax.make_jaxpr(grad)(*given))
    assert program.count("platform_index") == 3  # `w` is multiplied twice


def test_an_nnx_layer_trains_on_explicit_axes():
    model = jmp.with_policy(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), POLICY)
    graph, params = nnx.split(model)
    specs = jax.tree.map(lambda p: P("d", None) if p.ndim > 1 else P(), params)
    x = jax.random.normal(jax.random.key(1), (8, 8))

    def loss_of(shards, x):
        fun = lambda params: jnp.sum(nnx.merge(graph, params)(x) ** 2)
        return fun(jmp.sharding.gather_params(shards, POLICY, specs, reduce_axes="d", fun=fun))

    with jax.set_mesh(make_explicit("d")):
        grads = jax.jit(jax.grad(loss_of))(jax.device_put(params, specs), jax.device_put(x, P("d", None)))
        assert jax.typeof(grads.kernel.get_value()).sharding.spec == P("d", None)
    expected = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(x) ** 2))(params)
    for grad, right in zip(*map(jax.tree.leaves, jax.device_get((grads, expected))), strict=True):
        assert np.abs(grad - right).max() <= GRADIENT_BOUND * np.abs(right).max()


def test_an_axis_that_is_not_explicit_is_an_error():
    mesh = make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Explicit, AxisType.Auto))
    text = r"'t' in specs\['w'\] is not an explicit axis of the mesh; these are: 'd'\. Make it explicit, or call"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=text):
        jmp.sharding.gather_params({"w": jnp.ones((4, 4))}, POLICY, {"w": P("d", "t")}, reduce_axes="d")
