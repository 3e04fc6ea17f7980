"""Training in 8 bits of floating point: the format, the recipes of its scales, and how fields of formats are checked.

Data only: `jmp_policy.quant` computes with it.
"""

import dataclasses

from .._base import did_you_mean, quote

MULTIPLE = 16
"""What the sizes of a product are multiples of on hardware that multiplies 8-bit floating point."""

ODD_ROWS = f"the number of its rows is no multiple of {MULTIPLE}"
"""Why a product stays in the compute dtype whose other sizes are fit for 8 bits."""

_MIN_SIZE = 2**14
"""With smaller layers in 8 bits too, the GPT of `examples/gpt` had 1.3 % more validation loss than in bfloat16, and
0.4 % without them: means of two recipes, each with two seeds."""


def check_count(format: object, name: str, least: int, *, such_as: int = 128) -> None:
    """Raises unless a field is a whole number that is large enough.

    Raises:
      TypeError: it is not an int, or it is a bool.
      ValueError: it is less than `least`.
    """
    value = getattr(format, name)
    example = f"For example: {type(format).__name__}({name}={such_as})."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {quote(value)}. {example}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}. {example}")


def check_flag(format: object, name: str) -> None:
    """Raises unless a field is a bool.

    Raises:
      TypeError: it is none.
    """
    value = getattr(format, name)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, got {quote(value)}. For example: {type(format).__name__}().")


def check_word(format: object, name: str, known: tuple[str, ...]) -> None:
    """Raises unless a field is one of some words.

    Raises:
      ValueError: it is none of them.
    """
    value = getattr(format, name)
    if not isinstance(value, str) or value not in known:
        example = f"For example: {type(format).__name__}({name}={known[-1]!r})."
        raise ValueError(f"Unknown {name} {quote(value)}. {did_you_mean(value, known)} {example}")


def spell_options(format: object, *names: str) -> str:
    """What differs from the defaults, as the options of a string: `"(activations=false)"`, or nothing."""
    default = type(format)()
    differing = [name for name in names if getattr(format, name) != getattr(default, name)]
    options = [f"{name}={str(getattr(format, name)).lower()}" for name in differing]
    return f"({','.join(options)})" if options else ""


