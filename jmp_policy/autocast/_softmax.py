"""The softmax of half-precision logits as one operation: float32 inside, and half of everything that is kept.

Written out, its exponentials are kept for the backward pass in float32, which for attention is the largest array of
all. The derivative needs the result alone, y (t - sum(y t)), and the result is half. Its numbers no longer add up to 1,
so they are divided by their sum: what a saturated softmax differs from 1 by is all that is left of its derivative.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

PATTERN = (
    "reduce_max",
    "max",
    "broadcast_in_dim",
    "stop_gradient",
    "sub",
    "exp",
    "reduce_sum",
    "broadcast_in_dim",
    "div",
)
"""What `jax.nn.softmax` traces to, without `where` and outside of a derivative."""


def softmax_at(body: Jaxpr, start: int) -> Sequence[JaxprEqn] | None:
    """The equations of the softmax that begins at an equation, if one does."""
    eqns = body.eqns[start : start + len(PATTERN)]
    if tuple(eqn.primitive.name for eqn in eqns) != PATTERN:
        return None
    largest, _, _, stopped, shifted, exponentials, total, repeated, quotient = eqns
    logits = largest.invars[0]
    links = [
        (shifted.invars, [logits, stopped.outvars[0]]),
        (exponentials.invars, shifted.outvars),
        (total.invars, exponentials.outvars),
        (repeated.invars, total.outvars),
        (quotient.invars, [exponentials.outvars[0], repeated.outvars[0]]),
    ]
    is_chain = all(atom is other for atoms, others in links for atom, other in zip(atoms, others, strict=True))
    if not is_chain or largest.params["axes"] != total.params["axes"] or _is_used(eqns[:-1], body, start):
        return None
    return eqns


def softmax_in(dtype: np.dtype, eqns: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """An equation of the same softmax for logits in half precision; `None` where that must not be shared."""
    aval: Any = eqns[0].invars[0].aval
    if getattr(aval, "vma", None) or not aval.sharding.mesh.empty:  # it would have to be traced on that mesh
        return None
    return _traced(aval.shape, dtype, eqns[0].params["axes"])


@functools.lru_cache(maxsize=1024)
def _traced(shape: tuple[int, ...], dtype: np.dtype, axes: tuple[int, ...]) -> JaxprEqn:
    return jax.make_jaxpr(lambda x: _softmax(x, axes))(jax.ShapeDtypeStruct(shape, dtype)).eqns[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    wide = x.astype(jnp.float32)
    exponentials = jnp.exp(wide - wide.max(axes, keepdims=True))
    return (exponentials / exponentials.sum(axes, keepdims=True)).astype(x.dtype)


@_softmax.defjvp
def _softmax_jvp(axes: tuple[int, ...], primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    y = _softmax(x, axes)
    return y, _change(axes)(y, tangent)


@functools.lru_cache(maxsize=1024)
def _change(axes: tuple[int, ...]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @functools.partial(jax.checkpoint, prevent_cse=False)  # or `wide` is what would be kept
    def change(y: jax.Array, tangent: jax.Array) -> jax.Array:
        wide = y.astype(jnp.float32)
        normal = wide / wide.sum(axes, keepdims=True)  # XLA:CPU reads more where the sum of the products is divided
        products = normal * tangent.astype(jnp.float32)
        return (products - normal * products.sum(axes, keepdims=True)).astype(y.dtype)

    return change


def _is_used(eqns: Sequence[JaxprEqn], body: Jaxpr, start: int) -> bool:
    """Whether anything behind the softmax reads what is inside of it."""
    made = {var for eqn in eqns for var in eqn.outvars}
    later = (atom for eqn in body.eqns[start + len(PATTERN) :] for atom in eqn.invars)
    return any(not isinstance(atom, Literal) and atom in made for atoms in (later, body.outvars) for atom in atoms)
