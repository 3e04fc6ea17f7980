"""Faults of the forward pass, without loops."""

import jax
import jax.numpy as jnp
import numpy as np
from faults import fault, value_and_grads
from jax import lax

X = np.asarray([0.5, 1.0, 2.0], np.float32)
ZEROS = np.zeros(3, np.float32)
INFINITY = np.float32("inf")


@fault(X * 60)
def overflow(x):
    y = x * 2
    return jnp.exp(y) + 1  # origin: inf exp


@fault(X)
def logarithm_of_a_negative(x):
    y = jnp.sin(x)
    y = jnp.log(y - 0.9)  # origin: nan log
    return jnp.tanh(y)


@fault(X)
def zero_over_zero(x):
    y = x - x
    return x + y / y  # origin: nan div


@fault(X)
def infinity_minus_infinity(x):
    large = x * 1e38
    y = large * 1e5  # cause: inf mul
    z = y + 1
    return (z - y) * 2  # origin: nan sub


@fault(X)
def scale_that_is_infinite_for_a_nan(x):
    y = jnp.log(x - 1)  # origin: nan log
    scale = jnp.max(jnp.where(jnp.isnan(y), jnp.inf, jnp.abs(y)))
    return jnp.round(jnp.where(jnp.isnan(y), 0, x)) * scale  # as in an int8 product


@fault(np.asarray([200, 300], np.float16))
def overflow_of_float16(x):
    y = x + 1
    return y * y  # origin: inf mul


@fault(X * 1e5)
def cast_that_overflows(x):
    y = x * 2
    return y.astype(jnp.float16) * 0.5  # origin: inf convert_element_type


@fault(X * 1e19)
def matmul_that_overflows(x):
    return jnp.tanh(x) + x @ x  # origin: inf dot_general


@fault(X * 1e38)
def sum_that_overflows(x):
    return jnp.sum(x)  # origin: inf reduce_sum


@fault({"x": X, "y": np.asarray([1, np.nan, 2], np.float32)}, argument=("batch['y']", "nan"))
def argument_that_is_nan(batch):
    return jnp.sum(batch["x"] * batch["y"])


@fault([X, X * INFINITY], argument=("xs[1]", "inf"))
def argument_that_is_infinite(xs):
    return xs[0] + xs[1]


@fault(X, X * INFINITY, cause="y")
def infinite_argument_and_a_nan(x, y):
    return x + y * 0  # origin: nan mul


@fault(X, ZEROS)
def harmless_infinities_before_the_fault(x, zeros):
    x = x + jnp.exp(-1 / zeros)
    x = x + jnp.where(zeros > 0, jnp.log(zeros), 0)
    x = jnp.minimum(x, 1 / zeros) + 1 / (1 / zeros)
    y = jnp.log(x - 1)  # origin: nan log
    return y + jnp.tanh(1 / zeros)


@fault(X, ZEROS)
def harmless_nans_before_the_fault(x, zeros):
    x = x + jnp.where(zeros > 0, zeros / zeros, 1)
    x = x + jnp.nan_to_num(zeros / zeros)
    return x * jnp.exp(x * 100)  # origin: inf exp


@fault(np.asarray([2, 0, 3], np.float32))
def where_of_two_infinities(x):
    # Number 1 of the reciprocal is infinite, and not taken.
    reciprocal = 1 / x
    large = jnp.exp(x * 40)  # origin: inf exp
    return jnp.where((x == 0) | (x > 2.5), large, reciprocal)


@fault(np.ones((2, 3), np.float32), np.asarray([[True, False, True], [False] * 3]))
def softmax_that_is_fully_masked(scores, mask):
    scores = jnp.where(mask, scores, -jnp.inf)  # cause: inf select_n
    scores = scores - lax.stop_gradient(jnp.max(scores, 1, keepdims=True))  # origin: nan sub
    weights = jnp.exp(scores)
    return weights / jnp.sum(weights, 1, keepdims=True)


@fault(np.ones((2, 3), np.float32), np.asarray([[True, False, True], [True] * 3]))
def softmax_that_is_masked_in_part(scores, mask):
    scores = jnp.where(mask, scores, -jnp.inf)
    scores = scores - lax.stop_gradient(jnp.max(scores, 1, keepdims=True))
    weights = jnp.exp(scores)
    weights = weights / jnp.sum(weights, 1, keepdims=True)
    return jnp.log(weights - 0.4)  # origin: nan log


@fault(np.ones((2, 3), np.float32), np.asarray([[True, False, True], [False] * 3]))
def softmax_of_jax_that_is_fully_masked(scores, mask):
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))  # origin: nan sub # cause: inf select_n


@fault(X, True)
def branch_of_a_cond(x, which):
    def taken(x):
        return x + jnp.sqrt(-x)  # origin: nan sqrt

    def other(x):
        return jnp.log(-x)

    return lax.cond(which, taken, other, x) * 2


@fault(X, np.int32(2))
def branch_of_a_switch(x, which):
    faulty = lambda x: jnp.log(-x)
    last = lambda x: x / (x - 1)  # origin: inf div
    return lax.switch(which, [faulty, jnp.sin, last], x)


@fault(X)
def function_that_is_jitted(x):
    @jax.jit
    def inner(x):
        return x + lax.rsqrt(x - 1)  # origin: nan rsqrt

    return inner(x) * 2


@fault(X, X - 1)
def one_jitted_function_at_two_lines(x, y):
    log = jax.jit(jnp.log)
    return log(x) + log(y)  # origin: nan log


@fault(X, of=value_and_grads)
def forward_pass_of_a_remat(x):
    @jax.checkpoint
    def block(x):
        y = jnp.sin(x)
        return jnp.log(y - 0.9) * y  # origin: nan log

    return block(x * 2) + x


@fault(np.stack([X, X - 1]), of=jax.vmap)
def function_that_is_mapped(x):
    y = x * 2
    return jnp.sum(jnp.sqrt(y))  # origin: nan sqrt


@fault(X, of=jax.value_and_grad)
def forward_pass_under_a_gradient(x):
    y = jnp.exp(x)
    y = y / jnp.sum(y - y)  # origin: inf div
    return jnp.sum(y * 2)


@fault(X, path="blocks/head")
def function_in_named_scopes(x):
    with jax.named_scope("blocks"):
        x = jnp.sin(x)
        with jax.named_scope("head"):
            return x + jnp.log(x - 0.9)  # origin: nan log


@fault(np.complex64([1j, 2]))
def complex_numbers(x):
    y = jnp.real(x * x)
    return jnp.log(y)  # origin: nan log


@fault(X)
def output_that_is_a_constant(x):
    return x, jnp.log(jnp.float32(-1)) + jnp.sum(x)  # origin: nan log


@fault(X)
def exponent_that_is_large(x):
    return (x + 30) ** 40  # origin: inf integer_pow


@fault(X, np.asarray([0, 2, 1]))
def segment_without_members(x, segments):
    sums = jax.ops.segment_sum(x, segments, 4)
    counts = jax.ops.segment_sum(jnp.ones_like(x), segments, 4)
    return sums / counts  # origin: nan div
