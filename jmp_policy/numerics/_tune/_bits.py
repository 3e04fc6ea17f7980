"""Finds a format for each layer, so that the loss rises little and weights take a given number of bits."""

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..._base import escape_controls
from ...policy import Policy, parse_quantization, stored_format_of
from ...quant import QuantizedArray
from ._search import Ranking, Trial, TrialLog
from ._subject import Layer, Model, Subject, assign_policies, write_example
from ._tuning import BitRow, Tuning

_DTYPES = ("float32", "bfloat16", "float16")

_MOST_CHOICES = 2000  # of a front; a larger one is thinned
_NEIGHBORS = 8  # measured at a time
_ROWS = 12  # of the curve


def parse_formats(formats: Any, effective_bits: Any, policy: Policy, example: str) -> dict[str, Policy]:
    """Returns the policy of each format, by name; checks the arguments of `tune`."""
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


def tune_bits(
    subject: Subject,
    policy: Policy,
    policies: dict[str, Policy],
    effective_bits: float,
    metric: Callable[..., Any] | None,
    budget: int | None,
    log: TrialLog,
    is_shown: bool,
) -> Tuning:
    """Finds the map as `tune` says under `effective_bits`. Formats come from `parse_formats`."""
    if not subject.is_module:
        example = write_example(subject.target)
        raise ValueError(f"effective_bits is for the weights of a module, and {subject.name} is a function. {example}")
    model = Model(subject, policy, metric)
    layers = model.list_layers(policies)
    size = sum(layer.weight.size for layer in layers)
    totals = [sum(layer.bits[index] for layer in layers) for index in range(len(policies))]
    order = sorted(range(len(policies)), key=totals.__getitem__)  # the smallest format first
    layers = [layer.select(order) for layer in layers]
    least = sum(min(layer.bits) for layer in layers) / size
    if effective_bits < least:
        raise ValueError(
            f"The weights of {subject.name} take at least {least:.4g} bits, scales included, got effective_bits="
            f"{effective_bits:g}. Pass more, or a smaller format. For example: effective_bits="
            f"{math.ceil(10 * least) / 10:g}."
        )
    low = [*policies][order[0]]
    search = _Search(subject, low, layers, model, log, budget, is_shown)
    chosen = search.run(effective_bits * size)
    names = search.name_formats(chosen)
    wanted = {path: policies[name] for path, name in names.items()}
    loss = _measure_map(subject, policy, metric, layers, chosen, wanted, policies[low])
    error = (loss - search.reference) / abs(search.reference)
    curve = search.make_curve(chosen, error, size)  # adds trials
    return Tuning(
        policy_map=assign_policies(wanted, policies[low]),
        scopes=tuple(path for path in search.candidates if names[path] != low),
        candidates=search.candidates,
        error=error,
        tolerance=math.inf,
        trials=tuple(search.trials.values()),
        is_minimal=search.is_finished,
        loss_scale=1.0,
        noise=0.0,
        name=subject.name,
        low=low,
        kept="wider",
        by="with_policy",
        effective_bits=chosen.bits / size,
        formats=search.name_stored(chosen),
        curve=curve,
    )


def _measure_map(
    subject: Subject,
    policy: Policy,
    metric: Callable[..., Any] | None,
    layers: Sequence[Layer],
    chosen: "Choice",
    wanted: dict[str, Policy],
    default: Policy,
) -> float:
    """Returns the loss under the map, in which formats may quantize inputs too."""
    # The Params of an nnx model have the dtypes of the given policy.
    policies = {path: each.replace(param_dtype=policy.param_dtype) for path, each in wanted.items()}
    model = Model(subject, assign_policies(policies, default.replace(param_dtype=policy.param_dtype)), metric)
    cast = {
        layer.leaf: layer.read(index)
        for layer, index in zip(layers, chosen.formats, strict=True)
        if not isinstance(layer.stored[index], QuantizedArray)
    }
    return model.measure(cast)


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


