"""Faults in turns of loops."""

import jax
import jax.numpy as jnp
import numpy as np
from faults import fault, value_and_grads
from jax import lax

X = np.asarray([0.5, 1.0, 2.0], np.float32)
SIGNS = np.asarray([1, 1, 1, -1, 1, 1], np.float32)
"""Of six turns, turn 3 has another sign."""


@fault(X, SIGNS)
def carry_of_a_scan(x, signs):
    def body(carry, sign):
        carry = carry + jnp.sqrt(sign)  # origin: nan sqrt 3
        return carry * 0.5, None

    return lax.scan(body, x, signs)[0]


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


@fault(X, SIGNS)
def harmless_infinities_in_other_turns(x, signs):
    def body(carry, sign):
        harmless = 1 / (sign - 1)
        carry = jnp.minimum(carry, harmless * harmless)
        return carry + jnp.log(sign), None  # origin: nan log 3

    return lax.scan(body, x, signs)[0]


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


@fault(X, np.int32(5))
def turn_of_a_fori_loop(x, turns):
    def body(i, x):
        return x / (2 - i).astype(jnp.float32)  # origin: inf div 2

    return lax.fori_loop(0, turns, body, x)


@fault(X, SIGNS)
def while_in_a_scan(x, signs):
    def body(carry, sign):
        def turn(state):
            i, x = state
            return i + 1, x + jnp.sqrt(sign + 1 - i)  # origin: nan sqrt 3 1

        return lax.while_loop(lambda state: state[0] < 2, turn, (jnp.float32(0), carry))[1], None

    return lax.scan(body, x, signs)[0]


@fault(X, SIGNS)
def cond_in_a_scan(x, signs):
    def body(carry, sign):
        faulty = lambda x: x + jnp.log(sign)  # origin: nan log 3
        return lax.cond(sign < 0, faulty, jnp.sin, carry), None

    return lax.scan(body, x, signs)[0]


@fault(X, SIGNS)
def scan_in_a_cond(x, signs):
    def scan(x):
        return lax.scan(lambda carry, sign: (carry + jnp.log(sign), None), x, signs)[0]  # origin: nan log 3

    return lax.cond(x[0] > 0, scan, lambda x: x, x)


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


@fault(X, SIGNS, of=value_and_grads)
def carry_under_a_gradient(x, signs):
    def body(carry, sign):
        carry = jnp.sin(carry) + jnp.sqrt(sign)  # origin: nan sqrt 3
        return carry, None

    return lax.scan(body, x, signs)[0]


@fault(X, SIGNS, of=value_and_grads)
def layers_in_a_scan_under_remat(x, signs):
    @jax.checkpoint
    def body(carry, sign):
        carry = jnp.sin(carry) + jnp.log(sign)  # origin: nan log 3
        return carry, None

    return lax.scan(body, x, signs)[0]


@fault(X)
def long_loop(x):
    def body(carry, i):
        return carry + jnp.sqrt(76.5 - i), None  # origin: nan sqrt 77

    return lax.scan(body, x, jnp.arange(100.0))[0]


@fault(X, SIGNS)
def associative_scan_that_overflows(x, signs):
    large = signs * 1e20
    return jnp.sum(x) + lax.associative_scan(jnp.multiply, large)  # origin: inf mul
