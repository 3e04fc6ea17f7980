"""From a function of trees to a program, and back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from .._trees import is_array
from ._evaluate import evaluate


class Traced(NamedTuple):
    """The program of a function for certain arguments.

    Attributes:
      program: it takes the array leaves of the arguments, in order.
      leaves: those leaves.
      out_tree: the structure of what the function returns.
    """

    program: ClosedJaxpr
    leaves: list[Any]
    out_tree: Any


def trace(fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Traced:
    """Traces a function for its arguments; leaves of them that are no arrays are constants."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [is_array(leaf) for leaf in leaves]
    out_tree: Any = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal out_tree
        given = iter(arrays)
        merged = [next(given) if array else leaf for leaf, array in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        out, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        return out

    arrays = [leaf for leaf, array in zip(leaves, dynamic, strict=True) if array]
    program = jax.make_jaxpr(flat)(*arrays)
    return Traced(program, arrays, out_tree)


def run(traced: Traced, program: ClosedJaxpr) -> Any:
    """Runs a program in the place of the one that was traced."""
    return jax.tree.unflatten(traced.out_tree, evaluate(program, *traced.leaves))
