"""The written interface between the library and Flax.

`Adapter` says all that the library asks of a Flax API. Two objects keep it: `LINEN` in `linen/_adapter.py` and `NNX` in
`nnx/_adapter.py`. They are loaded when the first object of their kind arrives, so that importing the library loads no
Flax.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from .._base import Args, Kwargs, PyTree, remember_weakly
from ..policy import Match, Policy, PolicyMap


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """A call of a method of a Flax module, as a hook sees it.

    Attributes:
      path: the module names joined by `/`; the root's is the empty string.
      type: the class of the module; of one with a policy, the subclass that the policy made.
      method: the name of the method.
      scope: the `jax.named_scope` that Flax itself opens for the call, such as `dense` or `encoder.encode`; the empty
        string, if it opens none.
      module: the module itself.
      describe_quantization: says what becomes of the weight of the module, in the words of `explain`. It is asked while
        the call runs.
    """

    path: str
    type: type
    method: str = "__call__"
    scope: str = ""
    module: Any = None
    describe_quantization: Callable[[], str] = lambda: ""


WRITTEN = "author's dtype"
"""The rule of a module whose author wrote its dtype."""

Method = str | Callable[..., Any] | None
"""What to call of a module: a method or its name, or a function of the module; `None` for the module itself."""

Hook = Callable[[ModuleCall, Callable[..., Any], Args, Kwargs], Any]
"""What runs in place of each method: `hook(call, next, args, kwargs)` calls `next(*args, **kwargs)`."""


@dataclasses.dataclass(frozen=True)
class ModuleInfo:
    """What holds at one module.

    Attributes:
      type: the class of the module, without a policy.
      policy: the policy that holds for it, if any.
      rule: where that came from; the empty string without a policy.
      compute_dtype: the dtype that it is meant to compute in: the author's, if one is written, else the policy's.
      is_named: whether a rule, a policy of its own or its author says what holds just here.
      quantization: what becomes of its weight under a quantized policy, as in `Row`.
      accumulate_dtype: the name of the dtype in which its products may hand over their sums, if they may.
    """

    type: type
    policy: Policy | None = None
    rule: str = ""
    compute_dtype: np.dtype | None = None
    is_named: bool = False
    quantization: str = ""
    accumulate_dtype: str = ""

    @property
    def is_layer(self) -> bool:
        """Whether it is one of Flax's own, which see to their dtypes themselves."""
        return self.type.__module__.startswith("flax.")


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What an adapter knows of a model once the model was called.

    Attributes:
      modules: what holds at each module, by path.
      params: the parameters of each module itself, by path: anything with a shape and a dtype. A quantized weight is
        the tree of the arrays that are stored.
      unused: a sentence for each rule that decides for no module.
      unknown: a sentence for each module whose place in the model is not known.
    """

    modules: Mapping[str, ModuleInfo]
    params: Mapping[str, Sequence[Any]]
    unused: Sequence[str] = ()
    unknown: Sequence[str] = ()


class Adapter(Protocol):
    """What the library asks of a Flax API. Its models, modules and variables come from that API.

    Attributes:
      autocast_example: for errors: how to call `autocast` with a function that calls a module.
      audit_example: for errors: how to call `audit` with one.
    """

    autocast_example: str
    audit_example: str

    def attach(self, target: Any, policy: Policy | PolicyMap, keep: Collection[str]) -> Any:
        """Returns a module or module class with a policy, instead of the one it may have had.

        Args:
          target: the module or class. It stays as it is.
          policy: the policy.
          keep: names of arguments of its public methods that enter uncast.
        """
        ...

    def policy_of(self, target: Any) -> Policy | PolicyMap | None:
        """Returns the policy that a module or class was given, or `None`."""
        ...

    def hook_calls(self, fun: Callable[..., Any], hook: Hook, *, setup: bool = False) -> Callable[..., Any]:
        """Returns the same function, in which a hook runs in place of each method of a module that it calls.

        Hooks nest: the one of the outer function is the outer one. Modules that Flax calls only to try their setup do
        not count.

        Args:
          fun: a function: of nnx the modules among its arguments are hooked, and nobody else may hold these; of linen
            all that it calls.
          hook: runs in place of the methods.
          setup: whether it runs in place of linen's `setup` as well.
        """
        ...

    def find_modules(self, arguments: PyTree) -> dict[str, type]:
        """Returns the classes, by path, of the modules among some arguments that `hook_calls` would hook.

        Of linen there are none: its modules show when they are called.
        """
        ...

    def bind(self, model: Any, variables: Any) -> Any:
        """Returns a module that has its variables.

        Raises:
          ValueError: it has them already and is given others, or it has none and is given none.
        """
        ...

    def run(self, model: Any, inputs: Args, method: Method, kwargs: Kwargs, hook: Hook) -> Any:
        """Calls a module that has its variables, under a hook. What the call writes to them is lost.

        Args:
          model: the module, as `bind` returns it.
          inputs: positional arguments of the method.
          method: what to call, as for `explain`.
          kwargs: other keyword arguments; for linen, of `Module.apply`.
          hook: runs in place of the methods of all modules inside, and of the model's own.
        """
        ...

    def examine(
        self,
        model: Any,
        inputs: Args,
        method: Method,
        rngs: PyTree,
        kwargs: Kwargs,
        trace: Callable[..., None],
        hook: Hook,
    ) -> ModelInfo:
        """Has a model traced under a hook, and tells what holds at each of its modules.

        Args:
          model: the module.
          inputs: positional arguments of the method, arrays or `jax.ShapeDtypeStruct`s.
          method: what to call, as for `explain`.
          rngs: the keys, as for `explain`.
          kwargs: keyword arguments of the method.
          trace: called with a function that runs the model, and its arguments.
          hook: sees what enters each module before a boundary casts it.
        """
        ...

    def find_weights(self, model: Any) -> dict[str, Any]:
        """Returns the weights that can be quantized, or are, by the path of the module that they belong to."""
        ...

    @property
    def quantize(self) -> Callable[[Any, Policy | PolicyMap, Callable[..., Any]], tuple[Any, list[str]]] | None:
        """Quantizes a model that holds its weights; `None` for linen, whose weights are in its variables.

        It takes the model, the policy, and `Quantizer.quantize_weight`. It returns a model with the policy, and a
        sentence for each rule that decides for no module.
        """
        ...

    @property
    def attach_wrapped(self) -> Callable[[Any, Policy | PolicyMap, str, PyTree], tuple[Any, dict[str, type]]] | None:
        """Gives a policy to a new module inside a model of another API; `None` for linen, whose calls make modules.

        It takes the module, the policy, the path of the module in the model, and the arguments that it was made of. It
        returns the module, and the types of the modules in it by path.
        """
        ...

    @property
    def value_and_grad(self) -> Callable[..., Any] | None:
        """Differentiates functions of its models under a loss scale; `None` for linen, whose models hold no arrays."""
        ...

    def lift(self, run: Callable[..., Any], fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Runs a function of Flax objects by means of one that knows trees of arrays only.

        What `fun` writes to the objects lands in the caller's objects afterwards.

        Args:
          run: called with a pure function and its argument, a tree of arrays; returns what that function returns.
          fun: the function of Flax objects.
          args: its positional arguments.
          kwargs: its keyword arguments.
        """
        ...


