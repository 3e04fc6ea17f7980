"""`with_policy`: casts at the boundary of a function, and hands Flax modules to the adapter that knows them."""

import functools
import types
import typing
from collections.abc import Callable, Collection
from typing import Any, Never, overload

import jax

from .._base import P, PyTree, R, describe, hide_frames, note_for_observer, quote, warn_user
from ..policy import (
    Decorator,
    F,
    FirstSpec,
    Jitted,
    Policy,
    PolicyMap,
    PolicySpec,
    covers_path,
    get_policy,
    is_policy_spec,
    spell_key,
    spell_rules,
)
from ._adapter import find_adapter, is_flax_object
from ._call_casts import (
    cast_arguments,
    cast_held,
    cast_result,
    check_no_cast,
    explain_uncast,
    list_held,
    matmul_precision,
    name_function,
    widen_policy,
)


class _NoTarget:
    def __repr__(self) -> str:
        return "<nothing>"


class PolicyDecorator(functools.partial):
    """Decorator that applies a policy; in a `with` statement, as `torch.autocast` is used, an error."""

    def __enter__(self) -> Never:
        raise TypeError(
            "A policy is not a context manager: give it to the function that runs in the block. "
            "For example: autocast(loss_fn, 'params=float32,compute=float16,output=none')."
        )

    def __exit__(self, *_: object) -> None: ...


NO_TARGET: Any = _NoTarget()
"""Default of `target`: the call makes a decorator. `None` is a wrong target, and an error."""


# The overload for a policy in first place comes first: to a type checker, some policies are callables as well.
@overload
def with_policy(target: FirstSpec, *, no_cast: Collection[str] = ()) -> Decorator: ...
@overload
def with_policy(*, policy: PolicySpec = None, no_cast: Collection[str] = ()) -> Decorator: ...
@overload
def with_policy(
    target: Jitted[P, R], policy: PolicySpec = None, *, no_cast: Collection[str] = ()
) -> Callable[P, R]: ...
@overload
def with_policy(target: F, policy: PolicySpec = None, *, no_cast: Collection[str] = ()) -> F: ...
def with_policy(target: Any = NO_TARGET, policy: "PolicySpec" = None, *, no_cast: Collection[str] = ()) -> Any:
    """Gives a function or a Flax module a policy.

    Floating inputs are cast to the compute dtype, and outputs to the output dtype. A Flax module also stores its
    parameters in the param dtype, and each layer inside it computes in the compute dtype; its parameter tree does not
    change. The `dtype` that an author wrote on a layer wins. Then the innermost `with_policy` around the layer
    decides, and in a `PolicyMap` the first rule that covers it, else the map's default.

    Modules and nnx Variables among the arguments are not cast, nor objects that are not pytrees. A function has no
    weights, so it ignores the quantization of its policy, and warns of a `cache`. Arrays that a partial or a callable
    pytree holds are cast like arguments; arrays in a closure are not. A function that calls itself casts at each level.
    In a scan, give the policy to the code around the scan, or to the linen class that `nn.scan` lifts: the carry must
    keep its dtype.

    Args:
      target: a function, or a linen or nnx class or instance. Without one, or with a policy in its place, the result
        is a decorator: `@with_policy("mixed_bfloat16")`. Static and class methods, partials, jitted functions and
        callable objects count as functions; a partial of a class or module gives one with the policy.
      policy: anything that `get_policy` reads. `None` is the default policy at the time of this call. From a
        `PolicyMap`, a function takes the policy of the root path `""`.
      no_cast: names of arguments that are not cast, such as float positions. For a module, it applies to the arguments
        of this name of all its public methods.

    Returns:
      A new function, class or instance with the policy; `target` does not change. An nnx instance shares its
      Variables with `target`. A policy that `target` had is replaced, except on a function: it keeps its own inside.

    Raises:
      TypeError: `target` is neither a function nor a Flax module. Or a call returned something that would run later,
        without the policy: a generator, a coroutine, or a module that the call made.
      ValueError: `get_policy` cannot read `policy`, or `no_cast` names something else than an argument.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import linen as nn
    >>> model = jmp.with_policy(nn.Dense(4), "mixed_bfloat16")
    >>> y, variables = model.init_with_output(jax.random.key(0), jnp.ones((1, 8)))
    >>> variables["params"]["kernel"].dtype, y.dtype
    (dtype('float32'), dtype(bfloat16))
    """
    target, captured = parse_target(target, policy)
    if isinstance(no_cast, str):
        raise ValueError(
            f"no_cast must be a collection of argument names, got the string {quote(no_cast)}; "
            f"write [{quote(no_cast)}]."
        )
    give = PolicyDecorator(_give_policy, policy=captured, no_cast=no_cast)
    return give if target is NO_TARGET else give(target)


def parse_target(target: Any, policy: PolicySpec) -> tuple[Any, Policy | PolicyMap]:
    """Returns the target, `NO_TARGET` for a decorator, and the policy, which may be the first argument."""
    if policy is None and target is not NO_TARGET and is_policy_spec(target):
        target, policy = NO_TARGET, target
    return target, get_policy(policy)


