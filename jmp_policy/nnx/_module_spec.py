"""What a policy makes of one module: the spec that its class carries."""

import dataclasses
from typing import Any

from .._float8_format import Float8
from .._policy import Policy
from .._policy_map import PolicyMap
from ._float8 import float8_layer
from ._quantized_embed import quantized_embed

SPEC = "__jmp_spec__"
"""The attribute of a policied class that holds its spec. The class holds it, not the instance, because classes are
part of a graph definition: copies, `nnx.split`, `nnx.merge` and the key of every jit cache carry them."""


@dataclasses.dataclass(frozen=True)
class ModuleSpec:
    """What a policy makes of one module.

    Attributes:
      base: the class the module has without a policy.
      policy: the policy that holds for this module.
      given: what was attached to this module or to the one around it that has a policy of its own.
      lineage: with a map, the types by path of this module and those around it, for the rules that name types.
      attached: whether `with_policy` was applied to this very module.
      boundary: whether inputs and outputs are cast here.
      calls: whether its methods have anything to do; in a layer of Flax whose `dtype` says it all, they have not.
      keep: names of arguments that enter uncast.
      casts_params: whether its methods read its own Params in compute dtype, because it has no `dtype` to heed.
      open_dtype: whether the module has a `dtype` that its author left open.
      bridges: whether the policy was handed on to the linen module that this one wraps.
      authored: attributes that the policy replaced, as their author left them.
      reads_quantized_rows: whether its methods run in the subclass of an embedding that knows a quantized table.
      multiplies_in_float8: the attribute of the function that it multiplies with in 8-bit floating point, if it does.
    """

    base: type
    policy: Policy
    given: Policy | PolicyMap
    lineage: tuple[tuple[str, type], ...] = ()
    attached: bool = False
    boundary: bool = False
    calls: bool = True
    keep: tuple[str, ...] = ()
    casts_params: bool = False
    open_dtype: bool = False
    bridges: bool = False
    authored: tuple[tuple[str, Any], ...] = ()
    reads_quantized_rows: bool = False
    multiplies_in_float8: str | None = None

    @property
    def runs(self) -> type:
        """The class whose methods run; no field, because it has no name by which it could be pickled."""
        if self.multiplies_in_float8 is not None and isinstance(self.policy.quantization, Float8):
            return float8_layer(self.base, self.multiplies_in_float8, self.policy.quantization)
        return quantized_embed(self.base) if self.reads_quantized_rows else self.base

    @property
    def path(self) -> str:
        """Where the module stands in what the map was attached to."""
        return self.lineage[-1][0] if self.lineage else ""


def find_spec(module: Any) -> ModuleSpec | None:
    """The spec of a module, `None` outside of policied trees."""
    return vars(type(module)).get(SPEC)  # not getattr: a subclass of a policied class has its own methods
