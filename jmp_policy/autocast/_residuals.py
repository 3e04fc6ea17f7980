"""Keeps residuals for the backward pass in half precision: recomputes float32 arithmetic, and fuses softmaxes.

An operation that multiplies keeps its operands for the backward pass. If autocast upcasts them, as in a norm that is
written by hand, the residual is twice as large. Runs of such operations become one remat, which keeps its inputs.

A softmax written out keeps its exponentials in float32, which is the largest array of an attention layer. Its
derivative y (t - sum(y t)) needs the output only, which is in half precision. The rounded elements of y no longer add
up to 1, so they are divided by their sum. On TPUs the derivative reads the half-precision logits instead.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from .._jaxpr import Atom, JaxprBuilder, Value, list_variables, make_remat, without_mesh
from ._place import EquationPlace

KEEPING = frozenset(("mul", "div", "square", "integer_pow"))
"""Operations that keep their operands, and are as cheap to compute again as to read."""

_PASSING = KEEPING | {"add", "sub", "neg", "broadcast_in_dim"}
_LONGEST = 8


def measure_run(program: Jaxpr, start: int, places: Sequence[EquationPlace]) -> int:
    """Counts the equations of a run of arithmetic in one place. Later equations read its last output only."""
    last_uses = {var: i for i, eqn in enumerate(program.eqns) for var in list_variables(eqn.invars)}
    last_uses |= dict.fromkeys(list_variables(program.outvars), len(program.eqns))  # outputs are read after all
    length = 1
    for end in range(start + 1, min(start + _LONGEST, len(program.eqns))):
        if program.eqns[end].primitive.name not in _PASSING or places[end] != places[start]:
            break
        inside = [var for eqn in program.eqns[start:end] for var in eqn.outvars]
        if all(last_uses.get(var, end) <= end for var in inside):
            length = end + 1 - start
    return length


def write_again(
    eqns: Sequence[JaxprEqn],
    read: Callable[[Atom], Value],
    body: JaxprBuilder,
    write: Callable[[JaxprEqn, list[Value], JaxprBuilder], list[Value]],
) -> list[Value]:
    """Writes equations, each with `write`, in one remat, and returns the outputs of the last one."""
    made = {var for eqn in eqns for var in eqn.outvars}
    variables = dict.fromkeys(list_variables(atom for eqn in eqns for atom in eqn.invars))
    outer = {var: read(var) for var in variables if var not in made}
    inner = {var: Value(Var(value.atom.aval), value.kind) for var, value in outer.items()}

    environment, again, results = dict(inner), JaxprBuilder(), []
    for eqn in eqns:
        values = [read(atom) if isinstance(atom, Literal) else environment[atom] for atom in eqn.invars]
        results = write(eqn, values, again)
        environment.update(zip(eqn.outvars, results, strict=True))

    last, invars = eqns[-1], list[Any](value.atom for value in inner.values())
    info = DebugInfo("checkpoint", "autocast", None, None)
    inside = Jaxpr((), invars, [value.atom for value in results], again.equations, debug_info=info)
    atoms, kinds = [value.atom for value in outer.values()], [value.kind for value in results]
    remat = make_remat(last, inside)
    return body.append(remat, atoms, kinds, remat.params)


SOFTMAX = (
    *("reduce_max", "max", "broadcast_in_dim", "stop_gradient", "sub"),
    *("exp", "reduce_sum", "broadcast_in_dim", "div"),
)
"""The primitives of `jax.nn.softmax`, without `where` and outside a derivative."""


def find_softmax(body: Jaxpr, start: int) -> Sequence[JaxprEqn] | None:
    """Returns the equations of the softmax that starts at an equation, if there is one."""
    eqns = body.eqns[start : start + len(SOFTMAX)]
    if tuple(eqn.primitive.name for eqn in eqns) != SOFTMAX:
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
    inside = {var for eqn in eqns[:-1] for var in eqn.outvars}
    later = [atom for eqn in body.eqns[start + len(SOFTMAX) :] for atom in eqn.invars]
    is_used = not inside.isdisjoint(list_variables([*later, *body.outvars]))
    return None if not is_chain or is_used or largest.params["axes"] != total.params["axes"] else eqns


def make_softmax(source: np.dtype, dtype: np.dtype, eqns: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """Makes one equation for a softmax of logits in `source` with an output in `dtype`; returns None on a mesh."""
    aval: Any = eqns[0].invars[0].aval
    if getattr(aval, "vma", None) or not aval.sharding.mesh.empty:  # the types of the equation would refer to it
        return None
    return _trace_softmax(aval.shape, source, dtype, eqns[0].params["axes"])


@functools.lru_cache(maxsize=1024)
def _trace_softmax(shape: tuple[int, ...], source: np.dtype, dtype: np.dtype, axes: tuple[int, ...]) -> JaxprEqn:
    with without_mesh():
        return jax.make_jaxpr(lambda x: _softmax(x, axes, dtype))(jax.ShapeDtypeStruct(shape, source)).eqns[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softmax(x: jax.Array, axes: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    # The maximum is the same in half precision and float32. XLA:CPU reads less in float32; XLA:TPU, which casts float16
    # once for all readers, would write the float32 logits to memory.
    largest = lax.platform_dependent(
        x, tpu=lambda x: _upcast(x.max(axes, keepdims=True)), default=lambda x: _upcast(x).max(axes, keepdims=True)
    )
    return _normalize(jnp.exp(_upcast(x) - largest), axes).astype(dtype)


@_softmax.defjvp
def _softmax_jvp(
    axes: tuple[int, ...], dtype: np.dtype, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    y = _softmax(x, axes, dtype)
    if x.dtype != y.dtype:  # float32 logits are not kept: the output is half as large
        return y, _change_of_result(axes)(y, tangent)
    return y, _change(axes)(x, y, tangent)


@functools.lru_cache(maxsize=1024)
def _change(axes: tuple[int, ...]) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    @functools.partial(jax.checkpoint, prevent_cse=False)  # otherwise the float32 elements would be kept
    def change(x: jax.Array, y: jax.Array, tangent: jax.Array) -> jax.Array:
        wide = _upcast(tangent)
        of_result = lambda x, y, wide: _differentiate_output(y, wide, axes)
        return lax.platform_dependent(x, y, wide, tpu=of_logits, default=of_result).astype(y.dtype)

    def of_logits(x: jax.Array, y: jax.Array, wide: jax.Array) -> jax.Array:
        normal = _normalize(jnp.exp(_upcast(x) - _upcast(x.max(axes, keepdims=True))), axes)
        # XLA:TPU fuses this form. The difference of two products would be written to memory in float32.
        return normal * (wide - (normal * wide).sum(axes, keepdims=True))

    return change


@functools.lru_cache(maxsize=1024)
def _change_of_result(axes: tuple[int, ...]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def change(y: jax.Array, tangent: jax.Array) -> jax.Array:
        return _differentiate_output(y, tangent, axes).astype(y.dtype)

    return change


def _differentiate_output(y: jax.Array, tangent: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    normal = _normalize(_upcast(y), axes)
    products = normal * _upcast(tangent)  # in this form XLA:CPU reads less memory
    return products - normal * products.sum(axes, keepdims=True)


def _normalize(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x / x.sum(axes, keepdims=True)


def _upcast(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
