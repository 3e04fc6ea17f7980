"""What the benchmark of moments in 8 bits says, in little."""

import jax
import pytest

from benchmarks._optimizer_cost import count_bytes, count_parameters, traffic
from benchmarks._small_state_updates import describe_params, small_state_optimizers, update_program
from benchmarks._sparse_embeddings import sparse_contestants, train_sparse

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


@pytest.mark.exhaustive
def test_rare_gradients_blow_up_weights_whose_second_moments_become_zero():
    contestants = sparse_contestants()
    names = ("Adam", "quantize_state, embeddings too", "moments in e4m3, embeddings too")
    (expected, loss), (largest, small_loss), (careless, _) = (
        train_sparse(contestants[name], seed=0, steps=600) for name in names
    )
    assert largest == pytest.approx(expected, rel=0.05)
    assert small_loss == pytest.approx(loss, rel=0.05)
    assert careless > 100 * expected
