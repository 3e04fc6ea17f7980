"""Result of `tune_bits`, and the layers that it measures and predicts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..numerics import CHOSEN, Tuning
from ..report import REFERENCE_LINE, Table, find_style, make_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._base import describe, group_by_key
from .._jaxpr import take_apart
from ..modules import find_adapter, find_lifting_adapter
from ..numerics import Subject, is_loss
from ..policy import Policy, PolicyMap
from ..quant import QuantizedArray, quantize


@dataclasses.dataclass(frozen=True)
class BitRow:
    """A point of the curve of `tune_bits`.

    Attributes:
      bits: bits per weight, scales included.
      predicted: the predicted increase of the loss, relative to the loss before quantization. Its unit is fitted to
        the measured increases of all trials.
      error: the measured increase with rounded weights, for the chosen map `BitTuning.error`; `None` if the budget of
        trials ran out first.
      formats: the format in which each layer is stored, by path.

    >>> import jmp_policy as jmp
    >>> jmp.contrib.BitRow(4.3, 0.02, 0.018, {"head": "int4/128"}).bits
    4.3
    """

    bits: float
    predicted: float
    error: float | None
    formats: Mapping[str, str]


@dataclasses.dataclass(frozen=True, repr=False)
class BitTuning(Tuning):
    """The format of each layer within a number of bits per weight, found by `tune_bits`. Prints as a table.

    It has the attributes of `Tuning`. Its `scopes` are the layers that do not have the smallest format `low`, and
    `kept` is `"wider"`. Errors are increases of the loss, relative to the loss before quantization. The tolerance is
    infinite.

    Attributes:
      effective_bits: bits per weight under the map.
      formats: the format in which each layer is stored, by path: `"int8"` for a table in int4.
      curve: a `BitRow` for each of some maps that no other one beats by prediction, and for the chosen one.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> options = {"formats": ["int4/64", "int8"], "metric": lambda model, x: jnp.mean(model(x) ** 2)}
    >>> model, x = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.eye(64)
    >>> tuning = jmp.contrib.tune_bits(model, (x,), "float32", effective_bits=5.0, **options)
    >>> tuning.effective_bits, tuning.formats
    (4.625, {'': 'int4/64'})
    """

    effective_bits: float
    formats: Mapping[str, str]
    curve: tuple[BitRow, ...]

    def _draw(self, axes: "Axes") -> None:
        measured = [row for row in self.curve if row.error is not None]
        bits, color = [row.bits for row in self.curve], find_style(self.low).color
        axes.plot(bits, [100 * row.predicted for row in self.curve], **REFERENCE_LINE, label="predicted")
        errors = [100 * (row.error or 0) for row in measured]
        axes.plot([row.bits for row in measured], errors, color=color, marker="o", label="measured")
        axes.scatter([self.effective_bits], [100 * self.error], **CHOSEN)
        axes.set(xlabel="bits per weight, with scales", ylabel="increase of the loss, %")
        axes.set_title(self.name, loc="left")

    def _summarize(self) -> str:
        return f"{self.effective_bits:.4g} bits per weight, loss {_format_change(self.error)}"

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        ranks = {scope: index + 1 for index, scope in enumerate(self.candidates)}
        layers = [(path or "(root)", name, f"{ranks[path]} of {len(ranks)}") for path, name in self.formats.items()]
        points = [(f"{row.bits:.4g}", *map(_format_change, (row.predicted, row.error))) for row in self.curve]
        return [
            Table(make_columns("layer, format", "suspicion"), layers),
            Table(make_columns("bits", "predicted, measured"), points),
        ]

    def _describe(self) -> str:
        is_other = self.scopes and not math.isnan(self.low_error)
        low = f", and with all in {self.low} by {_format_change(self.low_error)}" if is_other else ""
        changes = f"Its loss changes by {_format_change(self.error)}{low}."
        return f"{self.name} takes {self.effective_bits:.4g} bits per weight. {changes}"


def _format_change(error: float | None) -> str:
    if error is None:
        return "not tried"
    return f"{100 * error:+.2g} %" if math.isfinite(error) else "not finite"


class Layer(NamedTuple):
    """A weight that some format quantizes."""

    paths: tuple[str, ...]  # the modules that share it
    leaf: int  # its position among the leaves of the model
    weight: Any
    formats: tuple[str, ...]  # the names of its formats
    stored: tuple[Any, ...]  # by format: a QuantizedArray, or the weight in a dtype
    bits: tuple[int, ...]  # by format, of all arrays

    def select(self, order: Sequence[int]) -> "Layer":
        """Returns this layer with its formats in another order, without those that store what an earlier one does."""
        kept: list[int] = []
        for index in order:
            same_size = [self.read(other) for other in kept if self.bits[index] == self.bits[other]]
            if not any(jnp.array_equal(self.read(index), values) for values in same_size):
                kept.append(index)
        formats, stored, bits = ([part[index] for index in kept] for part in (self.formats, self.stored, self.bits))
        return self._replace(formats=tuple(formats), stored=tuple(stored), bits=tuple(bits))

    def name_stored(self, index: int) -> str:
        """Returns a format, or that in which it stores this weight: `int4` stores tables in int8."""
        name, stored = self.formats[index], self.stored[index]
        if not isinstance(stored, QuantizedArray):
            return str(stored.dtype)
        kind = str(stored.format).partition("(")[0]
        return name if name.partition("(")[0] == kind else kind

    def read(self, index: int) -> jax.Array:
        """Returns the values of the weight in a format, in its own dtype."""
        stored = self.stored[index]
        return (stored.dequantize() if isinstance(stored, QuantizedArray) else stored).astype(self.weight.dtype)


class Model:
    """The loss of a model as a function of its weights."""

    def __init__(self, subject: Subject, policy: Policy | PolicyMap, metric: Callable[..., Any] | None):
        arguments = subject.make_candidate(policy)
        count = 1 if subject.holds_variables else 2
        self._subject, self._metric = subject, metric or _call
        self._found = _find_weights(arguments[0], *arguments[1:count])
        arrays, self._rebuild = take_apart(arguments[:count])
        self._leaves, self._tree = jax.tree.flatten(arrays)
        self._inputs, self._rebuild_inputs = take_apart(arguments[count:])
        self._run = jax.jit(self._compute)

    def list_layers(self, policies: dict[str, Policy]) -> list[Layer]:
        """Stores each weight in each format, and lists those that some format quantizes."""
        positions = {id(leaf): index for index, leaf in enumerate(self._leaves)}
        paths = group_by_key((positions[id(weight)], path) for path, weight in self._found.items())
        target = self._subject.target if self._subject.holds_variables else self._subject.args[0]
        by_format = []
        for policy in policies.values():
            if policy.quantization is None:
                by_format.append({path: weight.astype(policy.param_dtype) for path, weight in self._found.items()})
            else:
                made = quantize(target, policy)
                parts = (made,) if self._subject.holds_variables else (self._subject.target, made)
                by_format.append(_find_weights(*parts))
        layers = []
        for leaf, shared in paths.items():
            stored = tuple(found[shared[0]] for found in by_format)
            if any(isinstance(each, QuantizedArray) for each in stored):
                bits = tuple(8 * each.nbytes for each in stored)
                layers.append(Layer(tuple(shared), leaf, self._leaves[leaf], (*policies,), stored, bits))
        return layers

    def measure(self, weights: dict[int, jax.Array]) -> float:
        """Returns the loss with some leaves replaced."""
        return float(self._run(weights, self._leaves, self._inputs))

    def predict(self, layers: Sequence[Layer]) -> list[list[float]]:
        """Predicts the increase of the loss for each layer and format: half the mean square of gradient times error.

        The mean is over examples, whose gradients estimate the Fisher information. The mean gradient is left out: it is
        small after training, and other batches have another one.
        """
        sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(self._inputs)}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                f"effective_bits takes the gradient of each example, and the inputs of {self._subject.name} have no "
                f"leading axis of the same length, got {sorted(sizes)}. {write_example(self._subject.target)}"
            )
        weights = {layer.leaf: layer.weight for layer in layers}
        changes = [
            [(layer.read(index) - layer.weight).astype(jnp.float32) for index in range(len(layer.stored))]
            for layer in layers
        ]

        @jax.jit
        def square(weights: Any, leaves: Any, inputs: Any, changes: Any) -> list[jax.Array]:
            def multiply(example: Any) -> list[jax.Array]:
                example = jax.tree.map(lambda leaf: leaf[None], example)
                grads = jax.grad(self._compute)(weights, leaves, example)
                pairs = zip(layers, changes, strict=True)
                return [
                    jnp.array([jnp.vdot(grads[at.leaf].astype(jnp.float32), one) for one in of]) for at, of in pairs
                ]

            return [jnp.mean(jnp.square(products), axis=0) / 2 for products in lax.map(multiply, inputs)]

        return [row.tolist() for row in square(weights, self._leaves, self._inputs, changes)]

    def _compute(self, weights: dict[int, jax.Array], leaves: Sequence[Any], inputs: Any) -> jax.Array:
        leaves = [weights.get(index, leaf) for index, leaf in enumerate(leaves)]
        model = self._rebuild(jax.tree.unflatten(self._tree, leaves))
        loss = self._metric(*model, *self._rebuild_inputs(inputs))
        if not is_loss(loss):
            given = describe(loss) if not isinstance(loss, jax.Array) else f"{loss.dtype}{list(loss.shape)}"
            example = write_example(self._subject.target)
            raise ValueError(f"effective_bits needs a scalar loss of {self._subject.name}, got {given}. {example}")
        return loss.astype(jnp.float32)


def _call(model: Any, *args: Any) -> Any:
    return model(*args) if find_lifting_adapter(model) is not None else model.apply(*args)


def _find_weights(model: Any, variables: Any = None) -> dict[str, Any]:
    adapter: Any = find_adapter(model)
    return adapter.find_weights(adapter.bind(model, variables))


def write_example(target: Any) -> str:
    """Returns a call for errors, with the arguments of a linen or an nnx model."""
    args = "(variables, x, labels)" if find_lifting_adapter(target) is None else "(x, labels)"
    return (
        f"For example: tune_bits(model, {args}, 'mixed_bfloat16', metric=loss_fn, "
        "formats=['int4/128', 'int8', 'bfloat16'], effective_bits=4.8)."
    )
