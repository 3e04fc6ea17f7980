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
SCALES = np.asarray([1e-30, 1e-30, 1e30, 1e-30], np.float32)
PARTS = np.linspace(1, 2, 8, dtype=np.float32)
BAD = np.where(np.arange(8) == 5, -1, PARTS).astype(np.float32)
"""The third of four devices has the negative number."""


def value_and_grads(fun):
    """The value of a function of one array, summed, and its gradient."""
    return jax.value_and_grad(lambda *args: jnp.sum(fun(*args)))


@fault(X)
def scale_that_is_infinite_for_a_nan(x):
    y = jnp.log(x - 1)  # origin: nan log
    scale = jnp.max(jnp.where(jnp.isnan(y), jnp.inf, jnp.abs(y)))
    return jnp.round(jnp.where(jnp.isnan(y), 0, x)) * scale  # as in an int8 product


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


@fault(X.astype(np.float16))
def bound_that_is_infinite(x):
    dt = jnp.exp(10 * x)  # origin: inf exp
    return jnp.clip(dt, 0.0, jnp.inf)  # as the time steps of Mamba-2, whose bound is cast to float16


@fault(np.float16([0.0, 1.0]))
def bounds_that_are_infinite(x):
    logits = jnp.log(x)  # origin: inf log
    return jnp.clip(logits, -jnp.inf, jnp.inf)


MASK = np.where(np.tri(3, dtype=bool), 0, -np.inf).astype(np.float16)


@fault(np.full((3, 3), 300.0, np.float16))
def overflow_under_a_mask_of_infinities(x):
    scores = -x @ x.T  # cause: inf dot_general
    scores = MASK + scores
    shifted = scores - jnp.max(scores, axis=-1, keepdims=True)  # origin: nan sub
    return jnp.exp(shifted)


@fault(np.full((3, 3), 300.0, np.float16))
def overflow_where_a_mask_has_infinities(x):
    scores = -x @ x.T  # cause: inf dot_general
    scores = jnp.where(MASK == 0, scores, -jnp.inf)
    shifted = scores - jnp.max(scores, axis=-1, keepdims=True)  # origin: nan sub
    return jnp.exp(shifted)


@fault(np.ones((2, 3), np.float32), np.asarray([[True, False, True], [False] * 3]))
def softmax_that_is_fully_masked(scores, mask):
    scores = jnp.where(mask, scores, -jnp.inf)  # cause: inf select_n
    scores = scores - lax.stop_gradient(jnp.max(scores, 1, keepdims=True))  # origin: nan sub
    weights = jnp.exp(scores)
    return weights / jnp.sum(weights, 1, keepdims=True)


@fault(X, X - 1)
def one_jitted_function_at_two_lines(x, y):
    log = jax.jit(jnp.log)
    return log(x) + log(y)  # origin: nan log


@fault(X)
def infinity_minus_infinity(x):
    large = x * 1e38
    y = large * 1e5  # cause: inf mul
    z = y + 1
    return (z - y) * 2  # origin: nan sub


@fault(X, 0 * X)
def harmless_infinities_before_the_fault(x, zeros):
    x = x + jnp.exp(-1 / zeros)
    x = x + jnp.where(zeros > 0, jnp.log(zeros), 0)
    x = jnp.minimum(x, 1 / zeros) + 1 / (1 / zeros)
    y = jnp.log(x - 1)  # origin: nan log
    return y + jnp.tanh(1 / zeros)


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


@fault(X, SIGNS)
def while_in_a_scan(x, signs):
    def body(carry, sign):
        def turn(state):
            i, x = state
            return i + 1, x + jnp.sqrt(sign + 1 - i)  # origin: nan sqrt 3 1

        return lax.while_loop(lambda state: state[0] < 2, turn, (jnp.float32(0), carry))[1], None

    return lax.scan(body, x, signs)[0]


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


# JAX gives equations of a backward rule, and of a rule that is traced in a body, the line of the call.


@fault(X, of=value_and_grads)
def backward_pass_of_a_custom_vjp(x):
    @jax.custom_vjp
    def clip(x):
        return x * 1

    def forward(x):
        return clip(x), x

    def backward(x, cotangent):
        scale = x - 1
        return (cotangent / scale,)

    clip.defvjp(forward, backward)
    return jnp.sin(clip(x * 1))  # origin: inf div backward


@fault(X, of=value_and_grads)
def forward_pass_of_a_custom_vjp(x):
    @jax.custom_vjp
    def log(x):
        return jnp.log(x)

    def forward(x):
        return jnp.log(x - 0.9), x  # origin: nan log

    log.defvjp(forward, lambda x, cotangent: (cotangent / x,))
    return log(x) * 2


@fault(X, SCALES, of=value_and_grads)
def backward_pass_of_a_scan_under_remat(x, scales):
    @jax.checkpoint
    def body(carry, scale):
        y = carry * 1e30  # origin: inf mul backward 2
        return carry * 0.9 + steepen(y, scale), None

    return lax.scan(body, x, scales)[0]


@fault(X, SCALES, of=value_and_grads)
def pass_that_a_remat_in_a_scan_repeats(x, scales):
    @jax.custom_jvp
    def same(x, scale):
        return x * 1

    @same.defjvp
    def rule(primals, tangents):
        (x, scale), (tangent, _) = primals, tangents
        return same(x, scale), tangent * jnp.sqrt(2 - scale)

    body = lambda carry, scale: (jnp.sin(same(jnp.sin(carry), scale)), None)  # origin: nan sqrt recomputed 2
    body = jax.checkpoint(body)
    return lax.scan(body, x, scales)[0]


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


@fault(np.where(BAD < 0, 0, PARTS), of=shard_gradient)
def backward_pass_of_one_device(x):
    y = jnp.sqrt(x)  # origin: inf div
    return y + lax.psum(jnp.sum(x), "data")
