"""Observes the matmuls of a model that runs one operation at a time, so that their operands have values."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


class Deferred(NamedTuple):
    """A call in a program that is traced. The evaluation of the program makes it again, with values."""

    call: Callable[..., list[Any]]
    path: str  # of the module that makes it
    operands: Sequence[Any] = ()  # types
    results: Sequence[Any] = ()

    def __call__(self, *leaves: Any) -> list[Any]:
        with at_path(self.path):
            return defer(self.call, *leaves)  # again, if the evaluation is a part of another program

    def fits(self, operands: Sequence[Any], results: Sequence[Any]) -> bool:
        """True if the variables of an equation have the types of the call."""
        types = lambda avals: [(aval.shape, aval.dtype) for aval in avals]
        found = [types(var.aval for var in variables) for variables in (operands, results)]
        return found == [types(self.operands), types(self.results)]


class _Observer(NamedTuple):
    observe: Callable[..., Any]
    path: str = ""
    deferred: dict[str, Deferred] | None = None  # while the program of a model is traced


# Not a JAX context, which would be part of every jit key: each calibration would compile all ops again.
_OBSERVER: contextvars.ContextVar[_Observer | None] = contextvars.ContextVar("_OBSERVER", default=None)

_NUMBERS = itertools.count()  # of deferred calls: JAX may write what it traced for one program into another


@contextlib.contextmanager
def observe_products(observe: Callable[..., Any] = lambda path, operation, left, weight: weight) -> Iterator[None]:
    """Runs models one operation at a time, also in scans.

    Calls `observe(path, operation, left, weight)` before each matmul by a quantized weight: it returns the weight.
    """
    with jax.disable_jit(), _enter(_Observer(observe)):
        yield


@contextlib.contextmanager
def _enter(observer: _Observer) -> Iterator[None]:
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def is_observing() -> bool:
    return _OBSERVER.get() is not None


def at_path(path: str) -> Any:
    """Names the module whose matmuls are observed inside."""
    observer = _OBSERVER.get()
    assert observer is not None
    return _enter(observer._replace(path=path))


@contextlib.contextmanager
def collect_deferred() -> Iterator[dict[str, Deferred]]:
    """Yields the observed calls of the program that is traced inside, by the names of their equations."""
    observer, deferred = _OBSERVER.get(), {}
    with contextlib.nullcontext() if observer is None else _enter(observer._replace(deferred=deferred)):
        yield deferred


def defer(call: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of arrays; while a program is traced, as a jitted function, which its evaluation calls again."""
    observer = _OBSERVER.get()
    if observer is None or observer.deferred is None:
        return call(*args)

    def traced(*args: Any) -> Any:
        with _enter(observer._replace(deferred=None)):
            return call(*args)

    leaves, structure = jax.tree.flatten(args)
    run = lambda *leaves: jax.tree.leaves(call(*jax.tree.unflatten(structure, leaves)))
    traced.__name__ = f"deferred_call_{next(_NUMBERS)}"
    with jax.disable_jit(False):
        out = jax.jit(traced)(*args)
    types = [[*map(jax.typeof, own)] for own in (leaves, jax.tree.leaves(out))]
    observer.deferred[traced.__name__] = Deferred(run, observer.path, *types)
    return out


def observe_product(operation: Any, left: jax.Array, weight: Any) -> Any:
    """Reports a matmul by a quantized weight to the running observer, if any, and returns the weight to use."""
    observer = _OBSERVER.get()
    return weight if observer is None else observer.observe(observer.path, operation, left, weight)
