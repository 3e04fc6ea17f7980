"""The zoo: calls, loops, branches, rematerialization."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from specimen import Zoo

CONTROL_FLOW = Zoo()


@jax.jit
def layer(x, w):
    return jnp.tanh(x @ w)


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def five_calls_of_one_function(x, w):
    for _ in range(5):
        x = layer(x, w)
    return x


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def jit_in_jit(x, w):
    outer = jax.jit(lambda x, w: layer(x, w) + layer(w, x))
    return outer(x, w)


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def jit_that_donates_and_keeps(x, w):
    step = jax.jit(lambda x, w, unused: (x @ w, x), donate_argnums=0, keep_unused=True)
    return step(x * 2, w, w)


@CONTROL_FLOW.specimen((4, 4), (3, 4, 4))
def scan_over_layers(x, ws):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sum(x)), x, ws)


@CONTROL_FLOW.specimen((4, 4, 4), (4, 4))
def scan_without_a_carry(xs, w):
    return lax.scan(lambda _, x: ((), jnp.exp(x @ w)), (), xs)[1]


@CONTROL_FLOW.specimen((4, 4), (6, 4, 4))
def scan_backwards_unrolled(x, ws):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws, reverse=True, unroll=2)


@CONTROL_FLOW.specimen((4, 4), (2, 3, 4, 4), error=0.2)  # six layers in a row
def scan_in_scan(x, ws):
    inner = lambda x, w: (jnp.tanh(x @ w), None)
    return lax.scan(lambda x, ws: (lax.scan(inner, x, ws)[0], x.mean()), x, ws)


@CONTROL_FLOW.specimen((4, 4), (4, 4), differentiable=False)
def while_loop(x, w):
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))


@CONTROL_FLOW.specimen((4, 4), (4, 4), differentiable=False)
def while_with_constants_in_its_test(x, w):
    bound = jnp.sum(x**2) / 50
    return lax.while_loop(lambda c: jnp.sum(c**2) > bound, lambda c: 0.5 * jnp.tanh(c), x) @ w


@CONTROL_FLOW.specimen((3, 4), differentiable=False)
def while_with_a_mapped_test(x):
    return jax.vmap(lambda x: lax.while_loop(lambda x: jnp.max(x) < 8, lambda x: x * 2 + 1, x))(x)


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def fori_loop(x, w):
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) * (i + 1.0), x)


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def cond_of_one_value(x, w):
    return lax.cond(x[0, 0] > 0, lambda x: jnp.exp(x @ w), lambda x: x @ w, x)


@CONTROL_FLOW.specimen((4, 4), (4, 4), 1)
def switch_of_four(x, w, i):
    branches = [lambda x: x @ w, jnp.exp, lambda x: x, jnp.zeros_like]
    return lax.switch(i, branches, x)


@CONTROL_FLOW.specimen((3, 4, 4), jnp.arange(3))
def switch_in_vmap(x, i):
    branches = [lambda x: x @ x, jnp.exp, lambda x: x]
    return jax.vmap(lambda i, x: lax.switch(i, branches, x))(i, x)


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def remat(x, w):
    return jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w) @ w))(x)


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def remat_that_saves_a_name(x, w):
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    block = lambda x: jnp.sin(checkpoint_name(jnp.tanh(x @ w), "hidden") @ w)
    return jax.checkpoint(block, policy=policy)(x)


@CONTROL_FLOW.specimen((4, 4), (3, 4, 4))
def value_and_gradient_of_a_scan_in_remat(x, ws):
    block = jax.checkpoint(lambda x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])
    return jax.value_and_grad(lambda x: jnp.sum(block(x) ** 2))(x)


@CONTROL_FLOW.specimen((4, 4), (4, 4))
def gradient_inside(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


@CONTROL_FLOW.specimen((3, 4, 4), (4, 4))
def vmap_with_an_axis_name(x, w):
    return jax.vmap(lambda x: lax.pmean(x @ w, "i") * x[lax.axis_index("i")], axis_name="i")(x)
