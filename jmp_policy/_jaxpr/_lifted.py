"""Functions of Flax objects, on their way to a program: what they may write to has to be among their arguments."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._base import Args, Kwargs
from ..modules import find_lifting_adapter, is_flax_object


def open_partials(fun: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
    """Returns a function, and what a partial or a method of a Flax object holds among its arguments.

    The function may write to them, and so they have to come in as arguments.

    >>> open_partials(functools.partial(max, 1), (2,), {})
    (<built-in function max>, (1, 2), {})
    """
    if isinstance(fun, functools.partial):
        return open_partials(fun.func, (*fun.args, *args), {**fun.keywords, **kwargs})
    if isinstance(fun, types.MethodType) and is_flax_object(fun.__self__):
        return fun.__func__, (fun.__self__, *args), kwargs
    return fun, args, kwargs


def run_lifted(run: Callable[..., Any], fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls `run(fun, args, kwargs)`, where there are objects of nnx with a function and arguments that have none.

    What the function writes to them lands in the caller's objects when the trace is over.

    >>> run_lifted(lambda fun, args, kwargs: fun(*args, **kwargs), max, (1, 2), {})
    2
    """
    adapter = find_lifting_adapter((args, kwargs))
    if adapter is None:
        return run(fun, args, kwargs)
    return adapter.lift(lambda pure, state: run(pure, (state,), {}), fun, args, kwargs)


@contextlib.contextmanager
def explain_tracing(caller: str = "autocast", example: str = ", 'mixed_bfloat16'") -> Iterator[None]:
    """Adds what to do to errors that only tracing makes: they speak of trace levels and of a jit that nobody wrote.

    Args:
      caller: the name of the function that traces.
      example: its further arguments, for an example.
    """
    try:
        yield
    except _NO_VALUE as error:
        error.add_note(
            f"{caller} traces the function as jax.jit does: while it runs, arrays have no values that Python could "
            "decide on or convert. What Python needs can be a number of Python's among the arguments, which stays one."
        )
        raise
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                f"{caller} traces the function: pass an object that it writes to as an argument. "
                f"For example: {caller}(lambda model, x: model(x){example})(model, x)."
            )
        raise


_NO_VALUE = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError
)  # fmt: skip
