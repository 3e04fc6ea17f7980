"""Training with float8 state: microbatches and devices leave the state of one big batch, and skipped steps none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


def test_microbatches_of_multisteps_leave_the_state_of_one_big_batch():
    """Two a step, in any order, with bad ones between; each step is remembered once."""
    tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2), SCALE)
    step = train_step(tx)
    for order in ([BATCHES[1], BATCHES[0]], [BAD, *BATCHES[:2]], [BATCHES[0], BAD, BAD, BATCHES[1]]):
        variables, state = VARIABLES, tx.init(VARIABLES)
        for batch in order:
            variables, state = step(variables, state, batch)
        assert_same(variables[STATE], state_after(VARIABLES, joined(*BATCHES[:2])))
        assert int(state.skipped_steps) == len(order) - 2
    expected = state_after(variables, joined(*BATCHES[2:]))
    for batch in BATCHES[2:]:
        variables, state = step(variables, state, batch)
    assert_same(variables[STATE], expected)


def _with_groups():
    labels = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, tree)
    groups = {name: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation() for name in ("used", "idle")}
    return optax.partition(groups, labels)


@pytest.mark.parametrize(
    ("quantization", "make"),
    [
        ("float8/1(recipe=delayed/most_recent,min_size=0)", lambda: optax.MultiSteps(optax.sgd(0.1), 2)),
        ("float8/4(recipe=delayed/2,min_size=0)", _with_groups),
    ],
    ids=["most recent", "each group has its MultiSteps"],
)
def test_microbatches_leave_the_state_of_one_big_batch_in_every_recipe(quantization, make):
    variables, tx = variables_of(quantization), jmp.optim.skip_nonfinite(make())
    step, state, new = train_step(tx, quantization), tx.init(variables), variables
    for batch in BATCHES[:2]:
        new, state = step(new, state, batch)
    assert_same(new[STATE], state_after(variables, joined(*BATCHES[:2]), quantization))


def gradient(variables, batch):
    return jmp.grad(loss_fn, loss_scale=SCALE)(variables, batch)


def in_a_scan(variables):
    add = lambda total, batch: (jmp.optim.accumulate(total, gradient(variables, batch)), None)
    return lax.scan(add, jax.tree.map(jnp.zeros_like, variables), stacked(*BATCHES))[0]


def of_devices(variables, batch):
    return jmp.sharding.pmean(gradient(variables, batch), "devices")


def on_mapped_devices(variables):
    of_each = jax.vmap(of_devices, (None, 0), axis_name="devices")(variables, stacked(*BATCHES))
    return jax.tree.map(lambda x: x[0], of_each)


def on_a_mesh(variables):
    specs = {"mesh": MESH, "in_specs": (P(), P("devices")), "out_specs": P(), "check_vma": False}
    return jax.shard_map(of_devices, **specs)(variables, joined(*BATCHES))


@pytest.mark.parametrize(("put_together", "parts"), [(in_a_scan, 1), (on_mapped_devices, 4), (on_a_mesh, 4)])
def test_gradients_that_are_put_together_have_the_state_of_one_big_batch(put_together, parts):
    found, big = compiled(put_together)(VARIABLES), compiled(gradient)(VARIABLES, joined(*BATCHES))
    assert_same(found[STATE], big[STATE])
    mean = big["params"]["used"] / parts
    np.testing.assert_allclose(found["params"]["used"], mean, rtol=1e-5, atol=1e-5)


def by_hand(tx, variables, state, batch):
    return jmp.optim.step(tx, jmp.grad(loss_fn, loss_scale=state)(variables, batch), state, variables)


def minimized(tx, variables, state, batch):
    return jmp.optim.minimize(loss_fn, tx)(variables, state, batch)[:2]


@pytest.mark.parametrize("step", [by_hand, minimized])
def test_good_steps_overwrite_state_and_skipped_ones_keep_every_bit_in_one_trace(step):
    tx, traces = jmp.optim.loss_scaled(optax.sgd(0.1, momentum=0.9), SCALE), []

    def counted(variables, state, batch):
        traces.append(1)
        return step(tx, variables, state, batch)

    donating = compiled(counted, donate_argnums=(0, 1))
    variables, state = jax.tree.map(jnp.copy, VARIABLES), tx.init(VARIABLES)
    seen = []
    for batch in (BATCHES[0], BAD, BATCHES[1]):
        donated = variables
        variables, state = donating(variables, state, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated[STATE]))
        seen.append(jax.tree.map(np.array, variables))
    first, second, third = seen
    assert len(traces) == 1
    assert_same(first[STATE], state_after(VARIABLES, BATCHES[0]))
    assert_same(second, first)
    assert_same(third[STATE], state_after(jax.tree.map(jnp.asarray, first), BATCHES[1]))
    assert bool((first["params"]["used"] != VARIABLES["params"]["used"]).any())
