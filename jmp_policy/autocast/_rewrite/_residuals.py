"""What is kept for the backward pass stays half: runs of arithmetic in float32, and softmaxes, as one operation each.

An operation that multiplies keeps its operands for the backward pass. One that is cast to float32 for it alone is twice
as large as what it was cast from, and the next operation keeps the product, as in a norm that is written by hand. A
run that is computed again keeps what it reads.

A softmax, written out, keeps its exponentials in float32, which for attention is the largest array of all. The
derivative needs the result alone, y (t - sum(y t)), and the result is half. Its rounded numbers no longer add up to 1,
so they are divided by their sum: near saturation the derivative is what a number is short of 1, and nothing else. A TPU
reads the logits instead, which are half as well, and kept beside the result; `benchmarks/README.md` has the figures.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from ..._jaxpr import Atom, JaxprBuilder, Value, list_variables, without_mesh
from ._place import EquationPlace

KEEPING = frozenset(("mul", "div", "square", "integer_pow"))
"""What keeps its operands; as cheap to compute again as to read."""

_PASSING = KEEPING | {"add", "sub", "neg", "broadcast_in_dim"}
_LONGEST = 8

_LAST_USES: weakref.WeakKeyDictionary[Jaxpr, dict[Var, int]] = weakref.WeakKeyDictionary()


def measure_run(program: Jaxpr, start: int, places: Sequence[EquationPlace]) -> int:
    """How many equations, from one on, are arithmetic in one place, of which the last result alone is used later."""
    last_uses, length = _find_last_uses(program), 1
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
    """Writes equations as one that is computed again in the backward pass, and returns the results of the last.

    Args:
      eqns: the equations.
      read: what stands for the values that they read.
      body: where the one goes.
      write: writes one of them.
    """
    # What enters from outside gets a variable of its own inside.
    made = {var for eqn in eqns for var in eqn.outvars}
    variables = dict.fromkeys(list_variables(atom for eqn in eqns for atom in eqn.invars))
    outer = {var: read(var) for var in variables if var not in made}
    inner = {var: Value(Var(value.atom.aval), value.kind) for var, value in outer.items()}

    # Inside, each equation is written as it would be outside.
    environment, again, results = dict(inner), JaxprBuilder(), []
    for eqn in eqns:
        values = [read(atom) if isinstance(atom, Literal) else environment[atom] for atom in eqn.invars]
        results = write(eqn, values, again)
        environment.update(zip(eqn.outvars, results, strict=True))

    call = _make_call(eqns[-1], [value.atom for value in inner.values()], again, [value.atom for value in results])
    return body.append(call, [value.atom for value in outer.values()], [value.kind for value in results], call.params)


def _make_call(last: JaxprEqn, invars: list[Any], body: JaxprBuilder, outvars: list[Atom]) -> JaxprEqn:
    """An equation that computes a body again in the backward pass, in the place of the last that it was written for."""
    program = Jaxpr((), invars, outvars, body.equations, debug_info=DebugInfo("checkpoint", "autocast", None, None))
    pattern = _trace_checkpoint()
    params = {**pattern.params, "jaxpr": program}
    return pattern.replace(
        invars=invars, outvars=last.outvars, params=params, source_info=last.source_info, ctx=last.ctx
    )


def _find_last_uses(program: Jaxpr) -> dict[Var, int]:
    """The number of the last equation that reads each value; what the program returns is read after all of them."""
    if program not in _LAST_USES:
        uses = {var: i for i, eqn in enumerate(program.eqns) for var in list_variables(eqn.invars)}
        _LAST_USES[program] = uses | dict.fromkeys(list_variables(program.outvars), len(program.eqns))
    return _LAST_USES[program]


@functools.cache
def _trace_checkpoint() -> JaxprEqn:
    """An equation that is computed again in the backward pass, as JAX would trace it."""
    return jax.make_jaxpr(jax.checkpoint(lambda x: x * x, prevent_cse=False))(1.0).eqns[0]


SOFTMAX = (
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


def find_softmax(body: Jaxpr, start: int) -> Sequence[JaxprEqn] | None:
    """The equations of the softmax that begins at an equation, if one does."""
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
    if not is_chain or largest.params["axes"] != total.params["axes"] or _is_used(eqns[:-1], body, start):
        return None
    return eqns


def make_softmax(source: np.dtype, dtype: np.dtype, eqns: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """An equation of the same softmax with a result in half precision; `None` where that must not be shared.

    Args:
      source: the dtype of the logits: half, or float32 of sums that nothing has rounded.
      dtype: the dtype of the result.
      eqns: the softmax as it was traced.
    """
    aval: Any = eqns[0].invars[0].aval
    if getattr(aval, "vma", None) or not aval.sharding.mesh.empty:  # it would have to be traced on that mesh
        return None
    return _trace_softmax(aval.shape, source, dtype, eqns[0].params["axes"])


@functools.lru_cache(maxsize=1024)
def _trace_softmax(shape: tuple[int, ...], source: np.dtype, dtype: np.dtype, axes: tuple[int, ...]) -> JaxprEqn:
    with without_mesh():
        return jax.make_jaxpr(lambda x: _softmax(x, axes, dtype))(jax.ShapeDtypeStruct(shape, source)).eqns[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softmax(x: jax.Array, axes: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    # The largest logit is the same in half and in float32. XLA:CPU reads less for it in float32; XLA:TPU, which casts
    # float16 once for all that read it, would write the logits down in float32.
    largest = lax.platform_dependent(
        x, tpu=lambda x: _widen(x.max(axes, keepdims=True)), default=lambda x: _widen(x).max(axes, keepdims=True)
    )
    return _normalize(jnp.exp(_widen(x) - largest), axes).astype(dtype)


@_softmax.defjvp
def _softmax_jvp(
    axes: tuple[int, ...], dtype: np.dtype, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    y = _softmax(x, axes, dtype)
    if x.dtype != y.dtype:  # logits in float32 are not kept: the result is half as large
        return y, _change_of_result(axes)(y, tangent)
    return y, _change(axes)(x, y, tangent)


@functools.lru_cache(maxsize=1024)
def _change(axes: tuple[int, ...]) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    @functools.partial(jax.checkpoint, prevent_cse=False)  # or the float32 numbers are what would be kept
    def change(x: jax.Array, y: jax.Array, tangent: jax.Array) -> jax.Array:
        wide = _widen(tangent)
        return lax.platform_dependent(x, y, wide, tpu=of_logits, default=of_result).astype(y.dtype)

    def of_logits(x: jax.Array, y: jax.Array, wide: jax.Array) -> jax.Array:
        normal = _normalize(jnp.exp(_widen(x) - _widen(x.max(axes, keepdims=True))), axes)
        # In this order XLA:TPU fuses it; the difference of two products is written down in float32 between.
        return normal * (wide - (normal * wide).sum(axes, keepdims=True))

    def of_result(x: jax.Array, y: jax.Array, wide: jax.Array) -> jax.Array:
        normal = _normalize(_widen(y), axes)
        products = normal * wide  # in this order XLA:CPU reads less, by 4 % of the step of a GPT in bfloat16
        return products - normal * products.sum(axes, keepdims=True)

    return change


@functools.lru_cache(maxsize=1024)
def _change_of_result(axes: tuple[int, ...]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def change(y: jax.Array, tangent: jax.Array) -> jax.Array:
        normal = _normalize(_widen(y), axes)
        products = normal * _widen(tangent)
        return (products - normal * products.sum(axes, keepdims=True)).astype(y.dtype)

    return change


def _normalize(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x / x.sum(axes, keepdims=True)


def _widen(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _is_used(eqns: Sequence[JaxprEqn], body: Jaxpr, start: int) -> bool:
    """Whether anything behind the softmax reads what is inside of it."""
    made = {var for eqn in eqns for var in eqn.outvars}
    later = [atom for eqn in body.eqns[start + len(SOFTMAX) :] for atom in eqn.invars]
    return not made.isdisjoint(list_variables([*later, *body.outvars]))
