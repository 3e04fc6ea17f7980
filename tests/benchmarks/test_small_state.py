"""What the benchmark of moments in 8 bits says, in little."""

import jax
import pytest

from benchmarks._compiled import count_bytes, count_parameters, traffic
from benchmarks.small_state import describe_params, small_state_optimizers, update_program

OPTIMIZERS = small_state_optimizers()
PARAMS = describe_params(512, 4)
COUNT = count_parameters(PARAMS)

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("adamw", 8, 8.01), ("cast_state, bfloat16", 4, 4.01), ("quantize_state", 2, 2.05)],
)
def test_moments_have_so_many_bytes(name, least, most):
    state = jax.eval_shape(OPTIMIZERS[name].init, PARAMS)
    assert least <= count_bytes(state) / COUNT <= most


@pytest.mark.cpu("the figures are those of XLA:CPU")
def test_no_whole_float32_moment_is_ever_alive():
    names = ("quantize_state", "cast_state, bfloat16")
    small, whole = (traffic(update_program(OPTIMIZERS[name], PARAMS)).temporaries / COUNT for name in names)
    assert small <= 0.55  # bytes per parameter of 1 M: a chunk of 64 k elements takes 8 bytes for each
    assert whole >= 4
