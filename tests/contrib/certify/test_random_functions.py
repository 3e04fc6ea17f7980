"""Random functions: random inputs, and the ends of the ranges, break no certificate that holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from certified import draw
from random_functions import make_function

from jmp_policy.contrib import certify
from jmp_policy.contrib._certify._certificate import list_inputs
from jmp_policy.contrib._certify._interpreter import FaultSearch


@pytest.mark.parametrize("seed", range(4))
def test_a_certificate_of_a_random_function_is_true(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(4, 304))
def test_a_certificate_of_more_random_functions_is_true(seed):
    check(seed)


def check(seed):
    """Certifies a random function, and runs it on a batch of inputs, one operation at a time and compiled."""
    case, text = make_function(seed)
    certificate = certify(case.fun, case.ranges)(*case.args)
    if certificate.holds is None:
        return
    if certificate.holds is False:
        fault = find_break(case.fun, *map(jnp.asarray, certificate.counterexample))
        assert certificate.fault == "cancellation" or (fault and fault.kind == certificate.fault), text
        return
    ends = list_inputs([(arg, *pair) for arg, pair in zip(case.args, case.ranges, strict=True)])
    batch = [
        np.concatenate(both) for both in zip(map(np.stack, zip(*ends, strict=True)), draw(case, 1000), strict=True)
    ]
    assert find_break(jax.vmap(case.fun), *map(jnp.asarray, batch)) is None, text
    out = jax.jit(jax.vmap(case.fun))(*batch)
    assert np.isfinite(np.asarray(out, np.float64)).all(), text


def find_break(fun, *args):
    """Returns the fault of the first operation that fails for these arguments."""
    program = jax.make_jaxpr(fun)(*args)
    trial = FaultSearch(set())
    trial.run(program.jaxpr, program.consts, args)
    return trial.fault
