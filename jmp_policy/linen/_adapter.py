"""`LINEN`: the adapter of linen."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import DenyList, meta

from .._base import Args, Kwargs, forget_warnings
from ..modules import Adapter, Hook, Method
from ..policy import Policy, PolicyMap
from ..quant._weights import WEIGHT_NAMES, is_quantized
from ._active_policy import CLASS_POLICY, ClassPolicy
from ._calls import hook_calls
from ._classes import make_policied_class, unpolicied_class
from ._explain import examine
from ._fields import AUTOCAST_EXAMPLE
from ._place import ROOT, ModulePlace


class _Linen(Adapter):
    """The adapter of linen, whose modules hold no arrays: a call reads and writes variables. See `Adapter`."""

    autocast_example = AUTOCAST_EXAMPLE
    audit_example = "audit(model.apply)(variables, x)"

    def attach(self, target: Any, policy: Policy | PolicyMap, no_cast: Collection[str]) -> Any:
        base = unpolicied_class(target if isinstance(target, type) else type(target))
        cls = make_policied_class(base, policy, frozenset(no_cast), ROOT)
        forget_warnings(cls)
        forget_warnings(policy)
        return cls if isinstance(target, type) else _change_class(target, cls)

    def policy_of(self, target: Any) -> Policy | PolicyMap | None:
        given: ClassPolicy | None = getattr(target, CLASS_POLICY, None)
        return None if given is None else given.policy

    def hook_calls(self, fun: Callable[..., Any], hook: Hook, *, setup: bool = False) -> Callable[..., Any]:
        return hook_calls(fun, hook, setup=setup)

    def bind(self, model: nn.Module, variables: Any) -> nn.Module:
        if (model.scope is None) == (variables is None):
            amiss = "and is bound to some already" if variables is not None else "and is not bound to them"
            raise ValueError(f"A linen module runs with variables, {amiss}. For example: model.bind(variables).")
        return model if variables is None else model.bind(variables)

    def run(self, model: nn.Module, inputs: Args, method: Method, kwargs: Kwargs, hook: Hook) -> Any:
        unbound, variables = model.unbind()
        mutable = DenyList("params")  # a call may write caches, statistics and sown values
        return hook_calls(unbound.apply, hook)(variables, *inputs, method=method, mutable=mutable, **kwargs)[0]

    examine = staticmethod(examine)

    def find_weights(self, model: nn.Module) -> dict[str, Any]:
        _, variables = model.unbind()
        leaves = jax.tree.leaves_with_path(meta.unbox(variables.get("params", {})), is_leaf=is_quantized)
        weights = {}
        for keys, leaf in leaves:
            path, _, name = jax.tree_util.keystr(keys, simple=True, separator="/").rpartition("/")
            if name in WEIGHT_NAMES and leaf.ndim > 1:
                weights[path] = leaf
        return weights

    def attach_for_nnx(
        self,
        module: nn.Module,
        policy: Policy | PolicyMap,
        no_cast: Collection[str],
        lineage: tuple[tuple[str, type], ...],
        boundary: bool,
        inferred: np.dtype | None,
    ) -> nn.Module:
        """Returns a linen module inside an nnx model, with the policy of that model."""
        place = ModulePlace(lineage, boundary, inferred)
        return _change_class(
            module, make_policied_class(unpolicied_class(type(module)), policy, frozenset(no_cast), place)
        )


LINEN = _Linen()


def _change_class(target: nn.Module, kind: type[nn.Module]) -> Any:
    """Returns a copy of a module with another class."""
    module = object.__new__(kind)  # `copy.copy` reads attributes first, on which ToLinen recurses forever
    vars(module).update(vars(target))
    if target.scope is not None:
        # The original may have taken the names of its parameters: the copy starts as a second call would.
        object.__setattr__(module, "scope", target.scope.rewound())
        object.__setattr__(module, "_state", dataclasses.replace(target._state, children={**target._state.children}))
    return module
