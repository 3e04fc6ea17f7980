"""Watching a model's modules while it is traced."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ..._base import IN_FULL_PRECISION, OBSERVING, Args, Kwargs, PyTree, is_array
from .._adapter import ModuleCall, is_flax_object

_SCOPE = "jmp_policy_module_"


class Observation:
    """What came into a model's modules and what left them, by path, in the order of their first calls.

    Keys and Flax's own objects, such as RNG streams, do not count.

    Attributes:
      inputs: the dtypes of the arrays that each module was called with.
      outputs: the dtypes of the arrays that it returned.
      program: what was traced.
      widened: the paths of the modules that ran inside of `force_full_precision` at their last call.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[str, ...]] = {}
        self.outputs: dict[str, tuple[str, ...]] = {}
        self.program: Jaxpr | None = None
        self.widened: set[str] = set()
        self._running: set[str] = set()

    def trace(self, fun: Callable[..., Any], *args: Any) -> None:
        """Traces a function that calls a model under the hook of this observation.

        Args:
          fun: what to trace; anything may come in and out of it.
          *args: its arguments; their arrays, and `jax.ShapeDtypeStruct`s, are abstract, anything else stays as it is.
        """

        def list_arrays(*args: Any) -> list[Any]:  # a program can return nothing else
            return [leaf for leaf in jax.tree.leaves(fun(*args)) if is_array(leaf)]

        program, arrays = _split_arrays(list_arrays, args)
        with OBSERVING(object()), _ignore_map_warnings():
            self.program = jax.make_jaxpr(program)(arrays).jaxpr

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method and notes its dtypes; of methods of a module that call each other, the outermost counts."""
        if call.path in self._running:
            return next_fun(*args, **kwargs)
        (self.widened.add if IN_FULL_PRECISION.value else self.widened.discard)(call.path)
        _add_dtypes(self.inputs, call.path, (args, kwargs))
        self._running.add(call.path)
        try:
            # The scope tells later to which module each operation of the program belongs.
            with jax.named_scope(_SCOPE + call.path.encode().hex()):
                out = next_fun(*args, **kwargs)
        finally:
            self._running.discard(call.path)
        _add_dtypes(self.outputs, call.path, out)
        return out


def read_path(scope: str) -> str | None:
    """The path of the innermost module in the scope of an observed operation; `None` outside of all."""
    found = re.findall(_SCOPE + "([0-9a-f]*)", scope)
    return bytes.fromhex(found[-1]).decode() if found else None


def eval_shapes(fun: Callable[..., Any], *args: Any) -> PyTree:
    """The shapes and dtypes of what a function returns, as `jax.eval_shape`; its arguments are as for a trace."""
    program, arrays = _split_arrays(fun, args)
    with _ignore_map_warnings():
        return jax.eval_shape(program, arrays)


@contextlib.contextmanager
def _ignore_map_warnings() -> Iterator[None]:
    """A context without the warnings of rules that decide nothing: an explanation names them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="policy rule ")
        yield


def _split_arrays(fun: Callable[..., Any], args: Args) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """A function of the arrays among the arguments of `fun` alone, and these arrays."""
    leaves, structure = jax.tree.flatten(args)  # RNG streams too: drawing from them counts in a copy
    positions = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

    def program(arrays: list[Any]) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(positions, arrays, strict=True))
        return fun(*jax.tree.unflatten(structure, filled.values()))

    return program, [leaves[index] for index in positions]


def _add_dtypes(dtypes: dict[str, tuple[str, ...]], path: str, tree: PyTree) -> None:
    found = [leaf.dtype for leaf in jax.tree.leaves(tree, is_leaf=is_flax_object) if is_array(leaf)]
    new = (str(dtype) for dtype in found if not jnp.issubdtype(dtype, jax.dtypes.extended))
    dtypes[path] = tuple(dict.fromkeys((*dtypes.get(path, ()), *new)))
