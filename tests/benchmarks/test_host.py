"""Costs on the host stay within their bounds: calls of functions, over the same code without the package."""

import jax
import pytest

import jmp_policy as jmp
from benchmarks import host

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

BOUNDS = {
    **{
        f"{name}, {api}": (lambda trace=trace, rules=rules: trace(rules, 16), 1.2)
        for api, trace in host.CHAINS.items()
        for name, rules in host.RULES.items()
    },
    "autocast": (lambda: host.trace_autocast(16), 1.45),
    "minimize": (lambda: host.lower_minimize(1), 1.08),
    "dispatch of loss_scaled": (lambda: host.dispatch(jmp.optim.loss_scaled(host.ADAMW, jmp.DynamicLossScale())), 10),
    "dispatch of skip_nonfinite": (lambda: host.dispatch(jmp.optim.skip_nonfinite(host.ADAMW)), 10),
    "linen outside of jit": (host.run_linen, 1.1),
    "nnx outside of jit": (lambda: host.run_nnx(lambda fun: fun), 1.1),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_calls_stay_within_bounds(name):
    measure, bound = BOUNDS[name]
    with jax.numpy_dtype_promotion("standard"):
        assert float(measure()) <= bound
