"""`with_policy`: casts at the boundary of a function, and hands Flax modules to the adapter that knows them."""

import functools
import importlib
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from ._class_alias import keep_parameters, named_by, renamed
from ._flax_objects import is_flax_object
from ._get_policy import PolicySpec, get_policy, is_policy_spec
from ._memory import remember_weakly
from ._messages import describe, quote, shorten
from ._policy import Policy
from ._policy_map import PolicyMap
from ._recursion import Recursion
from ._trees import PyTree, cast_floating, floating_leaves

_ADAPTERS = {
    "flax.linen": "jmp_policy.linen._attach",
    "flax.nnx": "jmp_policy.nnx._attach",
}
"""The package of a `Module` class, and the module that knows its modules: `attach(target, policy, keep)`,
`policy_of(target)`, `explain(model, inputs, method, rngs, kwargs)` and `named(fun, enter)`, which tells what modules a
function calls. Loaded when the first target of that kind arrives, so that importing the library loads no Flax."""


NO_TARGET: Any = types.SimpleNamespace()
"""Stands for the target of a decorator, which is yet to come; `None` is one that is none, and an error."""


def with_policy(target: Any = NO_TARGET, policy: PolicySpec = None, *, keep: Collection[str] = ()) -> Any:
    """Gives a function or a Flax module a policy.

    A function's floating inputs (positional, keyword, nested) are cast to the compute dtype and its outputs to the
    output dtype, once, at the outermost call; Flax modules among the arguments pass through uncast, each has its own
    policy, and so do nnx Variables, alone or in optimizers, metrics and RNG streams, and any object that is no tree of
    arrays, with the arrays inside it. A function has no weights that the quantization of a policy could be for. A Flax
    module, linen or nnx, does the same at its boundary, and inside it stores its parameters in the param dtype, and
    every layer computes in the compute dtype; the parameter tree is that of the module without a policy. Nothing is
    changed in place: the target stays as it is, only a decorated class is a new one.

    Where several say what a layer computes in, the nearest wins:

    1. the `dtype` that an author wrote on the layer, a value other than the field's default;
    2. what `with_policy` gave to the layer itself, then to the module around it, and so on outwards. Of one module the
       last wins: a policy for an instance replaces that of its class, and a second one the first, map or not;
    3. in a `PolicyMap`, the first rule that covers the layer, be it by path, pattern or type, else the map's default;
       inside of a module that has a policy of its own, the rules of a map around it decide nothing;
    4. the default policy, where `with_policy` or a map was given none. It reaches nothing else.

    The dtypes of parameters follow the same order, but for 1: a written `dtype` is that of a computation. A function
    keeps the policy it has inside a second one, as with any decorator: replace it by decorating its `__wrapped__`.

    A module's policy holds while one of its methods runs. What is called past them has the policy of its caller: a
    submodule of a bound linen module (`bound.dense(x)`, where `apply` with `method=lambda module, x: module.dense(x)`
    has the policy), or an nnx method of a class without one (`Net.encode(net, x)`), which casts nothing. A linen module
    that one of them runs through `.apply`, as heads tied to a table do, stands inside of the one that makes the call,
    under its own name where that is one of the modules which the caller holds. In a scan the
    carry keeps one dtype: attach the policy around the scan, or to the linen class that `nn.scan` lifts; a policy or a
    rule for what runs inside needs the carry's dtype as its output dtype.

    Args:
      target: a function, a linen or nnx class or instance. Without one, or with a policy here and none in second
        place, the result is a decorator: `@with_policy(policy="mixed_bfloat16")`, `@with_policy("mixed_bfloat16")`. A
        partial, or a class with subscripts, is one of a class or module with the policy. Static and class methods,
        other partials, jitted functions and callable objects count as functions.
      policy: anything that `get_policy` reads. `None` is the default policy, as of now: one that is set later does
        not reach back. Of a `PolicyMap`, a function takes the policy of the root path `""`.
      keep: names of arguments that enter uncast, such as float positions that half precision would ruin; of a module,
        the arguments of that name of all its public methods.

    Returns:
      What `target` is, with the policy.

    Raises:
      TypeError: `target` is neither a function nor a Flax module; or, when it is called, what it returned would run
        later, out of reach of the policy: a generator, a coroutine, or a module that it made.
      ValueError: `policy` is no policy, or `keep` names no argument.

    >>> @with_policy("mixed_bfloat16", keep=["position"])
    ... def dtypes(x, position):
    ...     return str(x.dtype), str(position.dtype)
    >>> dtypes(jnp.ones(2), position=jnp.ones(2))
    ('bfloat16', 'float32')
    """
    target, captured = target_and_policy(target, policy)
    if target is NO_TARGET:
        return lambda decorated: _attach(decorated, captured, keep)
    return _attach(target, captured, keep)


