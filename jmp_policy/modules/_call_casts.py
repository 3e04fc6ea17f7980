"""Casts of arguments, held arrays and results at a boundary; float32 outputs of layers; `force_full_precision`."""

import contextlib
import contextvars
import functools
import inspect
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._base import (
    IN_FULL_PRECISION,
    Args,
    Kwargs,
    P,
    PyTree,
    R,
    at_least_float32,
    cast_floating,
    describe,
    floating_leaves,
    hide_frames,
    is_floating,
    meet_policy,
    quote,
    shorten,
)
from ..policy import Jitted, Policy, check_policy_x64
from ._adapter import find_adapter, is_flax_object


class WideResults:
    """Remembers each layer's float32 output by identity, and weakly, so that a boundary can return it uncast."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, jax.Array]] = {}  # id(output) -> (output, uncast)

    def remember(self, narrow: jax.Array, wide: jax.Array) -> None:
        key = id(narrow)
        self._known[key] = weakref.ref(narrow, lambda _: self._known.pop(key, None)), wide

    def find(self, x: Any) -> jax.Array | None:
        """Returns the output before it was cast down, or `None` for any other value."""
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def restore(self, policy: Policy, out: PyTree) -> Any:
        """Replaces outputs that the boundary is going to cast by their values before they were cast down."""
        dtype = policy.output_dtype
        if not self._known or dtype is None:
            return out
        restore = lambda x: x if (wide := self.find(x)) is None or x.dtype == dtype else wide
        return jax.tree.map(restore, out, is_leaf=is_flax_object)


_RESULTS: contextvars.ContextVar[WideResults | None] = contextvars.ContextVar("_RESULTS", default=None)


@contextlib.contextmanager
def keep_wide_results() -> Iterator[WideResults]:
    """Collects, in `WideResults`, the float32 outputs of the layers that run in this context."""
    results = WideResults()
    token = _RESULTS.set(results)
    try:
        yield results
    finally:
        _RESULTS.reset(token)


def round_result(wide: Any, dtype: Any) -> Any:
    """Casts the output of a layer down to the dtype that it returns (`None`: no cast), and remembers it uncast."""
    narrow = cast_floating(wide, dtype)
    results = _RESULTS.get()
    if results is not None and narrow is not wide and isinstance(narrow, jax.Array):
        results.remember(narrow, wide)
    return narrow


def read_wide(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the output of an inner layer in `dtype`, from its uncast value where one is known."""
    results = _RESULTS.get()
    wide = None if results is None else results.find(x)
    return cast_floating(x, dtype) if wide is None else wide.astype(dtype)


def cast_arguments(
    policy: Policy, fun: Callable[..., Any], no_cast: Collection[str], args: Args, kwargs: Kwargs, held: PyTree = None
) -> tuple[Policy, Args, Kwargs]:
    """Casts arguments to the compute dtype, which `held` may decide; returns the resolved policy too."""
    meet_policy(policy.compute_dtype, policy.reduce_dtype)  # first, because it may end the trace
    check_policy_x64(policy)
    kept = [i for i, name in enumerate(_name_positions(fun, len(args))) if name in no_cast] if no_cast else []
    named = {name: x for name, x in kwargs.items() if name not in no_cast} if kwargs else {}
    if policy.compute_dtype is None:
        policy = resolve_policy(policy, ([x for i, x in enumerate(args) if i not in kept], named, held))

    # One argument at a time: most are arrays, which need no tree walk.
    cast = functools.partial(cast_floating, dtype=policy.compute_dtype, is_leaf=is_flax_object)
    entering = [x if i in kept else cast(x) for i, x in enumerate(args)] if kept else map(cast, args)
    return policy, tuple(entering), kwargs | cast(named) if named else kwargs


def cast_held(policy: Policy, fun: Callable[..., Any], no_cast: Collection[str]) -> Callable[..., Any]:
    """Casts the arrays that a partial, a callable pytree or a method of one holds, as if they were arguments."""
    if isinstance(fun, functools.partial):
        _, args, kwargs = cast_arguments(policy, fun.func, no_cast, fun.args, fun.keywords)
        return functools.partial(cast_held(policy, fun.func, no_cast), *args, **kwargs)
    if isinstance(fun, types.MethodType):
        return types.MethodType(fun.__func__, _cast_object(policy, fun.__self__))
    return _cast_object(policy, fun)


