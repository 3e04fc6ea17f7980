"""Programs on small meshes, and what is counted of their collectives."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

from jmp_policy.numerics import collectives

AUTO = AxisType.Auto
DATA = make_mesh((4,), ("data",), axis_types=(AUTO,))
GRID = make_mesh((2, 2), ("data", "model"), axis_types=(AUTO, AUTO))
BOTH_WAYS = pytest.mark.parametrize("compiled", [True, False])


def array(shape, mesh, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def on_each(fun, mesh=DATA):
    """A function of the part that each device has."""
    return jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)


def summary(report):
    return [(row.kind, row.dtype, row.axes, row.shape, row.direction, row.count) for row in report.rows]


def loss_of_mlp(params, x):
    x = x.astype(jnp.bfloat16)
    with jax.named_scope("up"):
        x = jax.nn.relu(x @ params["up"].astype(jnp.bfloat16))
    with jax.named_scope("down"):
        x = x @ params["down"].astype(jnp.bfloat16)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def grads_of_mlp(mesh, up, down):
    params = {"up": array((8, 16), mesh, *up), "down": array((16, 8), mesh, *down)}
    shardings = jax.tree.map(lambda param: param.sharding, params)
    step = jax.jit(jax.value_and_grad(loss_of_mlp), out_shardings=(None, shardings))
    return collectives(step)(params, array((32, 8), mesh, "data"))
