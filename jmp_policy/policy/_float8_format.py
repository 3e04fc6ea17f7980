"""Float8 training: the format, its scaling recipes, and validation of format fields. Data only."""

import dataclasses

from .._base import did_you_mean, quote

MULTIPLE = 16  # hardware multiplies 8-bit floats only if all matmul sizes are multiples of this
ODD_ROWS = f"the number of its rows is not a multiple of {MULTIPLE}"
_MIN_SIZE = 2**14


def check_count(format: object, name: str, least: int, *, such_as: int = 128) -> None:
    """Raises unless a field is an int of at least `least`."""
    value = getattr(format, name)
    example = f"For example: {type(format).__name__}({name}={such_as})."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {quote(value)}. {example}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}. {example}")


def check_flag(format: object, name: str) -> None:
    """Raises unless a field is a bool."""
    value = getattr(format, name)
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, got {quote(value)}. For example: {type(format).__name__}().")


def check_word(format: object, name: str, known: tuple[str, ...]) -> None:
    """Raises unless a field is one of the known words."""
    value = getattr(format, name)
    if not isinstance(value, str) or value not in known:
        example = f"For example: {type(format).__name__}({name}={known[-1]!r})."
        raise ValueError(f"Unknown {name} {quote(value)}. {did_you_mean(value, known)} {example}")


def spell_options(format: object, *names: str) -> str:
    """Spells the fields that differ from their defaults: `"(activations=false)"`, or an empty string."""
    default = type(format)()
    differing = [name for name in names if getattr(format, name) != getattr(default, name)]
    options = [f"{name}={str(getattr(format, name)).lower()}" for name in differing]
    return f"({','.join(options)})" if options else ""


@dataclasses.dataclass(frozen=True)
class CurrentScaling:
    """Recipe that computes scales from the current values. No state is kept.

    Args:
      granularity: `"tensor"` for one scale per operand, or `"row"` for one scale per row of the left operand and per
        column of the right operand, that is per slice along the axes that are not summed over.

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
    """Recipe that computes scales from the largest magnitudes (amax) of earlier steps, kept as model state.

    Each operand is read only once, because it is not measured before it is scaled. Values too large for the scale of
    their step saturate.

    The state is trained beside the parameters, under `jax.jit`: its gradient is its next value. In linen it is the
    collection `_overwrite_with_gradient` that `model.init` returns beside `"params"`. Pass both to `value_and_grad`,
    `tx.init` and `optim.step`, or to `linen.TrainState` as `params`; the `update` of plain optax would treat the state
    as parameters. With `nn.scan` and `nn.vmap`, list `_overwrite_with_gradient` in `variable_axes`. In nnx it is
    `nnx.Float8State`, which `jmp_policy.nnx.value_and_grad` and `jmp_policy.nnx.Optimizer` update.

    Args:
      amax: `"max"` for the largest amax of the history, or `"most_recent"` for the last.
      delay: number of steps until a measured amax takes effect. 1: the scale is computed from the history when it is
        used, as in Flax. 2: the scale that the previous step stored is used, as in Keras.

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
    """Reads a recipe from an instance or a string.

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


# Written by hand, because a recipe may be given as a string.
@dataclasses.dataclass(frozen=True, init=False)
class Float8:
    """Training in float8: e4m3 matmuls in the forward pass, e5m2 times e4m3 in the backward pass.

    Weights stay in the parameter dtype: the operands of each matmul are scaled, saturated and rounded when it runs.
    Matmuls whose sizes are not multiples of 16, or that are too small to gain, stay in the compute dtype;
    `jmp_policy.explain` lists them. Only reverse-mode derivatives of first order are supported.

    Args:
      recipe: source of the scales: a `DelayedScaling`, a `CurrentScaling`, or the string of one.
      amax_history_length: number of steps in the history of a delayed scale.
      margin: scales leave a factor of `2**margin` of headroom below the largest value of the format.
      weight_grad: if True, the weight gradient is computed in float8 too; otherwise in the compute dtype.
      min_size: weights with fewer elements stay in the compute dtype. For small layers the casts cost more time than
        the 8-bit matmul saves. The break-even size depends on the device.

    Raises:
      TypeError, ValueError: an argument has the wrong type or an unknown value.

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
