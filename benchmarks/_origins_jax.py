"""Ten faults in JAX, and who looks for them. Their twins in PyTorch are in `_origins_torch.py`, in the same order.

Each returns a loss. Its value and its gradient are computed in one jitted function, and one of both is not finite.
"""

import contextlib
import io
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify

from benchmarks._origins_reports import ARGUMENTS, Fault, judge, name_of
from jmp_policy.numerics import first_nonfinite


def exp_that_overflows(x: jax.Array) -> jax.Array:
    y = x + 1
    z = jnp.exp(y)  # fault
    return jnp.sum(z)


def infinity_minus_infinity(x: jax.Array) -> jax.Array:
    large = x * 1e38
    y = large * 1e5  # cause
    z = y + 1
    difference = z - y  # fault
    return jnp.sum(difference)


def entropy_of_a_zero(p: jax.Array) -> jax.Array:
    logarithm = jnp.log(p)  # cause
    terms = p * logarithm  # fault
    return -jnp.sum(terms)


def norm_of_zeros(x: jax.Array) -> jax.Array:
    squares = x * x  # fault
    norm = jnp.sqrt(jnp.sum(squares))  # cause
    return norm + jnp.sum(jnp.cos(x))


def trap_of_where(x: jax.Array) -> jax.Array:
    positive = jnp.maximum(x, 0)
    root = jnp.sqrt(positive)  # fault
    return jnp.sum(jnp.where(x > 0, root, 0))


def harmless_ones_before_it(x: jax.Array, counts: jax.Array) -> jax.Array:
    means = counts / counts  # harmless
    means = jnp.where(counts > 0, means, 0)
    scores = jnp.where(counts > 0, x, -jnp.inf)  # harmless
    weights = jax.nn.softmax(scores)
    y = weights * means - 0.5
    logarithm = jnp.log(y)  # fault
    return jnp.sum(logarithm)


def turn_of_a_loop(x: jax.Array, signs: jax.Array) -> jax.Array:
    def body(carry: jax.Array, sign: jax.Array) -> tuple[jax.Array, None]:
        carry = jnp.sin(carry)
        root = jnp.sqrt(carry * sign)  # fault
        return carry + root, None

    return jnp.sum(lax.scan(body, x, signs)[0])


def under_a_remat(x: jax.Array) -> jax.Array:
    def block(x: jax.Array) -> jax.Array:
        y = jnp.sin(x) - 0.9
        root = jnp.sqrt(y)  # fault
        return root * x

    return jnp.sum(jax.checkpoint(block)(x * 2))


def backward_in_float16(x: jax.Array, scale: jax.Array) -> jax.Array:
    x, scale = x.astype(jnp.float16), scale.astype(jnp.float16)
    y = x * scale  # fault
    z = y * scale
    return jnp.sum(z.astype(jnp.float32))


def argument_that_is_nan(x: jax.Array, y: jax.Array) -> jax.Array:
    z = x * 2
    return jnp.sum(z * y)


FAULTS = {
    name_of(fun): Fault.read(fun)
    for fun in (
        exp_that_overflows,
        infinity_minus_infinity,
        entropy_of_a_zero,
        norm_of_zeros,
        trap_of_where,
        harmless_ones_before_it,
        turn_of_a_loop,
        under_a_remat,
        backward_in_float16,
        argument_that_is_nan,
    )
}

Look = Callable[[Callable[..., Any], tuple[jax.Array, ...]], str]
"""Runs a function on arrays, and returns what it reports."""


def look_with_ours(fun: Callable[..., Any], args: tuple[jax.Array, ...]) -> str:
    _, origin = jax.jit(first_nonfinite(fun))(*args)
    return origin.describe() if origin.found else ""


def look_with_debug_nans(fun: Callable[..., Any], args: tuple[jax.Array, ...]) -> str:
    with jax.debug_nans(True):
        return catch_report(lambda: jax.block_until_ready(jax.jit(fun)(*args)))


def look_with_debug_infs(fun: Callable[..., Any], args: tuple[jax.Array, ...]) -> str:
    with jax.debug_infs(True):
        return look_with_debug_nans(fun, args)


def look_with_checkify(fun: Callable[..., Any], args: tuple[jax.Array, ...]) -> str:
    error, _ = jax.jit(checkify.checkify(fun, errors=checkify.float_checks))(*args)
    return catch_report(error.throw)


CONTESTANTS: dict[str, Look] = {
    "`numerics.first_nonfinite`": look_with_ours,
    "`jax_debug_nans`": look_with_debug_nans,
    "`jax_debug_nans`, `jax_debug_infs`": look_with_debug_infs,
    "`checkify.float_checks`": look_with_checkify,
}

SECOND_ARGUMENT = "argument `y`"
"""How `first_nonfinite` calls it. Not written where it is used: a traceback quotes the lines of its frames."""


def catch_report(run: Callable[[], Any]) -> str:
    """Returns the output of a function and the traceback of its error; empty if it raises nothing."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            run()
        except (FloatingPointError, checkify.JaxRuntimeError) as error:
            return printed.getvalue() + "".join(traceback.format_exception(error))
    return ""


def report_of(contestant: str, name: str) -> str:
    """Returns a contestant's report of a fault."""
    args = tuple(jnp.asarray(values, jnp.float32) for values in ARGUMENTS[name])
    return CONTESTANTS[contestant](jax.value_and_grad(FAULTS[name].fun), args)


def judge_all(contestant: str) -> dict[str, str]:
    """Returns a contestant's report of each fault."""
    return {name: judge(report_of(contestant, name), fault, SECOND_ARGUMENT) for name, fault in FAULTS.items()}
