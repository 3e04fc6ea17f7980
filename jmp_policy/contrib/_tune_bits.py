"""`tune_bits`: a format for each layer, so that the loss rises little and weights take a given number of bits."""

import heapq
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._base import describe, hide_frames, sum_arrays, sum_code, sum_program
from ..modules import find_adapter
from ..numerics import Ranking, Subject, Trial, TrialLog, check_budget, name_metric
from ..policy import Policy, PolicySpec, assign_policies, get_policy, parse_quantization, stored_format_of
from ..quant import QuantizedArray
from ._bit_tuning import BitRow, BitTuning, Layer, Model, write_example

_MOST_CHOICES = 2000  # of a front; a larger one is thinned
_NEIGHBORS = 8  # measured at a time
_ROWS = 12  # of the curve


class Choice(NamedTuple):
    """A format for each layer, by number, with the bits of all weights and the predicted increase of the loss."""

    bits: int
    predicted: float
    formats: tuple[int, ...]


def find_front(bits: Sequence[Sequence[int]], predicted: Sequence[Sequence[float]]) -> list[Choice]:
    """Finds the choices that no other one beats in bits and predicted increase: fewest bits first.

    Layers are added one after another. The result is exact unless there are more than `_MOST_CHOICES`.
    """
    front = [Choice(0, 0.0, ())]
    for sizes, increases in zip(bits, predicted, strict=True):
        options = list(zip(sizes, increases, range(len(sizes)), strict=True))
        longer = (Choice(a + b, p + q, (*f, g)) for a, p, f in front for b, q, g in options)
        front, best = [], math.inf
        for choice in sorted(longer):
            if choice.predicted < best:
                front.append(choice)
                best = choice.predicted
        if len(front) > _MOST_CHOICES:
            unit = front[-1].bits / _MOST_CHOICES
            front = [*{int(choice.bits / unit): choice for choice in front}.values()]
    return front


def list_neighbors(
    choice: Choice, bits: Sequence[Sequence[int]], predicted: Sequence[Sequence[float]]
) -> Iterator[Choice]:
    """Lists the choices that differ in one or two layers."""
    for count in (1, 2):
        for places in itertools.combinations(range(len(bits)), count):
            for formats in itertools.product(*(range(len(bits[place])) for place in places)):
                new = list(choice.formats)
                size, increase = choice.bits, choice.predicted
                for place, format in zip(places, formats, strict=True):
                    size += bits[place][format] - bits[place][new[place]]
                    increase += predicted[place][format] - predicted[place][new[place]]
                    new[place] = format
                yield Choice(size, increase, tuple(new))


