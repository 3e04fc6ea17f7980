"""Accuracy of `numerics.predict`: models with planted faults, each prediction checked by running float16.

Run from the root of the repository; a hundred models take some fifteen minutes:

    python -m benchmarks.predict [--models 100] [--quick]

One table, a line for each kind of fault. A scope counts as named right if it was planted and named, and as named wrong
if it was named only. "float16 fails" counts the models whose gradient really is lost in float16, at the loss scale that
was asked about; "repaired" are models whose gradient under the predicted map and loss scale equals float32's.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

import jmp_policy as jmp
from benchmarks._planted_models import PlantedModel, make_model
from benchmarks._results import ResultTable, print_tables
from jmp_policy.numerics import Prediction, collect, predict

POLICY = "params=float32,compute=float16,output=float32"
MOST_ERROR = 0.1
"""The relative error of the gradient of a block from which on it is lost."""


class Outcome(NamedTuple):
    """The outcome for one model.

    Attributes:
      model: the model.
      prediction: the `Prediction`.
      half_error: the largest relative error of the gradient of a block in float16, at the scale that was asked about.
      repaired_error: the same under the predicted map, at the predicted scale.
    """

    model: PlantedModel
    prediction: Prediction
    half_error: float
    repaired_error: float

    @property
    def named(self) -> frozenset[str]:
        """The scopes that a reason names."""
        return frozenset(reason.path for reason in self.prediction.reasons)


def try_model(model: PlantedModel) -> Outcome:
    """Predicts what float16 does to a model, and does it."""
    (_, grads), stats = jax.jit(collect(jax.value_and_grad(model.loss), where="all"))(*model.args)
    prediction = predict(stats, POLICY, model.loss_scale)
    half = _differentiate(model, prediction.policy, model.loss_scale or 1.0)
    repaired = _differentiate(model, prediction.policy_map, prediction.loss_scale or 1.0)
    return Outcome(model, prediction, _find_error(half, grads), _find_error(repaired, grads))


def count(outcomes: Sequence[Outcome]) -> list[str]:
    """The cells of a line: models, scopes that were planted, named right and wrong, and what running them showed."""
    planted = sum(len(outcome.model.planted) for outcome in outcomes)
    right = sum(len(outcome.model.planted & outcome.named) for outcome in outcomes)
    wrong = sum(len(outcome.named - outcome.model.planted) for outcome in outcomes)
    fails = sum(not outcome.half_error <= MOST_ERROR for outcome in outcomes)
    repaired = sum(outcome.repaired_error <= MOST_ERROR for outcome in outcomes)
    worst = max(outcome.repaired_error for outcome in outcomes)
    numbers = [str(number) for number in (len(outcomes), planted, right, wrong, fails, repaired)]
    return [*numbers, f"{worst:.1e}", _share(right, right + wrong), _share(right, planted)]


def make_table(outcomes: Iterable[Outcome]) -> ResultTable:
    """A line for each kind, and one for all."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.model.kind, []).append(outcome)
    lines = [[kind, *count(own)] for kind, own in by_kind.items()]
    every = [outcome for own in by_kind.values() for outcome in own]
    title = f"What `predict` says of {len(every)} models, and what float16 does to them"
    return ResultTable.of("predictions", title, HEADER, [*lines, ["all", *count(every)]])


HEADER = [
    "planted", "models", "scopes", "named right", "named wrong", "float16 fails", "repaired", "largest error then",
    "precision", "recall",
]  # fmt: skip


def _differentiate(model: PlantedModel, policy: jmp.Policy | jmp.PolicyMap, scale: float) -> dict[str, jax.Array]:
    loss_scale = jmp.StaticLossScale(scale)
    fun = jmp.value_and_grad(jmp.autocast(model.loss, policy), loss_scale=loss_scale)
    return jax.jit(fun)(*model.args)[1]


def _find_error(grads: dict[str, jax.Array], expected: dict[str, jax.Array]) -> float:
    """The largest relative error of a block; infinite where a gradient is not finite."""
    found = 0.0
    for path, own in expected.items():
        pairs = zip(jax.tree.leaves(grads[path]), jax.tree.leaves(own), strict=True)
        wide = [(np.asarray(mine, np.float64), np.asarray(true, np.float64)) for mine, true in pairs]
        error = sum(((mine - true) ** 2).sum() for mine, true in wide)
        size = sum((true**2).sum() for _, true in wide)
        found = max(found, float(np.sqrt(error / size)) if np.isfinite(error) else np.inf)
    return found


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else ""


def tables(quick: bool, models: int = 100) -> Iterator[ResultTable]:
    """Tries this number of models."""
    outcomes = []
    for seed in range(2 if quick else models):
        outcomes.append(try_model(make_model(seed)))
        outcome = outcomes[-1]
        sign = "" if outcome.named == outcome.model.planted else f", but {sorted(outcome.model.planted)} was planted"
        print(f"{seed}: {outcome.model.kind}: {sorted(outcome.named)}{sign}", flush=True)
    yield make_table(outcomes)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100, help="how many models to try")
    parser.add_argument("--quick", action="store_true", help="two models")
    options = parser.parse_args(argv)
    print_tables(tables(options.quick, options.models))


if __name__ == "__main__":
    main()
