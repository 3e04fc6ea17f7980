"""Observes the matmuls of a model that runs one operation at a time, so that their operands have values."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


class Waiting(NamedTuple):
    """A call in a program that is traced. The evaluation of the program makes it again, with values."""

    call: Callable[..., list[Any]]
    path: str  # of the module that makes it
    avals: Sequence[Any]

    def __call__(self, *leaves: Any) -> list[Any]:
        with at_path(self.path):
            return self.call(*leaves)

    def fits(self, avals: Sequence[Any]) -> bool:
        types = [[(aval.shape, aval.dtype) for aval in each] for each in (self.avals, avals)]
        return types[0] == types[1]


class _Observer(NamedTuple):
    observe: Callable[..., Any]
    path: str = ""
    waiting: dict[str, Waiting] | None = None


# Not a JAX context, which would be part of every jit key: each calibration would compile all ops again.
_OBSERVER: contextvars.ContextVar[_Observer | None] = contextvars.ContextVar("_OBSERVER", default=None)

_NUMBERS = itertools.count()  # of calls that wait: no name is used again, because JAX remembers what it has traced


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
def collect_waiting() -> Iterator[dict[str, Waiting]]:
    """Lets observed calls wait, while the program of a model is traced; yields them by the names of their equations."""
    observer, waiting = _OBSERVER.get(), {}
    with contextlib.nullcontext() if observer is None else _enter(observer._replace(waiting=waiting)):
        yield waiting


def call_with_values(call: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of arrays; if it waits for the evaluation of a program, in a jitted function of its own."""
    observer = _OBSERVER.get()
    if observer is None or observer.waiting is None:
        return call(*args)

    def traced(*args: Any) -> Any:
        with _enter(observer._replace(waiting=None)):
            return call(*args)

    leaves, structure = jax.tree.flatten(args)
    run = lambda *leaves: jax.tree.leaves(call(*jax.tree.unflatten(structure, leaves)))
    traced.__name__ = f"waiting_call_{next(_NUMBERS)}"
    observer.waiting[traced.__name__] = Waiting(run, observer.path, [*map(jax.typeof, leaves)])
    with jax.disable_jit(False):
        return jax.jit(traced)(*args)


def observe_product(operation: Any, left: jax.Array, weight: Any) -> Any:
    """Reports a matmul by a quantized weight to the running observer, if any, and returns the weight to use."""
    observer = _OBSERVER.get()
    return weight if observer is None else observer.observe(observer.path, operation, left, weight)
