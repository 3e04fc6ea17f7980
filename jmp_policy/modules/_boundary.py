"""`with_policy`: casts at the boundary of a function, and hands Flax modules to the adapter that knows them."""

import contextlib
import functools
import itertools
import threading
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, overload

import jax

from .._base import Args, Kwargs, P, PyTree, R, describe, warn_user
from ..policy import Decorator, F, FirstSpec, Jitted, Policy, PolicyMap, PolicySpec, get_policy, is_policy_spec
from ._adapter import find_adapter, is_flax_object
from ._call_casts import (
    cast_arguments,
    cast_held,
    cast_result,
    check_keep,
    explain_uncast,
    list_held,
    matmul_precision,
    name_function,
    resolve_policy,
    widen_policy,
)
from ._misuse import NoContext, refuse_order, refuse_rules, refuse_unknown_arguments


class _NoTarget:
    def __repr__(self) -> str:
        return "<nothing>"


NO_TARGET: Any = _NoTarget()
"""Stands for the target of a decorator, which is yet to come. `None` does not: it is a wrong target, and an error."""


# A policy in first place comes first: to a checker each of its kinds that can be called is a target as well.
@overload
def with_policy(target: FirstSpec, *, keep: Collection[str] = ()) -> Decorator: ...
@overload
def with_policy(*, policy: PolicySpec = None, keep: Collection[str] = ()) -> Decorator: ...
@overload
def with_policy(target: Jitted[P, R], policy: PolicySpec = None, *, keep: Collection[str] = ()) -> Callable[P, R]: ...
@overload
def with_policy(target: F, policy: PolicySpec = None, *, keep: Collection[str] = ()) -> F: ...
@refuse_unknown_arguments
def with_policy(target: Any = NO_TARGET, policy: "PolicySpec" = None, *, keep: Collection[str] = ()) -> Any:
    """Gives a function or a Flax module a policy.

    A Flax module stores its parameters in float32, and computes in bfloat16:

    >>> import jax, jax.numpy as jnp
    >>> import jmp_policy as jmp
    >>> from flax import linen as nn
    >>> model = jmp.with_policy(nn.Dense(4), "mixed_bfloat16")
    >>> variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    >>> y = model.apply(variables, jnp.ones((1, 8)))
    >>> variables["params"]["kernel"].dtype, y.dtype
    (dtype('float32'), dtype(bfloat16))

    A function gets its arguments in bfloat16, but for those that are kept:

    >>> @jmp.with_policy("mixed_bfloat16", keep=["position"])
    ... def dtypes(x, position):
    ...     return str(x.dtype), str(position.dtype)
    >>> dtypes(jnp.ones(2), position=jnp.ones(2))
    ('bfloat16', 'float32')

    What it does:

    1. It casts floating inputs (positional, keyword, nested) to the compute
       dtype, and outputs to the output dtype: once, at the outermost call.
    2. It leaves uncast: Flax modules among the arguments, each of which has its
       own policy; nnx Variables, alone or in optimizers, metrics and RNG
       streams; and any other object that JAX does not take for a tree, with the
       arrays inside it.
    3. A Flax module stores its parameters in the param dtype, and every layer
       in it computes in the compute dtype. The parameter tree stays the same as
       without a policy.
    4. A function has no weights, and so the quantization of a policy means
       nothing to it. What a partial, a callable pytree (a module of Equinox) or
       a method of one holds is cast as its arguments are. What else holds
       arrays gives a warning, and what a function closes over stays as it is.
    5. Nothing is changed in place: a function, an instance and a class each
       give a new one. A new nnx instance shares its Variables with the old one.

    Where several say what a layer computes in, the first of these wins:

    1. The `dtype` that an author wrote on the layer, a value other than the
       field's default. It says what the layer computes in, and nothing of its
       parameters: their dtypes follow rules 2 to 4.
    2. What `with_policy` gave to the layer itself, then to the module around
       it, and so on outwards. A module has the policy it was given last: the
       policy of an instance replaces its class's, and a second one the first,
       map or not.
    3. In a `PolicyMap`, the first rule that covers the layer, be it by path,
       pattern or type; else the map's default. Inside of a module that has a
       policy of its own, the rules of a map around it decide nothing.
    4. The default policy, where `with_policy` or a map was given none. It
       reaches nothing else.

    Where a policy holds:

    1. A module's policy holds while one of its methods runs. What is called
       past them has the policy of its caller: a submodule of a bound linen
       module, `bound.dense(x)`, or an nnx method of a class without a policy,
       `Net.encode(net, x)`, which casts nothing. For the submodule write
       `apply` with `method=lambda module, x: module.dense(x)`, which has the
       policy.
    2. A linen module that another one runs through `.apply`, as heads tied to a
       table do, stands inside of the one that makes the call: under its own
       name, if the caller holds a module of that name.
    3. In a scan the carry keeps one dtype. Attach the policy around the scan,
       or to the linen class that `nn.scan` lifts. A policy or a rule for what
       runs inside needs the carry's dtype as its output dtype.
    4. A function keeps the policy it has inside a second one, as with any
       decorator. To replace it, decorate its `__wrapped__`.

    Args:
      target: a function, a linen or nnx class or instance. Without one, or with
        a policy here and none in second place, the result is a decorator:
        `@with_policy(policy="mixed_bfloat16")`,
        `@with_policy("mixed_bfloat16")`. A partial, or a class with subscripts,
        is one of a class or module with the policy. Static and class methods,
        other partials, jitted functions and callable objects count as
        functions.
      policy: anything that `get_policy` reads. `None` is the default policy, as
        of now: one that is set later does not reach back. Of a `PolicyMap`, a
        function takes the policy of the root path `""`.
      keep: names of arguments that enter uncast, such as float positions that
        half precision would ruin; of a module, the arguments of that name of
        all its public methods.

    Returns:
      What `target` is, with the policy.

    Raises:
      TypeError: `target` is neither a function nor a Flax module; or, when it
        is called, what it returned would run later, out of reach of the policy:
        a generator, a coroutine, or a module that it made.
      ValueError: `get_policy` cannot read `policy`, or `keep` names something
        else than an argument.
    """
    target, captured = parse_target(target, policy)
    if target is NO_TARGET:
        return NoContext(lambda decorated: _give_policy(decorated, captured, keep), "with_policy")
    return _give_policy(target, captured, keep)


