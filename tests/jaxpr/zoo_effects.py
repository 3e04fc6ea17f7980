"""The zoo: effects, references, programs that are opaque."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback, pallas as pl
from specimen import Zoo

EFFECTS = Zoo()


@EFFECTS.specimen((4, 4), (4, 4))
def debug_callback(x, w):
    h = x @ w
    jax.debug.callback(lambda h: None, h)
    return h


@EFFECTS.specimen((4, 4), (3, 4, 4), differentiable=False)
def ordered_callback_in_scan(x, ws):
    def body(x, w):
        h = jnp.tanh(x @ w)
        return io_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h, ordered=True), None

    return lax.scan(body, x, ws)[0]


@EFFECTS.specimen((4, 4), (4, 4), differentiable=False)
def pure_callback(x, w):
    h = x @ w
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h, vmap_method="sequential") + h


@EFFECTS.specimen((4, 4), (4, 4))
def reference_inside(x, w):
    ref = jax.new_ref(jnp.zeros((4, 4)))
    ref[...] = x @ w
    ref[0] += jnp.exp(x[0])
    return ref[...]


@EFFECTS.specimen((4, 4), (3, 4, 4))
def reference_in_scan(x, ws):
    ref = jax.new_ref(x)

    def body(total, w):
        ref[...] = jnp.tanh(ref[...] @ w)
        return total + ref[...].sum(), None

    total, _ = lax.scan(body, 0.0, ws)
    return total, ref[...]


@EFFECTS.specimen((8, 8), (8, 8), differentiable=False)
def pallas_kernel(x, w):
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...]) + w_ref[...]

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    return call(x @ w, w)


@EFFECTS.specimen((4, 4), (4, 4))
def platform_dependent(x, w):
    return lax.platform_dependent(x, cpu=lambda x: x @ w, default=lambda x: jnp.exp(x))
