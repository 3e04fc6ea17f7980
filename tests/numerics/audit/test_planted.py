"""Every planted fault is found, on its line, and nothing else is."""

import re

import jax
import planted_jax  # noqa: F401
import planted_linen  # noqa: F401
import planted_nnx  # noqa: F401
import planted_range  # noqa: F401
import pytest
from planted import PLANTED

import jmp_policy as jmp


def found_in(fun, args):
    with jax.numpy_dtype_promotion("standard"):
        report = jmp.numerics.audit(fun)(*args)
    return {(finding.id, int(re.search(r":(\d+) \(", finding.source)[1])) for finding in report.findings}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", PLANTED)
def test_fault_is_found_on_its_line(name):
    planted = PLANTED[name]
    assert found_in(planted.faulty, planted.args) == planted.faults


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", PLANTED)
def test_clean_counterpart_has_no_findings(name):
    planted = PLANTED[name]
    assert found_in(planted.clean, planted.args) == set()