def target_and_policy(target: Any, policy: PolicySpec) -> tuple[Any, Policy | PolicyMap]:
    """What is given a policy, `NO_TARGET` if a decorator is wanted, and the policy, which may stand in first place."""
    if policy is None and target is not NO_TARGET and is_policy_spec(target):
        target, policy = NO_TARGET, target
    return target, get_policy(policy)


def policy_of(target: Any) -> Policy | PolicyMap | None:
    """The policy that a function or module was given by `with_policy`, or `None`.

    >>> policy_of(with_policy(lambda x: x, "mixed_float16")).name
    'mixed_float16'
    """
    named = named_by(target)
    adapter = adapter_of(named)
    return getattr(target, "__jmp_attached__", None) if adapter is None else adapter.policy_of(named)


def cast_arguments(
    policy: Policy, fun: Callable[..., Any], keep: Collection[str], args: tuple, kwargs: dict[str, Any]
) -> tuple[Policy, tuple, dict[str, Any]]:
    """Casts what enters a boundary to compute dtype.

    Args:
      policy: the policy of the boundary; a missing compute dtype is taken from the arguments.
      fun: what is about to be called, for the names of positional arguments.
      keep: names of arguments that are left alone.
      args: positional arguments of `fun`.
      kwargs: keyword arguments of `fun`.

    Returns:
      The resolved policy and the arguments to call `fun` with. Flax modules and Variables among them are as they were.
    """
    names = _positional_names(fun, len(args)) if keep else [""] * len(args)
    entering = (
        {i: x for i, (name, x) in enumerate(zip(names, args, strict=True)) if name not in keep},
        {name: x for name, x in kwargs.items() if name not in keep},
    )
    policy = resolved(policy, entering)
    by_position, by_name = cast_floating(entering, policy.compute_dtype, is_leaf=is_flax_object)
    return policy, tuple(by_position.get(i, x) for i, x in enumerate(args)), kwargs | by_name


def resolved(policy: Policy, inputs: PyTree) -> Policy:
    """A policy whose missing compute dtype is that of the first floating input of a call, Flax's objects excepted."""
    return policy.resolve(floating_leaves(inputs, is_leaf=is_flax_object)) if policy.compute_dtype is None else policy


