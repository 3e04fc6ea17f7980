"""A float16 step cannot corrupt the state of a run: the benchmark of faults, in little."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from benchmarks import faults
from benchmarks._fault_contestants import TX, contestants
from benchmarks._faults import BURST, Fault, fault_tree, plan_faults, with_faults

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def _counts():
    """What sixty steps corrupt, library by library."""
    everyone = contestants()
    plan = plan_faults(everyone[0].state.params, steps=60, rate=0.1, seed=1)
    return {contestant.name: faults.corruption(contestant, plan) for contestant in everyone}


def test_nothing_of_ours_is_corrupted():
    counts = _counts()["jmp_policy"]
    assert {name: count.corrupted for name, count in counts.items()} == dict.fromkeys(counts, 0)
    assert [count.total for count in counts.values()] == [5684, 11368, 2, 160, 1]


@pytest.mark.parametrize(
    ("name", "corrupted"),
    [
        ("jmp", ["step counter"]),
        ("flax DynamicScale", ["batch statistics", "step counter"]),
        ("mixed-precision-for-jax", ["batch statistics", "step counter"]),
        ("optax.apply_if_finite", ["parameters", "moments", "schedule counts", "batch statistics", "step counter"]),
    ],
)
def test_others_corrupt_no_more_than_the_benchmark_says_of_them(name, corrupted):
    """A release of theirs may corrupt less."""
    if name not in _counts():
        pytest.skip(f"{name} is not installed")
    assert {part for part, count in _counts()[name].items() if count.corrupted} <= set(corrupted)


def test_the_benchmark_sees_what_a_step_without_a_guard_corrupts():
    [peer] = [contestant for contestant in contestants() if contestant.name == "optax.apply_if_finite"]
    state = peer.state.replace(tx=TX, opt_state=TX.init(peer.state.params))
    unguarded = dataclasses.replace(peer, state=state, scale_of=lambda before, after: before)
    counts = faults.corruption(unguarded, plan_faults(state.params, steps=20, rate=0.1, seed=1))
    assert [part for part, count in counts.items() if count.corrupted] == list(_counts()["jmp_policy"])


def test_every_fault_is_a_skip_and_nothing_else_is():
    ours = contestants()[0]
    plan = plan_faults(ours.state.params, steps=30, rate=0.1, seed=2)
    state, losses = ours.state, []
    for seed, fault in enumerate(plan):
        state, loss = ours.step(state, faults.make_batch(seed, state.params, fault))
        losses.append(float(loss))
    assert int(jmp.metrics(state)["skipped_steps"]) == sum(fault is not None for fault in plan)
    assert np.isfinite(losses).all()


def test_plans_hold_a_burst_and_every_bad_number():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    plan = plan_faults(params, steps=1000, rate=0.03, seed=0)
    bad = "".join("x" if fault else "." for fault in plan)
    assert "x" * BURST in bad
    assert {str(fault.number) for fault in plan if fault} == {"inf", "-inf", "nan"}
    assert {fault.leaf for fault in plan if fault} == {0, 1}


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
