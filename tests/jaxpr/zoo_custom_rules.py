"""The zoo: functions with derivatives of their own, of users and of JAX."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, linear_call
from specimen import Zoo

CUSTOM_RULES = Zoo()


TABLE = jnp.linspace(-1.0, 1.0, 4)


@jax.custom_jvp
def clipped_log(x):
    return jnp.log(jnp.maximum(x, 1e-3))


@clipped_log.defjvp
def _(primals, tangents):
    [x], [t] = primals, tangents
    return clipped_log(x), t / jnp.maximum(x, 1e-2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def bounded(limit, x):
    return x


bounded.defvjp(lambda limit, x: (x, None), lambda limit, _, ct: (jnp.clip(ct, -limit, limit),))


@jax.custom_vjp
def product(x, w):
    return x @ w


def _product_bwd(residuals, ct):
    x, w = residuals
    zero = isinstance(ct, SymbolicZero)
    return (None, None) if zero else (ct @ w.T, x.T @ ct)


product.defvjp(lambda x, w: (x.value @ w.value, (x.value, w.value)), _product_bwd, symbolic_zeros=True)


@CUSTOM_RULES.specimen((4, 4), (4, 4))
def custom_jvp(x, w):
    return clipped_log(jnp.exp(x @ w))


@CUSTOM_RULES.specimen((4, 4), (4, 4))
def custom_vjp_with_a_static_argument(x, w):
    return bounded(0.5, x @ w)


@CUSTOM_RULES.specimen((4, 4), (4, 4))
def custom_vjp_with_symbolic_zeros(x, w):
    return product(x, w), product(lax.stop_gradient(x), w)


@CUSTOM_RULES.specimen((4, 4), (4, 4))
def custom_vjp_in_vmap_and_scan(x, w):
    return lax.scan(lambda x, _: (jax.vmap(functools.partial(bounded, 0.5))(x @ w), None), x, None, length=2)[0]


@CUSTOM_RULES.specimen((4, 4))
def linear_call_with_a_transpose(x):
    return linear_call(lambda table, x: x * table, lambda table, ct: ct * table, TABLE, x)


@CUSTOM_RULES.specimen((4, 4), (4,))
def linear_solve(a, b):
    matvec = lambda x: (a @ a.T + 4 * jnp.eye(4)) @ x
    solve = lambda matvec, b: jax.scipy.sparse.linalg.cg(matvec, b, maxiter=4)[0]
    return lax.custom_linear_solve(matvec, b, solve, symmetric=True)


@CUSTOM_RULES.specimen(jnp.float32(2.0))
def square_root_by_newton(x):
    newton = lambda f, y: lax.fori_loop(0, 6, lambda _, y: y - f(y) / (2 * y), y)
    return lax.custom_root(lambda y: y * y - x, jnp.ones_like(x), newton, lambda g, y: y / g(1.0))


@CUSTOM_RULES.specimen((4, 4), (4, 4))
def functions_of_jax_with_rules(x, w):
    h = x @ w
    return (
        jax.nn.relu(h), jax.nn.relu6(h), jax.nn.silu(h), jax.nn.softplus(h), jnp.logaddexp(h, x),
        jax.nn.gelu(h), jax.nn.softmax(h), jax.nn.logsumexp(h), jnp.sinc(h),
    )  # fmt: skip


@jax.custom_batching.custom_vmap
def doubled(x):
    return 2 * x


@doubled.def_vmap
def _(axis_size, in_batched, x):
    return doubled(x) + axis_size, in_batched[0]


@CUSTOM_RULES.specimen((4, 4), (4, 4), differentiable=False)
def custom_vmap(x, w):
    return doubled(x @ w), jax.vmap(doubled)(x @ w)


@CUSTOM_RULES.specimen((4, 4), (4, 4), differentiable=False)
def composite(x, w):
    return lax.composite(lambda x: jnp.sin(x) @ x, name="zoo.composite")(x @ w)
