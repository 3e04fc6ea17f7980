"""Functions of nnx objects as functions of arrays."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ..modules import is_flax_object


def lift(run: Callable[..., Any], fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a function of nnx objects by `run(pure function, tree of arrays)`. Writes land in the caller's objects."""
    with nnx.update_context(lift):
        with nnx.split_context(lift) as outside:
            graphdef, state = outside.split((args, kwargs))

        def pure(state: Any) -> dict[str, Any]:
            with nnx.merge_context(lift, inner=True) as inside:
                copies = inside.merge(graphdef, state)
            before = _Contents(copies)
            out = fun(*copies[0], **copies[1])
            has_objects = any(map(is_flax_object, jax.tree.leaves(out, is_leaf=is_flax_object)))
            written = None if has_objects else _Contents(copies).find_written(before)
            if written is not None:
                return {"written": written, "out": out}
            with nnx.split_context(lift) as inside:  # every object is made anew in its place
                return {"graph": inside.split((*copies, out))}

        result = run(pure, state)
        if "graph" in result:
            with nnx.merge_context(lift, inner=False) as outside:
                return outside.merge(*result["graph"])[2]
    variables = _Contents((args, kwargs)).variables
    for number, value in result["written"].items():
        variables[number].set_raw_value(value)
    return result["out"]


class _Contents:
    """The contents of a tree of nnx objects; `variables` has an order that copies of the tree share."""

    def __init__(self, tree: Any):
        self._graphdef, state = nnx.split(tree, graph=True)
        nodes = [node for _, node in nnx.iter_graph(tree, graph=True)]
        self.variables = [node for node in nodes if isinstance(node, nnx.Variable)]
        self._values = [variable.get_raw_value() for variable in self.variables]
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
        self._bare = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_variable) if not is_variable(leaf)]

    def find_written(self, before: "_Contents") -> dict[int, Any] | None:
        """Returns the written values by the index of their Variable, or `None` if attributes were written too."""
        if self._graphdef != before._graphdef or not _are_same(self._bare, before._bare):
            return None
        pairs = enumerate(zip(self._values, before._values, strict=True))
        return {i: new for i, (new, old) in pairs if not _are_same(jax.tree.leaves(new), jax.tree.leaves(old))}


def _are_same(new: list[Any], old: list[Any]) -> bool:
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
