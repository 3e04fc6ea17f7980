"""Modules that were assigned to a policied one after it got its policy."""

from typing import Any

from flax import nnx

from ._attachment import Attachment
from ._mismatch import reject
from ._roles import Kind, Role, items_of, kind_of, role_of


def adopt(module: nnx.Module, role: Role) -> None:
    """Gives the policy to the modules that were assigned to a policied one since it got its own.

    Policied modules call this before each call, because nothing announces that a list or a dictionary inside them
    got another element. The new modules are copied, as `with_policy` does, and the copies take their places. A module
    that a call makes and uses itself has no policy until the next call: the running code holds the one it made.

    Args:
      module: the policied module.
      role: its role.

    Raises:
      ValueError: a Param is stored in another dtype than the param dtype.
    """
    for name, value in list(vars(module).items()):
        if _has_new_module(value, role):
            attachment = Attachment(role.given, reject, adopt, lineage=role.lineage)
            path = (*role.path.split("/"), name) if role.path else (name,)
            vars(module)[name] = attachment.include(value, path, role.policy)


def _has_new_module(value: Any, role: Role) -> bool:
    match kind_of(type(value)):
        case Kind.MODULE:
            other = role_of(value)
            return other is None or not (other.attached or other.given is role.given)
        case Kind.PYTREE | Kind.BUILTIN:
            return any(_has_new_module(item, role) for _, item in items_of(value))
    return False
