"""Every loop trains as by hand in float32, skips what overflowed, and is a program that never changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_registry import bits, types
from training_loops import LOOPS, several_optimizers

import jmp_policy as jmp
from jmp_policy.optim import LossScaledState

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

BAD = {1: np.inf, 4: np.nan}  # the steps that overflow, between four good ones


def _batches():
    rng = np.random.default_rng(20261121)
    x, y = rng.normal(size=(6, 4, 3)), rng.normal(size=(6, 4, 2))
    for step, number in BAD.items():
        x[step, 1, 2] = number  # in one microbatch of two
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}


def _good(batches):
    return jax.tree.map(lambda x: x[np.array([i for i in range(6) if i not in BAD])], batches)


def _kept(carry):
    """All that a skipped step must not change: everything but loss scales and the counters beside them."""

    def without_scale(node):
        if isinstance(node, jmp.LossScale):
            return None
        if isinstance(node, LossScaledState):
            return node.inner_state
        if isinstance(getattr(node, "inner_state", None), LossScaledState):  # inject_hyperparams, whose count is unread
            return node.hyperparams, node.inner_state.inner_state
        return node

    return jax.tree.map(without_scale, carry, is_leaf=lambda node: without_scale(node) is not node)


@pytest.fixture(scope="module", params=LOOPS)
def trained(request):
    """A loop, how often its step was traced, its jitted training, and what that made of the batches."""
    loop, traces = LOOPS[request.param](), []

    def body(carry, batch):
        traces.append(1)
        carry = loop.train_step(carry, batch)
        return carry, _kept(carry)

    with jax.numpy_dtype_promotion("standard"):
        train = jax.jit(lambda carry, batches: jax.lax.scan(body, carry, batches))
        return loop, traces, train, *train(loop.init(), _batches())


def test_good_steps_are_those_of_float32_without_scaling(trained):
    loop, _, _, carry, _ = trained
    body = lambda carry, batch: (loop.reference_step(carry, batch), None)
    expected, _ = jax.jit(lambda carry, batches: jax.lax.scan(body, carry, batches))(
        loop.reference_init(), _good(_batches())
    )
    start, got, expected = map(loop.params_of, (loop.init(), carry, expected))
    # Numbers of about one, of which each step adds at most 0.4 that float16 rounded a few times, by 2^-11 each.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), got, expected)
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), start, expected)
    assert max(jax.tree.leaves(moved)) > 0.05


def test_a_bad_step_changes_nothing_but_loss_scales_and_counters(trained):
    *_, history = trained
    at = lambda step: bits(jax.tree.map(lambda x: x[step], history))
    for step in BAD:
        assert at(step) == at(step - 1)
    assert at(2) != at(1)


def test_bad_steps_are_counted(trained):
    *_, carry, _ = trained
    states = jax.tree.leaves(carry, is_leaf=lambda node: isinstance(node, LossScaledState))
    states = [state for state in states if isinstance(state, LossScaledState)]
    assert {int(state.skipped_steps) for state in states} == {len(BAD)}


def test_more_steps_trace_nothing(trained):
    loop, traces, train, carry, _ = trained
    count = len(traces)
    again, _ = train(carry, _batches())
    assert len(traces) == count
    assert jax.tree.structure(again) == jax.tree.structure(loop.init())
    assert types(again) == types(loop.init())


def _one_batch(step):
    return jax.tree.map(lambda x: x[step], _batches())


def test_of_several_losses_only_the_scale_of_the_bad_one_is_lowered():
    loop = LOOPS["several losses, a scale each"]()
    _, _, scales = jax.jit(loop.train_step)(loop.init(), _one_batch(1))
    figures = {name: (float(scale.loss_scale), int(scale.counter)) for name, scale in scales.items()}
    assert figures == {"fit": (2.0**9, 0), "size": (2.0**4, 1)}


def test_of_several_optimizers_only_the_bad_one_skips_and_the_scale_is_lowered_once():
    loop, good, bad = several_optimizers(lambda both: both), _one_batch(0), _one_batch(1)
    train_step, start = jax.jit(loop.train_step), loop.init()
    for skips in ([0, 1], [1, 0], [1, 1]):
        params, states, scale = train_step(start, [(good, bad)[skip] for skip in skips])
        kept = [bits(new) == bits(old) for new, old in zip(params, start[0], strict=True)]
        assert kept == [bool(skip) for skip in skips]
        assert [int(state.skipped_steps) for state in states] == skips
        assert float(scale.loss_scale) == 2.0**9
