"""The dtypes in which a function reads its parameters, found in its jaxpr."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from .._base import PyTree, is_floating, is_floating_dtype
from .._jaxpr import Fact, Step, having, trace, walk

MOVES = having(Fact.MOVES, Fact.ANNOTATES, Fact.TRANSFERS)  # casting their operands or their results is the same
_MARK = "jmp_policy parameter "  # prefix of the names that mark parameters in the jaxpr
Reads = set[np.dtype] | None  # dtypes that an array is cast to before any computation; None for an uncast use


def find_reads(
    fun: Callable[[Any], Any], params: PyTree, prepare: Callable[[Any], Any] = lambda params: params
) -> list:
    """Finds for each leaf of `params` the dtypes that `fun` casts it to, or None if it uses it uncast.

    Looks into jitted functions, loops, branches, remat and the primal functions of custom derivatives, and passes ops
    that only move elements. `prepare` is applied to `params` before `fun` and is traced too: on a partly manual mesh a
    `jax.ShapeDtypeStruct` cannot describe its outputs.
    """
    leaves = jax.tree.leaves(params)
    marks = {f"{_MARK}{i}": i for i, leaf in enumerate(leaves) if is_floating(leaf)}

    def read_marked(params: PyTree) -> Any:
        whole, structure = jax.tree.flatten(prepare(params))
        marked = [checkpoint_name(x, f"{_MARK}{i}") if i in marks.values() else x for i, x in enumerate(whole)]
        return fun(structure.unflatten(marked))

    program = trace(read_marked, (params,), {}).program.jaxpr
    reads: list[Reads] = [set() for _ in leaves]
    holds: dict[int, set[int]] = {}  # the leaves that each variable is made from

    def note(leaf: int, dtype: np.dtype | None) -> None:
        known = reads[leaf]
        reads[leaf] = None if known is None or dtype is None else known | {dtype}

    for step in walk(program):
        held = [holds.get(id(operand), set()) for operand in step.operands]
        for result in step.results:  # an earlier call of the same sub-jaxpr may have set them
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
    return step.name == "link" or step.name in MOVES  # not "carry": its value changes from iteration to iteration


def _find_cast(step: Step, dtype: np.dtype) -> np.dtype | None:
    """Returns the floating dtype with fewer bytes that a step casts to, or None."""
    if step.name != "convert_element_type":
        return None
    new = step.eqn.params["new_dtype"]
    return np.dtype(new) if is_floating_dtype(new) and np.dtype(new).itemsize < dtype.itemsize else None
