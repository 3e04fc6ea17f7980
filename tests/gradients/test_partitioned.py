"""Which dtype gradients are reduced in over devices, as XLA's partitioner writes it."""

import contextlib
import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from losses import LOSSES, dense, make_arguments, stored_in_half
from meshes import make_mesh

import jmp_policy as jmp

MESH = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
EVERYWHERE, SPLIT = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))
PLAIN = jmp.NoOpLossScale()


_REDUCTION = re.compile(
    r"= \(?(?P<shapes>[^=]*?)\)? (?P<kind>all-reduce|all-reduce-start|reduce-scatter)\((?P<rest>.*)"
)


class Reduction(NamedTuple):
    """One operand of a reduction over devices."""

    dtype: str
    shape: tuple[int, ...]
    op_name: str

    @property
    def is_backward(self):
        return "transpose(" in self.op_name


def list_reductions(fun, *args, **kwargs):
    """The reductions over devices in the program of a jitted function, after partitioning."""
    lowered = jax.jit(fun, **kwargs).lower(*args)
    # What comes out of the cache of programs is not dumped, so that these never enter it.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 1e9)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(jax.config.update, name, before)
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        lowered.compile(compiler_options=options)
        [path] = Path(folder).glob("*after_spmd-partitioning*")
        lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for match in filter(None, map(_REDUCTION.search, lines)):
        name = re.search(r'op_name="([^"]*)"', match.string)
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", match["shapes"]):
            shape = tuple(int(size) for size in sizes.split(",") if size)
            found.append(Reduction(dtype, shape, name[1] if name else ""))
    return found


def list_backward(value_and_grad, params, batch):
    """The reductions of the backward pass, of parameters that each device has, and a batch that they share."""
    shardings = jax.tree.map(lambda _: EVERYWHERE, params), SPLIT
    options = {"in_shardings": shardings, "out_shardings": EVERYWHERE}
    return [r for r in list_reductions(value_and_grad, params, batch, **options) if r.is_backward]


def all_losses(params, batch):
    losses = []
    for name, loss in LOSSES.items():
        with jax.named_scope(name):
            losses.append(loss(params[name], batch))
    return sum(losses)


@pytest.mark.slow
def test_gradients_of_every_kind_are_reduced_in_the_dtype_that_was_asked_for():
    params, batch = {name: make_arguments(loss)[0] for name, loss in LOSSES.items()}, make_arguments(dense)[1]
    found = list_backward(jmp.value_and_grad(all_losses, loss_scale=PLAIN, reduce_dtype="float32"), params, batch)
    for name in LOSSES:
        own = [r for r in found if f"({name})" in r.op_name]
        assert {r.dtype for r in own} == {"f32"}, (name, own)


@pytest.mark.slow
def test_parameters_in_half_have_gradients_that_are_rounded_after_the_reduction():
    scale = jmp.StaticLossScale(8.0)
    params, batch = make_arguments(stored_in_half)
    widened = jmp.value_and_grad(stored_in_half, loss_scale=scale, reduce_dtype="float32")
    assert {r.dtype for r in list_backward(widened, params, batch)} == {"f32"}
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(widened, params, batch)[1])} == {jnp.dtype("float32")}
    plain = list_backward(jax.value_and_grad(stored_in_half), params, batch)
    assert {r.dtype for r in plain} == {"bf16"}  # if ever not, the library may do with less


@pytest.mark.slow
def test_a_sum_over_an_explicit_axis_is_widened_where_it_is_of_a_constant_and_keeps_its_name():
    def loss(b, x):
        with jax.named_scope("head"):
            return jnp.sum((x + b.astype(jnp.bfloat16)).astype(jnp.float32))

    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    arguments = jnp.ones(4), jnp.ones((8, 4), jnp.bfloat16, device=NamedSharding(mesh, P("data")))
    widened = jmp.grad(loss, loss_scale=PLAIN, reduce_dtype="float32")
    for grad, dtype in ((jax.grad(loss), "bfloat16"), (widened, "float32")):
        with jax.set_mesh(mesh):
            rows = jmp.numerics.collectives(grad)(*arguments).rows
            assert [(row.dtype, row.path) for row in rows] == [(dtype, "head")]


@pytest.mark.slow
def test_what_reduces_inside_of_shard_map_is_widened_too():
    params, batch = make_arguments(dense)

    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    def mapped(params, batch):
        return lax.pmean(dense(params, batch), "data")

    plain = jax.make_jaxpr(jax.grad(mapped))(params, batch)
    widened = jax.make_jaxpr(jmp.grad(mapped, loss_scale=PLAIN, reduce_dtype="float32"))(params, batch)
    dtypes = [{aval.dtype.name for aval in list_psums(program.jaxpr)} for program in (plain, widened)]
    assert dtypes == [{"bfloat16", "float32"}, {"float32"}]


def list_psums(program):
    """What collectives of a `shard_map` add up."""
    found = []
    for eqn in program.eqns:
        if eqn.primitive.name.startswith("psum"):
            found += [var.aval for var in eqn.outvars]
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found += list_psums(inner)
    return found


ORDER = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jmp_policy as jmp

meshes = {name: jax.make_mesh((4,), ("data",), axis_types=(getattr(AxisType, name),)) for name in ("Explicit", "Auto")}
shape = lambda mesh, sizes, dtype, *spec: jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))
def loss(w, x):  # rows of a table, which a scatter-add sums, and a product
    rows = w.astype(jnp.bfloat16)[jnp.arange(8) % 4]
    return jnp.mean(jnp.square(((x + rows) @ w.astype(jnp.bfloat16)).astype(jnp.float32)))
for name in sys.argv[1:]:
    arguments = shape(meshes[name], (4, 4), jnp.float32), shape(meshes[name], (8, 4), jnp.bfloat16, "data")
    with jax.set_mesh(meshes[name]):
        grad = jmp.grad(loss, loss_scale=jmp.NoOpLossScale(), reduce_dtype="float32")
        lowered = jax.jit(grad).lower(*arguments)
arguments = shape(meshes["Auto"], (4, 4), jnp.float32), shape(meshes["Auto"], (8, 4), jnp.bfloat16, "data")
print(jax.jit(grad).lower(*arguments).as_text())
print(lowered.as_text())
"""
"""Prints a program on an Auto mesh, outside of `jax.set_mesh` and inside."""


@pytest.mark.slow
def test_what_ran_on_an_explicit_mesh_before_leaves_a_program_on_an_auto_mesh_as_it_is():
    """Both in processes of their own: patterns of equations are traced once in each."""
    command = [sys.executable, "-c", ORDER]
    alone, after = [
        subprocess.run([*command, *names], capture_output=True, text=True, check=True).stdout
        for names in (["Auto"], ["Explicit", "Auto"])
    ]
    assert after == alone
