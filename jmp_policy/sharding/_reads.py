"""In which dtypes a function reads its parameters, found in its program."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from .._base import PyTree, is_floating, is_floating_dtype
from .._jaxpr import Fact, Step, having, trace, walk

MOVES = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS)
"""Primitives through which a cast can be moved: casting their operands or their results gives the same."""

_MARK = "jmp_policy parameter "
"""How the names begin by which parameters are found in a program."""

Reads = set[np.dtype] | None
"""The dtypes that an array is cast to before anything is computed of it; `None` where it is read as it is."""


def find_reads(
    fun: Callable[[Any], Any], params: PyTree, prepare: Callable[[Any], Any] = lambda params: params
) -> list:
    """Finds for each leaf of the parameters how a function reads it, as `Reads`.

    Jitted functions, loops, branches, remat and custom derivatives are looked into, and what only moves numbers is
    passed; of a function with custom derivatives, what it computes where it is not differentiated.

    Args:
      fun: a function of prepared parameters.
      params: arrays, or what stands for them.
      prepare: what is made of `params` before `fun` reads them, of the same structure; traced, since on a mesh that is
        manual in part no `jax.ShapeDtypeStruct` has the type of what it makes.

    >>> import jax.numpy as jnp
    >>> params = {"b": jnp.ones(2), "w": jnp.ones((2, 2))}
    >>> find_reads(lambda p: p["w"].T.astype(jnp.bfloat16).sum() + p["b"].astype(jnp.bfloat16).sum(), params)
    [{dtype(bfloat16)}, {dtype(bfloat16)}]
    >>> find_reads(lambda p: (p["b"] * 2, p["b"].astype(jnp.bfloat16)), params)
    [None, set()]
    """
    leaves = jax.tree.leaves(params)
    marks = {f"{_MARK}{i}": i for i, leaf in enumerate(leaves) if is_floating(leaf)}

    def read_marked(params: PyTree) -> Any:
        whole, structure = jax.tree.flatten(prepare(params))
        marked = [checkpoint_name(x, f"{_MARK}{i}") if i in marks.values() else x for i, x in enumerate(whole)]
        return fun(structure.unflatten(marked))

    program = trace(read_marked, (params,), {}).program.jaxpr
    reads: list[Reads] = [set() for _ in leaves]
    holds: dict[int, set[int]] = {}  # the leaves that a variable has

    def note(leaf: int, dtype: np.dtype | None) -> None:
        known = reads[leaf]
        reads[leaf] = None if known is None or dtype is None else known | {dtype}

    for step in walk(program):
        held = [holds.get(id(operand), set()) for operand in step.operands]
        for result in step.results:  # of an earlier call of the same body, maybe
            holds.pop(id(result), None)
        if step.name == "name" and step.eqn.params["name"] in marks:
            holds[id(step.results[0])] = {marks[step.eqn.params["name"]]}
            continue
        if not any(held):
            continue
        if _only_moves(step):
            in_pairs = len(step.results) == len(step.operands)
            for i, result in enumerate(step.results):
                holds[id(result)] = held[i] if in_pairs else set().union(*held)
        else:
            for leaf in set().union(*held):
                note(leaf, _find_cast(step, leaves[leaf].dtype))
    for var in program.outvars:
        for leaf in () if isinstance(var, Literal) else holds.get(id(var), ()):
            note(leaf, None)
    return reads


def _only_moves(step: Step) -> bool:
    if step.name == "convert_element_type":
        [operand], [result] = step.operands, step.results
        return operand.aval.dtype == result.aval.dtype
    return step.name == "link" or step.name in MOVES  # not "carry": it comes around a loop as something else


def _find_cast(step: Step, dtype: np.dtype) -> np.dtype | None:
    """The floating dtype that a step casts numbers of another one to, if it has fewer bytes."""
    if step.name != "convert_element_type":
        return None
    new = step.eqn.params["new_dtype"]
    return np.dtype(new) if is_floating_dtype(new) and np.dtype(new).itemsize < dtype.itemsize else None
