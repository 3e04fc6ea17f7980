"""`reduce_dtype` of gradients: traces a gradient function, rewrites its jaxpr and runs it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import Jaxpr

from .._base import (
    Args,
    DTypeLike,
    Kwargs,
    PyTree,
    Results,
    check_x64,
    drop_value_key,
    name_state,
    parse_dtype,
    warn_once,
    warn_user,
)
from .._jaxpr import AbstractValue, Rewriter, evaluate, explain_tracing, find_line, float_dtype, run_lifted, trace
from ._reduce_marks import Need, Obstacle, Origin, Upcasts, find_marks
from ._reduce_widening import Widening


def reduce_gradients_in(
    dtype: DTypeLike,
    differentiated: Callable[..., tuple[Any, PyTree]],
    parameters: Sequence[Any],
    on_opaque: Literal["error", "warn"] | None,
    args: Args,
    kwargs: Kwargs,
) -> tuple[Any, PyTree]:
    """Calls a function that returns a value and gradients, which are summed over devices in a dtype.

    `parameters` are the differentiated arrays. With `on_opaque=None`, for a policy, it warns once and raises nothing.
    """
    try:
        parsed = parse_dtype(dtype, where=" for reduce_dtype", example="reduce_dtype='float32'")
        check_x64(parsed, f"reduce_dtype={str(parsed)!r}", "reduce_dtype='float32'")
    except ValueError as error:
        if on_opaque is not None:
            raise
        warn_once(reduce_gradients_in, f"{_OF_POLICY} {error}")
        return differentiated(*args, **kwargs)
    gradients: dict[int, str] = {}
    run = functools.partial(_trace_and_run, parsed, on_opaque, gradients, set(map(id, parameters)))
    return run_lifted(run, _watch_gradients(differentiated, gradients), args, kwargs)


_OF_POLICY = "A policy has a reduce dtype that its gradients cannot have."


def _trace_and_run(
    dtype: np.dtype,
    on_opaque: Literal["error", "warn"] | None,
    gradients: dict[int, str],
    parameters: set[int],
    fun: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
) -> PyTree:
    results, names = Results(), list[str | None]()

    def list_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        arrays = results.take_arrays(fun)(*args, **kwargs)
        names[:] = [gradients.get(id(leaf)) for leaf in arrays]
        return arrays

    with explain_tracing("value_and_grad", ", reduce_dtype='float32'"):
        traced = trace(list_arrays, args, kwargs)
    old = traced.program
    origins = tuple([Origin.PARAMETER if id(leaf) in parameters else Origin.DATA for leaf in traced.leaves])
    marks = find_marks(old.jaxpr, _list_needs(names), origins, dtype)
    if marks.obstacles and _is_refused(old.jaxpr, names, origins, dtype, on_opaque):
        return results.put_back(evaluate(old, *traced.leaves))
    # Inputs and outputs keep their dtypes: gradients have the dtype of their parameter.
    kinds, wanted = [[float_dtype(var) for var in atoms] for atoms in (old.jaxpr.invars, old.jaxpr.outvars)]
    upcasts = Upcasts(_list_needs(names), origins)
    new = Rewriter(Widening(dtype)).rewrite(old, [*map(AbstractValue, kinds)], upcasts, wanted).program
    return results.put_back(evaluate(new, *traced.leaves))


def _is_refused(
    program: Jaxpr,
    names: Sequence[str | None],
    origins: tuple[Origin, ...],
    dtype: np.dtype,
    on_opaque: Literal["error", "warn"] | None,
) -> bool:
    """Raises or warns for each gradient that cannot be followed; True if nothing is rewritten."""
    found = {}
    # One walk per gradient tells which they are.
    for i, name in enumerate(names):
        if name is not None:
            alone = [name if i == j else None for j in range(len(names))]
            found[name] = find_marks(program, _list_needs(alone), origins, dtype).obstacles
    message, is_refused = explain_obstacles(found, dtype)
    if on_opaque is None:
        warn_once(reduce_gradients_in, f"{_OF_POLICY} {message}")
        return is_refused  # the reduce dtype is narrower than a sum
    if on_opaque == "error" or is_refused:
        raise ValueError(message)
    warn_user(message)
    return False


def _watch_gradients(
    differentiated: Callable[..., tuple[Any, PyTree]], gradients: dict[int, str]
) -> Callable[..., tuple[Any, PyTree]]:
    """Records the path of each gradient by the id of its array, without float8 state."""

    @functools.wraps(differentiated)
    def call_and_watch(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        out, grads = differentiated(*args, **kwargs)
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        for (path, leaf), state in zip(leaves, name_state(grads), strict=True):
            if not state:
                gradients[id(leaf)] = jax.tree_util.keystr(drop_value_key(path), simple=True, separator="/")
        return out, grads

    return call_and_watch


def _list_needs(names: Sequence[str | None]) -> tuple[Need, ...]:
    return tuple([Need.NONE if name is None else Need.GRADIENT for name in names])


_SHOWN = 5


def explain_obstacles(found: Mapping[str, Sequence[Obstacle]], dtype: np.dtype) -> tuple[str, bool]:
    """Returns the error text for the ends of walks, by gradient, and True if a reduction is narrower than a sum."""
    narrowed = {name: [o for o in obstacles if not o.is_opaque] for name, obstacles in found.items()}
    is_refused = any(narrowed.values())
    told = narrowed if is_refused else found
    lines = [f"{name or 'the argument'!r}: {_describe_obstacle(ends[0])}" for name, ends in told.items() if ends]
    where = "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *["..."] * (len(lines) > _SHOWN)])
    if is_refused:
        return (
            f"reduce_dtype={str(dtype)!r} is narrower than the dtype in which these gradients are summed:\n{where}\n"
            "Under jit XLA reduces in the dtype of the sum, which is never narrowed here. In a jax.shard_map, a cast "
            "before the collective does it: jmp.sharding has psum and psum_scatter. For example: "
            "reduce_dtype='float32'."
        ), True
    return (
        f"These gradients cannot be followed to the sums that make them, because of an op with unknown semantics. XLA "
        f"may reduce them over devices in half precision, not in {dtype}:\n{where}\n"
        f"Make the op return {dtype}, or pass on_opaque='warn', which makes this a warning. For example: "
        f"value_and_grad(loss_fn, loss_scale=scale, reduce_dtype='{dtype}', on_opaque='warn')."
    ), False


def _describe_obstacle(obstacle: Obstacle) -> str:
    line = find_line(obstacle.eqn)
    return f"{obstacle.eqn.primitive.name} in {obstacle.dtype}{line and f', at {line}'}"
