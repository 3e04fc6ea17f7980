"""Planted faults: `first_nonfinite` names the line, the operation, the pass, the turns of loops, and the cause."""

import faults_of_functions as faults_of_functions
import faults_of_models as faults_of_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import FAULTS
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

from jmp_policy.numerics import first_nonfinite

QUICK = (
    "overflow under a mask of infinities",
    "backward pass of a scan under remat",
    "where of two infinities",
    "scans in a scan",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_the_origin_is_named(name):
    fault = FAULTS[name]
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote their own float32 statistics
        fun, args = fault.make()
        _, found = jax.jit(first_nonfinite(fun))(*args)
    fault.assert_found(found)


def test_a_result_in_parts_is_summed_before_it_is_looked_at():
    mesh = make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    parts = lambda x: jnp.einsum("ij,kj->ik", x, x, out_sharding=P(unreduced={"data"}))
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(jnp.ones((2, 4)), P(None, "data"))
        run = jax.jit(first_nonfinite(parts))
        (out, fine), (_, found) = run(x), run(x * 1.3e19)  # each device has a part of 3.38e38, and twice that is inf
    assert jax.typeof(out).sharding.spec.unreduced == {"data"}
    assert (fine.found, found.kind, found.primitive) == (False, "inf", "dot_general")


def test_a_result_with_reduced_axes_is_looked_at():
    mesh = make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(jnp.ones(4), P(None, reduced={"data"}))
        out, found = jax.jit(first_nonfinite(lambda x: x / jnp.zeros_like(x)))(x)
    assert jax.typeof(out).sharding.spec.reduced == {"data"}
    assert (found.kind, found.primitive) == ("inf", "div")


@pytest.mark.slow
def test_nothing_is_found_without_a_fault_and_bits_are_the_same():
    grad = jax.value_and_grad(lambda x, w: jnp.sum(jnp.tanh(jnp.log1p(x**2) @ w) / 1.3))
    args = np.random.default_rng().normal(size=(2, 8, 8)).astype(np.float32)
    out, found = jax.jit(first_nonfinite(grad))(*args)
    assert (found.found, found.reproduced, found.kind, str(found)) == (False, True, "", "every result is finite")
    jax.tree.map(np.testing.assert_array_equal, out, jax.jit(grad)(*args))