def find_adapter(target: Any) -> Adapter | None:
    """Returns the adapter of a module or module class, loaded now; `None` if it is not one of Flax."""
    package = _find_package(target if isinstance(target, type) else type(target))
    return None if package is None else _load_adapter(package)


def find_loaded_adapters() -> list[Adapter]:
    """Returns the adapters of the Flax APIs that are loaded: a function may call the modules of any of them."""
    return [_load_adapter(package) for package in _ADAPTERS if package in sys.modules]


def find_lifting_adapter(tree: PyTree) -> Adapter | None:
    """Returns the adapter of nnx, if there are objects of nnx in a tree, which a function may write to."""
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    has_any = any(is_flax_object(leaf) and _is_of_nnx(type(leaf)) for leaf in leaves)
    return _load_adapter("flax.nnx") if has_any else None


def is_flax_object(node: object) -> bool:
    """Whether a node of a tree is an object of Flax's that a call may write to: a module, or an nnx Variable.

    A cast would copy it, and what the call writes would be lost: the RNG streams that a caller passes to a model, its
    optimizer and its metrics are trees of Variables, and a copied stream gives the same random numbers for ever.
    """
    return _is_flax_class(type(node))


def describe_module(kind: type, match: Match, *, attached: bool, by_map: bool, written: Any = None) -> ModuleInfo:
    """Says what holds at a module with a policy.

    Args:
      kind: its class.
      match: the policy, and the rule it came from.
      attached: whether the policy or map was given to this very module.
      by_map: whether it is a map that was given.
      written: the dtype that its author wrote, if any.
    """
    policy = match.policy
    if written is not None:
        return ModuleInfo(kind, policy, WRITTEN, np.dtype(written), is_named=True)
    if by_map:
        key = None if match.rule is None else match.rule.key
        rule = "default" if key is None else key if isinstance(key, str) else key.__qualname__
        named = attached or (match.rule is not None and match.boundary)
    else:
        rule, named = "its own policy" if attached else "inherited", attached
    return ModuleInfo(kind, policy, rule, policy.compute_dtype, is_named=named)


_ADAPTERS = {
    "flax.linen": ("jmp_policy.linen._adapter", "LINEN"),
    "flax.nnx": ("jmp_policy.nnx._adapter", "NNX"),
}
"""The package of a `Module` class, and the module and the name of the adapter that knows its modules."""


def _load_adapter(package: str) -> Adapter:
    module, name = _ADAPTERS[package]
    return getattr(importlib.import_module(module), name)


@remember_weakly
def _find_package(kind: type) -> str | None:
    for base in kind.__mro__:
        for package in _ADAPTERS:
            if base.__name__ == "Module" and base.__module__.startswith(package + "."):
                return package
    return None


@remember_weakly
def _is_of_nnx(kind: type) -> bool:
    return any(base.__module__.startswith("flax.nnx.") for base in kind.__mro__)


@remember_weakly
def _is_flax_class(kind: type) -> bool:
    packages = ("flax.linen.", "flax.nnx.")
    return any(b.__name__ in ("Module", "Variable") and b.__module__.startswith(packages) for b in kind.__mro__)
