"""Casts of arguments, held arrays and results at a boundary, wide results, and islands of full precision."""

import contextlib
import contextvars
import functools
import inspect
import types
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Iterator
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
    is_floating,
    meet_reduce_dtype,
    quote,
    shorten,
)
from ..policy import Jitted, Policy
from ._adapter import find_adapter, is_flax_object


class WideResults:
    """What each result was that a layer rounded while the call of one boundary runs.

    A result is known as the object that it is: one that was computed with, or went through a `jit`, is another. What it
    was is kept for as long as anything else keeps the result.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, jax.Array]] = {}  # by the id of the result

    def remember(self, narrow: jax.Array, wide: jax.Array) -> None:
        """Remembers what a result was."""
        key = id(narrow)
        self._known[key] = weakref.ref(narrow, lambda _: self._known.pop(key, None)), wide

    def find(self, x: Any) -> jax.Array | None:
        """What a result was; `None` of anything else."""
        found = self._known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def restore(self, policy: Policy, out: PyTree) -> Any:
        """What a boundary returns, in which the results that it casts are what they were before they were rounded."""
        if not self._known or policy.output_dtype is None:
            return out
        return jax.tree.map(lambda x: self._restore_leaf(x, policy.output_dtype), out, is_leaf=is_flax_object)

    def _restore_leaf(self, x: Any, dtype: np.dtype | None) -> Any:
        wide = self.find(x)
        return x if wide is None or x.dtype == dtype else wide


_RESULTS: contextvars.ContextVar[WideResults | None] = contextvars.ContextVar("_RESULTS", default=None)


@contextlib.contextmanager
def keep_wide_results() -> Iterator[WideResults]:
    """A context in which the layers inside of a boundary say what their results were before they were rounded."""
    results = WideResults()
    token = _RESULTS.set(results)
    try:
        yield results
    finally:
        _RESULTS.reset(token)


def round_result(wide: Any, dtype: Any) -> Any:
    """Casts what a layer computed to the dtype that it returns; a boundary around it still knows what it was.

    Args:
      wide: what the layer computed.
      dtype: what it returns; `None` for what it computed.
    """
    narrow = cast_floating(wide, dtype)
    results = _RESULTS.get()
    if results is not None and narrow is not wide and isinstance(narrow, jax.Array):
        results.remember(narrow, wide)
    return narrow


def read_wide(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """What a layer inside computed before it was rounded, or else a cast of what it returned."""
    results = _RESULTS.get()
    wide = None if results is None else results.find(x)
    return cast_floating(x, dtype) if wide is None else wide.astype(dtype)


def cast_arguments(
    policy: Policy, fun: Callable[..., Any], keep: Collection[str], args: Args, kwargs: Kwargs, held: PyTree = None
) -> tuple[Policy, Args, Kwargs]:
    """Casts what enters a boundary to compute dtype, and hands the reduce dtype to gradients that are being taken.

    Args:
      policy: the policy of the boundary; a missing compute dtype is taken from the arguments.
      fun: what is about to be called, for the names of positional arguments.
      keep: names of arguments that are left alone.
      args: positional arguments of `fun`.
      kwargs: keyword arguments of `fun`.
      held: where a missing compute dtype is looked for if no argument has one.

    Returns:
      The resolved policy and the arguments to call `fun` with. Flax modules and Variables among them are as they were.
    """
    meet_reduce_dtype(policy.reduce_dtype)  # before anything is traced, for it may end the trace
    # Without `keep` no name matters, and asking for the signature of a function is dear.
    kept = [i for i, name in enumerate(_name_positions(fun, len(args))) if name in keep] if keep else []
    named = {name: x for name, x in kwargs.items() if name not in keep} if kwargs else {}
    if policy.compute_dtype is None:
        policy = resolve_policy(policy, ([x for i, x in enumerate(args) if i not in kept], named, held))

    # One argument at a time: most are arrays, which are cast without walking a tree.
    cast = functools.partial(cast_floating, dtype=policy.compute_dtype, is_leaf=is_flax_object)
    entering = [x if i in kept else cast(x) for i, x in enumerate(args)] if kept else map(cast, args)
    return policy, tuple(entering), kwargs | cast(named) if named else kwargs


def cast_held(policy: Policy, fun: Callable[..., Any], keep: Collection[str]) -> Callable[..., Any]:
    """Casts the arrays that a partial, a pytree or a method of a pytree holds, as if they were arguments of a call.

    Args:
      policy: the policy of the boundary, with a compute dtype.
      fun: what is about to be called.
      keep: names of arguments that are left alone, those that a partial holds among them.
    """
    if isinstance(fun, functools.partial):
        _, args, kwargs = cast_arguments(policy, fun.func, keep, fun.args, fun.keywords)
        return functools.partial(cast_held(policy, fun.func, keep), *args, **kwargs)
    if isinstance(fun, types.MethodType):
        return types.MethodType(fun.__func__, _cast_object(policy, fun.__self__))
    return _cast_object(policy, fun)


def _cast_object(policy: Policy, held: Any) -> Any:
    """Casts the arrays of an object. One that has none to cast stays itself, and the call may write to it."""
    leaves = floating_leaves(held, is_leaf=is_flax_object)
    if all(leaf.dtype == policy.compute_dtype for leaf in leaves):
        return held
    return cast_floating(held, policy.compute_dtype, is_leaf=is_flax_object)


def list_held(fun: Callable[..., Any]) -> PyTree:
    """Returns the trees that `cast_held` casts."""
    if isinstance(fun, functools.partial):
        return [list_held(fun.func), fun.args, fun.keywords]
    return fun.__self__ if isinstance(fun, types.MethodType) else fun


def explain_uncast(fun: Callable[..., Any]) -> str:
    """Says that a callable holds arrays that a boundary cannot cast; the empty string if it holds none."""
    is_wrapped = False  # by jit, vmap or a decorator
    while not (isinstance(fun, type) or hasattr(fun, "__jmp_attached__") or _is_made_here(fun)):
        owner = getattr(fun, "__self__", fun)
        is_hidden = is_wrapped and _holds_arrays(list_held(fun))
        # A trainer may hand the arrays that it holds to its methods as arguments, so only `__call__` counts.
        is_object = getattr(fun, "__name__", "__call__") == "__call__"
        if is_hidden or (is_object and _has_array_attributes(owner)) or _has_variables(owner):
            return (
                f"with_policy casts the arguments of a call, but not the arrays that {_name_holder(fun)} holds: "
                "matmuls with them stay in their dtype. Give the policy to the partial or pytree itself, inside of jit "
                "and vmap; give a Flax module its own; or use jmp.autocast, which casts all arrays. "
                "For example: jmp.autocast(model, 'mixed_bfloat16')."
            )
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif (inner := getattr(fun, "__wrapped__", None)) is not None and not _holds_arrays(fun):
            is_wrapped, fun = True, inner
        else:
            break
    return ""


def _name_holder(fun: Callable[..., Any]) -> str:
    owner = getattr(fun, "__self__", fun)
    return describe(fun) if isinstance(fun, functools.partial) else type(owner).__name__


def _is_made_here(fun: Callable[..., Any]) -> bool:
    """True if one of our functions, such as `autocast`, made it: that sees to the arrays inside."""
    return getattr(fun, "__globals__", {}).get("__name__", "").startswith("jmp_policy.")


def _holds_arrays(tree: PyTree) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    return any(isinstance(leaf, jax.Array) and is_floating(leaf) and leaf.ndim > 0 for leaf in leaves)


def _has_array_attributes(owner: Any, depth: int = 3) -> bool:
    """True if JAX takes an object for a leaf, and it has arrays among its attributes, or among those of its parts."""
    other = type | types.ModuleType | types.FunctionType | types.MethodType
    if depth == 0 or isinstance(owner, other) or is_flax_object(owner):
        return False
    if hasattr(owner, "__wrapped__") or not hasattr(owner, "__dict__"):
        return False
    leaves = jax.tree.leaves(vars(owner), is_leaf=is_flax_object) if jax.tree_util.all_leaves([owner]) else []
    return _holds_arrays(leaves) or any(_has_array_attributes(leaf, depth - 1) for leaf in leaves)


def _has_variables(owner: Any) -> bool:
    """True for a Flax module without a policy that has its variables: one of nnx, or a bound one of linen."""
    adapter = find_adapter(owner) if is_flax_object(owner) else None
    if adapter is None or adapter.policy_of(owner) is not None:
        return False
    return bool(adapter.find_modules(owner)) or getattr(owner, "scope", None) is not None


def widen_policy(policy: Policy) -> Policy:
    """Returns the policy that holds here: inside of `force_full_precision` one that computes in float32."""
    return _make_full_precision(policy) if is_in_full_precision() else policy


def is_in_full_precision() -> bool:
    """True inside of `force_full_precision`. A function, because no pickle takes the context that it reads."""
    return IN_FULL_PRECISION.value


@functools.cache
def _make_full_precision(policy: Policy) -> Policy:
    # Not the param dtype and the quantization: the parameters are stored as they are.
    compute, output = (None if d is None else at_least_float32(d) for d in (policy.compute_dtype, policy.output_dtype))
    return policy.replace(compute_dtype=compute, output_dtype=output, precision="highest", accumulate_dtype=None)


def resolve_policy(policy: Policy, inputs: PyTree) -> Policy:
    """Fills in a missing compute dtype: the first floating input of a call has it. Flax's objects do not count."""
    return policy.resolve(floating_leaves(inputs, is_leaf=is_flax_object)) if policy.compute_dtype is None else policy