@dataclasses.dataclass(frozen=True)
class CurrentScaling:
    """Scales are made from the numbers of this very step, and nothing is kept.

    Args:
      granularity: `"tensor"`, one scale for all of an operand; or `"row"`, one for each row of a product's left operand
        and each column of its right one, that is for each slice along the axes that are not summed over.

    Raises:
      ValueError: the granularity is neither.

    Source: NVIDIA Transformer Engine's `Float8CurrentScaling`; torchao's `float8` training (tensorwise and rowwise).

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.CurrentScaling()), str(jmp.quant.CurrentScaling("row"))
    ('current', 'current/row')
    """

    granularity: str = "tensor"

    def __post_init__(self) -> None:
        check_word(self, "granularity", ("tensor", "row"))

    def __str__(self) -> str:
        return "current" if self.granularity == "tensor" else f"current/{self.granularity}"


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Scales are made from the largest magnitudes (amax) of earlier steps, which a model keeps as state.

    An operand is then read once: it need not be measured before it is scaled. A number that outgrows the scale of its
    step becomes the largest one of the format.

    The state is trained beside the parameters, under `jax.jit`: its gradient is its next value, and what is not
    differentiated learns no scale. In linen it is the collection `_overwrite_with_gradient` that `model.init` returns
    beside `"params"`; give both to `value_and_grad`, `tx.init` and `optim.step`, or to `linen.TrainState` as `params`.
    The `update` of plain optax would take it for a parameter. `nn.scan` and `nn.vmap` hand it on where their
    `variable_axes` name it. In nnx it is `nnx.Float8State`, which `jmp_policy.nnx.value_and_grad` and
    `jmp_policy.nnx.Optimizer` see to.

    Args:
      amax: `"max"`, the largest of the history, which spikes do not surprise twice; or `"most_recent"`.
      delay: how many steps after an amax was seen it acts. 1 makes the scale from the history as it is used, as Flax
        does; 2 applies the scale that the step before made and stored, as Keras does.

    Raises:
      ValueError: an argument is none of these.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3; NVIDIA Transformer Engine's
    `DelayedScaling`.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> str(jmp.quant.DelayedScaling()), str(jmp.quant.DelayedScaling("most_recent", delay=2))
    ('delayed', 'delayed/most_recent/2')

    >>> from flax import linen as nn
    >>> model = jmp.with_policy(nn.Dense(128), "float8/2_from_mixed_bfloat16")
    >>> x, tx = jnp.full((16, 128), 3.0), jmp.optim.skip_nonfinite(optax.sgd(0.1))
    >>> variables = model.init(jax.random.key(0), x)
    >>> loss_fn = lambda variables: jnp.mean(model.apply(variables, x).astype(jnp.float32))
    >>> train_step = jax.jit(jmp.optim.minimize(loss_fn, tx))
    >>> variables, opt_state, loss = train_step(variables, tx.init(variables))
    >>> variables["_overwrite_with_gradient"]["input_amax_history"].tolist()
    [3.0, 0.0]
    """

    amax: str = "max"
    delay: int = 1

    def __post_init__(self) -> None:
        check_word(self, "amax", ("max", "most_recent"))
        if type(self.delay) is not int or self.delay not in (1, 2):
            raise ValueError(f"delay is 1 or 2, got {self.delay!r}. For example: DelayedScaling(delay=2).")

    def __str__(self) -> str:
        amax = "" if self.amax == "max" else f"/{self.amax}"
        return f"delayed{amax}" if self.delay == 1 else f"delayed{amax}/{self.delay}"


Recipe = CurrentScaling | DelayedScaling

_RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "delayed/2": DelayedScaling(delay=2),
    "delayed/most_recent": DelayedScaling("most_recent"),
    "delayed/most_recent/2": DelayedScaling("most_recent", delay=2),
    "current": CurrentScaling(),
    "current/row": CurrentScaling("row"),
}
_LONGER = {
    "delayed/max": DelayedScaling(),
    "delayed/max/2": DelayedScaling(delay=2),
    "current/tensor": CurrentScaling(),
}


def parse_recipe(spec: object) -> Recipe:
    """Reads a recipe: one of the classes, or the string of one.

    Raises:
      ValueError: it is none.

    >>> parse_recipe("current / ROW"), parse_recipe("delayed/2")
    (CurrentScaling(granularity='row'), DelayedScaling(amax='max', delay=2))
    """
    if isinstance(spec, Recipe):
        return spec
    text = "/".join(word.strip() for word in spec.lower().split("/")) if isinstance(spec, str) else ""
    recipe = _RECIPES.get(text, _LONGER.get(text))
    if recipe is None:
        raise ValueError(f"Unknown recipe {quote(spec)}. {did_you_mean(spec, _RECIPES)} For example: 'current/row'.")
    return recipe


# An own __init__, since a recipe may be given as its string and is a recipe ever after.
@dataclasses.dataclass(frozen=True, init=False)
class Float8:
    """Training in 8 bits: products of e4m3 in the forward pass, and of e5m2 with e4m3 in the backward pass.

    Weights stay in the parameter dtype, and optimizers see nothing of the format: the operands of each product are
    scaled into the range of 8 bits and rounded on the way in. Casts saturate. Products whose lengths are not multiples
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

    >>> import jmp_policy as jmp
    >>> str(jmp.quant.Float8()), str(jmp.quant.Float8(amax_history_length=16))
    ('float8', 'float8/16')
    >>> str(jmp.quant.Float8("current/row", margin=1))
    'float8(recipe=current/row,margin=1)'
    """

    recipe: Recipe
    amax_history_length: int
    margin: int
    weight_grad: bool
    min_size: int

    def __init__(
        self,
        recipe: Recipe | str = DelayedScaling(),  # frozen
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
        return f"float8{length}" + spell_options(self, "recipe", "margin", "weight_grad", "min_size")
