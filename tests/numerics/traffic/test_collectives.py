"""What devices send each other, against programs that are counted by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from sharded import BOTH_WAYS, DATA, GRID, array, grads_of_mlp, on_each

from jmp_policy.numerics import collectives

THOUSANDS = AbstractMesh((512, 8), ("data", "model"))


def sum_repeatedly(x, length):
    return lax.scan(lambda c, _: (lax.psum(c, "data") / 4, None), x, length=length)[0]


LOOPS = {
    "scan": (lambda x: sum_repeatedly(x, 5), 5),
    "scan of scan": (lambda x: lax.scan(lambda c, _: (sum_repeatedly(c, 3), None), x, length=5)[0], 15),
    "reversed scan": (lambda x: lax.scan(lambda c, y: (c + y, lax.psum(c, "data")), x[0], x, reverse=True)[1], 2),
    "fori_loop": (lambda x: lax.fori_loop(2, 9, lambda i, c: lax.psum(c, "data") / 4, x), 7),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "data"), lambda x: x, x), 1),
    "jit": (jax.jit(lambda x: lax.psum(lax.psum(x, "data") + 1, "data")), 2),
    "remat": (jax.checkpoint(lambda x: lax.psum(x, "data")), 1),
}


@pytest.mark.parametrize(
    ("name", "compiled"), [*zip(LOOPS, itertools.repeat(False)), ("scan of scan", True), ("reversed scan", True)]
)
def test_turns_of_loops_are_counted(name, compiled):
    fun, count = LOOPS[name]
    report = collectives(on_each(fun), compiled=compiled)(array((8, 4), DATA, "data"))
    assert (report.total_count(), report.uncounted_loops, report.compiled) == (count, (), compiled)
    assert {(row.kind, row.reduction, row.dtype, row.axes, row.devices, row.inserted) for row in report.rows} == {
        ("all-reduce", "sum", "float32", ("data",), 4, False)
    }
    assert all("test_collectives.py" in row.source for row in report.rows)


@BOTH_WAYS
def test_a_loop_whose_turns_nobody_knows_counts_once_and_is_named(compiled):
    def total(x):
        return lax.while_loop(lambda x: jnp.sum(x) < 10, lambda x: lax.psum(x, "data"), x)

    report = collectives(on_each(total), compiled=compiled)(array((8, 4), DATA, "data"))
    [loop] = report.uncounted_loops
    assert report.total_count() == 1
    assert "test_collectives.py" in loop
    assert "(test_a_loop_whose_turns_nobody_knows_counts_once_and_is_named.<locals>.total)" in loop
    said = f"{loop}: the body of this loop counts once"
    assert "".join(said.split()) in "".join(str(report).split())  # wherever the lines of the report end


KINDS = {  # of (2, 4) float32 on each of 4 devices: what is counted, and what a ring sends of it
    "psum": (lambda x: lax.psum(x, "data"), "all-reduce", "sum", 32, 48),
    "pmax": (lambda x: lax.pmax(x, "data"), "all-reduce", "max", 32, 48),
    "pmin": (lambda x: lax.pmin(x, "data"), "all-reduce", "min", 32, 48),
    "all_gather": (lambda x: lax.all_gather(x, "data", tiled=True)[:2], "all-gather", "", 128, 96),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), "reduce-scatter", "sum",
                     32, 24),
    "all_to_all": (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), "all-to-all", "", 32, 24),
    "ppermute": (lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), "collective-permute", "",
                 32, 32),
}  # fmt: skip


@BOTH_WAYS
def test_kinds_and_their_bytes(compiled):
    def communicate(x):
        return [fun(x) for fun, *_ in KINDS.values()]

    report = collectives(on_each(communicate), compiled=compiled)(array((8, 4), DATA, "data"))
    found = [(row.kind, row.reduction, row.bytes, row.moved_bytes) for row in report.rows]
    assert sorted(found) == sorted(expected[1:] for expected in KINDS.values())


@BOTH_WAYS
def test_axes_are_those_along_which_devices_communicate(compiled):
    def reduce(x):
        return lax.psum(lax.pmax(lax.pmin(x, "model"), "data"), ("data", "model"))

    rows = collectives(on_each(reduce, GRID), compiled=compiled)(array((4, 4), GRID, "data")).rows
    assert [(row.reduction, row.axes, row.devices) for row in rows] == [
        ("min", ("model",), 2),
        ("max", ("data",), 2),
        ("sum", ("data", "model"), 4),
    ]


def test_thousands_of_devices_need_not_be_there():
    def layers(w, x):
        def layer(x, part):
            return jnp.tanh(x @ lax.all_gather(part.astype(jnp.bfloat16), "data", tiled=True)), None

        return lax.scan(layer, x, w)[0]

    specs = {"in_specs": (P(None, "data"), P("data")), "out_specs": P("data")}
    layers = jax.shard_map(layers, mesh=THOUSANDS, check_vma=False, **specs)
    w = array((100, 16384, 16384), THOUSANDS, None, "data")
    report = collectives(layers)(w, array((512, 16384), THOUSANDS, "data", dtype=jnp.bfloat16))
    [row] = report.rows
    assert (row.kind, row.devices, row.count, row.bytes) == ("all-gather", 512, 100, 100 * 16384**2 * 2)
    assert (report.devices, report.compiled) == (4096, False)
    assert "what XLA inserts by itself is not counted" in str(report)


def test_one_device_and_a_mesh_that_sends_nothing_have_no_collectives():
    report = collectives(jax.grad(lambda x: jnp.sum(x @ x)))(np.ones((4, 4), np.float32))
    assert (report.rows, report.devices, report.axes, report.compiled) == ((), 1, (), False)
    assert str(report).startswith("no collectives: one device\nA mesh comes with the arguments, jax.device_put(")

    report = collectives(lambda x: x + 1)(array((8, 4), DATA, "data"))
    assert (report.rows, report.devices, report.compiled) == ((), 4, True)
    assert str(report).startswith("no collectives on 4 devices\n")


def test_shardings_may_be_those_of_jit():
    shardings = (NamedSharding(DATA, P(None, "data")), NamedSharding(DATA, P("data")))
    product = jax.jit(lambda x, w: x @ w, in_shardings=shardings)
    [row] = collectives(product)(np.ones((2, 8), np.float32), np.ones((8, 4), np.float32)).rows
    assert (row.kind, row.axes, row.shape, row.direction) == ("all-reduce", ("data",), (2, 4), "forward")


def test_errors_of_jax_name_the_function():
    def total(x):
        return 1 if x.sum() else 0

    with pytest.raises(jax.errors.TracerBoolConversionError, match="tracing the function total_collectives_"):
        collectives(total)(array((8, 4), DATA, "data"))


@pytest.mark.slow
def test_a_persistent_cache_does_not_hide_the_program():
    assert jax.config.jax_compilation_cache_dir
    first, second = grads_of_mlp(DATA, (), ()), grads_of_mlp(DATA, (), ())
    assert first.rows == second.rows
