"""The interface between the library and Flax, and the classes that both adapters make.

`Adapter` is the protocol. `LINEN` in `linen/_adapter.py` and `NNX` in `nnx/_adapter.py` implement it. Each is loaded
when the first object of its API arrives, so that importing the library does not load Flax.
"""

import copyreg
import dataclasses
import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from .._base import Args, Kwargs, PyTree, is_array, is_floating_dtype, remember_on_class, remember_weakly
from ..policy import Match, Policy, PolicyMap


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """One call of a method of a Flax module, as a hook sees it."""

    path: str  # the module names joined by `/`; empty for the root
    type: type  # the class of the module, with its policy if it has one
    method: str = "__call__"  # the name of the method
    scope: str = ""  # the `jax.named_scope` that Flax opens for the call, such as `encoder.encode`, or an empty string
    module: Any = None  # the module itself
    # Returns the cell of `explain` about the quantized weight. Valid while the call runs.
    describe_quantization: Callable[[], str] = lambda: ""


WRITTEN = "author's dtype"
"""The rule that `explain` shows for a layer with a `dtype` of its author."""

Method = str | Callable[..., Any] | None
"""A method, its name, or a function of the module; `None` calls the module itself."""

Hook = Callable[[ModuleCall, Callable[..., Any], Args, Kwargs], Any]
"""Runs in place of each method: `hook(call, next, args, kwargs)` calls `next(*args, **kwargs)`."""


