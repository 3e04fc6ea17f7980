"""Observes the modules of a model while it is traced."""

import contextlib
import contextvars
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base import IN_FULL_PRECISION, OBSERVING, Args, Kwargs, PyTree, Results, flatten_function, is_array
from ._adapter import ModuleCall, is_flax_object

_SCOPE = "jmp_policy_module_"


class Observation:
    """Dtypes of the inputs and outputs of each module of a model, by path, without PRNG keys and Flax's own objects."""

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[str, ...]] = {}  # the dtypes of the arrays that each module was called with
        self.outputs: dict[str, tuple[str, ...]] = {}  # the dtypes of the arrays that it returned
        self.program: Any = None  # the traced jaxpr; `jax.extend` loads modules that `import jmp_policy` must not
        self.widened: set[str] = set()  # the paths of the modules whose last call was inside of `force_full_precision`
        self._running: set[str] = set()

    def trace(self, fun: Callable[..., Any], *args: Any) -> None:
        """Traces a function that calls a model under the hook. Arrays among `args` become abstract."""
        # Flattening copies RNG streams too, so that the caller's do not advance.
        flat, arrays, _ = flatten_function(Results().take_arrays(fun), args, {})
        with OBSERVING(object()), _ignore_map_warnings():
            self.program = jax.make_jaxpr(flat)(*arrays).jaxpr

    def hook(self, call: ModuleCall, next_fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a method and records its dtypes, unless another method of the same module is running."""
        if call.path in self._running:
            return next_fun(*args, **kwargs)
        (self.widened.add if IN_FULL_PRECISION.value else self.widened.discard)(call.path)
        _add_dtypes(self.inputs, call.path, (args, kwargs))
        self._running.add(call.path)
        try:
            # `read_path` finds the module of each equation by this scope.
            with jax.named_scope(_SCOPE + call.path.encode().hex()):
                out = next_fun(*args, **kwargs)
        finally:
            self._running.discard(call.path)
        _add_dtypes(self.outputs, call.path, out)
        return out


_BRIDGE: contextvars.ContextVar[str | None] = contextvars.ContextVar("_BRIDGE", default=None)
"""The path of the module that wraps the running one of Flax's other API. Modules inside have paths from there."""


@contextlib.contextmanager
def across_bridge(path: str) -> Iterator[None]:
    """Marks the call of the module that a module at a path wraps."""
    token = _BRIDGE.set("/".join(filter(None, (_BRIDGE.get(), path))))
    try:
        yield
    finally:
        _BRIDGE.reset(token)


def find_bridge() -> str | None:
    """Returns the path of the innermost module that wraps a running one of Flax's other API, or `None`."""
    return _BRIDGE.get()


def read_path(scope: str) -> str | None:
    """Returns the path of the innermost module in the scope of an observed operation, or `None`."""
    found = re.findall(_SCOPE + "([0-9a-f]*)", scope)
    return bytes.fromhex(found[-1]).decode() if found else None


def eval_shapes(fun: Callable[..., Any], *args: Any) -> PyTree:
    """Like `jax.eval_shape`, for arguments and results that are not all arrays."""
    flat, arrays, structures = flatten_function(fun, args, {})
    with _ignore_map_warnings():
        out = jax.eval_shape(flat, *arrays)
    return jax.tree.unflatten(structures[-1], out)


@contextlib.contextmanager
def _ignore_map_warnings() -> Iterator[None]:
    """Silences the warnings about unused rules, which an explanation reports itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="policy rule ")
        yield


def _add_dtypes(dtypes: dict[str, tuple[str, ...]], path: str, tree: PyTree) -> None:
    found = [leaf.dtype for leaf in jax.tree.leaves(tree, is_leaf=is_flax_object) if is_array(leaf)]
    new = (str(dtype) for dtype in found if not jnp.issubdtype(dtype, jax.dtypes.extended))
    dtypes[path] = tuple(dict.fromkeys((*dtypes.get(path, ()), *new)))


class _Constant:
    """Hides a NumPy array or number, which code may use as a Python value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def hide_constants(tree: PyTree) -> PyTree:
    """Hides the NumPy arrays and numbers in a tree from tracing."""
    hide = lambda leaf: _Constant(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
    return jax.tree.map(hide, tree, is_leaf=is_flax_object)


def show_constants(tree: PyTree) -> PyTree:
    """Inverse of `hide_constants`."""
    show = lambda leaf: leaf.value if isinstance(leaf, _Constant) else leaf
    return jax.tree.map(show, tree, is_leaf=is_flax_object)
