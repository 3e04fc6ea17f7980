"""Certificates: functions that are proved, issues of JAX that are found, and what cannot be told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from certified import CASES, WIDE, X, find_break, shape
from zoo import ZOO

from jmp_policy.contrib import Certificate, certify


@pytest.mark.parametrize("name", CASES)
def test_the_function_is_certified(name):
    case = CASES[name]
    certificate = certify(case.fun, case.ranges)(*case.args)
    assert certificate.holds, str(certificate)
    assert str(certificate) == "proved: no overflow, division by zero, invalid operation or cancellation"


def softmax_loss(logits):
    return -jnp.mean(jax.nn.log_softmax(logits))


def norm(x):
    return jnp.linalg.norm(x)  # jax issue 39899


def probability_of_no(x):
    return 1 - jax.nn.sigmoid(x)  # the result is zero from 8 on


ISSUES = {
    "norm": (norm, [(-100, 100)], shape(4096), "overflow", "convert_element_type"),
    "log_softmax": (softmax_loss, [(-6e4, 6e4)], X, "overflow", "sub"),  # jax issue 40409
    "sigmoid": (probability_of_no, [(-10, 10)], X, "cancellation", "sub"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ISSUES)
def test_the_issue_is_found(name):
    fun, ranges, x, fault, primitive = ISSUES[name]
    certificate = certify(fun, ranges, "float16")(x)
    assert (certificate.holds, certificate.fault, certificate.primitive) == (False, fault, primitive)
    assert certificate.dtype == "float16"
    file, _, line = certificate.source.rpartition(":")
    assert file == __file__
    assert fun.__code__.co_firstlineno < int(line) <= fun.__code__.co_firstlineno + 2
    assert not certificate
    (given,) = certificate.counterexample
    assert given.dtype == np.float16
    assert given.shape == x.shape
    assert np.abs(given.astype(np.float64)).max() <= ranges[0][1]
    out = np.asarray(fun(jnp.asarray(given)), np.float64)
    assert not np.isfinite(out).all() or (out == 0).any()


def test_the_norm_is_certified_where_it_fits():
    assert certify(lambda x: jnp.linalg.norm(x.astype(jnp.float32)), [(-100, 100)], "float16")(shape(4096)).holds
    assert certify(norm, [(-10, 10)], "float16")(shape(16)).holds
    assert certify(probability_of_no, [(-10, 10)])(X).holds
    assert certify(softmax_loss, [(-3e4, 3e4)], "float16")(X).holds


BROKEN = {
    "overflow": (jnp.exp, (0, 100), "float32", "exp"),
    "overflow of a sum": (lambda x: jnp.sum(x.astype(jnp.float16)), (0, 3e4), "float32", "convert_element_type"),
    "overflow of a product": (jnp.square, (-300, 300), "float16", "square"),
    "division by zero, underflow": (lambda x: 1 / (x * x), (1e-30, 1), "float32", "div"),
    "division by zero, no eps": (lambda x: x / jnp.sqrt(jnp.sum(x * x)), (-1, 1), "float32", "div"),
    "division by zero, eps": (lambda x: 1 / (jnp.abs(x) + jnp.array(1e-8, x.dtype)), (-1, 1), "float16", "div"),
    "division by zero, product": (lambda x: 1 / jnp.prod(x), (1e-5, 1), "float32", "div"),
    "division by zero, power that underflows": (lambda x: x**-2, (1e-30, 1), "float32", "integer_pow"),
    "division by zero, log": (lambda x: jnp.log(jax.nn.sigmoid(x)), (-20, 20), "float16", "log"),
    "invalid operation": (lambda x: jnp.sqrt(1 - x), (0, 2), "float32", "sqrt"),
    "division by zero, gradient": (
        jax.grad(lambda x: jnp.where(x > 0, jnp.log(x), 0.0).sum()), (-1, 1), "float32", "div"),
    "division by zero, unselected but multiplied": (lambda x: jnp.sign(x) * (1 / x), (-1, 1), "float32", "div"),
    "division by zero, but summed": (lambda x: jnp.where(x > 0, jnp.sum(1 / x), 0.0), (-1, 1), "float32", "div"),
    "division by zero, and returned": (lambda x: (jnp.where(x > 0, 1 / x, 0.0), 1 / x), (-1, 1), "float32", "div"),
    "division by zero, in the wrong case": (lambda x: jnp.where(x > 0, 0.0, 1 / x), (-1, 1), "float32", "div"),
    "division by zero, transposed": (lambda x: jnp.where(x[:, :3].T > 0, 1 / x[:, :3], 0.0), (-1, 1), "float32", "div"),
    "invalid operation, between two values": (
        lambda x: jnp.where((x != 0) & (x != 1), jnp.sqrt(x * (x - 1)), 0.0), (-2, 2), "float32", "sqrt"),
    "overflow, selected": (lambda x: jnp.where(x > 0, 1 / x, 0.0), (-1, 1), "float16", "div"),
    "cancellation, log": (lambda x: jnp.log(1 - jax.nn.sigmoid(x)), (-30, 30), "float32", "sub"),
    "cancellation, expm1": (lambda x: jnp.exp(x) - 1, (1e-8, 1), "float32", "sub"),
    "cancellation, scaled": (lambda x: 0.5 * (1 + jnp.tanh(x)), (-30, 30), "float32", "add"),
    "overflow in a scan": (
        lambda x: jax.lax.scan(lambda c, _: (c * c, None), x, None, length=9)[0], (1, 2), "float32", "mul"),
    "overflow after a while": (
        lambda x: jnp.exp(jax.lax.while_loop(lambda c: jnp.max(c) < 99, lambda c: 2 * c, x)), (1, 2), "float32", "exp"),
    "overflow in a cond": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.exp, jnp.sin, x), (-100, 100), "float32", "exp"),
}  # fmt: skip


DEAR = ("overflow of a sum", "division by zero, gradient", "division by zero, transposed")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in BROKEN]
)
def test_a_function_is_broken_by_its_counterexample(name):
    fun, pair, dtype, primitive = BROKEN[name]
    certificate = certify(fun, [pair], dtype)(X)
    assert (certificate.holds, certificate.primitive) == (False, primitive)
    assert name.startswith(certificate.fault)
    assert str(certificate).startswith(f"broken: {certificate.fault} in `{primitive}`")
    (given,) = certificate.counterexample
    fault = find_break(fun, jnp.asarray(given))
    assert certificate.fault == "cancellation" or (fault and fault.kind == certificate.fault)


LARGE = shape(3000, 3000)
"""Too large to be tried: only the bounds count."""

UNKNOWN = {
    "linear algebra": (jnp.linalg.qr, (-1, 1), "it has no rule", "qr"),
    "a loop": (lambda x: jax.lax.scan(lambda c, _: (c + x, None), x, None, length=300)[0], (0, 1),
               "its bounds still grow", "scan"),
    "subnormal numbers": (lambda x: jnp.arctan2(x, x), (-1, 1), "it has no rule", "atan2"),  # nan on a CPU
    "a sorted difference": (lambda x: jnp.sort(1 - jax.nn.sigmoid(x)), (-20, 20), "cancellation", "sub"),
    "correlations": (lambda x: jnp.sqrt(jnp.exp(x) - x), (-3, 3), "invalid operation", "sqrt"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_it_says_that_it_cannot_tell(name):
    fun, pair, fault, primitive = UNKNOWN[name]
    certificate = certify(fun, [pair])(LARGE)
    assert certificate.holds is None
    assert certificate.fault.startswith(fault)
    assert certificate.primitive == primitive
    assert certificate.counterexample is None
    assert not certificate
    assert str(certificate).startswith("cannot tell: ")


# The functions of four numbers are at most this large.
LARGEST = {
    "root of a mean of squares": (lambda x: x / jnp.sqrt(jnp.mean(jnp.square(x)) + 1e-6), 2.0),
    "rsqrt of a mean of squares": (lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)[0] + 1e-6), 2.0),
    "norm": (lambda x: x / (jnp.sqrt(jnp.sum(x**2)) + 1e-6), 1.0),
    "half a norm": (lambda x: x / (0.5 * jnp.sqrt(jnp.sum(x**2)) + 1e-6), 2.0),
    "half of the squares": (lambda x: x / jnp.sqrt(jnp.sum(x**2) / 2 + 1e-6), 2.0**0.5),
    "largest magnitude": (lambda x: x / jnp.maximum(jnp.max(jnp.abs(x)), 1e-6), 1.0),
    "difference of maxima": (lambda x: x - jnp.max(x), 0.0),
    "softmax": (jax.nn.softmax, 1.0),
    "logarithm of softmax": (lambda x: -jax.nn.logsumexp(x - jnp.max(x)), 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGEST)
def test_relations_bound_a_function_by_its_largest_value(name):
    fun, largest = LARGEST[name]
    x = shape(1, 4)
    assert certify(lambda x: jnp.sqrt(largest + 0.01 - fun(x)), WIDE)(x).holds
    assert not certify(lambda x: jnp.sqrt(largest - 0.01 - fun(x)), WIDE)(x).holds


def test_a_sum_of_exponentials_is_not_the_largest_one_of_another_slice():
    fun = lambda axis: lambda x: jnp.log(jnp.sum(jnp.exp(x - jnp.max(x, 0, keepdims=True)), axis) - 0.9)
    assert certify(fun(0), WIDE)(X).holds
    assert certify(fun(1), WIDE)(LARGE).holds is None

    def subtract_twice(x):  # the difference is zero somewhere in each row, and not in each column
        y = 100 * jnp.exp(x - jnp.max(x, 0, keepdims=True))
        return jnp.log(jnp.sum(jnp.exp(y - jnp.max(y, 1, keepdims=True)), 0) - 0.9)

    assert certify(subtract_twice, WIDE)(LARGE).holds is None
    transposed = lambda x: jnp.sqrt(jnp.max(x, 1)[None] - x)  # of a square matrix: a maximum for another row
    assert certify(transposed, WIDE)(LARGE).holds is None
    assert certify(lambda x: transposed(x.T), WIDE)(LARGE).holds is None
    assert certify(lambda x: jnp.sqrt(jnp.max(x, 1)[None] - x.T), WIDE)(shape(3, 3)).holds


@pytest.mark.cpu("a GPU computes with subnormal numbers, so that no input breaks the function there")
def test_subnormal_numbers_may_be_zero():
    certificate = certify(lambda x: x / (x * x), [(1e-20, 1)])(X)
    assert (certificate.holds, certificate.fault) == (False, "division by zero")
    assert certify(lambda x: x / (x * x + 1e-30), [(1e-20, 1)])(X).holds


def test_harmless_cancellation_is_not_reported():
    assert certify(lambda x: x * (1 + jnp.tanh(x)), WIDE)(X).holds
    assert certify(lambda x: jnp.log(jnp.maximum(1 - jax.nn.sigmoid(x), 1e-7)), WIDE)(X).holds


def test_a_policy_casts_arguments_and_outputs():
    certificate = certify(lambda x: 300 * x, [(0, 300)], "params=float32,compute=float32,output=float16")(X)
    assert (certificate.holds, certificate.primitive, certificate.dtype) == (False, "convert_element_type", "float16")
    assert certify(lambda x: 300 * x, [(0, 300)])(X).holds


def test_ranges_are_a_tree_or_one_pair():
    tree = {"a": X, "b": [X]}
    fun = lambda tree, y: tree["a"] / tree["b"][0] + y
    assert certify(fun, [{"a": (-1, 1), "b": [(1, 2)]}, (0, 1)])(tree, X).holds
    assert certify(fun, (1, 2))(tree, X).holds
    broken = certify(fun, [{"a": (-1, 1), "b": (-1, 2)}, (0, 1)])(tree, X)
    assert broken.fault == "division by zero"
    assert jax.tree.structure(broken.counterexample) == jax.tree.structure((tree, X))


def test_values_of_arguments_do_not_matter_and_large_arrays_are_not_tried():
    assert certify(jnp.exp, [(0, 100)])(jnp.zeros((3, 5))).holds is False
    certificate = certify(jnp.exp, [(0, 100)])(shape(10**5, 10**5))
    assert (certificate.holds, certificate.fault, certificate.operands) == (None, "overflow", ((0.0, 100.0),))


def test_a_constant_nan_is_an_invalid_operation():
    certificate = certify(lambda x: (x, jnp.full(3, jnp.nan)), [(0, 1)])(X)
    assert certificate.holds is None
    assert str(certificate).startswith("cannot tell: invalid operation may occur in a constant nan that is returned")


def test_a_certificate_is_true_only_if_it_holds():
    assert [bool(Certificate(holds)) for holds in (True, False, None)] == [True, False, False]


@pytest.mark.parametrize("name", ["scan_over_layers", "while_loop", "switch_in_vmap", "custom_vjp_in_vmap_and_scan"])
def test_control_flow_of_the_zoo_is_followed(name):
    assert certify(ZOO[name].fun, (0, 1))(*ZOO[name].args).holds


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: certify(3, (0, 1)), TypeError,
         r"certify takes a function, got 3\. .*: certify\(train_step, \[\(-1, 1\), \(0, 10\)\]\)"),
        (lambda: certify(jnp.add, [(0, 1)])(X, X), ValueError,
         r"The ranges \[\(0, 1\)\] do not fit arguments of shapes .*For example: certify\(loss"),
        (lambda: certify(lambda x, y: x * y, [(0, 1), (0, 9)])(X, 2.0), TypeError,
         r"The argument 2\.0 is a Python number, .*jax\.ShapeDtypeStruct\(\(\), 'float32'\)"),
        (lambda: certify(jnp.exp, [(1, 0)])(X), ValueError,
         r"\(1, 0\) is not a range\. .*For example: \(-10\.0, 10\.0\)"),
        (lambda: certify(jnp.exp, [(0, 1e6)], "float16")(X), ValueError,
         r"The range \(0, 1000000\.0\) does not fit float16, .*65504"),
        (lambda: certify(lambda i: i, [(0.1, 0.9)])(shape(3, dtype="int32")), ValueError,
         r"No number of int32 is in the range \(0\.1, 0\.9\)\. .*For example: \(0, 1\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_certified_is_an_error(call, error, text):
    with pytest.raises(error, match=text):
        call()
