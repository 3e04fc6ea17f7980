"""Functions of nnx objects as functions of arrays."""

from collections.abc import Callable
from typing import Any

from flax import nnx


def lifted(run: Callable[..., Any], fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a function of nnx objects by means of one that knows trees of arrays only.

    What the function writes, to Variables or attributes, lands in the caller's objects afterwards, as with `nnx.jit`.

    Args:
      run: called with a pure function and its argument, a tree of arrays; returns what that returns.
      fun: the function; it is called with copies of the objects.
      args: its positional arguments.
      kwargs: its keyword arguments.

    Returns:
      What `fun` returns.
    """
    with nnx.update_context(lifted):
        with nnx.split_context(lifted) as outside:
            graphdef, state = outside.split((args, kwargs))

        def pure(state: Any) -> Any:
            with nnx.merge_context(lifted, inner=True) as inside:
                args, kwargs = inside.merge(graphdef, state)
            out = fun(*args, **kwargs)
            with nnx.split_context(lifted) as inside:
                return inside.split((args, kwargs, out))

        new_graphdef, new_state = run(pure, state)
        with nnx.merge_context(lifted, inner=False) as outside:
            return outside.merge(new_graphdef, new_state)[2]
