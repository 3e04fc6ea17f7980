"""State that policies add to nnx layers: scales and amax histories of float8, and the decode cache in 8 bits."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from .._base import OVERWRITE, Kwargs, PyTree, name_state, prepare_leaf, remember_on_class
from ..modules import make_subclass
from ..policy import Policy
from ..quant import CACHED, SCALE, CacheSlot, attend_to_slots
from ._shadow import pytree_options


@functools.partial(nnx.register_variable_name, OVERWRITE, overwrite=True)
class Float8State(nnx.Variable):
    """A Variable of a float8 layer with delayed scaling: a scale or an amax history of one operand.

    The layer has a dictionary of them in its attribute `_overwrite_with_gradient`. They are not `nnx.Param`s.
    `jmp_policy.nnx.value_and_grad` differentiates with respect to them too: their gradients are their next values,
    which `jmp_policy.nnx.Optimizer` writes into the model. `flax.nnx.value_and_grad` is an error for a model that has
    them, and so is a `flax.nnx.Optimizer` as the `loss_scale`: the scales would stay at one, and gradients vanish.

    A policy that is attached again keeps them. A policy with another length of histories makes new ones, and one
    without state removes them. In the bridges to linen they are the collection of the same name.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.with_policy(nnx.Linear(128, 128, rngs=nnx.Rngs(0)), "float8/16_from_mixed_bfloat16")
    >>> state = nnx.state(model, jmp.nnx.Float8State)["_overwrite_with_gradient"]
    >>> sorted(state)[:2], state["input_amax_history"].shape
    (['input_amax_history', 'input_scale'], (16,))
    """

    __slots__ = ("is_new",)  # set until nnx copies it; metadata would be part of the graph definition


def prepare_states(fun: Callable[..., Any], positions: Iterable[int], loss_scale: ArrayLike) -> Callable[..., Any]:
    """Marks float8 state so that autodiff combines it by max and returns the state of true gradients."""

    @functools.wraps(fun)
    def call_prepared(*args: Any, **kwargs: Any) -> Any:
        states = find_states([args[position] for position in positions])
        before = {path: variable.get_value() for path, variable in states.items()}
        for path, value in before.items():
            states[path].set_value(prepare_leaf(path[-1], value, loss_scale))
        try:
            return fun(*args, **kwargs)
        finally:
            for path, value in before.items():
                states[path].set_value(value)

    return call_prepared


def find_states(model: PyTree) -> dict[Any, Float8State]:
    """Returns the float8 state in any tree of models, by path."""
    return {path: node for path, node in nnx.iter_graph(model, graph=True) if isinstance(node, Float8State)}


def find_state(tree: PyTree) -> str | None:
    """Describes the first Variable of the modules in a tree that is not an `nnx.Param`; see `Adapter`."""
    is_module = lambda node: isinstance(node, nnx.Module)
    for model in filter(is_module, jax.tree.leaves(tree, is_leaf=is_module)):
        for path, node in nnx.iter_graph(model, graph=True):
            if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param):
                return f"the {type(node).__name__} {'/'.join(map(str, path))!r}"
    return None


def check_state_types(model: PyTree, wrt: nnx.filterlib.Filter) -> None:
    """Raises a `ValueError` if float8 state among the Variables that `wrt` selects is not a `Float8State`."""
    is_differentiated = nnx.filterlib.to_predicate(wrt)
    others = {}
    for path, node in nnx.iter_graph(model, graph=True):
        place = "/".join(map(str, path))
        if isinstance(node, jax.Array):
            others[place] = node
        elif isinstance(node, nnx.Variable) and not isinstance(node, Float8State) and is_differentiated(path, node):
            others[place] = node.get_raw_value()
    for name, (path, _) in zip(name_state(others), jax.tree_util.tree_leaves_with_path(others), strict=True):
        if name:
            raise ValueError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')!r} is float8 state by its name, and would be "
                "differentiated as a parameter: in nnx, each array of state has a Float8State. For example: self.state "
                "= nnx.data({name: jmp_policy.nnx.Float8State(x) for name, x in float8_state('float8').items()})."
            )


def cache_format_of(base: type, policy: Policy) -> np.dtype | None:
    """Returns the format of the cache of a layer, or `None`: its dtype, or its author wrote how it is called."""
    is_flax = issubclass(base, nnx.MultiHeadAttention) and base.__call__ is nnx.MultiHeadAttention.__call__
    return policy.cache if is_flax else None


def check_layer_cache(module: nnx.MultiHeadAttention, dtype: np.dtype, format: np.dtype | None, kwargs: Kwargs) -> None:
    """Raises a `ValueError` if a call would read a cache that has another format than the policy."""
    cache = module.cached_key
    if not _is_decoding(module, kwargs) or cache is None:
        return
    found, has_scales = cache.get_value().dtype, hasattr(module, CACHED[0] + SCALE)
    if found == (dtype if format is None else format) and (format is None or has_scales):
        return
    stores = f"the layer computes in {dtype}" if format is None else f"its policy stores it in {format} with scales"
    inferred = (
        f"If the policy has no compute dtype, and only inputs tell it: layer.init_cache(input_shape, jnp.{dtype})."
    )
    raise ValueError(
        f"The cache of this attention layer is {found}, but {stores}. Make it anew under the policy: "
        f"layer.init_cache(input_shape). {inferred if format is None else ''}".rstrip()
    )


@remember_on_class
def make_cached_attention(base: type[nnx.MultiHeadAttention], format: np.dtype) -> type[nnx.MultiHeadAttention]:
    """Makes the subclass of an attention layer with its cache in a format."""

    def init_cache(self: Any, input_shape: Any, dtype: Any = format) -> None:
        base.init_cache(self, input_shape, dtype)
        for name in CACHED:
            shape = getattr(self, name).shape
            setattr(self, name + SCALE, nnx.Cache(jnp.zeros((*shape[:-1], 1), jnp.float32)))

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_decoding(self, kwargs) or self.cached_key is None:
            return base.__call__(self, *args, **kwargs)
        attributes = vars(self)
        own = {name: attributes[name] for name in (*CACHED, "attention_fn")}
        slots = {name: _make_slot(self, name) for name in CACHED}
        # Past `__setattr__`: a slot is not a Variable, and leaves before the call returns.
        attributes.update(slots, attention_fn=attend_to_slots(self.attention_fn, slots))
        try:
            return base.__call__(self, *args, **kwargs)
        finally:
            attributes.update(own)

    methods: dict[str, Callable[..., Any]] = {"init_cache": init_cache, "__call__": __call__}
    return make_subclass(base, methods, (make_cached_attention, (base, format)), **pytree_options(base))


def _is_decoding(module: nnx.MultiHeadAttention, kwargs: Kwargs) -> bool:
    decode = kwargs.get("decode")
    return bool(module.decode if decode is None else decode)


def _make_slot(module: nnx.MultiHeadAttention, name: str) -> CacheSlot:
    values, scale, index = (getattr(module, attribute) for attribute in (name, name + SCALE, "cache_index"))

    def store(new_values: Any, new_scale: Any) -> None:
        values[...], scale[...] = new_values, new_scale

    return CacheSlot(values[...], scale[...], index[...], module.dtype or jnp.float32, store)