class _Search:
    """Measures choices, the best by prediction first, and remembers them."""

    def __init__(
        self,
        subject: Subject,
        low: str,
        layers: Sequence[Layer],
        model: Model,
        log: TrialLog,
        budget: int | None,
        is_shown: bool,
    ):
        self._low, self._layers, self._model, self._log = low, layers, model, log
        self._name, self._budget, self._is_shown = subject.name, budget, is_shown
        self.reference = model.measure({})
        if not 0 < abs(self.reference) < math.inf:
            example = write_example(subject.target)
            raise ValueError(f"The loss of {self._name} is {self.reference:g} before quantization. {example}")
        self._bits = [layer.bits for layer in layers]
        self._predicted = model.predict(layers)
        if not all(math.isfinite(increase) for row in self._predicted for increase in row):
            raise ValueError(
                f"The gradients of the loss of {self._name} are not finite. Find the origin with "
                "numerics.first_nonfinite."
            )
        ranked = sorted(zip(self._predicted, layers, strict=True), key=lambda pair: -pair[0][0])
        self.candidates = tuple(path for _, layer in ranked for path in layer.paths)
        self._front = find_front(self._bits, self._predicted)
        self.trials: dict[tuple[int, ...], Trial] = {}
        self.is_finished = False
        log.start(Ranking(self.candidates, 1.0))

    def run(self, limit: float) -> Choice:
        """Finds the choice with the smallest measured loss among the best one by prediction and its neighbors."""
        best = [choice for choice in self._front if choice.bits <= limit][-1]
        error = self._measure(best)
        while self._has_budget():
            fitting = (
                choice
                for choice in list_neighbors(best, self._bits, self._predicted)
                if choice.bits <= limit and choice.formats not in self.trials
            )
            unique = {choice.formats: choice for choice in fitting}
            nearest = heapq.nsmallest(_NEIGHBORS, unique.values(), key=lambda choice: choice.predicted)
            errors = [(self._measure(choice), choice) for choice in nearest if self._has_budget()]
            if not errors or min(errors)[0] >= error:
                self.is_finished = len(errors) == len(nearest)
                break
            error, best = min(errors)
        return best

    def make_curve(self, chosen: Choice, error: float, size: int) -> tuple[BitRow, ...]:
        """Measures choices of the front at equal distances. Returns them and the chosen one, fewest bits first.

        `error` is that of the chosen map, which the trial of its weights alone does not have.
        """
        first, last = self._front[0].bits, self._front[-1].bits
        limits = [first + (last - first) * step / (_ROWS - 1) for step in range(_ROWS)]
        choices = [[choice for choice in self._front if choice.bits <= limit][-1] for limit in limits]
        choices = sorted({choice.formats: choice for choice in [*choices, chosen]}.values())
        for choice in choices:
            if choice.formats not in self.trials and self._has_budget():
                self._measure(choice)
        errors = {formats: trial.error for formats, trial in self.trials.items()}
        unit = self._fit_unit(errors)
        errors[chosen.formats] = error
        return tuple(
            BitRow(choice.bits / size, unit * choice.predicted, errors.get(choice.formats), self.name_stored(choice))
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

    def name_formats(self, choice: Choice) -> dict[str, str]:
        """Returns the format of each module."""
        return {path: layer.formats[index] for layer, index in self._pair(choice) for path in layer.paths}

    def name_stored(self, choice: Choice) -> dict[str, str]:
        """Returns the format in which the weight of each module is stored."""
        return {path: layer.name_stored(index) for layer, index in self._pair(choice) for path in layer.paths}

    def _pair(self, choice: Choice) -> Iterator[tuple[Layer, int]]:
        return zip(self._layers, choice.formats, strict=True)

    def _has_budget(self) -> bool:
        return self._budget is None or len(self.trials) < self._budget

    def _measure(self, choice: Choice) -> float:
        """Returns the relative increase of the loss, from the log or by running the model."""
        names = self.name_formats(choice).items()
        kept = tuple(f"{path}={name}" for path, name in names if name != self._low)
        trial = self._log.find(kept)
        if trial is None:
            loss = self._model.measure({layer.leaf: layer.read(index) for layer, index in self._pair(choice)})
            error = (loss - self.reference) / abs(self.reference)
            trial = Trial(kept, error if math.isfinite(error) else math.inf)
            self._log.add(trial)
        self.trials[choice.formats] = trial
        if self._is_shown:
            line = f"tuning {self._name}: trial {len(self.trials)}, loss {100 * trial.error:+.2g} %"
            print(escape_controls(line), file=sys.stderr)
        return trial.error