def _cast_object(policy: Policy, held: Any) -> Any:
    """Casts the arrays of an object. If there are none, returns the object itself: the call may write to it."""
    leaves = floating_leaves(held, is_leaf=is_flax_object)
    if all(leaf.dtype == policy.compute_dtype for leaf in leaves):
        return held
    return cast_floating(held, policy.compute_dtype, is_leaf=is_flax_object)


def list_held(fun: Callable[..., Any]) -> PyTree:
    if isinstance(fun, functools.partial):
        return [list_held(fun.func), fun.args, fun.keywords]
    return fun.__self__ if isinstance(fun, types.MethodType) else fun


def explain_uncast(fun: Callable[..., Any]) -> str:
    """Returns a warning for a callable with arrays that a boundary cannot cast, or an empty string."""
    for inner, is_wrapped in _list_layers(fun):
        owner = getattr(inner, "__self__", inner)
        is_hidden = is_wrapped and _holds_arrays(list_held(inner))
        # Only `__call__` counts: other methods of a trainer may take its arrays as arguments.
        is_object = getattr(inner, "__name__", "__call__") == "__call__"
        if is_hidden or (is_object and _has_array_attributes(owner)) or _has_variables(owner):
            name = describe(inner) if isinstance(inner, functools.partial) else type(owner).__name__
            return (
                f"with_policy casts the arguments of a call, but not the arrays that {name} holds: "
                "matmuls with them stay in their dtype. Give the policy to the partial or pytree itself, inside of jit "
                "and vmap; give a Flax module its own; or use jmp.autocast, which casts all arrays. "
                "For example: jmp.autocast(model, 'mixed_bfloat16')."
            )
    return ""


