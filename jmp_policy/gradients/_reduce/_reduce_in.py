"""`reduce_dtype` of gradients: a function that differentiates, with its program rewritten."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..._base import Args, DTypeLike, Kwargs, PyTree, is_array, name_state, parse_dtype, warn_once, warn_user
from ..._jaxpr import AbstractValue, Rewriter, evaluate, explain_tracing, float_dtype, run_lifted, trace
from ._marks import Marks, Need, Obstacle, Origin, Place, find_marks
from ._widening import Widening

KeyPath = tuple[Any, ...]


def reduce_gradients_in(
    dtype: DTypeLike,
    differentiated: Callable[..., tuple[Any, PyTree]],
    list_parameters: Callable[[Args], list[Any]],
    *,
    strict: bool | None,
) -> Callable[..., tuple[Any, PyTree]]:
    """Makes a function that differentiates sum its gradients over devices in a dtype.

    Args:
      dtype: the dtype of the sums.
      differentiated: a function that returns a value and a tree of gradients.
      list_parameters: finds, among the arguments, the arrays that are differentiated.
      strict: whether it is an error, and no warning, where a gradient cannot be followed to the sum that makes it.
        `None` for the dtype of a policy: then nothing is an error, and each warning is given once.

    Raises:
      ValueError: `dtype` names no floating dtype, or needs `jax_enable_x64`.

    >>> import jax, jax.numpy as jnp
    >>> from jmp_policy.gradients._reduce import reduce_gradients_in
    >>> loss_fn = lambda w, x: jnp.sum((w.astype(jnp.bfloat16) * x).astype(jnp.float32))
    >>> reduced = reduce_gradients_in("float32", jax.value_and_grad(loss_fn), lambda args: [args[0]], strict=True)
    >>> x = jnp.array([256.0, 1, 1], jnp.bfloat16)  # whose sum is 256 in bfloat16
    >>> [float(grad(jnp.float32(1), x)[1]) for grad in (jax.value_and_grad(loss_fn), reduced)]
    [256.0, 258.0]
    """
    try:
        parsed = parse_reduce_dtype(dtype)
    except ValueError as error:
        if strict is not None:
            raise
        warn_once(_Reduced, f"{_OF_POLICY} {error}")
        return differentiated
    return _Reduced(parsed, differentiated, list_parameters, strict).call


_OF_POLICY = "A policy has a reduce dtype that its gradients cannot have."


class _Reduced:
    """A function that differentiates, and how its gradients are reduced."""

    def __init__(
        self,
        dtype: np.dtype,
        differentiated: Callable[..., tuple[Any, PyTree]],
        list_parameters: Callable[[Args], list[Any]],
        strict: bool | None,
    ):
        self._dtype, self._strict = dtype, strict
        self._differentiated, self._list_parameters = differentiated, list_parameters

    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        """Differentiates."""
        results = _Results()
        parameters = {id(array) for array in self._list_parameters(args)}
        run = functools.partial(self._trace_and_run, results, parameters)
        return run_lifted(run, results.watch_gradients(self._differentiated), args, kwargs)

    def _trace_and_run(
        self, results: "_Results", parameters: set[int], fun: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> PyTree:
        with explain_tracing("value_and_grad", ", reduce_dtype='float32'"):
            traced = trace(results.take_arrays(fun), args, kwargs)
        old, names = traced.program, results.list_names()
        origins = [Origin.PARAMETER if id(leaf) in parameters else Origin.DATA for leaf in traced.leaves]
        marks = self._find_marks(old.jaxpr, names, origins)
        if marks.obstacles and self._is_refused(old.jaxpr, names, origins):
            return results.put_back(evaluate(old, *traced.leaves))
        # What enters and what leaves keeps its dtype: gradients have their parameter's.
        kinds, wanted = [[float_dtype(var) for var in atoms] for atoms in (old.jaxpr.invars, old.jaxpr.outvars)]
        place = Place(_list_needs(names), tuple(origins))
        new = Rewriter(Widening(self._dtype)).rewrite(old, [*map(AbstractValue, kinds)], place, wanted).program
        return results.put_back(evaluate(new, *traced.leaves))

    def _find_marks(self, program: Jaxpr, names: Sequence[str | None], origins: Sequence[Origin]) -> Marks:
        return find_marks(program, _list_needs(names), origins, self._dtype)

    def _is_refused(self, program: Jaxpr, names: Sequence[str | None], origins: Sequence[Origin]) -> bool:
        """Raises, or warns, for each gradient that cannot be followed: one walk for each tells which they are.

        Returns:
          Whether nothing is rewritten, since a policy's reduce dtype is narrower than what the program sums in.
        """
        found = {}
        for i, name in enumerate(names):
            if name is not None:
                alone = [name if i == j else None for j in range(len(names))]
                found[name] = self._find_marks(program, alone, origins).obstacles
        message, is_refused = explain_obstacles(found, self._dtype)
        if self._strict is None:
            warn_once(_Reduced, f"{_OF_POLICY} {message}")
            return is_refused
        if self._strict or is_refused:
            raise ValueError(message)
        warn_user(message)
        return False


class _Results:
    """What a function that differentiates returns: its arrays, and which of them are gradients."""

    def __init__(self) -> None:
        self._leaves: list[Any] = []
        self._structure: Any = None
        self._gradients: dict[int, str] = {}
        self._names: list[str | None] = []

    def watch_gradients(self, differentiated: Callable[..., tuple[Any, PyTree]]) -> Callable[..., tuple[Any, PyTree]]:
        """The same function, whose gradients are known from then on; float8 state, its own next value, is none."""

        @functools.wraps(differentiated)
        def call_and_watch(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
            out, grads = differentiated(*args, **kwargs)
            leaves = jax.tree_util.tree_leaves_with_path(grads)
            for (path, leaf), state in zip(leaves, name_state(grads), strict=True):
                if not state:
                    self._gradients[id(leaf)] = _spell_path(path)
            return out, grads

        return call_and_watch

    def take_arrays(self, fun: Callable[..., Any]) -> Callable[..., list[Any]]:
        """The same function, which returns a list of its arrays."""

        def call_and_take(*args: Any, **kwargs: Any) -> list[Any]:
            self._leaves, self._structure = jax.tree.flatten(fun(*args, **kwargs))
            arrays = [leaf for leaf in self._leaves if _is_traced(leaf)]
            self._names = [self._gradients.get(id(leaf)) for leaf in arrays]
            self._leaves = [_ARRAY if _is_traced(leaf) else leaf for leaf in self._leaves]
            return arrays

        return call_and_take

    def list_names(self) -> list[str | None]:
        """The names of the arrays that are gradients, and `None` for others."""
        return self._names

    def put_back(self, arrays: Sequence[Any]) -> PyTree:
        """What the function returned, with these arrays."""
        given = iter(arrays)
        return jax.tree.unflatten(self._structure, [next(given) if x is _ARRAY else x for x in self._leaves])


_ARRAY = object()


def _is_traced(leaf: object) -> bool:
    """Whether a result can be that of a program; gradients of integers, float0, cannot."""
    return is_array(leaf) and leaf.dtype != jax.dtypes.float0


def _list_needs(names: Sequence[str | None]) -> tuple[Need, ...]:
    return tuple([Need.NONE if name is None else Need.GRADIENT for name in names])


def _spell_path(path: KeyPath) -> str:
    is_value = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return jax.tree_util.keystr(path[:-1] if is_value else path, simple=True, separator="/")


def parse_reduce_dtype(dtype: DTypeLike) -> np.dtype:
    parsed = parse_dtype(dtype, where=" for reduce_dtype", example="reduce_dtype='float32'")
    if jax.dtypes.canonicalize_dtype(parsed) != parsed:
        raise ValueError(
            f"reduce_dtype={str(parsed)!r} needs jax.config.update('jax_enable_x64', True): without it, JAX computes "
            "in float32. For example: reduce_dtype='float32'."
        )
    return parsed


_SHOWN = 5
_LIBRARIES = ("flax", "jax", "jmp_policy", "optax")


def explain_obstacles(found: Mapping[str, Sequence[Obstacle]], dtype: np.dtype) -> tuple[str, bool]:
    """Says where the walks from gradients ended.

    Args:
      found: for each gradient, by name, where its walk ended.
      dtype: the dtype of reductions.

    Returns:
      The message, and whether it is of a reduction that is narrower than the program's: a refusal in any case.
    """
    narrowed = {name: [o for o in obstacles if not o.is_opaque] for name, obstacles in found.items()}
    is_refused = any(narrowed.values())
    lines = [
        f"{name or 'the argument'!r}: {_describe(obstacles[0])}"
        for name, obstacles in (narrowed if is_refused else found).items()
        if obstacles
    ]
    where = "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *["..."] * (len(lines) > _SHOWN)])
    if is_refused:
        return (
            f"reduce_dtype={str(dtype)!r} is narrower than what these gradients are summed in:\n{where}\n"
            "Under jit XLA reduces in the dtype of the sum, which is never narrowed here. In a jax.shard_map, a cast "
            "before the collective does it: jmp.sharding has psum and psum_scatter. For example: "
            "reduce_dtype='float32'."
        ), True
    return (
        f"These gradients cannot be followed to the sums that make them, which XLA may reduce over devices in half "
        f"precision, not in {dtype}, at an operation whose inside is unknown:\n{where}\n"
        f"Have the operation return {dtype}, or pass strict=False, which makes this a warning. For example: "
        f"value_and_grad(loss_fn, loss_scale=scale, reduce_dtype='{dtype}', strict=False)."
    ), False


def _describe(obstacle: Obstacle) -> str:
    return f"{obstacle.eqn.primitive.name} in {obstacle.dtype}{_locate(obstacle.eqn)}"


def _locate(eqn: JaxprEqn) -> str:
    """The user's line of an equation, or the innermost one outside of JAX."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    packages = [(frame, frame.file_name.split(os.sep)) for frame in frames]
    users = [frame for frame, parts in packages if not any(name in parts for name in _LIBRARIES)]
    return f", at {users[0].file_name}:{users[0].line_num} ({users[0].function_name})" if users else ""
