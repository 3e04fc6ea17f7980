"""Watching a model's modules while it is traced."""

import contextlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._flax_objects import is_flax_object

# A reference to the observation that is being made. A context of JAX's, part of the key of every jit cache: what was
# traced before is traced anew, and seen. JAX never lets go of such a key, and the observation is not to stay with it.
_OBSERVATION = jax.make_user_context(None)
_SCOPE = "jmp_policy_module_"


class Observation:
    """What came into a model's modules and what left them, by path, in the order of their first calls.

    Keys and Flax's own objects, such as RNG streams, do not count.

    Attributes:
      inputs: the dtypes of the arrays that each module was called with.
      outputs: the dtypes of the arrays that it returned.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[str, ...]] = {}
        self.outputs: dict[str, tuple[str, ...]] = {}
        self._running: set[str] = set()

    def call(self, path: str, fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a method of the module at a path; of methods that call each other, the outermost one counts."""
        if path in self._running:
            return fun(*args, **kwargs)
        _add_dtypes(self.inputs, path, (args, kwargs))
        self._running.add(path)
        try:
            with jax.named_scope(_SCOPE + path.encode().hex()):
                out = fun(*args, **kwargs)
        finally:
            self._running.discard(path)
        _add_dtypes(self.outputs, path, out)
        return out


def path_of(scope: str) -> str | None:
    """The path of the innermost module in the scope of an observed operation; `None` outside of all."""
    found = re.findall(_SCOPE + "([0-9a-f]*)", scope)
    return bytes.fromhex(found[-1]).decode() if found else None


def observe_call(path: str, fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a method of the module at a path, under the eyes of the observation that is being made, if there is one."""
    reference = _OBSERVATION.value
    observation: Observation | None = None if reference is None else reference()
    return fun(*args, **kwargs) if observation is None else observation.call(path, fun, args, kwargs)


def observe(fun: Callable[..., Any], *args: Any) -> tuple[Observation, ClosedJaxpr]:
    """Traces a function that calls a model, and tells what it saw.

    Args:
      fun: what to trace; anything may come in and out of it.
      *args: its arguments; their arrays, and `jax.ShapeDtypeStruct`s, are abstract, anything else stays as it is.
    """
    observation = Observation()

    def arrays_of(*args: Any) -> list[Any]:  # a program can return nothing else
        return [leaf for leaf in jax.tree.leaves(fun(*args)) if _is_array(leaf)]

    program, arrays = _abstracted(arrays_of, args)
    with _OBSERVATION(weakref.ref(observation)), _without_map_warnings():
        return observation, jax.make_jaxpr(program)(arrays)


def shapes(fun: Callable[..., Any], *args: Any) -> Any:
    """The shapes and dtypes of what a function returns, as `jax.eval_shape`; its arguments are as for `observe`."""
    program, arrays = _abstracted(fun, args)
    with _without_map_warnings():
        return jax.eval_shape(program, arrays)


@contextlib.contextmanager
def _without_map_warnings() -> Iterator[None]:
    """A context without the warnings of rules that decide nothing: an explanation names them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="policy rule ")
        yield


def _abstracted(fun: Callable[..., Any], args: tuple) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """A function of the arrays among the arguments of `fun` alone, and these arrays."""
    leaves, structure = jax.tree.flatten(args)  # RNG streams too: drawing from them counts in a copy
    positions = [index for index, leaf in enumerate(leaves) if _is_array(leaf)]

    def program(arrays: list[Any]) -> Any:
        filled = dict(enumerate(leaves)) | dict(zip(positions, arrays, strict=True))
        return fun(*jax.tree.unflatten(structure, filled.values()))

    return program, [leaves[index] for index in positions]


def _add_dtypes(dtypes: dict[str, tuple[str, ...]], path: str, tree: Any) -> None:
    found = [leaf.dtype for leaf in jax.tree.leaves(tree, is_leaf=is_flax_object) if _is_array(leaf)]
    new = (str(dtype) for dtype in found if not jnp.issubdtype(dtype, jax.dtypes.extended))
    dtypes[path] = tuple(dict.fromkeys((*dtypes.get(path, ()), *new)))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