def _list_layers(fun: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Lists a callable and those inside it, down to one that casts its own; true inside of jit, vmap or a decorator."""
    is_wrapped = False
    while not (isinstance(fun, type) or hasattr(fun, "__jmp_attached__") or _is_made_here(fun)):
        yield fun, is_wrapped
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif (wrapped := getattr(fun, "__wrapped__", None)) is not None and not _holds_arrays(fun):
            is_wrapped, fun = True, wrapped
        else:
            return


def _is_made_here(fun: Callable[..., Any]) -> bool:
    """True for our own wrappers, such as `autocast`: they cast the arrays inside."""
    return getattr(fun, "__globals__", {}).get("__name__", "").startswith("jmp_policy.")


def _holds_arrays(tree: PyTree) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    return any(isinstance(leaf, jax.Array) and is_floating(leaf) and leaf.ndim > 0 for leaf in leaves)


def _has_array_attributes(owner: Any, depth: int = 3) -> bool:
    """True if an object that JAX treats as a leaf has arrays among its attributes, at most three objects deep."""
    other = type | types.ModuleType | types.FunctionType | types.MethodType
    if depth == 0 or isinstance(owner, other) or is_flax_object(owner):
        return False
    if hasattr(owner, "__wrapped__") or not hasattr(owner, "__dict__"):
        return False
    leaves = jax.tree.leaves(vars(owner), is_leaf=is_flax_object) if jax.tree_util.all_leaves([owner]) else []
    return _holds_arrays(leaves) or any(_has_array_attributes(leaf, depth - 1) for leaf in leaves)


def _has_variables(owner: Any) -> bool:
    """True for a Flax module without a policy that has its variables: an nnx module, or a bound linen one."""
    adapter = find_adapter(owner) if is_flax_object(owner) else None
    if adapter is None or adapter.policy_of(owner) is not None:
        return False
    return bool(adapter.find_modules(owner)) or getattr(owner, "scope", None) is not None


def widen_policy(policy: Policy) -> Policy:
    """Returns the policy itself, or a version of it in its full dtype inside of `force_full_precision`."""
    if not IN_FULL_PRECISION.value:
        return policy
    # Parameters are stored as before: the param dtype and the quantization stay.
    widen = lambda dtype: max(policy.full_dtype, at_least_float32(dtype), key=lambda dtype: dtype.itemsize)
    compute, output = (None if d is None else widen(d) for d in (policy.compute_dtype, policy.output_dtype))
    return policy.replace(compute_dtype=compute, output_dtype=output, precision="highest", accumulate_dtype=None)


def resolve_policy(policy: Policy, inputs: PyTree) -> Policy:
    """Fills in a missing compute dtype from the first floating input."""
    return policy.resolve(floating_leaves(inputs, is_leaf=is_flax_object)) if policy.compute_dtype is None else policy


def cast_result(policy: Policy, out: PyTree) -> Any:
    """Casts outputs to the output dtype, except Flax modules and Variables. Rejects generators and coroutines."""
    if isinstance(out, Generator | Coroutine | AsyncGenerator):
        if not isinstance(out, AsyncGenerator):
            out.close()  # else Python warns about a coroutine that was never awaited
        raise TypeError(
            f"{name_function(out)} returned a {type(out).__name__}, which would run after its policy ended. "
            "Return arrays instead. For example: [*rows], not (row for row in rows)."
        )
    return cast_floating(out, policy.output_dtype, is_leaf=is_flax_object)


def matmul_precision(policy: Policy) -> AbstractContextManager:
    return nullcontext() if policy.precision is None else jax.default_matmul_precision(policy.precision)


def check_no_cast(
    fun: Callable[..., Any], no_cast: Collection[str], methods: Iterable[Callable[..., Any]] = ()
) -> None:
    """Raises a `ValueError` unless each of `no_cast` names an argument of `fun`, or of other methods."""
    if not no_cast:
        return
    while isinstance(fun, functools.partial):  # `no_cast` may name bound arguments too
        fun = fun.func
    try:
        parameters = inspect.signature(fun).parameters
    except ValueError:
        raise ValueError(
            f"no_cast names {quote(sorted(no_cast))}, but {name_function(fun)} has no signature that Python can read. "
            "Give the policy to a function that calls it. For example: lambda x, position: f(x, position)."
        ) from None
    all_parameters = [parameters, *(inspect.signature(method).parameters for method in methods)]
    takes_any = any(p.kind is p.VAR_KEYWORD for known in all_parameters for p in known.values())
    for name in no_cast:
        if not takes_any and not any(name in known for known in all_parameters):
            known = ", ".join(map(repr, parameters)) or "none"
            raise ValueError(
                f"no_cast names {quote(name)}, but {name_function(fun)} has no such argument. "
                f"Its arguments are {known}."
            )


def _name_positions(fun: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of the first `count` positional parameters; `*args` gives its name to all that it takes."""
    parameters = inspect.signature(fun).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return (names + [rest] * count)[:count]


def name_function(fun: object) -> str:
    return shorten(getattr(fun, "__qualname__", repr(fun)))


def keep_carry_dtypes(carry: PyTree, out: PyTree) -> Any:
    """Casts the new carry in `(new carry, output)` to the dtypes of the old one, as a scan needs it."""
    if carry is None or not isinstance(out, tuple) or len(out) != 2:
        return out
    new_carry, output = out
    if jax.tree.structure(new_carry) != jax.tree.structure(carry):
        return out
    cast_like = lambda new, old: cast_floating(new, old.dtype) if is_floating(old) else new
    return jax.tree.map(cast_like, new_carry, carry), output


F = TypeVar("F", bound=Callable[..., Any])

FULL_PRECISION = "force_full_precision"
"""The named scope around functions in full precision. `autocast` reads it."""


@overload
def force_full_precision(fun: Jitted[P, R]) -> Callable[P, R]: ...
@overload
def force_full_precision(fun: F) -> F: ...
def force_full_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `fun` in float32, with its matmuls at the highest precision.

    Floating inputs are upcast to float32 (float64 stays, also under `autocast`). Floating outputs are cast to the
    `jnp.result_type` of the floating inputs; without a floating input they are not cast. Flax modules and Variables are
    passed through.

    Flax layers and functions with a policy that `fun` calls compute in its `full_dtype`, float32 or float64. A `dtype`
    that an author wrote on a layer stays, and so does the quantization of a policy.

    Args:
      fun: a function of trees of arrays.

    Returns:
      A function with the same arguments and outputs.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.force_full_precision(jnp.cumsum)(jnp.ones(3, jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    widen = lambda leaf: cast_floating(leaf, at_least_float32(leaf.dtype)) if is_floating(leaf) else leaf

    @hide_frames
    @functools.wraps(fun)
    def in_full_precision(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = jax.tree.map(widen, (args, kwargs), is_leaf=is_flax_object)
        with jax.default_matmul_precision("highest"), jax.named_scope(FULL_PRECISION), IN_FULL_PRECISION(True):
            out = fun(*wide_args, **wide_kwargs)
        leaves = floating_leaves((args, kwargs), is_leaf=is_flax_object)
        with jax.numpy_dtype_promotion("standard"):
            dtype = np.dtype(jnp.result_type(*leaves)) if leaves else None
        return cast_floating(out, dtype, is_leaf=is_flax_object)

    return in_full_precision