def parse_target(target: Any, policy: PolicySpec, name: str = "with_policy") -> tuple[Any, Policy | PolicyMap]:
    """Returns what is given a policy, `NO_TARGET` for a decorator, and the policy, which may stand in first place."""
    if policy is not None and target is not NO_TARGET and not is_policy_spec(policy):
        if is_policy_spec(target):
            refuse_order(name, target, policy)
        if isinstance(target, Mapping):
            refuse_rules(name, target, policy)
    if policy is None and target is not NO_TARGET and is_policy_spec(target):
        target, policy = NO_TARGET, target
    return target, get_policy(policy)


def policy_of(target: Any) -> Policy | PolicyMap | None:
    """The policy that a function or module was given by `with_policy`, or `None`.

    >>> import jmp_policy as jmp
    >>> jmp.policy_of(jmp.with_policy(lambda x: x, "mixed_float16")).name
    'mixed_float16'
    """
    named = unwrap_alias(target)
    adapter = find_adapter(named)
    return getattr(target, "__jmp_attached__", None) if adapter is None else adapter.policy_of(named)


def _give_policy(target: Any, policy: Policy | PolicyMap, keep: Collection[str]) -> Any:
    named = unwrap_alias(target)
    adapter = find_adapter(named)
    if adapter is not None:
        attached = adapter.attach(named, policy, keep)
        copy_type_parameters(attached, named)
        return rewrap_alias(target, attached)
    if isinstance(target, staticmethod | classmethod):
        return type(target)(_give_policy(target.__func__, policy, keep))
    if isinstance(target, type) or not callable(target) or is_flax_object(target):
        each = " Give each of its items its own." if isinstance(target, list | tuple | dict) else ""
        raise TypeError(
            f"with_policy takes a function or a Flax module, got {describe(target)}.{each} "
            "For example: with_policy(loss_fn, 'mixed_bfloat16')."
        )
    return _wrap_function(target, policy, keep)


def _wrap_function(fun: Callable[..., Any], given: Policy | PolicyMap, keep: Collection[str]) -> Any:
    check_keep(fun, keep)
    if message := explain_uncast(fun):
        warn_user(message)
    boundary = _Boundary(fun, given, frozenset(keep))

    @functools.wraps(fun)
    def call_with_policy(*args: Any, **kwargs: Any) -> Any:
        return boundary.call(args, kwargs)

    call_with_policy.__jmp_attached__ = given  # type: ignore[attr-defined]
    return call_with_policy


