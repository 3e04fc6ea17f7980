"""Every planted fault is found, on its line, and nothing else is, nor anything in programs that are in float32."""

import re
import warnings

import jax
import jax.numpy as jnp
import optax
import planted_jax  # noqa: F401
import planted_models  # noqa: F401
import pytest
from planted import PLANTED, bf16, f32, ints
from zoo import ZOO

from jmp_policy.numerics import FINDINGS, audit


def found_in(fun, args):
    with jax.numpy_dtype_promotion("standard"):
        report = audit(fun)(*args)
    return {(finding.id, int(re.search(r":(\d+) \(", finding.source)[1])) for finding in report.findings}


@pytest.mark.parametrize("name", PLANTED)
def test_fault_is_found_on_its_line_and_its_clean_counterpart_has_no_findings(name):
    planted = PLANTED[name]
    assert found_in(planted.faulty, planted.args) == planted.faults
    assert found_in(planted.clean, planted.args) == set()


def test_every_finding_but_one_of_quantization_is_planted():
    faults = {fault for planted in PLANTED.values() for fault, _ in planted.faults}
    assert faults == FINDINGS.keys() - {"rounded-by-rule"}


LOSSES = {  # the arguments, in half precision or not
    "hinge_loss": lambda half: (half(4, 5), half(4, 5)),
    "l2_loss": lambda half: (half(4, 5), half(4, 5)),
    "ntxent": lambda half: (half(4, 5), ints(4)),
    "sigmoid_binary_cross_entropy": lambda half: (half(4, 5), half(4, 5)),
    "triplet_margin_loss": lambda half: (half(4, 5), half(4, 5), half(4, 5)),
    "ctc_loss": lambda half: (half(2, 5, 3), half(2, 5), ints(2, 4), half(2, 4)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_optax_in_half_is_found_and_in_float32_is_not(name):
    def total(*args):
        return jax.tree.map(lambda x: jnp.sum(x.astype(jnp.float32)), getattr(optax.losses, name)(*args))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of losses that have got another name
        assert "half-logits" in {found for found, _ in found_in(total, LOSSES[name](bf16))}
        assert found_in(total, LOSSES[name](f32)) == set()


def test_labels_that_are_smoothed_in_half_are_no_loss():
    assert audit(lambda labels: optax.smooth_labels(labels, 0.1))(bf16(4, 5)).findings == ()


@pytest.mark.parametrize("name", sorted(ZOO)[::30])
def test_program_is_read_and_each_matmul_has_a_line_of_it(name):
    specimen = ZOO[name]
    with specimen.context():
        report = audit(specimen.with_gradient(specimen.fun))(*specimen.args)
    assert report.rows
    assert all("/zoo_" in matmul.source or "specimen.py" in matmul.source for matmul in report.matmuls)
    assert report.findings == ()  # all is float32
