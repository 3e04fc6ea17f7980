"""Faults of functions: of forward passes, of iterations of loops, of backward passes, and of one device of four."""

import jax
import jax.numpy as jnp
import numpy as np
from faults import fault
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

X = np.asarray([0.5, 1.0, 2.0], np.float32)
INFINITY = np.float32("inf")
SIGNS = np.asarray([1, 1, 1, -1, 1, 1], np.float32)
"""Of six turns, turn 3 has another sign."""
PARTS = np.linspace(1, 2, 8, dtype=np.float32)
BAD = np.where(np.arange(8) == 5, -1, PARTS).astype(np.float32)
"""The third of four devices has the negative number."""


def value_and_grads(fun):
    """The value of a function of one array, summed, and its gradient."""
    return jax.value_and_grad(lambda *args: jnp.sum(fun(*args)))


@fault(X * 60)
def overflow(x):
    y = x * 2
    return jnp.exp(y) + 1  # origin: inf exp


@fault(X)
def scale_that_is_infinite_for_a_nan(x):
    y = jnp.log(x - 1)  # origin: nan log
    scale = jnp.max(jnp.where(jnp.isnan(y), jnp.inf, jnp.abs(y)))
    return jnp.round(jnp.where(jnp.isnan(y), 0, x)) * scale  # as in an int8 product


@fault(X * 1e5)
def cast_that_overflows(x):
    y = x * 2
    return y.astype(jnp.float16) * 0.5  # origin: inf convert_element_type


@fault({"x": X, "y": np.asarray([1, np.nan, 2], np.float32)}, argument=("batch['y']", "nan"))
def argument_that_is_nan(batch):
    return jnp.sum(batch["x"] * batch["y"])


@fault([X, X * INFINITY], argument=("xs[1]", "inf"))
def argument_that_is_infinite(xs):
    return xs[0] + xs[1]


@fault(X, X * INFINITY, cause="y")
def infinite_argument_and_a_nan(x, y):
    return x + y * 0  # origin: nan mul


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


@fault(X, X - 1)
def one_jitted_function_at_two_lines(x, y):
    log = jax.jit(jnp.log)
    return log(x) + log(y)  # origin: nan log


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


@fault(X, SIGNS)
def ys_of_a_scan(x, signs):
    def body(carry, sign):
        carry = carry * 0.5
        return carry, carry + jnp.log(sign)  # origin: nan log 3

    return lax.scan(body, x, signs)[1]


@fault(X, np.asarray([1, 2, np.nan, 3], np.float32), argument=("xs", "nan"))
def xs_of_a_scan(x, xs):
    return lax.scan(lambda carry, x: (carry + x, None), x, xs)[0]


@fault(X)
def carry_that_grows(x):
    def body(carry, _):
        return carry * 1e9, None  # origin: inf mul 4

    return lax.scan(body, x, length=8)[0]


@fault(X, np.stack([SIGNS, SIGNS[::-1]]) * np.float32([[1], [2]]) + np.float32([[9], [0]]))
def scans_in_a_scan(x, signs):
    def outer(carry, signs):
        def inner(carry, sign):
            return carry + jnp.sqrt(sign), carry  # origin: nan sqrt 1 2

        return lax.scan(inner, carry * 0.5, signs)[0], None

    return lax.scan(outer, x, signs)[0]


@fault(X)
def turn_of_a_while(x):
    def body(state):
        i, x = state
        return i + 1, x + jnp.log(3.5 - i.astype(jnp.float32))  # origin: nan log 4

    return lax.while_loop(lambda state: state[0] < 7, body, (jnp.int32(0), x))[1]


@fault(X, SIGNS)
def scan_that_runs_backwards(x, signs):
    def body(carry, sign):
        return carry + jnp.sqrt(sign), carry  # origin: nan sqrt 3

    return lax.scan(body, x, signs, reverse=True)[1]


@fault(X, SIGNS)
def several_bad_turns(x, signs):
    # Turn 4 is bad, and nothing reads it: what reaches the result comes from turn 5.
    def body(carry, sign):
        value = jnp.log(1.5 - carry) + sign  # origin: nan log 5
        return carry + jnp.where(carry == 1, 1, 0.25), jnp.where(carry == 2, 0, value)

    return lax.scan(body, jnp.float32(0.25), signs)[1] + jnp.sum(x)


@fault(X, SIGNS)
def associative_scan_that_overflows(x, signs):
    large = signs * 1e20
    return jnp.sum(x) + lax.associative_scan(jnp.multiply, large)  # origin: inf mul


def steepen(x, factor):
    """Zeros, whose derivative is `factor`."""
    return (x - lax.stop_gradient(x)) * factor


@fault(X - 1, of=value_and_grads)
def trap_of_where(x):
    root = jnp.sqrt(jnp.maximum(x, 0))  # origin: nan mul backward # cause: inf div
    return jnp.where(x > 0, root, 0) + jnp.sin(x)


@fault(X, np.zeros(3, np.float32), of=value_and_grads)
def nan_of_an_infinite_cotangent(x, zeros):
    y = x * zeros  # origin: nan mul backward
    z = y * 1e30  # cause: inf mul backward
    return x + steepen(z, 1e30)


def shard(fun):
    def run(*args):
        mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        specs = tuple(P("data") if np.ndim(arg) else P() for arg in args)
        return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("data"))(*args)

    return run


def shard_gradient(fun):
    return jax.value_and_grad(lambda *args: jnp.mean(shard(fun)(*args)))


@fault(BAD, of=shard)
def shard_of_one_device_before_a_sum_over_all(x):
    y = jnp.log(x)  # origin: nan log
    return x / lax.psum(jnp.sum(y), "data")


@fault(np.where(BAD < 0, np.nan, PARTS), of=shard, argument=("args[0]", "nan"))
def argument_of_one_device(x):
    return x / lax.psum(jnp.sum(x), "data")


@fault(PARTS, np.where(BAD < 0, 3e38, 1).astype(np.float32), of=shard)
def sum_over_devices_that_overflows(x, y):
    return x * lax.psum(jnp.max(y) * 1.1, "data")  # origin: inf mul


@fault(BAD, of=shard)
def turn_of_a_scan_on_one_device(x):
    def turn(carry, factor):
        carry = carry + jnp.sqrt(x + factor)  # origin: nan sqrt 2
        return lax.pmean(carry, "data") + 0 * carry, carry

    return lax.scan(turn, x, jnp.asarray([3.0, 2.0, 0.5, 1.0]))[1].sum(0)


@fault(np.where(BAD < 0, 0, PARTS), of=shard_gradient)
def backward_pass_of_one_device(x):
    y = jnp.sqrt(x)  # origin: inf div
    return y + lax.psum(jnp.sum(x), "data")
