"""What devices send each other, against programs that are counted by hand."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.numerics import collectives

AUTO = AxisType.Auto
DATA = make_mesh((4,), ("data",), axis_types=(AUTO,))
GRID = make_mesh((2, 2), ("data", "model"), axis_types=(AUTO, AUTO))
THOUSANDS = AbstractMesh((512, 8), ("data", "model"))
BOTH_WAYS = pytest.mark.parametrize("compiled", [True, False])


def array(shape, mesh, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def on_each(fun, mesh=DATA):
    """A function of the part that each device has."""
    return jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)


def summary(report):
    return [(row.kind, row.dtype, row.axes, row.shape, row.direction, row.count) for row in report.rows]


LOOPS = {
    "scan": (lambda x: lax.scan(lambda c, _: (lax.psum(c, "data") / 4, None), x, length=5)[0], 5),
    "scan of scan": (
        lambda x: lax.scan(
            lambda c, _: (lax.scan(lambda c, _: (lax.psum(c, "data") / 4, None), c, length=3)[0], None), x, length=5
        )[0],
        15,
    ),
    "reversed scan": (lambda x: lax.scan(lambda c, y: (c + y, lax.psum(c, "data")), x[0], x, reverse=True)[1], 2),
    "fori_loop": (lambda x: lax.fori_loop(2, 9, lambda i, c: lax.psum(c, "data") / 4, x), 7),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "data"), lambda x: x, x), 1),
    "jit": (jax.jit(lambda x: lax.psum(lax.psum(x, "data") + 1, "data")), 2),
    "remat": (jax.checkpoint(lambda x: lax.psum(x, "data")), 1),
}


@BOTH_WAYS
@pytest.mark.parametrize("name", LOOPS)
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
    assert f"{loop}: the body of this loop counts once" in str(report)


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
@pytest.mark.parametrize("name", KINDS)
def test_kinds_and_their_bytes(name, compiled):
    fun, kind, reduction, size, sent = KINDS[name]
    [row] = collectives(on_each(fun), compiled=compiled)(array((8, 4), DATA, "data")).rows
    assert (row.kind, row.reduction, row.bytes, row.moved_bytes) == (kind, reduction, size, sent)


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


LOSS = ("all-reduce", "float32", ("data",), (), "forward", 1)


def test_gradients_of_replicated_parameters_are_reduced_in_the_dtype_of_their_products():
    """XLA for CPUs widens what it reduces in bfloat16, but later."""
    report = grads_of_mlp(DATA, (), ())
    assert summary(report) == [
        LOSS,
        ("all-reduce", "bfloat16", ("data",), (8, 16), "backward", 1),
        ("all-reduce", "bfloat16", ("data",), (16, 8), "backward", 1),
    ]
    assert [(row.path, row.is_gradient, row.inserted) for row in report.rows] == [
        ("", False, True),
        ("down", True, True),
        ("up", True, True),
    ]
    assert report.total_bytes(gradients=True) == 2 * 8 * 16 * 2
    lines = [int(row.source.partition(".py:")[2].split()[0]) for row in report.rows[1:]]
    first = loss_of_mlp.__code__.co_firstlineno
    assert lines == [first + 5, first + 3]
    assert all(row.source.endswith("(loss_of_mlp)") for row in report.rows)


def test_sharded_parameters_are_gathered_for_the_forward_pass():
    report = grads_of_mlp(DATA, ("data",), ("data",))
    assert summary(report.select(kind="all-gather")) == [
        ("all-gather", "bfloat16", ("data",), (8, 16), "forward", 1),
        ("all-gather", "bfloat16", ("data",), (16, 8), "forward", 1),
    ]
    report.assert_gathered_in("bfloat16", axis="data")
    report.assert_reduced_in("bfloat16", of="gradients")


def test_activations_of_a_tensor_axis_are_no_gradients():
    def loss(params, x):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ params["first"].astype(jnp.bfloat16))
        return loss_of_mlp(params, x)

    params = {
        "first": array((8, 8), GRID),
        "up": array((8, 16), GRID, None, "model"),
        "down": array((16, 8), GRID, "model"),
    }
    shardings = jax.tree.map(lambda param: param.sharding, params)
    step = jax.jit(jax.grad(loss), out_shardings=shardings)
    report = collectives(step)(params, array((32, 8), GRID, "data", dtype=jnp.bfloat16))
    # Megatron's pair: what the second product makes, and the cotangent of what the first one reads.
    assert summary(report.select(axis="model")) == [
        ("all-reduce", "bfloat16", ("model",), (16, 8), "forward", 1),
        ("all-reduce", "bfloat16", ("model",), (16, 8), "backward", 1),
    ]
    assert sorted((row.path, row.axes) for row in report.rows if row.is_gradient) == [
        ("down", ("data",)),
        ("first", ("data",)),
        ("up", ("data",)),
    ]


@BOTH_WAYS
def test_gradients_of_tables_are_gradients(compiled):
    """Of one that is read by token and of one that is read by position, whose rows are read once each."""

    def step(tables, tokens):
        def loss(tables):
            return jnp.sum(jnp.tanh(tables["tokens"][tokens] + tables["positions"][jnp.arange(4)]))

        return jax.grad(loss)(tables)

    tables = {"tokens": array((16, 8), DATA), "positions": array((4, 8), DATA)}
    sharded = jax.shard_map(step, mesh=DATA, in_specs=(P(), P("data")), out_specs=P())
    report = collectives(sharded, compiled=compiled)(tables, array((8, 4), DATA, "data", dtype=jnp.int32))
    assert {(row.shape[-2:], row.is_gradient) for row in report.rows} == {((16, 8), True), ((4, 8), True)}
    replicated = jax.tree.map(lambda table: table.sharding, tables)
    report = collectives(jax.jit(step, out_shardings=replicated))(tables, array((8, 4), DATA, "data", dtype=jnp.int32))
    assert {(row.shape, row.is_gradient) for row in report.rows} == {((16, 8), True), ((4, 8), True)}


def fsdp_grads(w, x):
    """One parameter for 3 layers: a quarter of each on each device."""

    def loss(w):
        def layer(x, part):
            whole = lax.all_gather(part.astype(jnp.bfloat16), "data", tiled=True)
            return jnp.tanh(x @ whole), None

        x_out, _ = lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), w)
        return jnp.mean(x_out.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss)(w)
    return lax.pmean(loss, "data"), grads


@BOTH_WAYS
def test_gathers_are_recomputed_and_gradients_scattered_in_each_layer(compiled):
    specs = {"in_specs": (P(None, "data"), P("data")), "out_specs": (P(), P(None, "data"))}
    step = jax.jit(jax.shard_map(fsdp_grads, mesh=DATA, check_vma=False, **specs))
    report = collectives(step, compiled=compiled)(array((3, 8, 8), DATA, None, "data"), array((8, 8), DATA, "data"))
    rows = {row.direction + " " + row.kind: row for row in report.rows}
    assert {name: (row.dtype, row.shape, row.count, row.bytes) for name, row in rows.items()} == {
        "forward all-gather": ("bfloat16", (8, 8), 3, 384),
        "recomputed all-gather": ("bfloat16", (8, 8), 3, 384),
        "backward reduce-scatter": ("bfloat16", (8, 8), 3, 384),
        "forward all-reduce": ("float32", (), 1, 4),
    }
    assert [name for name, row in rows.items() if row.is_gradient] == ["backward reduce-scatter"]


@BOTH_WAYS
def test_activations_that_go_around_a_loop_are_no_gradients(compiled):
    """JAX sums the cotangent of a layer's input last: it is the next turn that multiplies by it."""

    def step(weights, x):
        def loss(weights):
            def layer(x, both):
                up, down = both
                return x + lax.psum(jnp.tanh(x @ up) @ down, "model"), None

            return jnp.sum(lax.scan(layer, x, weights)[0])

        return jax.grad(loss)(weights)

    specs = P(None, None, "model"), P(None, "model")
    sharded = jax.shard_map(step, mesh=GRID, in_specs=(specs, P("data")), out_specs=specs)
    weights = array((3, 4, 8), GRID, *specs[0]), array((3, 8, 4), GRID, *specs[1])
    report = collectives(sharded, compiled=compiled)(weights, array((4, 4), GRID, "data"))
    found = sorted((row.axes, row.direction, row.is_gradient, row.shape, row.count) for row in report.rows)
    assert found == [
        (("data",), "backward", True, (4, 4), 6),
        (("model",), "backward", False, (2, 4), 3),
        (("model",), "forward", False, (2, 4), 3),
    ]


