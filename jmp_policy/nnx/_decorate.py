"""Classes that give a policy to their instances, and `cast_params`."""

from typing import Any, TypeVar

from flax import nnx

from .._base import PyTree, cast_floating, forget_warnings, hide_frames, remember_on_class, warn_once
from ..modules import make_subclass, pickle_by_recipe
from ..policy import Policy, PolicyMap, PolicySpec, get_policy
from ._attachment import Attachment, reject_param, wrap_methods
from ._shadow import pytree_options, walk_nodes

_GIVEN = "__jmp_given__"
"""The attribute of a decorated class with its policy and `no_cast`."""

M = TypeVar("M", bound=nnx.Module)


@remember_on_class
def decorate_class(base: type, given: Policy | PolicyMap, no_cast: tuple[str, ...]) -> type:
    """Returns the subclass of an nnx class that gives a policy to its instances, also through `Net.encode(net, x)`."""
    forget_warnings(given)
    wrapped, methods = wrap_methods(base, base)
    namespace = {_GIVEN: (given, no_cast), **methods}
    recipe = decorate_class, (base, given, no_cast)
    metaclass = _make_metaclass(type(base))
    return make_subclass(wrapped, namespace, recipe, metaclass=metaclass, **pytree_options(base))


def find_given_policy(kind: type) -> Policy | PolicyMap | None:
    """Returns the policy that a decorated class gives to its instances, or `None`."""
    return getattr(kind, _GIVEN, (None, ()))[0]


def cast_params(model: M, policy: "PolicySpec") -> M:
    """Copies a model, with its Params in the param dtype of a policy.

    `with_policy` shares the Variables of an instance, and so rejects one whose Params have another dtype; it accepts
    this copy. Batch statistics, caches, RNG states and other Variables keep their dtypes. The model does not change,
    and shares nothing with the copy.

    Args:
      model: an nnx module.
      policy: anything that `get_policy` reads; with a map, each Param gets the param dtype of the policy that covers
        it.

    Returns:
      A model of the same structure, without a policy.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    >>> half = jmp.nnx.cast_params(model, "bfloat16")
    >>> half.scale.dtype, half.mean.dtype, model.scale.dtype
    (dtype(bfloat16), dtype('float32'), dtype('float32'))
    """
    copy = nnx.clone(model)
    # The walk finds the policy of each Param, and casts it in the copy; the policied modules are dropped.
    Attachment(get_policy(policy), cast_param).attach(copy)
    return copy


@remember_on_class
def _make_metaclass(parent: type[type]) -> type[type]:
    """Makes a metaclass that attaches the policy at the end of a constructor call, after the outermost `__init__`."""
    if getattr(parent, "attaches_policy", False):
        return parent

    @hide_frames
    def construct(kind: Any, *args: Any, **kwargs: Any) -> Any:
        module = parent.__call__(kind, *args, **kwargs)
        given, no_cast = getattr(kind, _GIVEN)
        # In place; the modules among the arguments of the constructor are copied.
        attachment = _make_attachment(given, no_cast, (args, kwargs))
        attachment.attach(module)
        for message in (*attachment.explain_unused_rules(), *attachment.explain_unused_cache()):
            warn_once(given, message)
        for message in attachment.explain_written_dtypes():
            warn_once(type(module), message)
        return module

    return pickle_by_recipe(type(parent.__name__, (parent,), {"__call__": construct, "attaches_policy": True}))


def attach_wrapped(
    module: nnx.Module, given: Policy | PolicyMap, path: str, arguments: PyTree
) -> tuple[nnx.Module, dict[str, type]]:
    """Gives a policy to a new module that a linen model wraps (`Adapter.attach_wrapped`)."""
    attachment = _make_attachment(given, (), arguments)
    names = tuple(path.split("/")) if path else ()
    return attachment.attach_inside(module, names), attachment.types


def _make_attachment(given: Policy | PolicyMap, no_cast: tuple[str, ...], arguments: PyTree) -> Attachment:
    passed_in = {id(node) for _, node in walk_nodes(arguments)}

    def settle(path: str, param: nnx.Param, policy: Policy) -> None:
        (reject_param if id(param) in passed_in else cast_param)(path, param, policy)

    return Attachment(given, settle, no_cast=no_cast, owned=lambda inner: id(inner) not in passed_in)


def cast_param(path: str, param: nnx.Param, policy: Policy) -> None:
    """Casts a Param to which no other code refers, such as one that was just drawn in its author's dtype."""
    param.set_value(cast_floating(param.get_value(), policy.param_dtype))
