"""Models whose Params a policy may cast, and functions of nnx objects as functions of arrays."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from .._base import PyTree, cast_floating, forget_warnings, remember_on_class, warn_once
from ..modules import is_flax_object
from ..modules.common import make_subclass, pickle_by_recipe
from ..policy import Policy, PolicyMap, PolicySpec, get_policy
from ._attachment import Attachment, reject_param, wrap_methods
from ._shadow import Node, NodeKind, find_kind, list_items, pytree_options


def lift(run: Callable[..., Any], fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs a function of nnx objects by means of one that knows trees of arrays only.

    What the function writes, to Variables or attributes, lands in the caller's objects afterwards, as with `nnx.jit`.
    What it only reads is not touched: the objects may be of an outer trace, as those that `jax.grad` does not
    differentiate with respect to, and JAX allows no writing there.

    Args:
      run: called with a pure function and its argument, a tree of arrays; returns what that returns.
      fun: the function; it is called with copies of the objects.
      args: its positional arguments.
      kwargs: its keyword arguments.

    Returns:
      What `fun` returns.
    """
    with nnx.update_context(lift):
        with nnx.split_context(lift) as outside:
            graphdef, state = outside.split((args, kwargs))

        def pure(state: Any) -> dict[str, Any]:
            with nnx.merge_context(lift, inner=True) as inside:
                copies = inside.merge(graphdef, state)
            before = _Contents(copies)
            out = fun(*copies[0], **copies[1])
            written = None if _has_objects(out) else _Contents(copies).find_written(before)
            if written is not None:
                return {"written": written, "out": out}
            with nnx.split_context(lift) as inside:  # every object is made anew in its place
                return {"graph": inside.split((*copies, out))}

        result = run(pure, state)
        if "graph" in result:
            with nnx.merge_context(lift, inner=False) as outside:
                return outside.merge(*result["graph"])[2]
    variables = _Contents((args, kwargs)).variables
    for number, value in result["written"].items():
        variables[number].set_raw_value(value)
    return result["out"]


class _Contents:
    """What a tree of nnx objects holds.

    Attributes:
      variables: its Variables, in an order that copies of the tree share.
    """

    def __init__(self, tree: Any):
        self._graphdef, state = nnx.split(tree, graph=True)
        nodes = [node for _, node in nnx.iter_graph(tree, graph=True)]
        self.variables = [node for node in nodes if isinstance(node, nnx.Variable)]
        self._values = [variable.get_raw_value() for variable in self.variables]
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
        self._bare = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_variable) if not is_variable(leaf)]

    def find_written(self, before: "_Contents") -> dict[int, Any] | None:
        """The values of the Variables that were written, by their numbers; `None` if more was, such as attributes."""
        if self._graphdef != before._graphdef or not _are_same(self._bare, before._bare):
            return None
        pairs = enumerate(zip(self._values, before._values, strict=True))
        return {i: new for i, (new, old) in pairs if not _are_same(jax.tree.leaves(new), jax.tree.leaves(old))}


def _are_same(new: list[Any], old: list[Any]) -> bool:
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


def _has_objects(tree: Any) -> bool:
    return any(map(is_flax_object, jax.tree.leaves(tree, is_leaf=is_flax_object)))


_GIVEN = "__jmp_given__"
"""The attribute of a decorated class that holds its policy and the arguments to keep."""

M = TypeVar("M", bound=nnx.Module)


@remember_on_class
def decorate_class(base: type, given: Policy | PolicyMap, keep: tuple[str, ...]) -> type:
    """The subclass of an nnx class that gives a policy to its instances, and to its subclasses' instances.

    Its methods are wrapped, as the methods of the instances are, so that `Net.encode(net, x)` has the policy too.
    """
    forget_warnings(given)
    wrapped, methods = wrap_methods(base, base)
    namespace = {_GIVEN: (given, keep), **methods}
    recipe = decorate_class, (base, given, keep)
    metaclass = _make_metaclass(type(base))
    return make_subclass(wrapped, namespace, recipe, metaclass=metaclass, **pytree_options(base))


