"""Planted faults: `first_nonfinite` names the line, the operation, the pass, the turns of loops, and the cause."""

import faults_backward as faults_backward
import faults_forward as faults_forward
import faults_linen as faults_linen
import faults_loops as faults_loops
import faults_nnx as faults_nnx
import jax
import numpy as np
import pytest
from faults import FAULTS, assert_is, assert_ranges_are
from oracle import find_origin

from jmp_policy.numerics import first_nonfinite
from jmp_policy.numerics._first_nonfinite import search_nonfinite

EAGER = ("turn of a while", "trap of where")


QUICK = (
    "overflow",
    "scale that is infinite for a nan",
    "argument that is nan",
    "harmless infinities before the fault",
    "softmax that is fully masked",
    "cast that overflows",
    "branch of a cond",
    "forward pass under a gradient",
    "scans in a scan",
    "while in a scan",
    "long loop",
    "backward pass of a scan",
    "backward pass of a custom vjp",
    "pass that a remat repeats",
    "where of two infinities",
    "parameter of a linen model that is nan",
    "layer of a scan over layers",
    "overflow before a linear",
)


def mark(name):
    return pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])


def is_of_model(name):
    return FAULTS[name].file.endswith(("faults_linen.py", "faults_nnx.py"))


@pytest.fixture(autouse=True)
def promotion(name):
    """Flax's norms promote their own float32 statistics."""
    with jax.numpy_dtype_promotion("standard" if is_of_model(name) else "strict"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", [mark(name) for name in FAULTS])
def test_the_origin_is_named(name):
    fault = FAULTS[name]
    _, found = jax.jit(first_nonfinite(fault.fun))(*fault.args)
    assert_fault_is_found(found, fault)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.exhaustive) for name in FAULTS]
)
def test_the_origin_is_named_by_the_search_of_the_host(name):
    """The program of `optim.find_origin`, which does not look at results first."""
    fault = FAULTS[name]
    found = jax.jit(lambda *args: search_nonfinite(fault.fun, None, checks=False)(*args)[1])(*fault.args)
    assert_fault_is_found(found, fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_the_origin_is_named_without_jit(name):
    fault = FAULTS[name]
    out, found = first_nonfinite(fault.fun)(*fault.args)
    jax.tree.map(np.testing.assert_array_equal, out, fault.fun(*fault.args))
    assert_fault_is_found(found, fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", [mark(name) if is_of_model(name) else name for name in FAULTS])
def test_what_comments_say_is_so_number_by_number(name):
    fault = FAULTS[name]
    origin = find_origin(fault.fun, *fault.args)
    if fault.origin is None:
        assert (origin.argument is not None, origin.kind) == (True, fault.argument[1])
        return
    place = lambda origin: (origin.kind, origin.primitive, origin.direction, origin.turns)
    assert place(origin) == fault.origin[:4]
    if isinstance(fault.cause, str):
        assert origin.cause.argument is not None
    elif fault.cause:
        assert place(origin.cause) == fault.cause[:4]


def assert_fault_is_found(found, fault):
    assert found.found
    assert found.reproduced
    if fault.origin is None:
        assert (found.argument, found.kind, found.primitive) == (*fault.argument, "")
        return
    assert found.argument is None
    assert_is(found, fault.origin, fault.file)
    assert fault.path in (None, found.path)
    assert (found.cause is None) == (fault.cause is None)
    if isinstance(fault.cause, str):
        assert found.cause.argument == fault.cause
    elif fault.cause:
        assert_is(found.cause, fault.cause, fault.file)
        assert fault.cause_path in (None, found.cause.path)
    assert_ranges_are(found, find_origin(fault.fun, *fault.args))
