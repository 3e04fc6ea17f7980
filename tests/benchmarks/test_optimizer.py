"""What the benchmark of optimizers says of ours, in little: fewer bytes than any other, and donated buffers kept."""

import functools

import jax
import pytest

from benchmarks import _optimizer_steps, _optimizer_updates, optimizer
from benchmarks._compiled import Figures, count_parameters, traffic

on_cpu = pytest.mark.cpu("the figures are those of XLA:CPU")

GIVEN = 10**5
WHOLE = 10**6  # of fewer parameters, the activations count

HALF = {update.name: update for update in _optimizer_updates.half_updates()}
STEPS = _optimizer_steps.float16_steps()

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def _whole(name: str) -> Figures:
    """From a batch, in multiples of float32 parameters."""
    steps = _optimizer_steps.Steps(WHOLE, depth=2)
    try:
        return traffic(STEPS[name](steps)).per(4 * count_parameters(steps.params))
    except ImportError:
        pytest.skip(f"{name} is not installed")


@on_cpu
@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith(("by hand", "jmp", "mixed", "flax"))])
def test_minimizing_needs_the_fewest_bytes_of_all(name):
    ours = _whole("loss_scaled, `optim.minimize`")
    assert ours.bytes_accessed <= _whole(name).bytes_accessed * 1.001  # the scalars that a state carries
    assert ours.temporaries <= _whole(name).temporaries + 0.01


@on_cpu
def test_minimizing_needs_less_than_gradients_and_a_step():
    ours, in_two = _whole("loss_scaled, `optim.minimize`"), _whole("loss_scaled, value_and_grad + `optim.step`")
    assert ours.bytes_accessed <= in_two.bytes_accessed - 2.4
    assert ours.temporaries <= in_two.temporaries - 0.5


def test_donated_parameters_and_moments_are_updated_in_place():
    for name in ("`optim.minimize`", "value_and_grad + `optim.step`", "value_and_grad + update + apply"):
        assert _whole(f"loss_scaled, {name}").aliased >= 3


@pytest.mark.parametrize("name", ["master_weights, float32", "master_weights, split", "kahan"])
def test_half_precision_parameters_and_their_memory_are_updated_in_place(name):
    update = HALF[f"{name}, skip_nonfinite"]
    count = count_parameters(update.params(GIVEN))
    parameter_and_state = 2 + update.state_bytes(GIVEN) / count
    assert traffic(update.program(GIVEN)).per(count).aliased == pytest.approx(parameter_and_state, abs=1e-3)


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
    rows = [
        optimizer.Row("ours", {"1 M": Figures(0, 1.0, 0.0, 0, 3.0)}, 7.0),
        optimizer.Row("mpx", {}, 0, missing="mpx"),
    ]
    assert optimizer.report("whole", "Whole", rows).rows[1] == ("mpx", "not measured: needs mpx", "", "", "")
