"""Planted faults: `first_nonfinite` names the line, the operation, the pass, the turns of loops, and the cause."""

import faults_of_functions as faults_of_functions
import faults_of_models as faults_of_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import FAULTS, assert_is
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from random_programs import make_program

from jmp_policy.numerics import first_nonfinite

QUICK = (
    "argument that is nan",
    "infinite argument and a nan",
    "where of two infinities",
    "scans in a scan",
    "several bad turns",
    "trap of where",
    "shard of one device before a sum over all",
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turn of a while", "trap of where"])
def test_the_origin_is_named_without_jit(name):
    fun, args = FAULTS[name].make()
    out, found = first_nonfinite(fun)(*args)
    jax.tree.map(np.testing.assert_array_equal, out, fun(*args))
    FAULTS[name].assert_found(found)


def test_a_result_in_parts_is_summed_before_it_is_looked_at():
    mesh = make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    parts = lambda x: jnp.einsum("ij,kj->ik", x, x, out_sharding=P(unreduced={"data"}))
    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(jnp.ones((2, 4)), P(None, "data"))
        run = jax.jit(first_nonfinite(parts))
        (out, fine), (_, found) = run(x), run(x * 1.3e19)  # each device has a part of 3.38e38, and twice that is inf
    assert jax.typeof(out).sharding.spec.unreduced == {"data"}
    assert (fine.found, found.kind, found.primitive) == (False, "inf", "dot_general")


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60)]])
def test_the_fault_of_a_random_program_is_found(seed, tmp_path):
    program = make_program(seed)
    _, found = jax.jit(first_nonfinite(program.load(tmp_path)))(*program.make_arguments())
    assert found.found, program.text
    file, expected = str(tmp_path / "random_program.py"), program.expected
    if program.argument:
        assert (found.argument, found.kind) == ("x", "nan")
        return
    assert_is(found, expected["origin"], file)
    assert (found.cause is None) == ("cause" not in expected)
    if found.cause is not None:
        assert_is(found.cause, expected["cause"], file)
    if program.scope:
        planted = found.cause if expected["origin"].primitive == "sub" else found
        assert planted.path.split("/")[-1] == program.scope


@pytest.mark.slow
def test_nothing_is_found_without_the_fault_and_bits_are_the_same(tmp_path):
    program = make_program(3)
    fun, args = program.load(tmp_path), program.make_arguments(is_faulty=False)
    out, found = jax.jit(first_nonfinite(fun))(*args)
    assert (found.found, found.reproduced, found.kind, str(found)) == (False, True, "", "every result is finite")
    for leaf, other in zip(jax.tree.leaves(out), jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        assert np.isfinite(leaf).all()
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint32), np.asarray(other).view(np.uint32))
