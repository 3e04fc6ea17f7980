"""Which sums over devices are of gradients, in which dtype, and where they are told from those of activations."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from sharded import BOTH_WAYS, DATA, GRID, array, grads_of_mlp, loss_of_mlp, summary

import jmp_policy as jmp
from jmp_policy.numerics import collectives

LOSS = ("all-reduce", "float32", ("data",), (), "forward", 1)


@pytest.mark.slow
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


@pytest.mark.slow
def test_gradients_of_tables_are_gradients():
    """Of one that is read by token and of one that is read by position, whose rows are read once each."""

    def step(tables, tokens):
        def loss(tables):
            return jnp.sum(jnp.tanh(tables["tokens"][tokens] + tables["positions"][jnp.arange(4)]))

        return jax.grad(loss)(tables)

    tables = {"tokens": array((16, 8), DATA), "positions": array((4, 8), DATA)}
    sharded = jax.shard_map(step, mesh=DATA, in_specs=(P(), P("data")), out_specs=P())
    replicated = jax.tree.map(lambda table: table.sharding, tables)
    for fun, compiled in [(sharded, True), (sharded, False), (jax.jit(step, out_shardings=replicated), None)]:
        report = collectives(fun, compiled=compiled)(tables, array((8, 4), DATA, "data", dtype=jnp.int32))
        assert {(row.shape[-2:], row.is_gradient) for row in report.rows} == {((16, 8), True), ((4, 8), True)}


def fsdp_grads(w, x):
    """One parameter for 3 layers: a quarter of each on each device."""

    def loss(w):
        layer = jax.checkpoint(lambda x, part: (gathered_layer(part, x), None))
        x_out, _ = lax.scan(layer, x.astype(jnp.bfloat16), w)
        return jnp.mean(x_out.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss)(w)
    return lax.pmean(loss, "data"), grads


@pytest.mark.slow
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


MOVES = {
    "joined by stack": lambda g: jnp.stack([g, g]),
    "taken apart by unstack": lambda g: jnp.unstack(g)[0],
    "split": lambda g: jnp.split(g, 2)[0],
    "transposed": lambda g: g.T,
    "written into a buffer": lambda g: jnp.zeros((5, 8), g.dtype).at[jnp.array([0, 1, 2, 4])].set(g),
    "in another order": lambda g: g[jnp.array([3, 1, 0, 2])],
    "raveled": lambda g: jnp.concatenate([g.reshape(-1), g.reshape(-1)]),
    "named": lambda g: checkpoint_name(g, "gradient"),
    "rounded": lambda g: lax.reduce_precision(g, 8, 5),
}


def sum_moved_gradients(w, x):
    grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w).astype(jnp.float32) ** 2))(w)
    sums = {}
    for name, move in MOVES.items():
        with jax.named_scope(name):
            sums[name] = lax.psum(move(grad), "data")
    return sums


INSIDE_A_SHARD_MAP = {
    "nothing": lambda f: f,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda w, x: lax.scan(lambda carry, _: (carry, f(w, x)), 0, None, length=2)[1],
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[None]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "compiled"), [("nothing", True), *((around, False) for around in INSIDE_A_SHARD_MAP)]
)
def test_gradients_that_were_moved_before_they_are_summed_are_gradients(around, compiled):
    step = INSIDE_A_SHARD_MAP[around](sum_moved_gradients)
    half = {"dtype": jnp.bfloat16}
    step = jax.shard_map(step, mesh=DATA, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    report = collectives(step, compiled=compiled)(array((4, 8), DATA, **half), array((8, 4), DATA, "data", **half))
    assert {row.path for row in report.rows if row.is_gradient} == set(MOVES)
    with pytest.raises(AssertionError, match=r"^(\d+) of \1 reductions of gradients are not in"):
        report.assert_reduced_in("float32")


@BOTH_WAYS
def test_rows_that_tokens_choose_are_no_gradients_in_a_loop_over_steps(compiled):
    """A table that is split by rows over devices: each looks up what it has, and the sum of that is an activation."""

    def step(table, tokens):
        def loss(table):
            rows = jnp.where(tokens[:, None] < 2, table[tokens % 2], 0)
            return jnp.mean(jnp.tanh(lax.psum(rows, "data")) ** 2)

        return table - 0.1 * jax.grad(loss)(table), None

    train = jax.shard_map(
        lambda table, tokens: lax.scan(step, table, tokens)[0],
        mesh=DATA, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    report = collectives(train, compiled=compiled)(array((8, 4), DATA, "data"), array((3, 6), DATA, dtype=jnp.int32))
    assert [row.is_gradient for row in report.select(direction="forward").rows] == [False]


def gathered_layer(w, x):
    return jnp.tanh(x @ lax.all_gather(w.astype(jnp.bfloat16), "data", tiled=True))


def mapped_layer(w, x, layer=gathered_layer):
    with jax.named_scope("outside"):
        return jax.shard_map(layer, mesh=DATA, in_specs=(P("data"), P("data")), out_specs=P("data"))(w, x)


AROUND_A_SHARD_MAP = {
    "jit": jax.jit(mapped_layer),
    "remat inside": lambda w, x: mapped_layer(w, x, jax.checkpoint(gathered_layer)),
    "scan": lambda w, x: lax.scan(lambda h, _: (mapped_layer(w, h), None), x, length=2)[0],
    "vmap": lambda w, x: jax.vmap(mapped_layer, (None, 0))(w, x[None]),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND_A_SHARD_MAP)
def test_a_gradient_that_is_taken_outside_of_a_shard_map_is_reduced_in_the_dtype_that_was_asked_for(around):
    """XLA names what is in a shard_map without what is around it, the backward pass too."""

    def loss(w, x):
        return jnp.mean(AROUND_A_SHARD_MAP[around](w, x).astype(jnp.float32) ** 2)

    arguments = array((8, 8), DATA, "data"), array((8, 8), DATA, "data", dtype=jnp.bfloat16)
    for reduce_dtype, compiled in ((None, True), ("float32", False)):
        grad = jmp.grad(loss, loss_scale=jmp.NoOpLossScale(), reduce_dtype=reduce_dtype)
        report = collectives(grad, compiled=compiled)(*arguments)
        report.assert_reduced_in(reduce_dtype or "bfloat16")
        assert {row.path for row in report.rows} == {"outside"}


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


class Module(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.body(x)


ROWS = {("body", "bfloat16", True, (8,)), ("body", "bfloat16", True, (8, 8))}


def test_what_a_step_changes_in_an_nnx_model_is_reduced():
    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x).astype("float32") ** 2))(model))

    graph, state = nnx.split(jmp.with_policy(Module(nnx.Rngs(0)), "mixed_bfloat16"))
    model = nnx.merge(graph, jax.device_put(state, NamedSharding(DATA, P())))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(DATA, P("data")))
    report = collectives(step)(model, optimizer, x)
    assert {(row.path, row.dtype, row.is_gradient, row.shape) for row in report.rows} == ROWS
    assert report.total_bytes(gradients=True) == 2 * (8 * 8 + 8)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, of the extra `compiled`, is missing")
def test_a_program_is_read_as_it_is_partitioned_for_tpus(monkeypatch):
    for name, value in TPU.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    report = grads_of_mlp(Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,)), (), ())
    assert report.compiled
    report.assert_reduced_in("bfloat16", axis="data")
    assert report.total_bytes(gradients=True) == 2 * 8 * 16 * 2


TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
       "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip
"""What libtpu otherwise asks of the metadata server of a TPU machine, or of a lock that one process may hold."""
