"""What `with_policy`, `policy_of` and `explain` do with nnx modules and module classes."""

from collections.abc import Collection
from typing import Any

from .._messages import warn_user
from .._policy import Policy
from .._policy_map import PolicyMap
from ._attachment import AUTOCAST_EXAMPLE as AUTOCAST_EXAMPLE, Attachment, reject_param
from ._call import parse_keep
from ._decorate import decorate_class, find_given_policy
from ._explain import explain as explain
from ._lifted import lifted as lifted
from ._module_spec import find_spec
from ._named import named as named
from ._quantize import quantize as quantize
from ._watch import bound as bound, call_watched as call_watched, weights_of as weights_of

AUDIT_EXAMPLE = "audit(lambda model, x: model(x))(model, x)"


def attach(target: Any, policy: Policy | PolicyMap, keep: Collection[str]) -> Any:
    """Gives an nnx module or module class a policy.

    A module is copied, with the modules inside it, and shares its Variables with the copy. A class gives a subclass
    of the same name, whose instances get the policy when their constructor ends.

    Raises:
      ValueError: a Param is stored in another dtype than the param dtype, or `keep` names no argument.
    """
    base = target if isinstance(target, type) else type(target)
    names = parse_keep(base, keep)
    if isinstance(target, type):
        return decorate_class(target, policy, names)
    attachment = Attachment(policy, reject_param, keep=names)
    module = attachment.attach(target)
    for message in (*attachment.explain_unused_rules(), *attachment.explain_written_dtypes()):
        warn_user(message)
    return module


def policy_of(target: Any) -> Policy | PolicyMap | None:
    """The policy that an nnx module or class was given, by itself or by a rule of a map that names it."""
    if isinstance(target, type):
        return find_given_policy(target)
    spec = find_spec(target)
    if spec is None or not spec.casts:
        return None
    return spec.given if spec.attached else spec.policy
