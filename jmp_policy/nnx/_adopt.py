"""Modules that were assigned to a policied one after it got its policy."""

from typing import Any

from flax import nnx

from ._attachment import Attachment
from ._mismatch import reject
from ._module_spec import ModuleSpec, find_spec
from ._nodes import NodeKind, items_of, kind_of


def adopt(module: nnx.Module, spec: ModuleSpec) -> None:
    """Gives the policy to the modules that were assigned to a policied one since it got its own.

    Policied modules call this before each call, because nothing announces that a list or a dictionary inside them
    got another element. The new modules are copied, as `with_policy` does, and the copies take their places. A module
    that a call makes and uses itself has no policy until the next call: the running code holds the one it made.

    Args:
      module: the policied module.
      spec: its spec.

    Raises:
      ValueError: a Param is stored in another dtype than the param dtype.
    """
    for name, value in list(vars(module).items()):
        if _has_new_module(value, spec):
            attachment = Attachment(spec.given, reject, adopt, lineage=spec.lineage)
            path = (*spec.path.split("/"), name) if spec.path else (name,)
            vars(module)[name] = attachment.include(value, path, spec.policy)


def _has_new_module(value: Any, spec: ModuleSpec) -> bool:
    match kind_of(type(value)):
        case NodeKind.MODULE:
            other = find_spec(value)
            return other is None or not (other.attached or other.given is spec.given)
        case NodeKind.PYTREE | NodeKind.BUILTIN:
            return any(_has_new_module(item, spec) for _, item in items_of(value))
    return False
