"""The format of training in 8 bits of floating point. Data only."""

import dataclasses

from ._float8_recipe import DelayedScaling, Recipe, parse_recipe
from ._format_fields import check_count, check_flag, spelled_options

MULTIPLE = 16
"""What the sizes of a product are multiples of on hardware that multiplies 8-bit floating point."""

ODD_ROWS = f"the number of its rows is no multiple of {MULTIPLE}"
"""Why a product stays in the compute dtype whose other sizes are fit for 8 bits."""

_MIN_SIZE = 2**14
"""With smaller layers in 8 bits too, the demo's GPT had 1.3 % more validation loss than in bfloat16, and 0.4 %
without them: means of two recipes, each with two seeds."""


# An own __init__, since a recipe may be given as its string and is a recipe ever after.
@dataclasses.dataclass(frozen=True, init=False)
class Float8:
    """Training in 8 bits: products of e4m3 in the forward pass, and of e5m2 with e4m3 in the backward pass.

    Weights stay in the parameter dtype, and optimizers see nothing of the format: the operands of each product are
    scaled into the range of 8 bits and rounded on the way in. Casts saturate. Products of lengths that are no multiples
    of 16, or too small to gain, stay in the compute dtype; `jmp_policy.explain` says which. There is a reverse-mode
    derivative, and neither a forward-mode nor a second one.

    Args:
      recipe: where the scales come from: a `DelayedScaling`, a `CurrentScaling`, or the string of one.
      amax_history_length: over how many steps a delayed scale looks back.
      margin: scales leave a factor of `2**margin` of room below the largest number of the format.
      weight_grad: whether the gradient of the weight is computed in 8 bits too, else in the compute dtype.
      min_size: the number of elements below which a weight is left in the compute dtype. The time of the
        casts grows with the operands, and what they save with the product, so that small layers lose time, and
        precision for nothing. From which size on yours gain depends on the device.

    Raises:
      TypeError, ValueError: an argument is not of its kind.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3; NVIDIA Transformer Engine's
    `DelayedScaling` (a history of 1024, max or most recent, a margin); Keras's `QuantizedFloat8DTypePolicy`.

    >>> str(Float8()), str(Float8(amax_history_length=16)), str(Float8("current/row", margin=1))
    ('float8', 'float8/16', 'float8(recipe=current/row,margin=1)')
    """

    recipe: Recipe
    amax_history_length: int
    margin: int
    weight_grad: bool
    min_size: int

    def __init__(
        self,
        recipe: Recipe | str = DelayedScaling(),  # noqa: B008 # frozen
        amax_history_length: int = 1024,
        margin: int = 0,
        weight_grad: bool = True,
        min_size: int = _MIN_SIZE,
    ) -> None:
        vars(self).update(
            recipe=parse_recipe(recipe),
            amax_history_length=amax_history_length,
            margin=margin,
            weight_grad=weight_grad,
            min_size=min_size,
        )
        check_count(self, "amax_history_length", 1)
        check_count(self, "margin", 0, such_as=1)
        check_flag(self, "weight_grad")
        check_count(self, "min_size", 0)

    def __str__(self) -> str:
        length = "" if self.amax_history_length == Float8().amax_history_length else f"/{self.amax_history_length}"
        return f"float8{length}" + spelled_options(self, "recipe", "margin", "weight_grad", "min_size")
