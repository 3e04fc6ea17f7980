"""The spec of a module: what a policy makes of it, kept by its class."""

import dataclasses
import enum
from typing import Any

import numpy as np

from ..policy import Float8, Policy, PolicyMap
from ._float8 import make_float8_layer, make_wide_layer
from ._layer_table import make_quantized_embed
from ._rounding import make_rounding_layer

SPEC = "__jmp_spec__"
"""The attribute of a policied class that holds its spec. The class holds it, not the instance, because classes are part
of a graph definition: copies, `nnx.split`, `nnx.merge` and the key of every jit cache carry them. Old pickles hold
classes with an attribute of this name."""


class CallEffect(enum.Enum):
    """What a policy does where a method of a module is called from outside."""

    NOTHING = enum.auto()
    """The method runs as it is: of a layer of Flax whose attributes say it all."""
    COMPUTES = enum.auto()
    """The method computes as the policy says, with arguments and results as they come."""
    CASTS = enum.auto()
    """Arguments and results are cast as well, because a rule of a map names the module."""
    CASTS_AT_ROOT = enum.auto()
    """The same, because `with_policy` was applied to this very module."""


class DtypeSource(enum.Enum):
    """Where the code of a module finds the dtype that it computes in."""

    AUTHOR = enum.auto()
    """In a `dtype` that the author of the model wrote, or in a linen module that has a policy of its own."""
    FIELD = enum.auto()
    """In a `dtype` that the author left open: the policy writes its compute dtype there."""
    PARAMS = enum.auto()
    """In its Params: without a `dtype` to heed, its methods read them in compute dtype."""
    LINEN_MODULE = enum.auto()
    """In the linen module that it wraps, which was handed the policy."""


class Product(enum.Enum):
    """How a layer multiplies by its weight."""

    OWN = enum.auto()
    """With the functions in its attributes."""
    FLOAT8 = enum.auto()
    """In 8-bit floating point, in a subclass that knows the state of the layer."""
    ROUNDED_AT_RANDOM = enum.auto()
    """In blocks, and gradients with noise, in a subclass that knows the stream of the layer's keys."""
    QUANTIZED_ROWS = enum.auto()
    """By the rows of a quantized table, in a subclass of the embedding that reads them."""


@dataclasses.dataclass(frozen=True)
class ModuleSpec:
    """What a policy makes of one module.

    Attributes:
      base: the class the module has without a policy.
      policy: the policy that holds for this module.
      given: what was attached to this module or to the one around it that has a policy of its own.
      lineage: with a map, the types by path of this module and those around it, for the rules that name types.
      effect: what a call of its methods does.
      keep: names of arguments that enter uncast.
      dtype_source: where its code finds the compute dtype.
      product: how it multiplies by its weight.
      accumulate_dtype: what it hands over sums in before it rounds them; `None` if it does not.
      authored: attributes that the policy replaced, as their author left them.
    """

    base: type
    policy: Policy
    given: Policy | PolicyMap
    lineage: tuple[tuple[str, type], ...] = ()
    effect: CallEffect = CallEffect.COMPUTES
    keep: tuple[str, ...] = ()
    dtype_source: DtypeSource = DtypeSource.AUTHOR
    product: Product = Product.OWN
    accumulate_dtype: np.dtype | None = None
    authored: tuple[tuple[str, Any], ...] = ()

    @property
    def runs(self) -> type:
        """The class whose methods run; no field, because it has no name by which it could be pickled."""
        narrow = self._find_product_class()
        return narrow if self.accumulate_dtype is None else make_wide_layer(narrow, self.accumulate_dtype)

    def _find_product_class(self) -> type:
        if self.product is Product.FLOAT8 and isinstance(self.policy.quantization, Float8):
            return make_float8_layer(self.base, self.policy.quantization)
        if self.product is Product.ROUNDED_AT_RANDOM:
            return make_rounding_layer(self.base)
        return make_quantized_embed(self.base) if self.product is Product.QUANTIZED_ROWS else self.base

    @property
    def attached(self) -> bool:
        """Whether `with_policy` was applied to this very module."""
        return self.effect is CallEffect.CASTS_AT_ROOT

    @property
    def casts(self) -> bool:
        """Whether arguments and results are cast here."""
        return self.effect is CallEffect.CASTS or self.effect is CallEffect.CASTS_AT_ROOT

    @property
    def open_dtype(self) -> bool:
        """Whether the module has a `dtype` that its author left open."""
        return self.dtype_source is DtypeSource.FIELD

    @property
    def path(self) -> str:
        """Where the module stands in what the map was attached to."""
        return self.lineage[-1][0] if self.lineage else ""


def find_spec(module: Any) -> ModuleSpec | None:
    """The spec of a module, `None` outside of policied trees."""
    return vars(type(module)).get(SPEC)  # not getattr: a subclass of a policied class has its own methods