def cast_result(policy: Policy, out: Any) -> Any:
    """Casts what leaves a boundary to output dtype; Flax modules and Variables in it are as they were.

    Raises:
      TypeError: it is a generator or a coroutine, whose body has yet to run.
    """
    if isinstance(out, Generator | Coroutine | AsyncGenerator):
        if not isinstance(out, AsyncGenerator):
            out.close()  # never run: Python warns of a coroutine that was not awaited
        raise TypeError(
            f"{_name(out)} returned a {type(out).__name__}, and would run when its policy holds no more. Return arrays "
            "instead. For example: [*rows], not (row for row in rows)."
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
    try:
        parameters = inspect.signature(fun).parameters
    except ValueError:
        raise ValueError(
            f"keep names {quote(sorted(keep))}, but Python knows no argument names of {_name(fun)}. Give the policy to "
            "a function that calls it. For example: lambda x, position: f(x, position)."
        ) from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in keep:
        if name not in parameters and not takes_any:
            known = ", ".join(map(repr, parameters)) or "none"
            raise ValueError(
                f"keep names {quote(name)}, which is no argument of {_name(fun)}. Its arguments are {known}."
            )


def _attach(target: Any, policy: Policy | PolicyMap, keep: Collection[str]) -> Any:
    named = named_by(target)
    adapter = adapter_of(named)
    if adapter is not None:
        attached = adapter.attach(named, policy, keep)
        keep_parameters(attached, named)
        return renamed(target, attached)
    if isinstance(target, staticmethod | classmethod):
        return type(target)(_attach(target.__func__, policy, keep))
    if isinstance(target, type) or not callable(target) or is_flax_object(target):
        each = " Give each of its items its own." if isinstance(target, list | tuple | dict) else ""
        raise TypeError(
            f"with_policy takes a function or a Flax module, got {describe(target)}.{each} "
            "For example: with_policy(loss_fn, 'mixed_bfloat16')."
        )
    return _function_with_policy(target, policy, keep)


def _function_with_policy(fun: Callable[..., Any], given: Policy | PolicyMap, keep: Collection[str]) -> Any:
    check_keep(fun, keep)
    boundary = _Boundary(fun, given, frozenset(keep))

    @functools.wraps(fun)
    def policied(*args: Any, **kwargs: Any) -> Any:
        return boundary.call(args, kwargs)

    policied.__jmp_attached__ = given  # type: ignore[attr-defined]
    return policied


class _Boundary:
    """A function and its policy."""

    def __init__(self, fun: Callable[..., Any], given: Policy | PolicyMap, keep: frozenset[str]):
        self._fun = fun
        self._given = given
        self._policy = given[""] if isinstance(given, PolicyMap) else given
        self._keep = keep
        self._recursion = Recursion()

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls the function, with casts at its outermost call."""
        if self._recursion.is_running():
            return self._fun(*args, **kwargs)
        policy, args, kwargs = cast_arguments(self._policy, self._fun, self._keep, args, kwargs)
        with self._recursion.outermost_call(), matmul_precision(policy):
            out = self._fun(*args, **kwargs)
        out = cast_result(policy, out)
        _check_made_no_module(self._fun, (args, kwargs), out)
        return out

    def __reduce__(self) -> tuple:  # who is running is of this process
        return _Boundary, (self._fun, self._given, self._keep)


def _check_made_no_module(fun: Callable[..., Any], inputs: PyTree, out: PyTree) -> None:
    """Checks that a function that was given no module returned none without a policy, as factories do.

    Raises:
      TypeError: it did.
    """
    modules = (leaf for leaf in jax.tree.leaves(out, is_leaf=is_flax_object) if adapter_of(leaf) is not None)
    made = next((module for module in modules if policy_of(module) is None), None)
    inputs = [] if made is None else jax.tree.leaves(inputs, is_leaf=is_flax_object)
    if made is not None and not any(adapter_of(leaf) is not None for leaf in inputs):
        raise TypeError(
            f"{_name(fun)} returned a module of {type(made).__name__}, which would run when the policy of the function "
            "holds no more. Give the policy to the module, or to its class. "
            f"For example: with_policy({_name(fun)}(...), 'mixed_bfloat16')."
        )


def adapter_of(target: Any) -> Any:
    """The module that attaches policies to targets of this kind, imported now; `None` if it is no Flax module."""
    path = _adapter_path(target if isinstance(target, type) else type(target))
    return None if path is None else importlib.import_module(path)


def loaded_adapters() -> list[Any]:
    """The adapters of the packages that are loaded: a function may call the modules of any of them."""
    return [importlib.import_module(path) for package, path in _ADAPTERS.items() if package in sys.modules]


def lifting_adapter(tree: PyTree) -> Any:
    """The module that calls functions of objects that they write to, such as those in a tree; `None` if it has none."""
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    is_any = any(is_flax_object(leaf) and _is_of_nnx(type(leaf)) for leaf in leaves)
    return importlib.import_module(_ADAPTERS["flax.nnx"]) if is_any else None


@remember_weakly
def _is_of_nnx(kind: type) -> bool:
    return any(base.__module__.startswith("flax.nnx.") for base in kind.__mro__)


@remember_weakly
def _adapter_path(kind: type) -> str | None:
    for base in kind.__mro__:
        for package, adapter in _ADAPTERS.items():
            if base.__name__ == "Module" and base.__module__.startswith(package + "."):
                return adapter
    return None


def _positional_names(fun: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters; a `*args` gives its name to all it takes."""
    parameters = inspect.signature(fun).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return (names + [rest] * count)[:count]


def _name(fun: Any) -> str:
    return shorten(getattr(fun, "__qualname__", repr(fun)))