@BOTH_WAYS
def test_gradients_that_are_summed_after_the_backward_pass_are_gradients(compiled):
    """Also in a loop over steps, whose next step reads what this one leaves."""

    def train(w, xs):
        def step(w, x):
            loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)
            norm = lax.psum(jnp.sum(grad**2), "data")
            return w - lax.pmean(grad * 0.5, "data") / norm, lax.pmean(loss, "data")

        return lax.scan(step, w, xs)

    train = jax.shard_map(train, mesh=DATA, in_specs=(P(), P(None, "data")), out_specs=(P(), P()), check_vma=False)
    report = collectives(train, compiled=compiled)(array((4, 4), DATA), array((6, 8, 4), DATA, None, "data"))
    found = sorted((row.shape, row.direction, row.is_gradient, row.count) for row in report.rows)
    assert found == [((), "forward", False, 6)] * 2 + [((4, 4), "backward", True, 6)]


def test_axes_that_a_shard_map_leaves_to_xla_are_read_after_partitioning():
    def step(w, x):
        def loss(w):
            whole = lax.all_gather(w.astype(jnp.bfloat16), "data", tiled=True)
            return jnp.sum(jnp.tanh(x @ whole).astype(jnp.float32))

        return jax.grad(loss)(w)

    step = jax.shard_map(
        step, mesh=GRID, in_specs=(P("data"), P("data")), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    w, x = array((8, 16), GRID, "data", "model"), array((4, 8), GRID, "data", dtype=jnp.bfloat16)
    report = collectives(step)(w, x)
    by_hand = report.select(axis="data")
    assert [(row.kind, row.reduction, row.dtype, row.inserted) for row in by_hand.rows] == [
        ("all-gather", "", "bfloat16", False),
        ("reduce-scatter", "sum", "bfloat16", False),
    ]
    assert [row.is_gradient for row in by_hand.rows] == [False, True]


def test_thousands_of_devices_need_not_be_there():
    def layers(w, x):
        def layer(x, part):
            return jnp.tanh(x @ lax.all_gather(part.astype(jnp.bfloat16), "data", tiled=True)), None

        return lax.scan(layer, x, w)[0]

    layers = jax.shard_map(
        layers, mesh=THOUSANDS, in_specs=(P(None, "data"), P("data")), out_specs=P("data"), check_vma=False
    )
    w = array((100, 16384, 16384), THOUSANDS, None, "data")
    report = collectives(layers)(w, array((512, 16384), THOUSANDS, "data", dtype=jnp.bfloat16))
    [row] = report.rows
    assert (row.kind, row.devices, row.count, row.bytes) == ("all-gather", 512, 100, 100 * 16384**2 * 2)
    assert (report.devices, report.compiled) == (4096, False)
    assert "what XLA inserts by itself is not counted" in str(report)


def test_one_device_has_no_collectives():
    report = collectives(jax.grad(lambda x: jnp.sum(x @ x)))(np.ones((4, 4), np.float32))
    assert (report.rows, report.devices, report.axes, report.compiled) == ((), 1, (), False)
    assert str(report) == "no collectives: one device"


def test_a_mesh_may_have_nothing_to_send():
    report = collectives(lambda x: x + 1)(array((8, 4), DATA, "data"))
    assert (report.rows, report.devices, report.compiled) == ((), 4, True)
    assert str(report).startswith("no collectives on 4 devices\n")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="head")(nn.relu(nn.Dense(8, name="body")(x)))


