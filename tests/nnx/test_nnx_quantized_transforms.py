"""Quantized policies under the transforms of nnx and of JAX: stacks of layers, gradients, meshes, and linen inside."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.quant import quantize

INT8 = "int8(min_size=0)_from_float32"
INT4 = "int4/4(min_size=0)_from_float32"
MXFP8 = "mxfp8/4(min_size=0)_from_float32"
X = jnp.linspace(-1.0, 1.0, 4 * 8).reshape(4, 8)


def waves(key, shape, dtype):
    """Numbers of both signs: to draw them would take a compilation."""
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), dtype)


@pytest.fixture(scope="module")
def layer():
    return nnx.Linear(8, 8, kernel_init=waves, rngs=nnx.Rngs(0))


def stack(layer):
    """Three layers in one, of magnitudes that differ."""
    graphdef, state = nnx.split(layer)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.stack([x, x * 10, -x]), state))


def of_stack(stack, i):
    graphdef, state = nnx.split(stack)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[i], state))


def one_by_one(layers, x):
    for i in range(3):
        x = jnp.tanh(of_stack(layers, i)(x))
    return x


def scanned(layers, x):
    return nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)


def rematerialized(layers, x):
    step = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
    return nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)


def mapped(layers, x):
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, x).sum(0)


def separately(layers, x):
    return sum(of_stack(layers, i)(x) for i in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [INT8, INT4])
def test_a_stack_has_a_scale_for_each_of_its_layers(layer, policy):
    @nnx.jit
    def weights(layer):
        return quantize(stack(layer), policy).kernel[...], quantize(layer, policy).kernel[...]

    of_all, first = weights(layer)
    np.testing.assert_array_equal(of_all.values[0], first.values)
    np.testing.assert_array_equal(of_all.scale[0], first.scale)
    np.testing.assert_allclose(of_all.scale[1], np.asarray(first.scale) * 10, rtol=1e-6)
    assert of_all.shape == (3, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "plain", "policy"),
    [
        (scanned, one_by_one, INT4),
        (rematerialized, one_by_one, INT8),
        (mapped, separately, INT8),
        (rematerialized, one_by_one, MXFP8),
        (mapped, separately, MXFP8),
        (scanned, one_by_one, "nvfp4/4(min_size=0)_from_float32"),
    ],
    ids=["scan", "remat", "vmap", "remat in blocks", "vmap in blocks", "scan in nvfp4"],
)
def test_a_transformed_stack_computes_and_learns_as_its_layers_do(layer, run, plain, policy):
    @nnx.jit
    def values_and_grads(layers):
        loss_of = lambda run: lambda model: jnp.mean(run(model, X) ** 2)
        trained, quantized = jmp.with_policy(layers, policy), quantize(layers, policy)
        both = [nnx.value_and_grad(loss_of(run))(trained), nnx.value_and_grad(loss_of(plain))(trained)]
        return both, loss_of(run)(quantized)

    ((value, grads), (plain_value, plain_grads)), quantized_value = values_and_grads(stack(layer))
    np.testing.assert_allclose(value, plain_value, rtol=1e-6)
    np.testing.assert_allclose(value, quantized_value, rtol=1e-6)
    np.testing.assert_allclose(grads.kernel[...], plain_grads.kernel[...], rtol=1e-5, atol=1e-6)
    assert np.asarray(grads.kernel[...]).any(axis=(1, 2)).all()


def on_mesh(model, split, x_spec, out_spec, gather=lambda x: x):
    """The output of a model on 4 devices, of whose weights `split` tells the parts."""
    graphdef, state = nnx.split(model)
    mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    run = lambda state, x: gather(nnx.merge(graphdef, state)(x))
    specs = jax.tree.map(split, state)
    return jax.shard_map(run, mesh=mesh, in_specs=(specs, x_spec), out_specs=out_spec)(state, X)


@pytest.mark.slow
def test_devices_with_parts_of_a_weight_compute_what_one_does():
    rows, columns = PartitionSpec("d"), PartitionSpec(None, "d")
    of_inputs = lambda leaf: rows if leaf.shape[0] > 1 else PartitionSpec()
    of_outputs = lambda leaf: PartitionSpec(*[None] * (leaf.ndim - 1), "d")
    policy = "int4/2(min_size=0)_from_float32"  # of whose blocks each device has whole ones

    @nnx.jit
    def outputs(layer):
        models = jmp.with_policy(layer, policy), quantize(layer, policy)
        sum_up = lambda x: jax.lax.psum(x, "d")
        return models[1](X), [
            out
            for model in models
            for out in (
                on_mesh(model, lambda leaf: PartitionSpec(), rows, rows),
                on_mesh(model, of_outputs, PartitionSpec(), columns),
                on_mesh(model, of_inputs, columns, PartitionSpec(), sum_up),
            )
        ]

    expected, found = outputs(nnx.Linear(8, 8, kernel_init=waves, use_bias=False, rngs=nnx.Rngs(0)))
    assert len(found) == 6
    for out in found:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("attach", [jmp.with_policy, quantize])
def test_an_embedding_is_sharded_as_it_is_told(attach):
    tokens, seen = jnp.arange(8), []

    def outputs(embed):
        embed = attach(embed, INT8)
        seen.extend(map(jax.typeof, (embed(tokens, out_sharding=rows), embed.attend(X, out_sharding=rows))))

    rows = PartitionSpec("d")
    with jax.set_mesh(make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))):
        nnx.eval_shape(outputs, nnx.Embed(8, 8, embedding_init=waves, rngs=nnx.Rngs(0)))
    assert [(out.shape, out.sharding.spec[0]) for out in seen] == [((8, 8), "d"), ((4, 8), "d")]


@pytest.mark.slow
def test_linen_and_nnx_in_one_another_are_given_the_policy():
    @jax.jit
    def outputs(params, x):
        apply = jmp.with_policy(nn.Dense(8), INT8).apply
        inside_linen = nnx.bridge.to_linen(jmp.with_policy(nnx.Linear, INT8), 8, 8)
        inside_nnx = nnx.bridge.ToNNX(nn.Dense(8), rngs=nnx.Rngs(0)).lazy_init(x)
        nnx.update(inside_nnx, params)
        by_linen, by_bridge = apply({"params": params}, x), inside_linen.apply({"params": params}, x)
        return by_linen, by_bridge, jmp.with_policy(inside_nnx, INT8)(x)

    params = {"kernel": waves(None, (8, 8), jnp.float32), "bias": jnp.zeros(8)}
    by_linen, inside_linen, inside_nnx = outputs(params, X)
    np.testing.assert_array_equal(inside_linen, by_linen, strict=True)
    np.testing.assert_array_equal(inside_nnx, by_linen, strict=True)
    assert (np.asarray(by_linen) != np.asarray(X @ params["kernel"])).any()
