"""The recipes for the scales of float8: from the numbers at hand, or from those of earlier steps. Data only."""

import dataclasses
from typing import Any

from ._dtypes import did_you_mean
from ._format_fields import check_word
from ._messages import quote


@dataclasses.dataclass(frozen=True)
class CurrentScaling:
    """Scales are made from the numbers of this very step, so there is no state.

    Args:
      granularity: `"tensor"`, one scale for all of an operand; or `"row"`, one for each row of a product's left operand
        and each column of its right one, that is for each slice along the axes that are not summed over.

    Raises:
      ValueError: the granularity is neither.

    Source: NVIDIA Transformer Engine's `Float8CurrentScaling`; torchao's `float8` training (tensorwise and rowwise).

    >>> str(CurrentScaling()), str(CurrentScaling("row"))
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

    >>> str(DelayedScaling()), str(DelayedScaling("most_recent", delay=2))
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


def parse_recipe(spec: Any) -> Recipe:
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
