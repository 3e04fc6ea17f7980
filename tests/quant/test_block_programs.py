"""What programs say of products in blocks: exports for accelerators, and everything here that reads programs."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_policy as jmp
from jmp_policy import numerics, quant

FORMATS = {"mxfp8(min_size=0)": "f8E4M3FN", "nvfp4(min_size=0)": "f4E2M1FN"}
"""The names of the formats, and of what StableHLO calls their numbers."""

KEYS = [("up", "forward"), ("down", "forward"), ("down", "backward"), ("up", "backward")]
"""The layers and passes of the products: the first layer has no gradient of its input."""


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="down")(nn.relu(nn.Dense(64, name="up")(x)))


def make_step(format):
    """Loss and gradients of a model, with their arguments."""
    model = jmp.with_policy(MLP(), f"{format}_from_mixed_bfloat16")
    x = jax.random.normal(jax.random.key(0), (32, 32))
    params = model.init(jax.random.key(1), x)["params"]

    def loss_fn(params, x):
        return jnp.mean(jnp.square(model.apply({"params": params}, x).astype(jnp.float32) - 1))

    return loss_fn, (params, x)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "platform"), list(zip(FORMATS, ["tpu", "cuda"], strict=True)))
def test_a_step_exports_with_three_products_of_narrow_numbers_for_each_layer(format, platform):
    loss_fn, args = make_step(format)
    grads_of_all = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1)))
    text = jax.export.export(grads_of_all, platforms=[platform])(*args).mlir_module()
    products = re.findall(r'stablehlo\.composite "xla\.scaled_dot".*: \((.*)\) ->', text)
    assert len(products) == 3 * 2
    for operands in products:
        left, right, *scales = re.findall(r"x([a-z]\w*)>", operands)
        assert left == right == FORMATS[format]
        assert len(set(scales)) == 1
        assert scales[0] == ("f8E8M0FNU" if format.startswith("mx") else "f8E4M3FN")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_an_audit_counts_the_products_and_finds_nothing(format):
    loss_fn, args = make_step(format)
    report = numerics.audit(jax.value_and_grad(loss_fn))(*args)
    dtype = "float8_e4m3fn" if format.startswith("mx") else "float4_e2m1fn"
    found = {(matmul.path, matmul.backward): matmul for matmul in report.matmuls}
    assert [found[path, direction == "backward"].count for path, direction in KEYS] == [1, 1, 2, 1]
    assert {(matmul.operation, matmul.dtypes) for matmul in report.matmuls} == {("scaled_dot", (dtype,))}
    assert {matmul.flops for matmul in report.matmuls if matmul.count == 1} == {2 * 32 * 32 * 64}
    assert not report.findings


@pytest.mark.slow
def test_a_nan_is_followed_through_blocks_to_where_it_began():
    """Four bits have no nan: it is in the scale, which is made of the bits of the largest magnitude."""
    loss_fn, (params, x) = make_step("nvfp4(min_size=0)")
    origin = numerics.first_nonfinite(loss_fn)(params, x.at[0, 0].set(jnp.nan))[1]
    assert "argument `x`" in str(origin)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "computed"), [("nvfp4", ("float4_e2m1fn", "bfloat16")), ("mxfp8(activations=false)", ("bfloat16",))]
)
def test_explain_shows_what_layers_compute_in_and_no_conversions(format, computed):
    layer = jmp.with_policy(nn.Dense(64), f"{format}_from_mixed_bfloat16")
    (row,) = jmp.explain(layer, jax.ShapeDtypeStruct((4, 64), jnp.float32)).rows
    assert row.compute_dtypes == computed


def test_a_gradient_of_a_product_in_blocks_counts_as_one_where_devices_sum_it():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    format = quant.MXFP8(min_size=0)

    def of_device(w, x):
        loss = lambda w: jnp.sum(quant.einsum("ab,bc->ac", x, w, quantization=format))
        return jax.lax.pmean(jax.grad(loss)(jax.lax.pcast(w, "data", to="varying")), "data")

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    step = jax.jit(jax.shard_map(of_device, mesh=mesh, **specs))
    shapes = jax.ShapeDtypeStruct((32, 32), jnp.bfloat16), jax.ShapeDtypeStruct((128, 32), jnp.bfloat16)
    report = numerics.collectives(step)(*shapes)
    assert [row.is_gradient for row in report.rows] == [True]
    report.assert_reduced_in("bfloat16")
