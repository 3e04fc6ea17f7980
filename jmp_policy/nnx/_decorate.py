"""Decorated classes, whose instances get the policy when their constructor ends."""

from typing import Any

from flax import nnx

from .._made_classes import make_subclass, pickle_by_recipe
from .._memory import remember_on_class
from .._messages import forget_warnings, warn_once
from .._policy import Policy
from .._policy_map import PolicyMap
from ._attachment import Attachment, cast_param, reject_param, wrap_methods
from ._nodes import NodeKind, find_kind, list_items

_GIVEN = "__jmp_given__"


@remember_on_class
def decorate_class(base: type, given: Policy | PolicyMap, keep: tuple[str, ...]) -> type:
    """The subclass of an nnx class whose instances, and those of its own subclasses, get a policy.

    Its methods are wrapped as well as those of the instances, so that `Net.encode(net, x)` has the policy too.
    """
    forget_warnings(given)
    namespace = {
        _GIVEN: (given, keep),
        **wrap_methods(base),
    }
    options: dict[str, Any] = {} if getattr(base, "_pytree__is_pytree", True) else {"pytree": False}
    recipe = decorate_class, (base, given, keep)
    return make_subclass(base, namespace, recipe, metaclass=_make_metaclass(type(base)), **options)


def find_given_policy(kind: type) -> Policy | PolicyMap | None:
    """The policy that a decorated class gives to its instances, or `None`."""
    return getattr(kind, _GIVEN, (None, ()))[0]


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


def _attach_to_new(module: nnx.Module, given: Policy | PolicyMap, keep: tuple[str, ...], arguments: Any) -> Any:
    """Attaches the policy to a new module, in place, for it is nobody else's; what came as an argument is copied."""
    passed_in: set[int] = set()
    _collect_ids(arguments, passed_in)

    def settle(path: str, param: nnx.Param, policy: Policy) -> None:
        (reject_param if id(param) in passed_in else cast_param)(path, param, policy)

    attachment = Attachment(given, settle, keep=keep, owned=lambda inner: id(inner) not in passed_in)
    attachment.attach(module)
    for message in attachment.explain_unused_rules():
        warn_once(given, message)
    for message in attachment.explain_written_dtypes():
        warn_once(type(module), message)
    return module


def _collect_ids(value: Any, ids: set[int]) -> None:
    """Collects the ids of the modules, Params and containers in a value."""
    if id(value) not in ids and find_kind(type(value)) is not NodeKind.OTHER:
        ids.add(id(value))
        for _, item in list_items(value):
            _collect_ids(item, ids)