def cast_result(policy: Policy, out: PyTree) -> Any:
    """Casts what leaves a boundary to output dtype; Flax modules and Variables in it are as they were.

    Raises:
      TypeError: it is a generator or a coroutine, whose body has yet to run.
    """
    if isinstance(out, Generator | Coroutine | AsyncGenerator):
        if not isinstance(out, AsyncGenerator):
            out.close()  # never run: Python warns of a coroutine that was not awaited
        raise TypeError(
            f"{name_function(out)} returned a {type(out).__name__}, and would run when its policy holds no more. "
            "Return arrays instead. For example: [*rows], not (row for row in rows)."
        )
    return cast_floating(out, policy.output_dtype, is_leaf=is_flax_object)


def matmul_precision(policy: Policy) -> AbstractContextManager:
    """The context in which matmuls have the policy's precision."""
    return nullcontext() if policy.precision is None else jax.default_matmul_precision(policy.precision)


def check_keep(fun: Callable[..., Any], keep: Collection[str]) -> None:
    """Checks that `keep` names arguments of `fun`.

    Raises:
      ValueError: it does not, or it is a string, which is a collection of letters.
    """
    if isinstance(keep, str):
        raise ValueError(
            f"keep must be a collection of argument names, got the string {quote(keep)}; write [{quote(keep)}]."
        )
    if not keep:
        return
    while isinstance(fun, functools.partial):  # `keep` may name the arguments that it holds
        fun = fun.func
    try:
        parameters = inspect.signature(fun).parameters
    except ValueError:
        raise ValueError(
            f"keep names {quote(sorted(keep))}, but Python knows no argument names of {name_function(fun)}. Give the "
            "policy to a function that calls it. For example: lambda x, position: f(x, position)."
        ) from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in keep:
        if name not in parameters and not takes_any:
            known = ", ".join(map(repr, parameters)) or "none"
            raise ValueError(
                f"keep names {quote(name)}, which is no argument of {name_function(fun)}. Its arguments are {known}."
            )


