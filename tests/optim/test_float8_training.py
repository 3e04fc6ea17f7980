"""Training with float8 state: microbatches and devices leave the state of one big batch, and skipped steps none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from float8_problem import (
    FORMAT,
    STATE,
    assert_same,
    batch_of,
    compiled,
    joined,
    loss_fn,
    stacked,
    state_after,
    variables_of,
)
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

VARIABLES = variables_of()
BATCHES = [batch_of(seed) for seed in range(4)]
BAD = BATCHES[0] | {"x": BATCHES[0]["x"].at[0, 0].set(jnp.inf)}
SCALE = jmp.DynamicLossScale(2.0**10)
MESH = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))


def train_step(tx, quantization=FORMAT):
    """A jitted step, `(variables, state, batch) -> (variables, state)`."""

    @compiled
    def step(variables, state, batch):
        grads = jmp.grad(lambda v: loss_fn(v, batch, quantization), loss_scale=state)(variables)
        return jmp.optim.step(tx, grads, state, variables)

    return step


@pytest.fixture(scope="module")
def accumulated():
    """A step of every few microbatches of which one may be bad, by what the number of microbatches is."""
    steps = {}
    for every in (2, 3):
        tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every), SCALE)
        steps[every] = tx.init(VARIABLES), train_step(tx)
    return steps


@pytest.mark.parametrize(
    ("every", "microbatches", "good"),
    [
        (2, BATCHES[:2], BATCHES[:2]),
        (2, BATCHES[1::-1], BATCHES[:2]),
        (3, BATCHES[:3], BATCHES[:3]),
        (2, [BAD, *BATCHES[:2]], BATCHES[:2]),
        (2, [BATCHES[0], BAD, BAD, BATCHES[1]], BATCHES[:2]),
    ],
    ids=["2", "2, turned round", "3", "2, the first bad", "2, with bad ones between"],
)
def test_microbatches_of_multisteps_leave_the_state_of_one_big_batch(accumulated, every, microbatches, good):
    (state, step), variables = accumulated[every], VARIABLES
    for batch in microbatches:
        variables, state = step(variables, state, batch)
    assert_same(variables[STATE], state_after(VARIABLES, joined(*good)))
    assert int(state.skipped_steps) == len(microbatches) - len(good)


def test_each_step_of_multisteps_is_remembered_once(accumulated):
    (state, step), variables = accumulated[2], VARIABLES
    for good in (BATCHES[:2], BATCHES[2:]):
        expected = state_after(variables, joined(*good))
        for batch in good:
            variables, state = step(variables, state, batch)
        assert_same(variables[STATE], expected)


def test_microbatches_leave_the_state_of_one_big_batch_where_each_group_of_parameters_has_its_multisteps():
    labels = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)
    groups = {name: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation() for name in ("used", "idle")}
    tx = jmp.optim.skip_nonfinite(optax.partition(groups, labels))
    step, state, variables = train_step(tx), tx.init(VARIABLES), VARIABLES
    for batch in BATCHES[:2]:
        variables, state = step(variables, state, batch)
    assert_same(variables[STATE], state_after(VARIABLES, joined(*BATCHES[:2])))


@pytest.mark.parametrize("quantization", [
    "float8/1(recipe=delayed/most_recent,min_size=0)",
    "float8/4(recipe=delayed/2,min_size=0)",
])  # fmt: skip
def test_microbatches_leave_the_state_of_one_big_batch_in_every_recipe(quantization):
    variables = variables_of(quantization)
    tx = jmp.optim.skip_nonfinite(optax.MultiSteps(optax.sgd(0.1), 2))
    step, state, new = train_step(tx, quantization), tx.init(variables), variables
    for batch in BATCHES[:2]:
        new, state = step(new, state, batch)
    assert_same(new[STATE], state_after(variables, joined(*BATCHES[:2]), quantization))


def gradient(variables, batch):
    return jmp.grad(loss_fn, loss_scale=SCALE)(variables, batch)


def in_a_scan(variables):
    add = lambda total, batch: (jmp.optim.accumulate(total, gradient(variables, batch)), None)
    return lax.scan(add, jax.tree.map(jnp.zeros_like, variables), stacked(*BATCHES))[0]


def one_after_the_other(variables):
    total = gradient(variables, BATCHES[0])
    for batch in BATCHES[1:]:
        total = jmp.optim.accumulate(total, gradient(variables, batch))
    return total


def of_devices(variables, batch):
    return jmp.sharding.pmean(gradient(variables, batch), "devices")


def on_mapped_devices(variables):
    of_each = jax.vmap(of_devices, (None, 0), axis_name="devices")(variables, stacked(*BATCHES))
    return jax.tree.map(lambda x: x[0], of_each)


def on_a_mesh(variables):
    specs = {"mesh": MESH, "in_specs": (P(), P("devices")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(of_devices, **specs)(variables, joined(*BATCHES))


ACCUMULATED = {"scan": in_a_scan, "loop": one_after_the_other}
AVERAGED = {"vmap": on_mapped_devices, "shard_map": on_a_mesh}


@pytest.fixture(scope="module")
def put_together():
    return compiled(lambda v: {way: fun(v) for way, fun in (ACCUMULATED | AVERAGED).items()})(VARIABLES)


@pytest.mark.parametrize("way", ACCUMULATED | AVERAGED)
def test_gradients_that_are_put_together_have_the_state_of_one_big_batch(put_together, way):
    big = compiled(gradient)(VARIABLES, joined(*BATCHES))
    assert_same(put_together[way][STATE], big[STATE])
    parts = len(BATCHES) if way in AVERAGED else 1
    mean = big["params"]["used"] / parts
    np.testing.assert_allclose(put_together[way]["params"]["used"], mean, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def whole_steps():
    """Three steps, the second of which is skipped, in every way there is to write them: variables after each."""
    tx = jmp.optim.loss_scaled(optax.sgd(0.1, momentum=0.9), SCALE)
    start = VARIABLES, tx.init(VARIABLES)
    created = jmp.linen.TrainState.create(apply_fn=None, params=VARIABLES, tx=tx)

    def by_hand(carry, batch):
        grads = jmp.grad(loss_fn, loss_scale=carry[1])(carry[0], batch)
        carry = jmp.optim.step(tx, grads, carry[1], carry[0])
        return carry, carry[0]

    def minimized(carry, batch):
        *carry, _ = jmp.optim.minimize(loss_fn, tx)(*carry, batch)
        return tuple(carry), carry[0]

    def train_state(state, batch):
        state = state.apply_gradients(grads=jmp.grad(loss_fn, loss_scale=state)(state.params, batch))
        return state, state.params

    ways = {"by hand": (by_hand, start), "minimize": (minimized, start), "TrainState": (train_state, created)}
    batches = stacked(BATCHES[0], BAD, BATCHES[1])
    return compiled(lambda: {way: lax.scan(*step_and_start, batches)[1] for way, step_and_start in ways.items()})()


@pytest.mark.parametrize("way", ["by hand", "minimize", "TrainState"])
def test_good_steps_overwrite_state_and_skipped_ones_keep_every_bit(whole_steps, way):
    first, second, third = (jax.tree.map(lambda x, i=i: x[i], whole_steps[way]) for i in range(3))
    assert_same(first[STATE], state_after(VARIABLES, BATCHES[0]))
    assert_same(second, first)
    assert_same(third[STATE], state_after(first, BATCHES[1]))
    assert bool((first["params"]["used"] != VARIABLES["params"]["used"]).any())


def test_step_is_traced_once_and_its_arguments_can_be_donated():
    tx, traces = jmp.optim.loss_scaled(optax.sgd(0.1), SCALE), []

    def step(variables, state):
        traces.append(1)
        return jmp.optim.step(tx, gradient(variables, BATCHES[0]), state, variables)

    variables = jax.tree.map(jnp.copy, VARIABLES)
    carry, donating = (variables, tx.init(variables)), compiled(step, donate_argnums=(0, 1))
    for _ in range(3):
        carry = donating(*carry)
    assert len(traces) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(variables[STATE]))


def test_variables_and_optimizer_state_are_saved_and_restored(tmp_path):
    tx = jmp.optim.loss_scaled(optax.adamw(0.1), SCALE)
    tree = {"variables": VARIABLES, "opt_state": tx.init(VARIABLES)}
    assert_same(serialization.from_bytes(jax.tree.map(jnp.zeros_like, tree), serialization.to_bytes(tree)), tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(tmp_path / "saved", jax.eval_shape(lambda: tree)), tree)