class BitTuner:
    """One call of `tune_bits`. Measures choices, the best by prediction first, and remembers them."""

    def __init__(self, subject: Subject, policy: Policy, policies: dict[str, Policy], metric: Any, log: TrialLog):
        self._example = write_example(subject.target)
        if not subject.is_module:
            raise ValueError(
                f"effective_bits is for the weights of a module, and {subject.name} is a function. {self._example}"
            )
        self._subject, self._policy, self._policies, self._metric, self._log = subject, policy, policies, metric, log
        self._model = Model(subject, policy, metric)
        layers = self._model.list_layers(policies)
        totals = [sum(layer.bits[index] for layer in layers) for index in range(len(policies))]
        order = sorted(range(len(policies)), key=totals.__getitem__)  # the smallest format first
        self._low, self._layers = [*policies][order[0]], [layer.select(order) for layer in layers]
        self._bits, self._size = [layer.bits for layer in self._layers], sum(layer.weight.size for layer in layers)
        self._predicted: list[list[float]] = []
        self._reference = 0.0
        self._trials: dict[tuple[int, ...], Trial] = {}

    def tune(self, effective_bits: float, budget: int | None) -> BitTuning:
        self._predict(effective_bits)
        ranked = sorted(zip(self._predicted, self._layers, strict=True), key=lambda pair: -pair[0][0])
        candidates = tuple(path for _, layer in ranked for path in layer.paths)
        self._log.start(Ranking(candidates, 1.0))
        front = find_front(self._bits, self._predicted)
        best = [choice for choice in front if choice.bits <= effective_bits * self._size][-1]
        chosen, is_finished = self._improve(best, effective_bits * self._size, budget)
        names = self._name_formats(chosen)
        wanted = {path: self._policies[name] for path, name in names.items()}
        error = self._measure_map(chosen, wanted)
        curve = self._make_curve(front, chosen, error, budget)  # adds trials
        return BitTuning(
            policy_map=assign_policies(wanted, self._policies[self._low]),
            scopes=tuple(path for path in candidates if names[path] != self._low),
            candidates=candidates,
            error=error,
            tolerance=math.inf,
            trials=tuple(self._trials.values()),
            is_minimal=is_finished,
            loss_scale=1.0,
            noise=0.0,
            name=self._subject.name,
            low=self._low,
            kept="wider",
            by="with_policy",
            effective_bits=chosen.bits / self._size,
            formats=self._name_stored(chosen),
            curve=curve,
        )

    def _predict(self, effective_bits: float) -> None:
        """Measures the loss before quantization, and predicts its increase for each layer and format."""
        name, least = self._subject.name, sum(map(min, self._bits)) / self._size
        if effective_bits < least:
            raise ValueError(
                f"The weights of {name} take at least {least:.4g} bits, scales included, got effective_bits="
                f"{effective_bits:g}. Pass more, or a smaller format. For example: effective_bits="
                f"{math.ceil(10 * least) / 10:g}."
            )
        self._reference = self._model.measure({})
        if not 0 < abs(self._reference) < math.inf:
            raise ValueError(f"The loss of {name} is {self._reference:g} before quantization. {self._example}")
        self._predicted = self._model.predict(self._layers)
        if not all(math.isfinite(increase) for row in self._predicted for increase in row):
            raise ValueError(
                f"The gradients of the loss of {name} are not finite. Find the origin with numerics.first_nonfinite."
            )

    def _improve(self, best: Choice, limit: float, budget: int | None) -> tuple[Choice, bool]:
        """Goes to neighbors with a smaller measured loss. Returns the last choice, and False if the budget ran out."""
        error = self._measure(best)
        while self._has_left(budget):
            fitting = (
                choice
                for choice in list_neighbors(best, self._bits, self._predicted)
                if choice.bits <= limit and choice.formats not in self._trials
            )
            unique = {choice.formats: choice for choice in fitting}
            nearest = heapq.nsmallest(_NEIGHBORS, unique.values(), key=lambda choice: choice.predicted)
            errors = [(self._measure(choice), choice) for choice in nearest if self._has_left(budget)]
            if not errors or min(errors)[0] >= error:
                return best, len(errors) == len(nearest)
            error, best = min(errors)
        return best, False

    def _make_curve(
        self, front: Sequence[Choice], chosen: Choice, error: float, budget: int | None
    ) -> tuple[BitRow, ...]:
        """Measures choices of the front at equal distances. Returns them and the chosen one, fewest bits first.

        `error` is the error of the chosen map, which the trial of its weights alone does not have.
        """
        first, last = front[0].bits, front[-1].bits
        limits = [first + (last - first) * step / (_ROWS - 1) for step in range(_ROWS)]
        choices = [[choice for choice in front if choice.bits <= limit][-1] for limit in limits]
        choices = sorted({choice.formats: choice for choice in [*choices, chosen]}.values())
        for choice in choices:
            if choice.formats not in self._trials and self._has_left(budget):
                self._measure(choice)
        errors = {formats: trial.error for formats, trial in self._trials.items()}
        unit = self._fit_unit(errors)
        errors[chosen.formats] = error
        return tuple(
            BitRow(
                choice.bits / self._size, unit * choice.predicted, errors.get(choice.formats), self._name_stored(choice)
            )
            for choice in choices
        )

    def _fit_unit(self, errors: Mapping[tuple[int, ...], float]) -> float:
        """Returns the factor with which predictions fit measured errors best; 1 if they do not."""
        pairs = [
            (sum(row[index] for row, index in zip(self._predicted, formats, strict=True)), error)
            for formats, error in errors.items()
            if math.isfinite(error)
        ]
        fitted = sum(predicted * error for predicted, error in pairs)
        return fitted / sum(predicted**2 for predicted, _ in pairs) if fitted > 0 else 1.0

    def _name_formats(self, choice: Choice) -> dict[str, str]:
        return {path: layer.formats[index] for layer, index in self._pair(choice) for path in layer.paths}

    def _name_stored(self, choice: Choice) -> dict[str, str]:
        """Returns the format in which the weight of each module is stored."""
        return {path: layer.name_stored(index) for layer, index in self._pair(choice) for path in layer.paths}

    def _pair(self, choice: Choice) -> Iterator[tuple[Layer, int]]:
        return zip(self._layers, choice.formats, strict=True)

    def _has_left(self, budget: int | None) -> bool:
        return budget is None or len(self._trials) < budget

    def _measure(self, choice: Choice) -> float:
        """Returns the relative increase of the loss, from the log or by running the model."""
        names = self._name_formats(choice).items()
        kept = tuple(f"{path}={name}" for path, name in names if name != self._low)
        trial = self._log.find(kept)
        if trial is None:
            loss = self._model.measure({layer.leaf: layer.read(index) for layer, index in self._pair(choice)})
            error = self._compare(loss)
            trial = Trial(kept, error if math.isfinite(error) else math.inf)
            self._log.add(trial)
        self._trials[choice.formats] = trial
        self._log.show(f"tuning {self._subject.name}: trial {len(self._trials)}, loss {100 * trial.error:+.2g} %")
        return trial.error

    def _measure_map(self, chosen: Choice, wanted: dict[str, Policy]) -> float:
        """Returns the relative increase of the loss under the map, in which formats may quantize inputs too."""
        # The Params of an nnx model have the dtypes of the given policy.
        dtype = self._policy.param_dtype
        policies = {path: each.replace(param_dtype=dtype) for path, each in wanted.items()}
        policy_map = assign_policies(policies, self._policies[self._low].replace(param_dtype=dtype))
        cast = {
            layer.leaf: layer.read(index)
            for layer, index in self._pair(chosen)
            if not isinstance(layer.stored[index], QuantizedArray)
        }
        return self._compare(Model(self._subject, policy_map, self._metric).measure(cast))

    def _compare(self, loss: float) -> float:
        return (loss - self._reference) / abs(self._reference)


