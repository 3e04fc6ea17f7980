"""Products with an accumulate dtype on several devices, and gradients that are reduced in a dtype of their own."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

WIDE = "p=f32,c=bf16,o=f32,a=f32"
X = jax.random.normal(jax.random.key(0), (8, 4, 32))
KERNELS = {"data": (P(), P()), "fsdp": (P("data"), P("data")), "tensor": (P(None, "data"), P("data"))}


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="down")(nn.relu(nn.Dense(64, name="up")(x)))


MODEL = jmp.with_policy(MLP(), WIDE)
VARIABLES = MLP().init(jax.random.key(1), X)


def loss_fn(variables, x):
    return (MODEL.apply(variables, x) ** 2).mean()


def assert_near(found, wanted, tolerance=5e-3):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= tolerance * np.linalg.norm(np.asarray(b))


def place(mesh, kernels, batch):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    specs = dict(zip(("up", "down"), kernels, strict=True))
    params = {
        name: {"kernel": put(layer["kernel"], specs[name]), "bias": put(layer["bias"], P())}
        for name, layer in VARIABLES["params"].items()
    }
    return {"params": params}, put(X, batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("kernels", ["data", "fsdp"])
def test_gradients_on_a_mesh_are_those_of_one_device(kernels, kind):
    mesh = make_mesh((4,), ("data",), axis_types=(kind,))
    if kind is AxisType.Explicit and kernels == "fsdp":
        pytest.skip("JAX asks where the result of such a product is to lie, and Flax's layers do not say")
    with jax.set_mesh(mesh):
        variables, x = place(mesh, KERNELS[kernels], P("data"))
        value, grads = jax.jit(jax.value_and_grad(loss_fn))(variables, x)
    wanted, wanted_grads = jax.value_and_grad(loss_fn)(VARIABLES, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-3)
    assert_near(grads, wanted_grads)


@pytest.mark.slow
def test_weights_that_devices_share_get_sums_of_float32_in_shard_map():
    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def step(variables, x):
        return jax.lax.pmean(loss_fn(variables, x), "data")

    grads = jax.jit(jax.grad(step))(VARIABLES, X)
    assert_near(grads, jax.grad(loss_fn)(VARIABLES, X))
    program = str(jax.make_jaxpr(jax.grad(step))(VARIABLES, X))
    sums = [line for line in program.splitlines() if "psum" in line and re.search(r"\[(32|64),(64|16)\]", line)]
    assert len(sums) == 2
    assert "bf16[" not in "".join(sums)


def test_gradients_that_are_summed_in_float32_are_reduced_in_it():
    mesh = make_mesh((4,), ("data",))
    reduced = lambda dtype: jax.jit(jmp.value_and_grad(loss_fn, loss_scale=jmp.NoOpLossScale(), reduce_dtype=dtype))
    with jax.set_mesh(mesh):
        variables, x = place(mesh, KERNELS["data"], P("data"))
        _, grads = reduced("float32")(variables, x)
        with pytest.raises(ValueError, match=r"^reduce_dtype='bfloat16' is narrower than the dtype in which these"):
            reduced("bfloat16")(variables, x)
    assert_near(grads, jax.grad(loss_fn)(VARIABLES, X))


@pytest.mark.exhaustive
def test_reports_read_programs_with_unrounded_sums():
    step = jax.value_and_grad(loss_fn)
    audit = jmp.numerics.audit(step)(VARIABLES, X)
    assert "float32-matmul" not in str(audit)
    collected, report = jmp.numerics.collect(step)(VARIABLES, X)
    assert_near(collected[1], step(VARIABLES, X)[1])
    assert "up" in str(report)