@dataclasses.dataclass(frozen=True)
class ModuleInfo:
    """Policy and dtypes of one module."""

    type: type  # the class of the module, without a policy
    policy: Policy | None = None
    rule: str = ""  # the origin of the policy, or an empty string
    compute_dtype: np.dtype | None = None  # the dtype that its author wrote, else the policy's
    is_named: bool = False  # true if a rule, a policy of its own or its author decides for this very module
    quantization: str = ""  # the treatment of its weight under a quantized policy, as in `ModuleRow`
    accumulate_dtype: str = ""  # the output dtype of its matmuls, if they may have another one than the inputs

    @property
    def is_layer(self) -> bool:
        """True for a layer of Flax, which casts its own operands."""
        return self.type.__module__.startswith("flax.")


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Everything that an adapter found in a model that was called."""

    modules: Mapping[str, ModuleInfo]  # the modules, by path
    # The parameters of each module itself, by path, with shape and dtype. A quantized weight is the tree of its arrays.
    params: Mapping[str, Sequence[Any]]
    unused: Sequence[str] = ()  # a sentence for each rule that covers no module
    unknown: Sequence[str] = ()  # a sentence for each module with an unknown path


class Adapter(Protocol):
    """The functions that the library needs from a Flax API."""

    autocast_example: str  # for errors: a call of `autocast` with a function that calls a module
    audit_example: str  # likewise for `audit`

    def attach(self, target: Any, policy: Policy | PolicyMap, no_cast: Collection[str]) -> Any:
        """Returns a module or class with a policy in place of the one it may have had. `target` does not change."""
        ...

    def policy_of(self, target: Any) -> Policy | PolicyMap | None:
        """Returns the policy of a module or class, or `None`."""
        ...

    def hook_calls(self, fun: Callable[..., Any], hook: Hook, *, setup: bool = False) -> Callable[..., Any]:
        """Returns `fun` with a hook in place of each method.

        In nnx no other code may refer to the modules in its inputs: their classes are swapped during the call.
        """
        ...

    find_modules: Callable[[PyTree], dict[str, type]] = staticmethod(lambda arguments: {})
    """Returns the classes, by path, of the nnx modules among some arguments."""

    def bind(self, model: Any, variables: Any) -> Any:
        """Returns a module with its variables. Rejects a second set of variables, or none at all."""
        ...

    def run(self, model: Any, inputs: Args, method: Method, kwargs: Kwargs, hook: Hook) -> Any:
        """Calls a bound module under a hook and drops its writes. In linen, `Module.apply` gets `kwargs`."""
        ...

    examine: Callable[..., ModelInfo]
    """`(model, inputs, method, rngs, kwargs, trace, hook)`: traces a model under a hook, and describes its modules.

    The hook sees inputs before they are cast. `method` and `rngs` are as in `explain`; the method gets `kwargs`.
    `trace` is called with a function that runs the model, and its arguments."""

    def find_weights(self, model: Any) -> dict[str, Any]:
        """Returns the quantized weights, and those that can be quantized, by the path of their module."""
        ...

    def list_parameters(self, model: Any) -> dict[str, Any]:
        """Returns all parameters of a bound model by their paths; quantized weights are one leaf."""
        ...

    quantize: Callable[..., tuple[Any, list[str]]] | None = None
    """`(model, policy, Quantizer.quantize_weight) -> (model, sentences about unused rules)`; `None` for linen."""

    attach_wrapped: Callable[..., tuple[Any, dict[str, type]]] | None = None
    """`(new module, policy, its path, its constructor's arguments) -> (module, types by path)`; `None` for linen.

    Gives a policy to an nnx module that a linen model wraps."""

    value_and_grad: Callable[..., Any] | None = None
    """Differentiates functions of nnx modules under a loss scale; `None` for linen."""

    find_state: Callable[[PyTree], str | None] = staticmethod(lambda tree: None)
    """Describes the first Variable of the nnx modules in a tree that is not a parameter, if there is one."""

    take_apart: Callable[..., tuple[Any, Callable[[Any], Args]]] | None = None
    """Splits arguments with nnx objects into arrays and a function that puts them back; `None` for linen."""

    lift: Callable[..., Any] = staticmethod(
        lambda run, fun, args, kwargs: run(lambda arguments: fun(*arguments[0], **arguments[1]), (args, kwargs))
    )
    """Runs `fun`, a function of Flax objects, by `run(pure function, tree of arrays)`, and keeps its writes.

    In linen, a call cannot write to a module."""


def find_adapter(target: Any) -> Adapter | None:
    """Returns the adapter of a Flax module or module class, or `None`."""
    package, name = _find_flax_base(target if isinstance(target, type) else type(target))
    return _load_adapter(package) if name == "Module" else None


def require_adapter(model: Any, message: str) -> Adapter:
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(message)
    return adapter


def check_batches(name: str, batches: Any) -> None:
    """Rejects an array, which would be read row by row."""
    if is_array(batches):
        raise TypeError(
            f"{name} takes a list of batches, got an array of shape {batches.shape}. Pass a list of batches: [x]. "
            f"For example: {name}(model, [x], variables=variables)."
        )


def find_loaded_adapters() -> list[Adapter]:
    """Returns the adapters of the Flax APIs that are imported: a function may call modules of any of them."""
    return [_load_adapter(package) for package in _ADAPTERS if package in sys.modules]


def find_lifting_adapter(tree: PyTree) -> Adapter | None:
    """Returns the nnx adapter if the tree has nnx objects, which a function may write to."""
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    has_any = any(_find_flax_base(type(leaf))[0] == "flax.nnx" for leaf in leaves)
    return _load_adapter("flax.nnx") if has_any else None


def is_flax_object(node: object) -> bool:
    """True for Flax modules and nnx Variables, which a cast would copy, so that writes of the call were lost."""
    return bool(_find_flax_base(type(node))[0])


def describe_module(
    kind: type, match: Match, *, attached: bool, by_map: bool, written: Any, quantization: str, sums: np.dtype | None
) -> ModuleInfo:
    """Describes a module with a policy, given to itself (`attached`) or by a map, and what overrides it."""
    policy, details = match.policy, (quantization, "" if sums is None else str(sums))
    if written is not None:
        return ModuleInfo(kind, policy, WRITTEN, np.dtype(written), True, *details)
    if by_map:
        key = None if match.rule is None else match.rule.key
        rule = "default" if key is None else key if isinstance(key, str) else key.__qualname__
        named = attached or (match.rule is not None and match.boundary)
    else:
        rule, named = "its own policy" if attached else "inherited", attached
    return ModuleInfo(kind, policy, rule, policy.compute_dtype, named, *details)


_ADAPTERS = {
    "flax.linen": ("jmp_policy.linen._adapter", "LINEN"),
    "flax.nnx": ("jmp_policy.nnx._adapter", "NNX"),
}
"""The package of each kind of module, with the module and the name of its adapter."""


def _load_adapter(package: str) -> Adapter:
    module, name = _ADAPTERS[package]
    return getattr(importlib.import_module(module), name)


@remember_weakly
def _find_flax_base(kind: type) -> tuple[str, str]:
    """Returns package and name of the first Flax base class, `Module` or `Variable`; without one, empty strings."""
    for base in kind.__mro__:
        for package in _ADAPTERS:
            if base.__name__ in ("Module", "Variable") and base.__module__.startswith(package + "."):
                return package, base.__name__
    return "", ""


_FEWEST = 3
"""With fewer written dtypes than this, the author may have meant them."""


def find_other_dtype(written: Any, policy: Policy) -> np.dtype | None:
    """Returns the dtype that an author wrote on a layer if it is floating and not the compute dtype, else `None`."""
    if written is None or policy.compute_dtype is None:
        return None
    try:
        dtype = np.dtype(written)
    except TypeError:  # the author's own field happens to be called `dtype`
        return None
    return dtype if dtype != policy.compute_dtype and is_floating_dtype(dtype) else None


def describe_written_dtypes(layers: Mapping[str, np.dtype | None], example: str) -> list[str]:
    """Returns a warning, in a list, if most layers have another dtype than their policy (`layers`, by path)."""
    others = {path: dtype for path, dtype in layers.items() if dtype is not None}
    if len(others) < _FEWEST or 2 * len(others) <= len(layers):
        return []
    path, dtype = next(iter(others.items()))
    return [
        f"{len(others)} of {len(layers)} layers with weights compute in the dtype that their author wrote, not in the "
        f"compute dtype of the policy: {path!r} has dtype={dtype.name}. Write dtype=None, which the policy fills in"
        # Digits that the layer rounds away are lost under autocast, too.
        + ("." if dtype.itemsize < 4 else f", or use autocast, which casts each operation. For example: {example}.")
    ]


_RECIPE = "_jmp_recipe"
"""The attribute of a made class with the recipe to pickle it."""


def make_subclass(
    base: type, namespace: dict[str, Any], recipe: tuple, metaclass: type[type] | None = None, **options: Any
) -> Any:
    """Makes a subclass with the name of its base."""
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # A decorated class keeps its metaclass, because authors mix it with classes that have their own.
    if metaclass is None:
        metaclass = type(base)
        if find_by_name(base) is base and metaclass not in copyreg.dispatch_table:
            metaclass = _Picklable if metaclass is type else _make_picklable(metaclass)
    return metaclass(base.__name__, (base,), {_RECIPE: recipe, **same, **namespace}, **options)


def find_by_name(kind: type) -> Any:
    """Returns the object that the module of a class has under its name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def pickle_by_recipe(metaclass: type[type]) -> type[type]:
    """Registers a metaclass, so that its classes are pickled by their recipes unless Python finds them by name."""
    copyreg.pickle(metaclass, _reduce_class)  # type: ignore[arg-type]
    return metaclass


def _reduce_class(kind: type) -> Any:
    recipe = vars(kind).get(_RECIPE)
    return kind.__qualname__ if recipe is None or find_by_name(kind) is kind else recipe


class _Picklable(type):
    """Metaclass of made classes whose bases have the metaclass `type`."""


pickle_by_recipe(_Picklable)


@remember_on_class
def _make_picklable(parent: type[type]) -> type[type]:
    return pickle_by_recipe(type(parent.__name__, (parent,), {"__module__": __name__}))
