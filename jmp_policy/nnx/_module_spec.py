"""The spec of a module: the effects of its policy, stored in its class."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np

from ..policy import Policy, PolicyMap
from ._products import make_wide_layer

SPEC = "__jmp_spec__"
"""The attribute of a policied class that holds its spec.

The class holds it, not the instance, because classes are part of a graph definition: copies, `nnx.split`, `nnx.merge`
and the key of every jit cache carry them.
"""


class CallEffect(enum.Enum):
    """The effect of a policy on a call of a method from outside."""

    NOTHING = enum.auto()  # runs the method unchanged: the attributes of a Flax layer are enough
    COMPUTES = enum.auto()  # computes as the policy says, without casts of arguments and results
    CASTS = enum.auto()  # casts arguments and results too, because a rule of a map names the module
    CASTS_AT_ROOT = enum.auto()  # the same, because `with_policy` was applied to this very module


class DtypeSource(enum.Enum):
    """The place where the code of a module reads its compute dtype."""

    AUTHOR = enum.auto()  # a `dtype` that the author wrote, or a linen module that has a policy of its own
    FIELD = enum.auto()  # a `dtype` that the author left open: the policy writes its compute dtype there
    PARAMS = enum.auto()  # the Params: without a `dtype`, methods read them in the compute dtype
    LINEN_MODULE = enum.auto()  # the wrapped linen module, which has the policy


@dataclasses.dataclass(frozen=True)
class ModuleSpec:
    """The effects of a policy on one module."""

    base: type  # the class of the module without a policy
    policy: Policy  # the policy of this module
    # The policy or map that was attached to it, or to the module around it that has a policy of its own.
    given: Policy | PolicyMap
    # For a map, the types by path of this module and those around it, for the rules that name types.
    lineage: tuple[tuple[str, type], ...] = ()
    effect: CallEffect = CallEffect.COMPUTES  # the effect on a call of its methods
    no_cast: tuple[str, ...] = ()  # names of arguments that are not cast
    dtype_source: DtypeSource = DtypeSource.AUTHOR  # where its code reads the compute dtype
    # Makes the subclass that multiplies by its weight; `None` if the attributes are enough.
    layer_class: Callable[[Any], type] | None = None
    accumulate_dtype: np.dtype | None = None  # the output dtype of its matmul before it is cast down, or `None`
    authored: tuple[tuple[str, Any], ...] = ()  # attributes that the policy replaced, with their original values

    @property
    def runs(self) -> type:
        """The class whose methods run. Not a field, because pickle could not find it by name."""
        runs = self.base if self.layer_class is None else self.layer_class(self.base)
        return runs if self.accumulate_dtype is None else make_wide_layer(runs, self.accumulate_dtype)

    @property
    def attached(self) -> bool:
        """True if `with_policy` was applied to this very module."""
        return self.effect is CallEffect.CASTS_AT_ROOT

    @property
    def casts(self) -> bool:
        """True if arguments and results are cast here."""
        return self.effect is CallEffect.CASTS or self.effect is CallEffect.CASTS_AT_ROOT

    @property
    def path(self) -> str:
        """The path of the module in the model that the map was attached to."""
        return self.lineage[-1][0] if self.lineage else ""


def find_spec(module: Any) -> ModuleSpec | None:
    """Returns the spec of a module, or `None` outside of policied trees."""
    return vars(type(module)).get(SPEC)  # not getattr: a subclass of a policied class has its own methods
