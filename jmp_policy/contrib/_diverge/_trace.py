"""Traces a function, with the paths of its modules."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import Jaxpr

from ..._base import Args, Kwargs
from ..._jaxpr import (
    ModulePaths,
    Register,
    find_line,
    find_policy_keys,
    find_unrepeatable,
    name_results,
    open_partials,
    take_apart,
    trace_call,
    walk,
)
from ...modules import find_lifting_adapter
from ._scopes import Flat, has_floats


class FlatFunction:
    """A flattened jaxpr with the arrays that it takes, and the names of its outputs."""

    def __init__(self, fun: Callable[..., Any], args: Args, kwargs: Kwargs):
        register = Register()
        opened, args, kwargs = open_partials(fun, args, kwargs)
        arrays, rebuild = take_apart(args)
        closed = _list_closed_modules(opened)
        watched = register.watch(lambda closed, args, kwargs: opened(*args, **kwargs))
        pure = lambda arrays, kwargs: watched(closed, rebuild(arrays), kwargs)
        traced = trace_call("diverge", register, pure, (arrays, kwargs), {})
        _refuse_effects(traced.program.jaxpr)
        self.program, self._modules = traced.program.jaxpr, traced.modules
        self.flat = Flat(traced.program, ModulePaths(traced.modules))
        self.closed = [*self.flat.constants.values()]
        self.leaves = [*traced.leaves, *self.closed]
        self.flat.inputs += self.flat.constants  # as constants of the compiled program, weights would be copied
        self.flat.constants = {}
        self.types: list[Any] = [atom.aval for atom in traced.program.jaxpr.outvars]
        self.names = [str(name) for name in name_results(traced.results.list_paths(), is_lifted=False)]

    def find_policy_keys(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns the key of a rule for each path; the path, if no rule reaches the program."""
        scopes = (step.scope for step in walk(self.program, all_results=False))
        return find_policy_keys(paths, scopes, self._modules) or {}

    def list_floats(self) -> list[int]:
        return [i for i, aval in enumerate(self.types) if has_floats(aval)]


def _list_closed_modules(fun: Callable[..., Any]) -> list[Any]:
    """Lists the nnx modules that a function reads from its closure, so that their paths are known."""
    inner = inspect.unwrap(fun)
    if not inspect.isfunction(inner):
        return []
    known = inspect.getclosurevars(inner)
    values = {**known.globals, **known.nonlocals}.values()
    return [value for value in values if find_lifting_adapter((value,)) is not None]


def _refuse_effects(program: Jaxpr) -> None:
    eqn = find_unrepeatable(program)
    if eqn is not None:
        raise ValueError(
            f"diverge runs a function in parts and more than once, and {eqn.primitive.name} of {find_line(eqn)} would "
            "then act several times. Compare a part without it. For example: diverge(loss_fn, low_loss_fn)(params, x)."
        )
