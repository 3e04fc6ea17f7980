"""A fault on one of four devices: `first_nonfinite` around a `shard_map` names it as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import FAULTS, assert_is, fault
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

from jmp_policy.numerics import first_nonfinite

X = np.linspace(1, 2, 8, dtype=np.float32)
BAD = np.where(np.arange(8) == 5, -1, X).astype(np.float32)
"""The third of four devices has the negative number."""


def shard(fun):
    def run(*args):
        mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        specs = tuple(P("data") if np.ndim(arg) else P() for arg in args)
        return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("data"))(*args)

    return run


def shard_gradient(fun):
    return jax.value_and_grad(lambda *args: jnp.mean(shard(fun)(*args)))


@fault(BAD, of=shard)
def shard_of_one_device(x):
    return jnp.log(x) + 1  # origin: nan log


@fault(BAD, of=shard)
def shard_of_one_device_before_a_sum_over_all(x):
    y = jnp.log(x)  # origin: nan log
    return x / lax.psum(jnp.sum(y), "data")


@fault(np.where(BAD < 0, np.nan, X), of=shard, argument=("args[0]", "nan"))
def argument_of_one_device(x):
    return x / lax.psum(jnp.sum(x), "data")


@fault(X, np.where(BAD < 0, 3e38, 1).astype(np.float32), of=shard)
def sum_over_devices_that_overflows(x, y):
    return x * lax.psum(jnp.max(y) * 1.1, "data")  # origin: inf mul


@fault(BAD, of=shard)
def turn_of_a_scan_on_one_device(x):
    def turn(carry, factor):
        carry = carry + jnp.sqrt(x + factor)  # origin: nan sqrt 2
        return lax.pmean(carry, "data") + 0 * carry, carry

    return lax.scan(turn, x, jnp.asarray([3.0, 2.0, 0.5, 1.0]))[1].sum(0)


@fault(np.where(BAD < 0, 0, X), of=shard_gradient)
def backward_pass_of_one_device(x):
    y = jnp.sqrt(x)  # origin: inf div
    return y + lax.psum(jnp.sum(x), "data")


OWN = [name for name, one in FAULTS.items() if one.file == __file__]
QUICK = ("shard of one device before a sum over all",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in OWN])
def test_the_origin_is_named(name):
    one = FAULTS[name]
    _, found = jax.jit(first_nonfinite(one.fun))(*one.args)
    assert found.reproduced
    assert found.cause is None
    if one.argument:
        assert (found.argument, found.kind) == one.argument
    else:
        assert_is(found, one.origin, one.file)


def test_a_result_in_parts_is_summed_before_it_is_looked_at():
    mesh = make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    parts = lambda x: jnp.einsum("ij,kj->ik", x, x, out_sharding=P(unreduced={"data"}))
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(jnp.ones((2, 4)), P(None, "data"))
        run = jax.jit(first_nonfinite(parts))
        (out, fine), (_, found) = run(x), run(x * 1.3e19)  # each device has a part of 3.38e38, and twice that is inf
    assert jax.typeof(out).sharding.spec.unreduced == {"data"}
    assert (fine.found, found.kind, found.primitive) == (False, "inf", "dot_general")
