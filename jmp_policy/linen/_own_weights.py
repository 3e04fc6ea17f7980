"""The weights that linen modules multiply by in their own code, where no layer of Flax does it."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen import transforms

from .._base import (
    REWRITING,
    Args,
    KeyPath,
    Kwargs,
    PyTree,
    drop_value_key,
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


_READ: contextvars.ContextVar[list[_Read] | None] = contextvars.ContextVar("_READ", default=None)
"""The parameters that were read while the outermost module was traced. Not a JAX context: it is only written to."""


def note_weight(module: nn.Module, policy: Policy, name: str, value: Any, layout: Layout | None = None) -> bool:
    """Records a weight that the code of a module reads; returns False if its matmuls are not rewritten.

    `quantize` stores a `kernel` or `embedding` in a `layout`, whatever code multiplies by it.
    """
    found = _READ.get()
    if found is None or policy.quantization is None or _is_of_flax(module):
        return False
    key, path = _join(module.path, name), _join(path_of(module), name)
    if isinstance(value, QuantizedArray):
        found.append(_Read(f"{key}/values", value.values, path, weight=value))
        return True
    from ..autocast import WeightFormat

    format = WeightFormat(policy.quantization, find_accumulate_dtype(policy), layout=layout)
    before = len(found)
    for keys, leaf in jax.tree.leaves_with_path(value):
        if is_array(leaf) and is_floating(leaf) and leaf.ndim > 1:
            names, own = _spell(keys), format._replace(shape=leaf.shape, is_part=bool(keys))
            found.append(_Read(_join((key,), *names), leaf, _join((path,), *names), own))
    return len(found) > before


def _is_of_flax(module: nn.Module) -> bool:
    return layer_of(type(module)) is not None or type(module).__module__.startswith("flax.linen.")


def is_rewritten(
    method: Callable[..., Any],
    call: Callable[..., Any],
    module: nn.Module,
    given: Policy | PolicyMap,
    known: dict[Any, bool],
    args: Args,
    kwargs: Kwargs,
) -> bool:
    """True if `call` of a method is to be rewritten, because code in it reads weights of its own.

    The first call with such parameters and arguments is traced to know.
    """
    if _READ.get() is not None or module.is_initializing():
        return False
    if all(policy.quantization is None for policy in list_policies(given)):
        return False
    others = [leaf for leaf in jax.tree.leaves((args, kwargs)) if not isinstance(leaf, jax.Array)]
    structure = jax.tree.structure((module.variables.get("params"), args, kwargs))
    kind = str(structure), repr(getattr(inspect.unwrap(method), "__code__", method))
    key = *kind, *map(repr, others)
    # One call of this kind that reads such weights is enough. Numbers that change at each call do not fill the memory.
    if not known.get(kind) and key not in known and len(known) < _MOST_KINDS:
        known[key] = _reads_own_weights(call, module, args, kwargs)
        known[kind] = known.get(kind, False) or known[key]
    return known.get(kind, False)


_MOST_KINDS = 256


class _Probed(Exception):
    """Ends a call whose results do not matter."""


def _reads_own_weights(call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    found: list[Any] = []

    def probe(pure: Callable[..., Any], given: tuple, weights: Weights) -> Any:
        with contextlib.suppress(Exception):  # the call raises it again
            eval_shapes(lambda *given: pure(*given) and None, *given)
        found.extend([*weights.floating, *weights.stored])
        raise _Probed

    scopes = transforms.get_module_scopes(module, args, kwargs)[0]
    counters = [dict(scope.rng_counters) for scope in scopes]
    with contextlib.suppress(_Probed):
        _call_lifted(probe, call, module, args, kwargs, type(module._state)())
    for scope, before in zip(scopes, counters, strict=True):  # the call draws the keys that it would have drawn
        scope.rng_counters.clear()
        scope.rng_counters.update(before)
    return bool(found)


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
    known: dict[Any, _Read] = {id(read.value): read for read in reads} | {read.key: read for read in reads}
    keys = dict(pair for scope in scopes for pair in _name_params(scope).items())
    for number, leaf in enumerate(leaf for leaf in jax.tree.leaves(given) if is_array(leaf)):
        read = known.get(keys.get(id(leaf)), known.get(id(leaf)))
        if read is not None and read.weight is not None:
            describe = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)
            weights.stored[number] = read.path, jax.tree.map(describe, read.weight)
        elif read is not None and read.format is not None:
            weights.floating[number] = read.path, read.format


def _name_params(scope: Any) -> dict[int, str]:
    """Returns the paths of the parameters in a scope, by the ids of their arrays."""
    leaves = jax.tree.leaves_with_path(scope.variables().get("params", {}))
    return {id(leaf): _join(scope.path, *_spell(drop_value_key(keys))) for keys, leaf in leaves}


def _spell(keys: KeyPath) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in keys]


def _join(path: tuple[str, ...], *names: str) -> str:
    return "/".join((*path, *names))
