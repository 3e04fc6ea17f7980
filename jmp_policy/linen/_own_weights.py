"""The weights that linen modules multiply by in their own code, where no layer of Flax does it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen import transforms

from .._base import (
    REWRITING,
    Args,
    Kwargs,
    PyTree,
    is_array,
    is_floating,
)
from ..modules import eval_shapes, hide_constants, show_constants
from ..policy import Policy, PolicyMap, list_policies
from ..quant import Layout, QuantizedArray, find_accumulate_dtype
from ._active_policy import CURRENT
from ._layer_table import layer_of
from ._place import path_of

if TYPE_CHECKING:
    from ..autocast import WeightFormat, Weights


class _Read(NamedTuple):
    """A parameter that the code of a module read."""

    key: str  # its path in the variables
    value: Any
    path: str  # its path in the whole model
    format: WeightFormat | None = None
    weight: QuantizedArray | None = None  # the stored weight with these values


class _ReadsOne(BaseException):
    """Ends a call that was to run unchanged, at the first weight that its code reads."""


_READ: contextvars.ContextVar[list[_Read] | type[_ReadsOne] | None] = contextvars.ContextVar("_READ", default=None)
"""The parameters that were read while the outermost module was traced. Not a JAX context: it is only written to."""


def note_weight(module: nn.Module, policy: Policy, name: str, value: Any, layout: Layout | None = None) -> bool:
    """Records a weight that the code of a module reads; returns False if its matmuls are not rewritten.

    `quantize` stores a `kernel` or `embedding` in a `layout`, whatever code multiplies by it.
    """
    found = _READ.get()
    if found is None or policy.quantization is None or _is_of_flax(module):
        return False
    if found is _ReadsOne:
        raise _ReadsOne
    assert isinstance(found, list)
    key, path = _join(module.path, name), _join(path_of(module), name)
    if isinstance(value, QuantizedArray):
        found.append(_Read(f"{key}/values", value.values, path, weight=value))
        return True
    from ..autocast import WeightFormat

    format = WeightFormat(policy.quantization, find_accumulate_dtype(policy), layout=layout)
    before = len(found)
    for keys, leaf in jax.tree.leaves_with_path(value):
        if is_floating(leaf) and leaf.ndim > 1:
            names, own = _spell(keys), format._replace(shape=leaf.shape, is_part=bool(keys))
            found.append(_Read(_join((key,), *names), leaf, _join((path,), *names), own))
    return len(found) > before


def note_table(module: nn.Module, policy: Policy, table: Any) -> None:
    """Records the table of a layer of Flax: the code around may multiply by it."""
    found = _READ.get()
    if isinstance(found, list) and policy.quantization is not None and is_array(table):
        from ..autocast import WeightFormat

        accumulate = find_accumulate_dtype(policy)
        format = WeightFormat(policy.quantization, accumulate, is_table=True, is_of_layer=True)
        found.append(_Read(_join(module.path, "embedding"), table, _join(path_of(module), "embedding"), format))


def _is_of_flax(module: nn.Module) -> bool:
    return layer_of(type(module)) is not None or type(module).__module__.startswith("flax.linen.")


def call_by_weights(
    method: Callable[..., Any],
    call: Callable[..., Any],
    module: nn.Module,
    given: Policy | PolicyMap,
    known: dict[Any, bool | None],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Runs `call` of a method; quantizes the matmuls by weights in the code of modules, if a trial finds any.

    `known` has the results of earlier trials.
    """
    is_inside = _READ.get() is not None or module.is_initializing()
    if is_inside or all(policy.quantization is None for policy in list_policies(given)):
        return call(module, *args, **kwargs)
    kind = _describe_kind(method, module, args, kwargs)
    if not known.get(kind):  # one call of this kind that reads such weights is enough
        details = kind, _describe_arguments(module, args, kwargs)
        if details not in known:
            reads = _try(call, module, args, kwargs)
            while len(known) >= _MOST_KNOWN:
                known.pop(next(iter(known)), None)
            known[kind if reads else details] = reads
        else:
            reads = known[details]
        if reads is None:
            token = _READ.set(_ReadsOne)
            try:
                return call(module, *args, **kwargs)
            except _ReadsOne:  # the rewriter raises the error of the trial
                known.pop(details, None)
            finally:
                _READ.reset(token)
        elif not reads:
            return call(module, *args, **kwargs)
    return call_rewritten(call, module, args, kwargs)


_MOST_KNOWN = 256