class _Boundary:
    """A function and its policy."""

    def __init__(self, fun: Callable[..., Any], given: Policy | PolicyMap, keep: frozenset[str]):
        self._fun = fun
        self._given = given
        self._policy = given[""] if isinstance(given, PolicyMap) else given
        self._keep = keep
        self._recursion = Recursion()

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """Calls the function, with casts at its outermost call."""
        fun, given = self._fun, widen_policy(self._policy)
        if self._recursion.is_running():
            return self._cast_held(resolve_policy(given, (args, kwargs)))(*args, **kwargs)
        held = None if isinstance(fun, types.FunctionType) else list_held(fun)
        policy, args, kwargs = cast_arguments(given, fun, self._keep, args, kwargs, held)
        with self._recursion.outermost_call(), matmul_precision(policy):
            out = self._cast_held(policy)(*args, **kwargs)
        out = cast_result(policy, out)
        _check_made_no_module(self._fun, (args, kwargs), out)
        return out

    def _cast_held(self, policy: Policy) -> Callable[..., Any]:
        return self._fun if isinstance(self._fun, types.FunctionType) else cast_held(policy, self._fun, self._keep)

    def __reduce__(self) -> tuple:  # who is running is of this process
        return _Boundary, (self._fun, self._given, self._keep)


def _check_made_no_module(fun: Callable[..., Any], inputs: PyTree, out: PyTree) -> None:
    """Checks that a function that was given no module returned none without a policy, as factories do.

    Raises:
      TypeError: it did.
    """
    modules = (leaf for leaf in jax.tree.leaves(out, is_leaf=is_flax_object) if find_adapter(leaf) is not None)
    made = next((module for module in modules if policy_of(module) is None), None)
    inputs = [] if made is None else jax.tree.leaves(inputs, is_leaf=is_flax_object)
    if made is not None and not any(find_adapter(leaf) is not None for leaf in inputs):
        raise TypeError(
            f"{name_function(fun)} returned a module of {type(made).__name__}, which would run when the policy of the "
            "function holds no more. Give the policy to the module, or to its class. "
            f"For example: with_policy({name_function(fun)}(...), 'mixed_bfloat16')."
        )


# The numbers of the functions that run in this thread. What a jitted function inside makes of a call depends on them,
# so they are a context of JAX's, part of the key of every jit cache. JAX never lets go of such a key: it refers to
# nothing, and there are few, for a new one compiles everything inside anew.
_RUNNING = jax.make_user_context(frozenset())

_LOCK = threading.Lock()
_TAKEN: set[int] = set()
"""The numbers that functions have now, and those that some keep for good."""


class Recursion:
    """Tells the outermost call of a function from those that it makes of itself.

    A function has a number while it runs: the smallest that is free. One that is made anew in a loop gets the number of
    the one before, and finds what that one compiled. The set of numbers in use is part of JAX's cache keys: a program
    that was traced under one set is used again only under an equal one. So under an equal set a call must do the same:

    - a call that is the outermost is remembered with the set, and this function never takes a number out of it;
    - at a call that is not, this function keeps its number for good, and no other will ever have it.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._keeps_number = False
        self._calls = 0  # that are running, in all threads
        self._avoided: frozenset[int] = frozenset()

    def is_running(self) -> bool:
        """Whether this thread is inside of a call."""
        if self._number not in _RUNNING.value:
            return False
        self._keeps_number = True
        return True

    @contextlib.contextmanager
    def outermost_call(self) -> Iterator[None]:
        """The context of the outermost call of this thread."""
        around = _RUNNING.value
        number = self._take_number(around)
        try:
            with _RUNNING(around | {number}):
                yield
        finally:
            self._free_number(number)

    def _take_number(self, around: frozenset[int]) -> int:
        with _LOCK:
            self._avoided |= around
            if self._number is None:
                self._number = next(n for n in itertools.count() if n not in _TAKEN and n not in self._avoided)
                _TAKEN.add(self._number)
            self._calls += 1
            return self._number

    def _free_number(self, number: int) -> None:
        with _LOCK:
            self._calls -= 1
            if self._calls == 0 and not self._keeps_number:
                _TAKEN.remove(number)
                self._number = None


def unwrap_alias(target: Any) -> Any:
    """The class or object inside of partials and subscripts, or the target itself.

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
    """A target of partials and subscripts that names another class or object.

    >>> rewrap_alias(functools.partial(list[int], "ab"), dict)
    functools.partial(dict[int], 'ab')
    """
    if isinstance(target, functools.partial):
        return functools.partial(rewrap_alias(target.func, new), *target.args, **target.keywords)
    return new[typing.get_args(target)] if isinstance(typing.get_origin(target), type) else new


def copy_type_parameters(new: Any, generic: Any) -> None:
    """Has a subclass made of a generic class take subscripts as that does: Python takes it for one of no parameters."""
    parameters = getattr(generic, "__parameters__", ())
    if isinstance(new, type) and parameters:
        new.__parameters__ = parameters  # type: ignore[attr-defined]
