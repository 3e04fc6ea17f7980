"""Differentiating with respect to the half-precision copies of parameters, which is where their gradients are small.

A model that computes in half precision casts each parameter once, and the gradient of that cast is a cast to float32:
twice the bytes of the gradient that the backward pass computed, and not one bit more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from ._rounding import is_half
from ._trees import PyTree


class OfCopies(NamedTuple):
    """A function of parameters as one of their copies, some of which are already in half precision.

    Attributes:
      copies: what to differentiate with respect to: the parameters, as their casts where there is one.
      fun: a function of the copies.
    """

    copies: PyTree
    fun: Callable[[PyTree], Any]


def of_copies(fun: Callable[[PyTree], Any], params: PyTree) -> OfCopies:
    """Takes the casts of parameters to half precision out of a function.

    Only a cast that is all that the function does with a parameter: where it is cast twice, or used uncast as well,
    the parts of its gradient must be summed in its own dtype.

    Args:
      fun: a function of parameters that JAX can trace.
      params: its argument, a tree of arrays.

    >>> copies, fun = of_copies(lambda w: jnp.sum(w["a"].astype(jnp.float16)) * w["b"], {"a": jnp.ones(2), "b": 3.0})
    >>> copies["a"].dtype, copies["b"], float(fun(copies))
    (dtype('float16'), 3.0, 6.0)
    """
    leaves, structure = jax.tree.flatten(params)
    trees = []

    def of_leaves(leaves: list[Any]) -> list[Any]:
        out, tree = jax.tree.flatten(fun(structure.unflatten(leaves)))
        trees.append(tree)
        return out

    traced = jax.make_jaxpr(of_leaves)(leaves)
    casts = [_only_use(traced.jaxpr, var) for var in traced.jaxpr.invars]
    evaluate = core.jaxpr_as_fun(_without(traced, casts))
    copies = [leaf if cast is None else _replay(cast, leaf) for leaf, cast in zip(leaves, casts, strict=True)]
    return OfCopies(structure.unflatten(copies), lambda copies: trees[0].unflatten(evaluate(*jax.tree.leaves(copies))))


def _only_use(jaxpr: Any, var: Any) -> Any:
    """The cast to half precision that is the only equation to read a variable, or `None`."""
    readers = [eqn for eqn in jaxpr.eqns for read in eqn.invars if read is var]
    if len(readers) != 1 or any(out is var for out in jaxpr.outvars):
        return None
    (eqn,) = readers
    of_float32 = np.dtype(var.aval.dtype) == np.float32 and not var.aval.weak_type
    is_cast = eqn.primitive.name == "convert_element_type" and is_half(eqn.outvars[0].aval)
    return eqn if is_cast and of_float32 else None


def _without(traced: Any, casts: list[Any]) -> Any:
    """The traced function that takes the results of casts in place of the variables that they cast."""
    jaxpr = traced.jaxpr
    invars = [var if cast is None else cast.outvars[0] for var, cast in zip(jaxpr.invars, casts, strict=True)]
    taken = {id(cast) for cast in casts if cast is not None}
    eqns = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
    return traced.replace(jaxpr=jaxpr.replace(invars=invars, eqns=eqns))


def _replay(cast: Any, leaf: Any) -> jax.Array:
    return lax.convert_element_type(leaf, cast.outvars[0].aval.dtype)
