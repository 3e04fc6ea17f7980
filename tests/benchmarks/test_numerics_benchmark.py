"""The benchmark of statistics runs, and what it must not exceed holds."""

import jax
import pytest

from benchmarks._programs import Program
from benchmarks._targets import cpu
from benchmarks.numerics import MEASURED, cost, gradient, observe
from examples.gpt.model import GPTConfig

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def test_a_row_for_each_matmul_of_the_demo_costs_no_more_than_it_may():
    with jax.numpy_dtype_promotion("standard"):
        fun, args = gradient(GPTConfig())
        plain = cost(Program(jax.jit(fun), args), cpu())
        ratios = cost(observe(fun, args, MEASURED["matmuls, four formats, histogram"]), cpu()).over(plain)
    assert ratios.operations <= 5
    assert ratios.bytes <= 1.3
    assert ratios.temporaries <= 1.05
