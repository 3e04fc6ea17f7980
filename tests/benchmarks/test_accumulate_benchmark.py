"""What the benchmark of accumulate dtypes says, in little."""

import jax
import pytest

from benchmarks import accumulate

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def test_logits_and_gradients_of_weights_lose_nothing():
    with jax.numpy_dtype_promotion("standard"):
        rows = {tuple(row[:2]): [float(cell) for cell in row[2:]] for row in accumulate.error_rows((1, 8, 32), 64)}
    for param_dtype in ("float32", "bfloat16"):
        assert rows[param_dtype, "a=f32"][1] < 1e-6 < 1e-3 < rows[param_dtype, "a=none"][1]
    assert rows["float32", "a=f32"][3] < 1e-6 < 1e-3 < rows["float32", "a=none"][3]


def test_a_step_has_as_many_flops():
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote by themselves
        rows = accumulate.cost_rows([])
    flops = [float(row[2]) for row in rows]
    assert abs(flops[1] / flops[0] - 1) < 0.02