def find_given_policy(kind: type) -> Policy | PolicyMap | None:
    """The policy that a decorated class gives to its instances, or `None`."""
    return getattr(kind, _GIVEN, (None, ()))[0]


def cast_params(model: M, policy: "PolicySpec") -> M:
    """Copies a model, with its Params in the param dtype of a policy.

    `with_policy` shares the Variables of an instance, and so refuses one whose Params have another dtype; it takes
    this copy. Batch statistics, caches, RNG states and other Variables keep their dtypes. The model itself stays as
    it is, and shares nothing with the copy.

    Args:
      model: an nnx module.
      policy: anything that `get_policy` reads; of a map, each Param gets the dtype of the policy that covers it.

    Returns:
      A model of the same structure. It has no policy yet.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    >>> half = jmp.nnx.cast_params(model, "bfloat16")
    >>> half.scale.dtype, half.mean.dtype, model.scale.dtype
    (dtype(bfloat16), dtype('float32'), dtype('float32'))
    """
    copy = nnx.clone(model)
    # Attaching the policy tells which one covers a Param; what it was attached to shares the Params with the copy.
    Attachment(get_policy(policy), cast_param).attach(copy)
    return copy


@remember_on_class
def _make_metaclass(parent: type[type]) -> type[type]:
    """A metaclass whose classes attach the policy where a call of the class ends: after the outermost `__init__`."""
    if getattr(parent, "attaches_policy", False):
        return parent

    def construct(kind: Any, *args: Any, **kwargs: Any) -> Any:
        module = parent.__call__(kind, *args, **kwargs)
        given, keep = getattr(kind, _GIVEN)
        return _attach_to_new(module, given, keep, (args, kwargs))

    return pickle_by_recipe(type(parent.__name__, (parent,), {"__call__": construct, "attaches_policy": True}))


def _attach_to_new(module: nnx.Module, given: Policy | PolicyMap, keep: tuple[str, ...], arguments: PyTree) -> Any:
    """Attaches the policy to a new module, in place, because nobody else holds it; copies what came as an argument."""
    attachment = _make_attachment(given, keep, arguments)
    attachment.attach(module)
    for message in attachment.explain_unused_rules():
        warn_once(given, message)
    for message in attachment.explain_written_dtypes():
        warn_once(type(module), message)
    return module


def attach_wrapped(
    module: nnx.Module, given: Policy | PolicyMap, path: str, arguments: PyTree
) -> tuple[nnx.Module, dict[str, type]]:
    """Gives a policy to a new module that a linen model wraps.

    Args:
      module: the module, which nobody else holds.
      given: what holds there; the rules of a map name paths in the whole model.
      path: where it stands in the model.
      arguments: what it was made of.

    Returns:
      The module, and the types of the modules in it by path.
    """
    attachment = _make_attachment(given, (), arguments)
    names = tuple(path.split("/")) if path else ()
    return attachment.attach_inside(module, names), attachment.types


def _make_attachment(given: Policy | PolicyMap, keep: tuple[str, ...], arguments: PyTree) -> Attachment:
    """Makes the walk over a new module, which changes modules in place but for those that came as arguments."""
    passed_in: set[int] = set()
    _collect_ids(arguments, passed_in)

    def settle(path: str, param: nnx.Param, policy: Policy) -> None:
        (reject_param if id(param) in passed_in else cast_param)(path, param, policy)

    return Attachment(given, settle, keep=keep, owned=lambda inner: id(inner) not in passed_in)


def cast_param(path: str, param: nnx.Param, policy: Policy) -> None:
    """Rounds a Param that nobody else holds, such as one that was just drawn in the dtype its author chose."""
    param.set_value(cast_floating(param.get_value(), policy.param_dtype))


def _collect_ids(value: Node, ids: set[int]) -> None:
    """Collects the ids of the modules, Params and containers in a value."""
    if id(value) not in ids and find_kind(type(value)) is not NodeKind.OTHER:
        ids.add(id(value))
        for _, item in list_items(value):
            _collect_ids(item, ids)
