"""Faults of the backward pass: the loss is finite, and a gradient is not."""

import jax
import jax.numpy as jnp
import numpy as np
from faults import fault, value_and_grads
from jax import lax

X = np.asarray([0.5, 1.0, 2.0], np.float32)
SCALES = np.asarray([1e-30, 1e-30, 1e30, 1e-30], np.float32)


# JAX gives equations of a backward rule, and of a rule that is traced in a body, the line of the call.


def steepen(x, factor):
    """Zeros, whose derivative is `factor`."""
    return (x - lax.stop_gradient(x)) * factor


@fault(X, of=value_and_grads)
def backward_pass_that_overflows(x):
    y = x * 1e30  # origin: inf mul backward
    return x + steepen(y, 1e30)


@fault(np.asarray([1e-6, 2e-6], np.float16), np.float16(300), of=value_and_grads)
def backward_pass_that_overflows_in_float16(x, scale):
    y = x * scale  # origin: inf mul backward
    return (y * scale).astype(jnp.float32)


@fault(X - 1, of=value_and_grads)
def trap_of_where(x):
    root = jnp.sqrt(jnp.maximum(x, 0))  # origin: nan mul backward # cause: inf div
    return jnp.where(x > 0, root, 0) + jnp.sin(x)


@fault(np.zeros(3, np.float32), of=value_and_grads)
def norm_of_zeros(x):
    return jnp.sqrt(jnp.sum(x * x)) + jnp.sum(jnp.cos(x))  # origin: nan mul backward # cause: inf div


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


@fault(X, of=value_and_grads)
def rule_of_a_custom_jvp(x):
    @jax.custom_jvp
    def same(x):
        return x * 1

    @same.defjvp
    def rule(primals, tangents):
        (x,), (tangent,) = primals, tangents
        return same(x), tangent * jnp.log(-x)  # origin: nan log

    return jnp.sin(same(x))


@fault(X, of=value_and_grads)
def pass_that_a_remat_repeats(x):
    @jax.custom_jvp
    def same(x):
        return x * 1

    @same.defjvp
    def rule(primals, tangents):
        (x,), (tangent,) = primals, tangents
        return same(x), tangent * jnp.log(-x)

    block = jax.checkpoint(lambda x: jnp.sin(same(jnp.sin(x))))  # origin: nan log recomputed
    return block(x) * 2


@fault(X, of=value_and_grads)
def backward_pass_of_a_remat(x):
    @jax.checkpoint
    def block(x):
        y = jnp.sin(x) * 1e30  # origin: inf mul backward
        return jnp.sin(x) + steepen(y, 1e30)

    return block(x * 2)


@fault(X, SCALES, of=value_and_grads)
def backward_pass_of_a_scan(x, scales):
    def body(carry, scale):
        y = carry * 1e30  # origin: inf mul backward 2
        return carry * 0.9 + steepen(y, scale), None

    return lax.scan(body, x, scales)[0]


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


@fault(X, True, of=value_and_grads)
def backward_pass_of_a_cond(x, which):
    def taken(x):
        y = x * 1e30  # origin: inf mul backward
        return x + steepen(y, 1e30)

    return lax.cond(which, taken, jnp.log, x) * 2


@fault(X, np.zeros(3, np.float32), of=value_and_grads)
def harmless_infinities_before_the_backward_fault(x, zeros):
    x = x + jnp.exp(-1 / zeros)
    y = x * 1e30  # origin: inf mul backward
    return x + steepen(y, 1e30) + jnp.where(zeros > 0, jnp.log(zeros), 0)


@fault(X, np.zeros(3, np.float32), of=value_and_grads)
def nan_of_an_infinite_cotangent(x, zeros):
    y = x * zeros  # origin: nan mul backward
    z = y * 1e30  # cause: inf mul backward
    return x + steepen(z, 1e30)