def _describe_kind(method: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """Returns the code of a call, with the values that it closes over, its fields and parameters: a hashable object."""
    function: Any = inspect.unwrap(method)
    cells = getattr(function, "__closure__", None) or ()
    structure = str(jax.tree.structure((module.variables.get("params"), args, kwargs)))
    return getattr(function, "__code__", function), *map(_describe_value, (cells, module)), structure


def _describe_arguments(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """Returns all else that the code of a call may depend on when it is traced, hashable."""
    scope: Any = module.scope
    leaves, structure = jax.tree.flatten((module.variables, args, kwargs))
    return str(structure), tuple(map(_describe_value, leaves)), repr(scope.mutable), tuple(scope.rngs)


def _describe_value(value: Any) -> Any:
    """Returns a hashable description of a value; of a module its fields, without its place."""
    if is_array(value):
        return value.shape, value.dtype
    if isinstance(value, nn.Module):
        names = [field.name for field in dataclasses.fields(value) if field.name != "parent"]
        return type(value), *[(name, _describe_value(vars(value).get(name))) for name in names]
    if isinstance(value, list | tuple):
        return tuple(map(_describe_value, value))
    if isinstance(value, Mapping):
        return tuple((name, _describe_value(each)) for name, each in value.items())
    try:
        if isinstance(value, types.CellType):
            return _describe_value(value.cell_contents)
        hash(value)
    except ValueError:  # an empty cell
        return None
    except TypeError:
        return repr(value)
    return type(value), value  # True is 1


class _Tried(Exception):
    """Ends a call whose results do not matter."""


def _try(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> bool | None:
    """Returns True if the code of a call multiplies by weights, or reads its own; None if it cannot be traced."""
    from ..autocast import multiplies_by_weights

    found: list[bool] = []

    def probe(pure: Callable[..., Any], given: tuple, weights: Weights) -> Any:
        look = lambda *given: found.append(multiplies_by_weights(pure, given, lambda: weights))
        with contextlib.suppress(Exception):  # the call raises it again
            eval_shapes(look, *given)
        is_own = [not format.is_of_layer for _, format in weights.floating.values()]
        found.extend([True] if any(is_own) or weights.stored else [])
        raise _Tried

    scopes = transforms.get_module_scopes(module, args, kwargs)[0]
    counters = [dict(scope.rng_counters) for scope in scopes]
    with contextlib.suppress(_Tried):
        _call_lifted(probe, call, module, args, kwargs, type(module._state)())
    for scope, before in zip(scopes, counters, strict=True):  # the call draws the keys that it would have drawn
        scope.rng_counters.clear()
        scope.rng_counters.update(before)
    return any(found) if found else None


def call_rewritten(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """Calls `call(module, *args, **kwargs)` with the matmuls by weights of the model quantized."""
    from ..autocast import quantize_products  # loads the rewriter

    policy = CURRENT.value.policy
    run = lambda pure, given, weights: quantize_products(pure, given, policy, lambda: weights)
    return _call_lifted(run, call, module, args, kwargs, module._state)


def _call_lifted(
    run: Callable[..., Any], call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs, state: Any
) -> Any:
    """Calls `run(pure function, its arguments, the weights that it finds)` for a call of a bound module.

    `state` is Flax's own of the module.
    """
    from ..autocast import Weights

    scopes, args, kwargs = transforms.get_module_scopes(module, *hide_constants((args, kwargs)))

    def call_on_variables(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        weights = Weights({}, {})

        def pure(*given: Any) -> Any:
            variables, rngs, args, kwargs = given
            scopes = scope_fn(variables, rngs)
            copy, args, kwargs = transforms.set_module_scopes(module, args, kwargs, scopes)
            object.__setattr__(copy, "_state", state.export())
            args, kwargs = show_constants((args, kwargs))
            reads: list[_Read] = []
            token = _READ.set(reads)
            try:
                with REWRITING(True):
                    out = call(copy, *args, **kwargs)
            finally:
                _READ.reset(token)
                _note_numbers(weights, reads, scopes, given)
            state.reimport(copy._state)
            return out, repack(scopes)

        return run(pure, (variables, rngs, args, kwargs), weights)

    return lift.pack(call_on_variables, (True,), (True,), (True,), enable_kwargs=True)(scopes, *args, **kwargs)


def _note_numbers(weights: Weights, reads: Sequence[_Read], scopes: Sequence[Any], given: PyTree) -> None:
    """Notes the weights that were read by their numbers among the arrays that were given."""
    # A module that runs by `.apply` has other variables, made of the same arrays.
    by_array, by_key = {id(read.value): read for read in reads}, {read.key: read for read in reads}
    keys = dict(pair for scope in scopes for pair in _name_params(scope).items())
    remembered = CURRENT.value.attachment._known_reads
    describe = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)
    for number, leaf in enumerate(leaf for leaf in jax.tree.leaves(given) if is_array(leaf)):
        key = keys.get(id(leaf), "")
        read = by_key.get(key, by_array.get(id(leaf)))
        if id(leaf) not in by_array:  # read inside of a transform, and `nn.jit` traces no call twice
            place = key, leaf.shape, leaf.dtype
            if read is not None:
                remembered[place] = read._replace(value=None, weight=jax.tree.map(describe, read.weight))
            read = remembered.get(place)
        if read is not None and read.weight is not None:
            weights.stored[number] = read.path, jax.tree.map(describe, read.weight)
        elif read is not None and read.format is not None:
            weights.floating[number] = read.path, read.format


def _name_params(scope: Any) -> dict[int, str]:
    """Returns the paths of the parameters in a scope, by the ids of their arrays."""
    leaves = jax.tree.leaves_with_path(scope.variables().get("params", {}))
    is_box = lambda key: isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value"
    return {id(leaf): _join(scope.path, *_spell([key for key in keys if not is_box(key)])) for keys, leaf in leaves}


def _spell(keys: Iterable[Any]) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in keys]


def _join(path: tuple[str, ...], *names: str) -> str:
    return "/".join((*path, *names))
