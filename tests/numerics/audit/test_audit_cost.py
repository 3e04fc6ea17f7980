"""What an audit counts is what XLA counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from planted import f32

import jmp_policy as jmp
from benchmarks._targets import cpu


def convolved(x, w, strides=(1, 1), padding="SAME", **kwargs):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **kwargs)


def gradients(fun):
    return jax.grad(lambda *args: jnp.sum(fun(*args)), argnums=(0, 1))


def layers(x, w):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


IMAGE, KERNEL = f32(2, 9, 9, 8), f32(3, 3, 8, 16)
MATMUL_DOMINATED = {
    "dense": (jnp.matmul, f32(64, 128), f32(128, 96)),
    "strided convolution": (lambda x, w: convolved(x, w, (2, 2)), IMAGE, KERNEL),
    "dilated convolution": (lambda x, w: convolved(x, w, rhs_dilation=(2, 2)), IMAGE, KERNEL),
    "convolution backward": (gradients(lambda x, w: convolved(x, w, (2, 2))), IMAGE, KERNEL),
    "groups of a batch": (lambda x, w: convolved(x, w, batch_group_count=4), f32(8, 9, 9, 8), KERNEL),
    "grouped backward": (
        gradients(lambda x, w: convolved(x, w, feature_group_count=4)), f32(2, 9, 9, 32), f32(3, 3, 8, 32)
    ),
}  # fmt: skip


def windows(operation, initial, strides=(1, 1), padding="VALID", dilation=(1, 1)):
    sizes = {"window_dimensions": (1, 4, 4, 1), "window_strides": (1, *strides, 1)}
    dilations = {"base_dilation": (1, *dilation, 1), "window_dilation": (1, *dilation, 1)}
    return lambda x: lax.reduce_window(x, np.float32(initial), operation, padding=padding, **sizes, **dilations)


def multiply_and_add(x, y):
    return x * y + 1.0


REDUCTIONS = {
    "sum of windows": windows(lax.add, 0),
    "maximum of windows": windows(lax.max, -np.inf),
    "padded sum of windows": windows(lax.add, 0, (2, 2), "SAME"),
    "dilated sum of windows": windows(lax.add, 0, (2, 2), "SAME", (2, 2)),
    "product of windows": windows(lax.mul, 1),
    "windows and a function": windows(multiply_and_add, 1),
    "reduction by a function": lambda x: lax.reduce(x, np.float32(1), multiply_and_add, (1, 2)),
    "max pooling forward": lambda x: jax.jvp(lambda x: nn.max_pool(x, (3, 3), (2, 2)), (x,), (x,))[1],
    "max pooling backward": jax.grad(lambda x: jnp.sum(nn.max_pool(x, (3, 3), (2, 2)))),
}


def counted_by_xla(fun, *args):
    return jax.jit(fun).lower(*cpu().put(args)).cost_analysis()["flops"]


@pytest.mark.parametrize("name", MATMUL_DOMINATED)
def test_flops_are_those_of_xla(name):
    fun, *args = MATMUL_DOMINATED[name]
    assert jmp.numerics.audit(fun)(*args).flops == pytest.approx(counted_by_xla(fun, *args), rel=0.02)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_flops_of_reductions_are_those_of_xla(name):
    fun, x = REDUCTIONS[name], f32(1, 17, 17, 16)
    assert jmp.numerics.audit(fun)(x).flops == pytest.approx(counted_by_xla(fun, x), rel=0.005)


@pytest.mark.parametrize("fun", [layers, gradients(layers)], ids=["forward", "backward"])
def test_scan_counts_every_turn(fun):
    args = f32(64, 64), f32(5, 64, 64)
    by_hand = 5 * 2 * 64**3 * (1 if fun is layers else 3)
    matmuls = jmp.numerics.audit(fun)(*args).matmuls
    assert sum(matmul.flops for matmul in matmuls) == by_hand


def test_ragged_matmul_counts_each_row_once():
    args = f32(12, 8), f32(3, 8, 5), jax.ShapeDtypeStruct((3,), jnp.int32)
    ragged = jmp.numerics.audit(lax.ragged_dot)(*args)
    both = jmp.numerics.audit(jax.grad(lambda x, w, sizes: jnp.sum(lax.ragged_dot(x, w, sizes)), argnums=(0, 1)))(*args)
    assert ragged.flops == 2 * 12 * 8 * 5
    assert sum(matmul.flops for matmul in both.matmuls) == 2 * ragged.flops  # of the sum, only gradients are live


def test_shard_map_counts_all_devices():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec)
    assert jmp.numerics.audit(jax.jit(mapped))(f32(4, 8), f32(8, 2)).matmuls[0].flops == 2 * 4 * 8 * 2


def test_bytes_are_those_of_operands_and_results():
    report = jmp.numerics.audit(lambda x, w: x @ w)(f32(4, 8), f32(8, 2))
    assert report.bytes == 4 * (4 * 8 + 8 * 2 + 4 * 2)