def test_a_train_step_with_donated_arguments_of_a_linen_model():
    model = jmp.with_policy(Net(), "mixed_bfloat16")
    tx = optax.sgd(1e-3, momentum=0.9)  # adam's powers of a count are no strict promotion
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((8, 8)))["params"]

    def step(params, opt_state, x):
        grads = jax.grad(lambda params: jnp.mean(model.apply({"params": params}, x).astype(jnp.float32) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    replicated = NamedSharding(DATA, P())
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated),
        (params, jax.eval_shape(tx.init, params)),
    )
    donating = jax.jit(step, donate_argnums=(0, 1), out_shardings=replicated)
    report = collectives(donating)(*state, array((8, 8), DATA, "data"))
    found = sorted((row.path, row.dtype, row.shape) for row in report.rows if row.is_gradient)
    assert found == [
        ("body", "bfloat16", (8,)),
        ("body", "bfloat16", (8, 8)),
        ("head", "bfloat16", (4,)),
        ("head", "bfloat16", (4, 8)),
    ]


class Module(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.body(x)


def test_an_nnx_model():
    graph, state = nnx.split(jmp.with_policy(Module(nnx.Rngs(0)), "mixed_bfloat16"))
    model = nnx.merge(graph, jax.device_put(state, NamedSharding(DATA, P())))
    step = nnx.jit(lambda model, x: nnx.grad(lambda model: jnp.mean(model(x).astype(jnp.float32) ** 2))(model))
    report = collectives(step)(model, jax.device_put(np.ones((8, 8), np.float32), NamedSharding(DATA, P("data"))))
    assert {(row.path, row.dtype, row.is_gradient) for row in report.rows} == {("body", "bfloat16", True)}


def test_shardings_may_be_those_of_jit():
    shardings = (NamedSharding(DATA, P(None, "data")), NamedSharding(DATA, P("data")))
    product = jax.jit(lambda x, w: x @ w, in_shardings=shardings)
    [row] = collectives(product)(np.ones((2, 8), np.float32), np.ones((8, 4), np.float32)).rows
    assert (row.kind, row.axes, row.shape, row.direction) == ("all-reduce", ("data",), (2, 4), "forward")


def test_an_explicit_mesh():
    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        report = collectives(lambda x, w: jnp.einsum("ij,jk->ik", x, w, out_sharding=P()))(
            array((2, 8), mesh, None, "data", dtype=jnp.bfloat16), array((8, 4), mesh, "data", dtype=jnp.bfloat16)
        )
    assert summary(report) == [("all-reduce", "bfloat16", ("data",), (2, 4), "forward", 1)]


def test_a_persistent_cache_neither_hides_the_program_nor_keeps_it():
    folder = jax.config.jax_compilation_cache_dir
    assert folder
    first, second = grads_of_mlp(DATA, (), ()), grads_of_mlp(DATA, (), ())
    assert first.rows == second.rows
    assert [name for name in os.listdir(folder) if "collectives_" in name] == []