def _name_positions(fun: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of the first `count` positional parameters; a `*args` gives its name to all it takes."""
    parameters = inspect.signature(fun).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return (names + [rest] * count)[:count]


def name_function(fun: object) -> str:
    """Names a function, or what it returned, for an error."""
    return shorten(getattr(fun, "__qualname__", repr(fun)))


def keep_carry_dtypes(carry: PyTree, out: PyTree) -> Any:
    """The result of a step of a cell, its new carry in the dtypes of the old one.

    Cells make their first carry in param dtype. Most promote to it: the memory of an LSTM stays float32, and nothing
    is cast here. A `SimpleCell` returns what its layers computed, in compute dtype, which a scan refuses; widening
    that loses nothing. Making the first carry in compute dtype instead would round the memory of the others. A first
    carry narrower than what the cell computes in is rounded at each step: it chose the dtype to keep.

    Args:
      carry: the old carry, as the caller handed it over; `None` if there is none.
      out: `(new carry, output)`; anything else, and a new carry of another structure, is left as it is.
    """
    if carry is None or not isinstance(out, tuple) or len(out) != 2:
        return out
    new_carry, output = out
    if jax.tree.structure(new_carry) != jax.tree.structure(carry):
        return out
    return jax.tree.map(_cast_like, new_carry, carry), output


def _cast_like(new: Any, old: Any) -> Any:
    return cast_floating(new, old.dtype) if is_floating(old) else new


F = TypeVar("F", bound=Callable[..., Any])

FULL_PRECISION = "force_full_precision"
"""The scope that marks what is inside: where the inputs are float32 already nothing else tells `autocast` of it."""


@overload
def force_full_precision(fun: Jitted[P, R]) -> Callable[P, R]: ...
@overload
def force_full_precision(fun: F) -> F: ...
def force_full_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `fun` in float32, its matmuls at the highest precision.

    Floating inputs narrower than float32 enter as float32, and floating outputs leave in the dtype that
    `jnp.result_type` gives the floating inputs together; without a floating input they leave as they are. Flax modules
    and Variables, which `fun` may write to, are handed to it as they are.

    Flax layers and functions with a policy that `fun` calls compute in float32 as well, whatever their policy says. A
    `dtype` that an author wrote on a layer stays, and so does the quantization of a policy.

    Args:
      fun: any function of trees of arrays.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.force_full_precision(jnp.cumsum)(jnp.ones(3, jnp.bfloat16)).dtype
    dtype(bfloat16)
    """

    @functools.wraps(fun)
    def in_full_precision(*args: Any, **kwargs: Any) -> Any:
        wide_args, wide_kwargs = jax.tree.map(_widened, (args, kwargs), is_leaf=is_flax_object)
        with jax.default_matmul_precision("highest"), jax.named_scope(FULL_PRECISION), IN_FULL_PRECISION(True):
            out = fun(*wide_args, **wide_kwargs)
        return cast_floating(out, _joint_dtype((args, kwargs)), is_leaf=is_flax_object)

    return in_full_precision


def _widened(leaf: Any) -> Any:
    return cast_floating(leaf, at_least_float32(leaf.dtype)) if is_floating(leaf) else leaf


def _joint_dtype(tree: PyTree) -> np.dtype | None:
    leaves = floating_leaves(tree, is_leaf=is_flax_object)
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*leaves)) if leaves else None
