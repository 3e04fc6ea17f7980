"""What the benchmark of optimizers says of ours, in little: fewer bytes than any other, and donated buffers kept."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _optimizer_steps, _optimizer_updates, optimizer
from benchmarks._optimizer_cost import Traffic, count_parameters, traffic

on_cpu = pytest.mark.cpu("the figures are those of XLA:CPU")

GIVEN = 10**5
WHOLE = 10**6  # of fewer parameters, the activations count

FLOAT32 = {update.name: update for update in _optimizer_updates.float32_updates()}
HALF = {update.name: update for update in _optimizer_updates.half_updates()}
STEPS = _optimizer_steps.float16_steps()

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def _given(name: str) -> Traffic:
    """From given gradients, in multiples of float32 parameters."""
    update = FLOAT32[name]
    return traffic(update.program(GIVEN)).per(4 * count_parameters(update.params(GIVEN)))


@functools.cache
def _whole(name: str) -> Traffic:
    """From a batch, in multiples of float32 parameters."""
    steps = _optimizer_steps.Steps(WHOLE, depth=2)
    try:
        return traffic(STEPS[name](steps)).per(4 * count_parameters(steps.params))
    except ImportError:
        pytest.skip(f"{name} is not installed")


@on_cpu
def test_a_step_reads_the_gradients_once_more():
    ours = _given("loss_scaled, `optim.step`")
    assert ours.accessed <= 11.6  # and a byte for each number, written and read
    assert ours.temporaries <= 0.3


@on_cpu
@pytest.mark.parametrize("peer", ["optax.apply_if_finite", "jmp: all_finite, select_tree", "flax: is_finite, where"])
def test_updates_and_their_application_need_no_more_than_with_others(peer):
    ours = _given("loss_scaled, update + apply")
    assert ours.accessed <= min(14.6, _given(peer).accessed + 0.01)
    assert ours.temporaries <= min(1.05, _given(peer).temporaries + 0.01)


@on_cpu
@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith(("by hand", "jmp", "mixed", "flax"))])
def test_minimizing_needs_the_fewest_bytes_of_all(name):
    ours = _whole("loss_scaled, `optim.minimize`")
    assert ours.accessed <= _whole(name).accessed * 1.001  # the scalars that a state carries
    assert ours.temporaries <= _whole(name).temporaries + 0.01


@on_cpu
def test_minimizing_needs_less_than_gradients_and_a_step():
    ours, in_two = _whole("loss_scaled, `optim.minimize`"), _whole("loss_scaled, value_and_grad + `optim.step`")
    assert ours.accessed <= in_two.accessed - 2.4
    assert ours.temporaries <= in_two.temporaries - 0.5


def test_donated_parameters_and_moments_are_updated_in_place():
    for name in ("loss_scaled, `optim.step`", "loss_scaled, update + apply"):
        assert _given(name).in_place >= 3
    assert _whole("loss_scaled, `optim.minimize`").in_place >= 3


@pytest.mark.parametrize("name", ["master_weights, float32", "master_weights, split", "kahan"])
def test_half_precision_parameters_and_their_memory_are_updated_in_place(name):
    update = HALF[f"{name}, skip_nonfinite"]
    count = count_parameters(update.params(GIVEN))
    parameter_and_state = 2 + update.state_bytes(GIVEN) / count
    assert traffic(update.program(GIVEN)).per(count).in_place == pytest.approx(parameter_and_state, abs=1e-3)


def test_bytes_of_state_per_parameter():
    state = {name: round(update.state_bytes(GIVEN) / count_parameters(update.params(GIVEN)), 2)
             for name, update in HALF.items() if "skip" not in name}  # fmt: skip
    assert state == {
        "adamw": 4,
        "cast_state, float32 nu": 6,
        "master_weights, float32": 12,
        "master_weights, split": 10,
        "kahan": 10,
        "stochastic_rounding": 8,
    }


def test_a_step_whose_library_is_missing_says_so():
    rows = [optimizer.Row("ours", {"1 M": Traffic(1.0, 0.0, 3.0)}, 7.0), optimizer.Row("mpx", {}, 0, missing="mpx")]
    assert optimizer.report("whole", "Whole", rows).rows[1] == ("mpx", "not measured: needs mpx", "", "", "")


def test_the_sizes_are_those_of_the_names():
    for name, size in (optimizer.SIZES | optimizer.QUICK_SIZES).items():
        steps = _optimizer_steps.Steps(size)
        update = FLOAT32["adamw"]
        for params in (steps.params, update.params(size)):
            assert round(count_parameters(params) / 1e6) == pytest.approx(int(name.split()[0]), rel=0.01)
            assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
