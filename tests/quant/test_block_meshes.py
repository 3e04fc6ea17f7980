"""Products of numbers in blocks on several devices: what they compute there, and what devices send each other."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy import quant

MXFP8, NVFP4 = quant.MXFP8(min_size=0), quant.NVFP4(min_size=0)
FORMATS = [MXFP8, NVFP4]

MESHES = {
    "data": ((4,), ("data",), {}, P("data")),
    "fsdp": ((4,), ("fsdp",), {"up": P("fsdp"), "down": P("fsdp")}, P("fsdp")),
    "data and fsdp": ((2, 2), ("data", "fsdp"), {"up": P("fsdp"), "down": P("fsdp")}, P(("data", "fsdp"))),
    "tensor": ((4,), ("tensor",), {"up": P(None, "tensor"), "down": P("tensor")}, P()),
}
"""Sizes and names of axes, where the kernels of both layers lie, and the batch."""


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, use_bias=False, name="down")(nn.relu(nn.Dense(128, use_bias=False, name="up")(x)))


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(128, 128, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(128, 32, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def make_linen(format):
    model = jmp.with_policy(MLP(), f"{format}_from_mixed_bfloat16")
    params = model.init(jax.random.key(0), jnp.ones((1, 128)))["params"]
    return params, lambda params, x: model.apply({"params": params}, x)


def make_nnx(format):
    graph, state = nnx.split(jmp.with_policy(NnxMLP(nnx.Rngs(0)), f"{format}_from_mixed_bfloat16"))
    return state, lambda state, x: nnx.merge(graph, state)(x)


def place(params, mesh, specs):
    def put(path, leaf):
        spec = next((spec for name, spec in specs.items() if name in jax.tree_util.keystr(path)), P())
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, params)


def compile_gradients(make, format, mesh_name):
    """Loss and gradients, compiled for a mesh, with their arguments there; and the same on one device."""
    params, call = make(format)
    x = jax.random.normal(jax.random.key(1), (128, 128))

    def loss_fn(params, x):
        return jnp.mean(jnp.square(call(params, x).astype(jnp.float32) - 1))

    sizes, names, specs, batch = MESHES[mesh_name]
    mesh = make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    given = place(params, mesh, specs), jax.device_put(x, NamedSharding(mesh, batch))
    gradients = jax.jit(jax.value_and_grad(loss_fn))
    return gradients.lower(*given).compile(), given, gradients(params, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("make", "mesh_name"), [*((make_linen, name) for name in MESHES), (make_nnx, "data and fsdp")])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_loss_and_gradients_are_those_of_one_device(make, format, mesh_name):
    compiled, given, (loss, grads) = compile_gradients(make, format, mesh_name)
    loss_there, grads_there = compiled(*given)
    # Blocks have the same bits; sums over devices have another order. Where one is at the border of two numbers of
    # bfloat16, what comes after it differs by up to that: measured up to 1.5e-6 in the loss.
    np.testing.assert_allclose(loss_there, loss, rtol=2.0**-18)
    for there, here in zip(*map(jax.tree.leaves, jax.device_get((grads_there, grads))), strict=True):
        assert np.abs(there - here).max() <= 2.0**-8 * np.abs(here).max()


def count_maxima(compiled):
    """How many magnitudes are compared over devices, which are integers: XLA may combine several into one call."""
    calls = re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled.as_text())
    return sum(len(re.findall(r"u32\[", call)) for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_name", "maxima"), [("data", {MXFP8: 0, NVFP4: 6}), ("tensor", {MXFP8: 0, NVFP4: 6})])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_only_the_scale_of_a_tensor_is_one_of_all_devices(format, mesh_name, maxima):
    compiled, *_ = compile_gradients(make_linen, format, mesh_name)
    assert (count_maxima(compiled) >= maxima[format] > 0) if maxima[format] else count_maxima(compiled) == 0


def product(x, w, format, out_sharding=None):
    return quant.einsum("ab,bc->ac", x, w, quantization=format, out_sharding=out_sharding)


def make_operands():
    return jax.random.normal(jax.random.key(2), (64, 64)), jax.random.normal(jax.random.key(3), (64, 96))


def gradients(fun, x, w):
    """The result of a product, and the gradients of a function of it."""
    (_, out), grads = jax.value_and_grad(lambda x, w: (lambda y: (jnp.sum(jnp.sin(y)), y))(fun(x, w)), (0, 1), True)(
        x, w
    )
    return out, *grads


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "out"),
    [
        (P("d"), P(), None),
        (P(), P(None, "t"), None),
        (P("d"), P(None, "t"), None),
        (P("d", "t"), P("t"), P("d")),
    ],
    ids=str,
)
def test_gradients_lie_as_their_operands_where_shardings_are_part_of_types(rows, columns, out, format):
    given = make_operands()
    expected = jax.device_get(jax.jit(functools.partial(gradients, functools.partial(product, format=format)))(*given))
    with jax.set_mesh(make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2)):
        x, w = (jax.device_put(*pair) for pair in zip(given, (rows, columns), strict=True))
        fun = functools.partial(product, format=format, out_sharding=out)
        found = jax.jit(functools.partial(gradients, fun))(x, w)
        y = jax.eval_shape(lambda x, w: quant.einsum("ab,bc->ac", x, w, out_sharding=out), x, w)
        specs = [jax.typeof(each).sharding.spec for each in found]
        assert specs == [each.sharding.spec for each in (y, *map(jax.typeof, (x, w)))]
    for there, here in zip(jax.device_get(found), expected, strict=True):
        # The same blocks, and sums in another order, in float32; where a result moves by that, a block of gradients of
        # it may have another number at a border: measured up to 1.6e-5.
        assert np.abs(there - here).max() <= 2.0**-14 * np.abs(here).max()


@pytest.mark.slow
def test_a_sum_over_devices_needs_a_sharding_of_the_result_as_without_blocks():
    with jax.set_mesh(make_mesh((4,), ("t",), axis_types=(AxisType.Explicit,))):
        x, w = (jax.device_put(*pair) for pair in zip(make_operands(), (P(None, "t"), P("t")), strict=True))
        with pytest.raises(Exception, match="specify the output sharding via the `out_sharding`"):
            jax.jit(functools.partial(product, format=MXFP8))(x, w)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_each_device_multiplies_its_own_rows_in_shard_map(format, is_checked):
    x, w = make_operands()
    mesh = make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def of_device(x, w):
        out, of_x, of_w = gradients(functools.partial(product, format=format), x, w)
        return out, of_x, of_w if is_checked else jax.lax.psum(of_w, "d")  # JAX sums what it knows devices to share

    specs = {"in_specs": (P("d"), P()), "out_specs": (P("d"), P("d"), P())}
    found = jax.jit(jax.shard_map(of_device, mesh=mesh, check_vma=is_checked, **specs))(x, w)
    halves = [gradients(functools.partial(product, format=format), half, w) for half in (x[:32], x[32:])]
    (y, of_x, of_w), (y2, of_x2, of_w2) = jax.device_get(halves)
    np.testing.assert_array_equal(found[0], np.concatenate([y, y2]))
    np.testing.assert_allclose(found[1], np.concatenate([of_x, of_x2]), rtol=2.0**-20, atol=2.0**-20)
    np.testing.assert_allclose(found[2], of_w + of_w2, rtol=2.0**-20, atol=2.0**-18)


def place_dense(kind):
    mesh = make_mesh((4,), ("fsdp",), axis_types=(kind,))
    return {"dense": {"kernel": jax.device_put(jnp.ones((512, 64)), NamedSharding(mesh, P("fsdp")))}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["int4/256", "mxfp8/256"])
def test_blocks_that_devices_cannot_share_are_a_warning_or_an_error_with_a_size_that_fits(format):
    """Each of 8 devices had all of them, as many bytes as the shard of float32 had, without a word."""
    policy, kind = f"{format}_from_mixed_bfloat16", format.partition("/")[0]
    why = rf"its 2 blocks of 256 cannot be split over the 4 devices of 'fsdp'; with '{kind}/128' it is split\.$"
    with pytest.warns(UserWarning, match=rf"^Each device has quantized weights whole, .*: 'dense/kernel': {why}"):
        quant.quantize(place_dense(AxisType.Auto), policy)
    model = nnx.Linear(512, 64, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = place_dense(AxisType.Auto)["dense"]["kernel"]
    with pytest.warns(UserWarning, match=rf"'kernel': {why}"):
        quant.quantize(model, policy)
    with pytest.raises(ValueError, match=rf"^The weight 'dense/kernel' cannot be quantized where it is: {why}"):
        quant.quantize(place_dense(AxisType.Explicit), policy)
    values = quant.quantize(place_dense(AxisType.Auto), f"{kind}/128_from_mixed_bfloat16")["dense"]["kernel"].values
    assert values.sharding.spec == P("fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("spec", [P("t"), P(None, "t")], ids=str)
def test_a_stored_weight_in_parts_multiplies_as_the_whole(format, spec):
    x, w = make_operands()
    stored = quant.quantize({"kernel": w}, f"{format}_from_mixed_bfloat16")["kernel"]
    mesh = make_mesh((2,), ("t",), axis_types=(AxisType.Auto,))
    parts = stored.shard(NamedSharding(mesh, spec))
    for name in ("values", "scale"):  # a whole block and its scale are on one device
        whole, part = getattr(stored, name), getattr(parts, name)
        lengths = zip(part.sharding.shard_shape(whole.shape), whole.shape, strict=True)
        assert [axis for axis, (own, all_) in enumerate(lengths) if own < all_] == [
            0 if spec == P("t") else whole.ndim - 1
        ]
    run = jax.jit(functools.partial(product, format=None))
    here, there = run(x, stored), run(jax.device_put(x, NamedSharding(mesh, P())), parts)
    np.testing.assert_allclose(there, here, rtol=0, atol=2.0**-20 * np.abs(here).max())
