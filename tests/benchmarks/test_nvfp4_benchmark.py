"""What the benchmark of NVFP4 says, in little."""

import jax
import pytest

from benchmarks import nvfp4

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.mark.exhaustive
def test_stochastic_rounding_costs_a_draw_and_gains_in_the_mean():
    with jax.numpy_dtype_promotion("standard"):
        cases = {"dense layer": nvfp4.CASES["dense layer"]}
        rows = {name: (float(one), float(mean)) for name, one, mean in nvfp4.error_rows(cases, 4, (1, 64, 64))}
    default, noisy = rows["nvfp4, the default"], rows["without the transform"]
    assert noisy[1] < default[1] < noisy[0]
    assert rows["bfloat16"][0] < rows["mxfp8"][0] < default[0] == default[1]
