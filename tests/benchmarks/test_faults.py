"""A float16 step cannot corrupt the state of a run: the benchmark of faults, in little."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from benchmarks import faults
from benchmarks._fault_contestants import TX, Fault, contestants, fault_tree, plan_faults, with_faults
from benchmarks._peer_steps import BY_HAND, KERAS, OURS, TORCH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.optimized,
    pytest.mark.filterwarnings("ignore"),  # of what Keras and PyTorch import
]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


EVERYTHING = ["parameters", "moments", "schedule counts", "batch statistics", "step counter"]

CORRUPTED = {
    OURS: [],
    BY_HAND: [],
    "jmp": ["step counter"],
    "flax DynamicScale": ["batch statistics", "step counter"],
    "mixed-precision-for-jax": ["batch statistics", "step counter"],
    "optax.apply_if_finite": EVERYTHING,
    KERAS: ["batch statistics"],
    TORCH: EVERYTHING,
}

FAULT = Fault(leaf=5, index=7, number=np.inf)  # in the kernel of the second dense layer


@pytest.fixture(params=CORRUPTED)
def name(request):
    """The name of a contestant that is installed."""
    if contestants()[request.param] is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def test_steps_corrupt_what_the_table_says(name):
    """Sixty steps. A release of theirs may corrupt less."""
    contestant = contestants()[name]
    counts = faults.corruption(contestant, plan_faults(contestants()[OURS].state.params, 60, rate=0.1, seed=1))
    corrupted = [part for part, count in counts.items() if count.corrupted]
    assert corrupted == CORRUPTED[name] if name in (OURS, BY_HAND) else set(corrupted) <= set(CORRUPTED[name])
    if name == OURS:
        assert [count.total for count in counts.values()] == [5684, 11368, 2, 160, 1]


def test_steps_without_faults_corrupt_nothing(name):
    assert {count.corrupted for count in faults.corruption(contestants()[name], [None] * 3).values()} == {0}


def test_everybody_notices_a_bad_step(name):
    """Its loss scale, or its count of skips, is another than after a good one: the fault has reached the gradients."""
    good, bad = (_list_scale(contestants()[name], fault) for fault in (None, FAULT))
    assert any(not np.array_equal(one, other) for one, other in zip(good, bad, strict=True))


def _list_scale(contestant, fault):
    """The state, of which a step has changed the loss scale and the count of skips alone."""
    after, _ = contestant.step(contestant.state, faults.make_batch(0, contestant.state.params, fault))
    return jax.tree.leaves(contestant.scale_of(contestant.state, after))


@pytest.mark.parametrize("name", [KERAS, TORCH], indirect=True)
def test_a_bad_step_halves_the_scale_and_leaves_parameters_alone(name):
    contestant = contestants()[name]
    after, _ = contestant.step(contestant.state, faults.make_batch(0, contestant.state.params, FAULT))
    jax.tree.map(np.testing.assert_array_equal, after.params, contestant.state.params)
    scale = lambda state: (
        state.scale["scale"] if name == TORCH else max(float(v) for v in state.opt_state[:4] if v.ndim == 0)
    )
    assert scale(after) == scale(contestant.state) / 2


def test_the_benchmark_sees_what_a_step_without_a_guard_corrupts():
    peer = contestants()["optax.apply_if_finite"]
    state = peer.state.replace(tx=TX, opt_state=TX.init(peer.state.params))
    unguarded = dataclasses.replace(peer, state=state, scale_of=lambda before, after: before)
    counts = faults.corruption(unguarded, plan_faults(state.params, steps=20, rate=0.1, seed=1))
    assert [part for part, count in counts.items() if count.corrupted] == EVERYTHING


def test_every_fault_is_a_skip_and_nothing_else_is():
    ours = contestants()[OURS]
    plan = plan_faults(ours.state.params, steps=30, rate=0.1, seed=2)
    state, losses = ours.state, []
    for seed, fault in enumerate(plan):
        state, loss = ours.step(state, faults.make_batch(seed, state.params, fault))
        losses.append(float(loss))
    assert int(jmp.metrics(state)["skipped_steps"]) == sum(fault is not None for fault in plan)
    assert np.isfinite(losses).all()


def test_a_fault_strikes_one_gradient_and_not_the_loss():
    params = {"b": jnp.ones(2), "w": jnp.ones((2, 2))}
    fault = fault_tree(params, Fault(leaf=1, index=3, number=-np.inf))
    loss_fn = lambda params: sum(x.sum() for x in jax.tree.leaves(with_faults(params, fault)))
    loss, grads = jax.value_and_grad(loss_fn)(params)
    assert float(loss) == 6.0
    assert grads["b"].tolist() == [1.0, 1.0]
    assert grads["w"].tolist() == [[1.0, 1.0], [1.0, -np.inf]]


def test_numbers_are_compared_by_their_bits():
    got = faults._differing({"a": np.float32([0.0, 1.0, np.nan])}, {"a": np.float32([-0.0, 1.0, np.nan])})
    assert got == faults.Count(corrupted=1, total=3)