def policy_of(target: Any) -> Policy | PolicyMap | None:
    """Returns the policy that `with_policy` gave to a function or module, or `None`.

    >>> import jmp_policy as jmp
    >>> jmp.policy_of(jmp.with_policy(lambda x: x, "mixed_float16")).name
    'mixed_float16'
    """
    named = unwrap_alias(target)
    adapter = find_adapter(named)
    return getattr(target, "__jmp_attached__", None) if adapter is None else adapter.policy_of(named)


def _give_policy(target: Any, policy: Policy | PolicyMap, no_cast: Collection[str]) -> Any:
    named = unwrap_alias(target)
    adapter = find_adapter(named)
    if adapter is not None:
        attached = adapter.attach(named, policy, no_cast)
        if isinstance(attached, type) and getattr(named, "__parameters__", ()):
            # A subclass of a generic class takes subscripts only if it says so.
            attached.__parameters__ = named.__parameters__  # type: ignore[attr-defined]
        return rewrap_alias(target, attached)
    if isinstance(target, staticmethod | classmethod):
        return type(target)(_give_policy(target.__func__, policy, no_cast))
    if isinstance(target, type) or not callable(target) or is_flax_object(target):
        each = " Give each of its items its own." if isinstance(target, list | tuple | dict) else ""
        raise TypeError(
            f"with_policy takes a function or a Flax module, got {describe(target)}.{each} "
            "For example: with_policy(loss_fn, 'mixed_bfloat16')."
        )
    return _cast_function(target, policy, no_cast)


def _cast_function(fun: Callable[..., Any], given: Policy | PolicyMap, no_cast: Collection[str]) -> Any:
    check_no_cast(fun, no_cast)
    if message := explain_uncast(fun):
        warn_user(message)
    names, own = frozenset(no_cast), given[""] if isinstance(given, PolicyMap) else given
    if message := _explain_no_effect(fun, given, own):
        warn_user(message)
    holds_arrays = not isinstance(fun, types.FunctionType)

    @hide_frames
    @functools.wraps(fun)
    def call_with_policy(*args: Any, **kwargs: Any) -> Any:
        held = list_held(fun) if holds_arrays else None
        policy, args, kwargs = cast_arguments(widen_policy(own), fun, names, args, kwargs, held)
        run = cast_held(policy, fun, names) if holds_arrays else fun
        note_for_observer("policy", lambda: spell_rules(given))
        with matmul_precision(policy):
            out = run(*args, **kwargs)
        out = cast_result(policy, out)
        _check_made_no_module(fun, (args, kwargs), out)
        return out

    call_with_policy.__jmp_attached__ = given  # type: ignore[attr-defined]
    return call_with_policy


def _explain_no_effect(fun: Callable[..., Any], given: Policy | PolicyMap, own: Policy) -> str:
    """Names the first part of a policy that only layers have, or returns an empty string."""
    keys = [rule.key for rule in given.rules] if isinstance(given, PolicyMap) else []
    idle = [key for key in keys if isinstance(key, type) or not covers_path(key, "")]
    if own.cache is not None:
        part, reason = f"cache={str(own.cache)!r}", "only attention layers of Flax store a cache"
    elif own.quantization is not None:
        part, reason = repr(str(own.quantization)), "only the layers of a model are quantized"
    elif idle:
        part, reason = f"rule {spell_key(idle[0])}", "only the modules of a model have paths and types"
    else:
        return ""
    instead = "" if own.cache is not None else f", or use autocast({name_function(fun)}, policy)"
    example = "policy" if isinstance(given, PolicyMap) else repr(own.name)
    return (
        f"{name_function(fun)} is a function: {part} of its policy has no effect, because {reason}. Give that policy "
        f"to the model{instead}. For example: with_policy(model, {example})."
    )


def _check_made_no_module(fun: Callable[..., Any], inputs: PyTree, out: PyTree) -> None:
    """Rejects a call that returned a module without a policy but was given no module, such as a factory."""
    modules = (leaf for leaf in jax.tree.leaves(out, is_leaf=is_flax_object) if find_adapter(leaf) is not None)
    made = next((module for module in modules if policy_of(module) is None), None)
    inputs = [] if made is None else jax.tree.leaves(inputs, is_leaf=is_flax_object)
    if made is not None and not any(find_adapter(leaf) is not None for leaf in inputs):
        raise TypeError(
            f"{name_function(fun)} returned a module of {type(made).__name__}, which would run after the policy of the "
            "function ended. Give the policy to the module, or to its class. "
            f"For example: with_policy({name_function(fun)}(...), 'mixed_bfloat16')."
        )


def unwrap_alias(target: Any) -> Any:
    """Returns the class or object inside of partials and subscripts.

    >>> unwrap_alias(functools.partial(functools.partial(list[int])))
    <class 'list'>
    """
    while True:
        if isinstance(target, functools.partial):
            target = target.func
        elif isinstance(origin := typing.get_origin(target), type):
            target = origin
        else:
            return target


def rewrap_alias(target: Any, new: Any) -> Any:
    """Puts another class or object inside of the partials and subscripts of `target`.

    >>> rewrap_alias(functools.partial(list[int], "ab"), dict)
    functools.partial(dict[int], 'ab')
    """
    if isinstance(target, functools.partial):
        return functools.partial(rewrap_alias(target.func, new), *target.args, **target.keywords)
    return new[typing.get_args(target)] if isinstance(typing.get_origin(target), type) else new
