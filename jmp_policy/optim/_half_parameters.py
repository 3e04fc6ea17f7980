"""Shared parts of optimizers of half-precision parameters, which compute in float32 and store less."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._base import PyTree, is_half
from ._step import fast_params, keep_dtypes, step
from ._transformation import (
    ParameterUpdate,
    Transformation,
    check_not_loss_scaled,
    check_not_outermost,
    check_transformation,
    with_extra_args,
)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Storage of float32 values in half-precision parameters and a memory beside them."""

    name: str  # of the public transformation
    state_type: Any  # made from an inner state and a memory
    init: Callable[[PyTree], Any]  # the memory of fresh parameters
    decode: Callable[[PyTree, PyTree], PyTree]  # parameters and memory to float32
    encode: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, Any]]  # float32, old parameters and memory to new ones
    is_exact: bool = False  # true if `decode` returns every bit that `encode` stored


def pair_storage(
    name: str,
    state_type: Any,
    memory_name: str,  # for errors
    begin: Callable[[jax.Array], jax.Array],  # the memory of a fresh parameter
    join: Callable[[jax.Array, jax.Array], jax.Array],  # parameter and memory to float32
    split: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],  # float32 and dtype to parameter and memory
    dtypes: tuple[Any, ...] = (jnp.float16, jnp.bfloat16),
    is_exact: bool = False,
) -> Storage:
    """Builds a storage whose memory has one array per half-precision parameter."""

    def init(params: PyTree) -> Any:
        for path, param in jax.tree_util.tree_leaves_with_path(params):
            if is_half(param) and param.dtype not in dtypes:
                raise ValueError(
                    f"mode='split' needs bfloat16 parameters, the high half of a float32, got {param.dtype} for "
                    f"{jax.tree_util.keystr(path) or 'the parameter'}. For float16: master_weights(inner)."
                )
        return map_half(begin, params, otherwise=no_memory)

    def decode(params: PyTree, memory: PyTree) -> PyTree:
        check_fits(params, memory, memory_name)
        return map_half(join, params, memory, otherwise=lambda p, _: p)

    def encode(wide: PyTree, params: PyTree, memory: PyTree) -> tuple[PyTree, Any]:
        del memory
        pairs = map_half(lambda p, w: split(w, p.dtype), params, wide, otherwise=lambda p, w: (w, no_memory()))
        narrowed = jax.tree.map(lambda p, pair: pair[0], params, pairs)
        return narrowed, jax.tree.map(lambda p, pair: pair[1], params, pairs)

    return Storage(name, state_type, init, decode, encode, is_exact)


def half_parameters(inner: Transformation, storage: Storage) -> optax.GradientTransformationExtraArgs:
    """Builds the transformation that runs `inner` on decoded parameters and float32 gradients."""
    check_transformation(inner)
    check_not_outermost(inner, storage.name)

    def init(params: PyTree) -> Any:
        memory = storage.init(params)
        inner_state = inner.init(storage.decode(params, memory))
        check_not_loss_scaled(inner_state, storage.name)
        return storage.state_type(inner_state, memory)

    return optax.GradientTransformationExtraArgs(init, _HalfParametersUpdate(inner, storage))


@dataclasses.dataclass(frozen=True, eq=False)
class _HalfParametersUpdate(ParameterUpdate):
    _inner: Transformation
    _storage: Storage

    def step(self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, Any]:
        wide, wide_grads = self._wide(grads, state, params)
        wide, inner_state = step(self._inner, wide_grads, state[0], wide, **extra)
        params, memory = self._storage.encode(wide, params, state[1])
        return params, self._storage.state_type(keep_dtypes(state[0], inner_state), memory)

    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        #  params, memory --decode--> wide --inner.update--> wide + wide_updates --encode--> target, new memory
        #     |                                                                                |
        #     `---- updates = target - params, in float32: the caller adds them, and lands on `target` in most cases
        wide, wide_grads = self._wide(updates, state, params)
        wide_updates, inner_state = with_extra_args(self._inner).update(wide_grads, state[0], wide, **extra)
        wide = optax.apply_updates(wide, wide_updates)
        target, memory = self._storage.encode(wide, params, state[1])
        if self._storage.is_exact:  # the stored value; XLA may compute `wide` differently for each use
            wide = self._storage.decode(target, memory)
        subtract = lambda p, t, _: widen(t) - widen(p)
        updates = map_half(subtract, params, target, wide_updates, otherwise=lambda p, t, update: update)
        # A float32 sum misses its target if a parameter shrinks to a small fraction of itself in one step, and at -0.0.
        # The memory must match the parameter that results, so it is made again of the wide values there.
        with jax.numpy_dtype_promotion("standard"):  # optax adds float32 updates to half-precision parameters
            landed = optax.apply_updates(params, updates)
        bits = lambda x: lax.bitcast_convert_type(x, jnp.uint16)
        choose = lambda landed, t, w: jnp.where(bits(landed) == bits(t), w, widen(landed))
        wide = map_half(choose, landed, target, wide, otherwise=lambda landed, t, w: w)
        _, memory = self._storage.encode(wide, params, state[1])
        return updates, self._storage.state_type(keep_dtypes(state[0], inner_state), memory)

    def _wide(self, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the parameters and gradients for the transformation inside."""
        name = self._storage.name
        if params is None:
            raise ValueError(f"{name} needs the parameters: tx.update(grads, opt_state, params).")
        if not isinstance(state, self._storage.state_type):
            raise TypeError(
                f"Expected the state of {name}, got {type(state).__name__}. Make one: tx.init(params). If the "
                "optimizer inside was trained alone, or in another transformation, insert its state, with float32 "
                "moments: tx.init(params)._replace(inner_state=restored)."
            )
        check_fits(fast_params(params), grads, "gradients", per_example=True)
        wide = self._storage.decode(params, state[1])
        return wide, jax.tree.map(lambda g: widen(g) if is_half(g) else g, grads)


def map_half(fun: Callable[..., Any], params: PyTree, *rest: PyTree, otherwise: Callable[..., Any]) -> PyTree:
    """Maps `fun` over half-precision parameters, and `otherwise` over all others."""
    return jax.tree.map(lambda p, *x: fun(p, *x) if is_half(p) else otherwise(p, *x), params, *rest)


def no_memory(*_: Any) -> Any:
    """Returns the memory of a parameter that needs none: a tree without leaves."""
    return optax.MaskedNode()


def widen(x: Any) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32)


def widen_half(params: PyTree) -> PyTree:
    """Upcasts half-precision parameters to float32, without any memory."""
    return map_half(widen, params, otherwise=lambda p: p)


def check_fits(params: PyTree, tree: PyTree, what: str, *, per_example: bool = False) -> None:
    """Raises a `ValueError` if a tree has no array of the same shape for a half-precision parameter.

    With `per_example` the array may have one more axis in front.
    """
    found = dict(jax.tree_util.tree_leaves_with_path(tree))
    fits = lambda x, param: x.shape == param.shape or (per_example and x.shape[1:] == param.shape)
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        if is_half(param) and (path not in found or not fits(found[path], param)):
            has = f"has the shape {found[path].shape}" if path in found else "is missing"
            raise ValueError(
                f"The {what} do not fit the parameters: {jax.tree_util.keystr(path) or 'the parameter'} "
                f"{has}, but the parameter has the shape {param.shape}. Differentiate with respect to all parameters, "
                "and make their state with tx.init(params)."
            )