_DTYPES = ("float32", "bfloat16", "float16")


@hide_frames
def tune_bits(
    model: Any,
    args: Sequence[Any],
    policy: PolicySpec,
    *,
    formats: Sequence[str],
    effective_bits: float,
    metric: Callable[..., Any] | None = None,
    budget: int | None = None,
    trials_file: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> BitTuning:
    """Finds the format of each layer of a module, so that the loss rises little within a number of bits per weight.

    One pass predicts the increase of the loss for each layer and format: half the mean square, over examples, of
    gradient times rounding error. The best map by prediction is measured with the nearest others, until none of them
    has a smaller loss.

    Args:
      model: a linen or nnx module. It is not changed.
      args: a tuple of its arguments; for a linen module the variables come first.
      policy: a policy without a quantization, around the formats.
      formats: stored formats to choose from, such as `["int4/128", "int8", "bfloat16"]`. A dtype stores a
        weight unquantized.
      effective_bits: the largest mean number of bits per weight, over the weights that some format quantizes. Scales
        and zero points count, as `quant.QuantizedArray` stores them.
      metric: the loss: `metric(model, *args)` gets the module under a map (or unchanged) and returns a differentiable
        scalar, the mean of the losses of the examples. The examples are the rows of all arguments but variables. It is
        jitted. If `None`, the output of the module is the loss.
      budget: the maximum number of trials; unlimited if `None`.
      trials_file: a file with one trial per line. Trials in it are not run again, so a search can resume.
      progress: whether to print a line for each trial on standard error. If `None`, only if that is a terminal.

    Returns:
      A `BitTuning`: a `jmp.Tuning` with `.formats` and `.curve`, the loss over the bits. Prints as tables.

    Raises:
      TypeError: `model` is not a module or a function, or `args` is not a tuple or list.
      ValueError: `model` is a function; the policy is unknown, is a map or has a quantization; a format is unknown or
        stores no weights, or none quantizes; `effective_bits` is not positive, or too small for the model; the budget
        is not positive; the loss is not a finite scalar other than 0, or has inputs without a common axis of examples;
        or the file has trials of something else.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (8, 64))
    >>> options = {"formats": ["int4/64", "int8"], "metric": lambda model, x: jnp.mean(model(x) ** 2)}
    >>> tuning = jmp.contrib.tune_bits(model, (x,), "float32", effective_bits=5.0, **options)
    >>> tuning.formats
    {'': 'int4/64'}
    """
    example = write_example(model)
    given = get_policy(policy)
    if not isinstance(given, Policy):
        raise ValueError(f"tune_bits takes one policy and finds the map, got {given!r}. {example}")
    policies = parse_formats(formats, effective_bits, given, example)
    check_budget(budget)
    if isinstance(model, type) or not (find_adapter(model) is not None or callable(model)):
        raise TypeError(f"tune_bits takes a Flax module, got {describe(model)}. {example}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"tune_bits takes a tuple of arguments, got {describe(args)}. {example}")
    subject = Subject(model, tuple(args), differentiates=False, has_aux=False, seed=0)
    run, arrays = subject.make_run(None)
    header = {
        "function": subject.name,
        "policy": " or ".join([str(given), *policies]),
        "compared": name_metric(metric) if metric else "outputs",
        "arguments": sum_arrays(arrays),
        "traced program": trials_file and sum_program(run, arrays),
        "code of the metric": metric and sum_code(metric),
        "jax": f"{jax.__version__} on {jax.default_backend()}",
    }
    is_shown = sys.stderr.isatty() if progress is None else progress
    log = TrialLog(None if trials_file is None else Path(trials_file), header, is_shown, "tune_bits")
    return BitTuner(subject, given, policies, metric, log).tune(effective_bits, budget)


def parse_formats(formats: Any, effective_bits: Any, policy: Policy, example: str) -> dict[str, Policy]:
    """Returns the policy of each format, by name; checks the arguments of `tune_bits`."""
    is_number = isinstance(effective_bits, int | float) and not isinstance(effective_bits, bool)
    if not is_number or not 0 < effective_bits < math.inf:
        raise ValueError(f"effective_bits must be a number above 0, got {effective_bits!r}. {example}")
    if isinstance(formats, str) or not formats:
        raise ValueError(f"effective_bits needs a list of formats to choose from, got {formats!r}. {example}")
    if policy.quantization is not None:
        raise ValueError(f"The policy {policy.name!r} has a quantization, and formats replace it. {example}")
    policies = {}
    for name in formats:
        if name in _DTYPES:
            policies[name] = policy.replace(param_dtype=name)
            continue
        quantization = parse_quantization(name, where=" in formats")
        if stored_format_of(quantization) is None:
            raise ValueError(f"The format {str(quantization)!r} in formats stores no weights. {example}")
        policies[str(quantization)] = policy.replace(quantization=quantization)
    if all(each.quantization is None for each in policies.values()):
        raise ValueError(f"No format quantizes, got {formats!r}. {example}")
    return policies
