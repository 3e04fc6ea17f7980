"""The zoo: four devices."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh
from specimen import Zoo

DEVICES = Zoo()

on_devices = functools.partial(DEVICES.specimen, (8, 4), (4, 4))


@functools.cache
def mesh(kind=AxisType.Auto):
    return make_mesh((4,), ("d",), axis_types=(kind,))


def explicit_mesh():
    return jax.set_mesh(mesh(AxisType.Explicit))


ROWS = P("d")


def sharded(fun, out_specs=ROWS, **options):
    return jax.shard_map(fun, mesh=mesh(), in_specs=(ROWS, P()), out_specs=out_specs, **options)


@on_devices()
def psum_unchecked(x, w):
    return sharded(lambda x, w: lax.psum((x @ w).sum(), "d"), P(), check_vma=False)(x, w)


@on_devices()
def collectives(x, w):
    def body(x, w):
        h = x @ w
        gathered = lax.all_gather(h, "d", axis=0, tiled=True)
        scattered = lax.psum_scatter(gathered, "d", scatter_dimension=0, tiled=True)
        return scattered + lax.ppermute(h, "d", [(i, (i + 1) % 4) for i in range(4)]) + lax.pmean(h, "d")

    return sharded(body)(x, w)


@on_devices()
def shard_map_with_control_flow(x, w):
    def body(x, w):
        x = lax.scan(lambda x, _: (jax.nn.relu(x @ w), None), x, None, length=2)[0]
        return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)

    return sharded(body)(x, w)


@on_devices()
def sharding_constraint(x, w):
    return lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh(), P("d"))) @ w


@on_devices()
def jit_with_shardings(x, w):
    rows = NamedSharding(mesh(), P("d"))
    product = jax.jit(jnp.matmul, in_shardings=(rows, NamedSharding(mesh(), P())), out_shardings=rows)
    return jnp.exp(product(x, w))


@on_devices(context=explicit_mesh)
def explicit_sharding(x, w):
    h = jnp.tanh(jax.sharding.reshard(x, P("d")) @ w)
    return jax.sharding.reshard(h, P()), jnp.exp(h).sum()


@on_devices(context=explicit_mesh)
def shard_map_on_an_explicit_mesh(x, w):
    body = jax.shard_map(lambda x, w: lax.psum(x @ w, "d"), in_specs=(P("d"), P()), out_specs=P())
    return body(jax.sharding.reshard(x, P("d")), w)
