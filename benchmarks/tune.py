"""Measures the scopes that `tune` finds and its number of trials, for planted culprits and real models.

Run from the root of the repository:

    python -m benchmarks.tune [--plantings N] [--chains N] [--first-chain N] [--only NAME]

Makes three tables: the search alone, with known culprits; chains of layers in float16 in which some layers overflow or
cancel; and models, with the map of `tune` beside float32, half precision and a map by hand.
"""

import argparse
import dataclasses
import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_policy as jmp
from benchmarks._results import ResultTable, print_tables
from benchmarks.architectures._architecture import Architecture, Model
from benchmarks.architectures._registry import ARCHITECTURES
from benchmarks.architectures._resnet import ResNet
from benchmarks.architectures._training import train_model
from benchmarks.autocast import gpt
from examples.gpt.model import GPTConfig
from jmp_policy.numerics._tune._search import find_smallest

RANKINGS = ("culprits first", "culprits among the first, with up to 3 others", "random", "culprits last")
HALF = "params=float32,compute=float16,output=none"
CHAIN_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Planting:
    """Result of one search.

    Attributes:
      scopes: number of scopes.
      culprits: number of scopes that must stay in float32.
      extra: number of other scopes that were kept.
      missed: number of culprits that were not kept.
      trials: number of maps that were tried.
    """

    scopes: int
    culprits: int
    extra: int
    missed: int
    trials: int

    @property
    def bound(self) -> float:
        """Returns the largest number of trials that counts as few."""
        return 2 * math.log2(self.scopes) + 2 * self.culprits


def search_plantings(ranking: str, count: int) -> Iterator[Planting]:
    """Searches for 1 to 4 culprits among 12 to 96 items, with an oracle that knows them."""
    rng = random.Random(0)
    for _ in range(count):
        size, number = rng.randint(12, 96), rng.randint(1, 4)
        culprits = _draw_culprits(rng, ranking, size, number)
        found = find_smallest(lambda kept, culprits=culprits: 0.0 if culprits <= kept else 1.0, size, 0.5)
        yield Planting(size, number, len(found.kept - culprits), len(culprits - found.kept), found.trials)


def _draw_culprits(rng: random.Random, ranking: str, size: int, number: int) -> set[int]:
    if ranking == RANKINGS[0]:
        return set(range(number))
    if ranking == RANKINGS[1]:
        return set(rng.sample(range(min(size, number + rng.randint(0, 3))), number))
    return set(rng.sample(range(size), number) if ranking == RANKINGS[2] else range(size - number, size))


def tune_chains(seeds: Iterable[int]) -> Iterator[tuple[str, Planting]]:
    """Tunes chains of 12 to 96 layers in float16. In each, 1 to 4 layers overflow or cancel."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        size, number = int(rng.integers(12, 97)), int(rng.integers(1, 5))
        where = sorted(rng.choice(size, number, replace=False).tolist())
        faults = {f"layer_{i}": str(rng.choice(["overflows", "cancels"])) for i in where}
        loss_fn, args = make_chain(size, faults, rng)
        tuning = jmp.tune(loss_fn, args, HALF, tolerance=CHAIN_TOLERANCE, progress=False)
        kinds = " and ".join(sorted(set(faults.values())))
        found = set(tuning.scopes)
        planting = Planting(size, number, len(found - {*faults}), len({*faults} - found), len(tuning.trials))
        yield kinds, planting


FAULTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "": lambda x, weight: x @ weight,
    "overflows": lambda x, weight: (x @ (weight * 1e6)) / 1e6,
    "cancels": lambda x, weight: x @ (weight + 1000) - x @ jnp.full_like(weight, 1000),
}
"""What a layer multiplies. Constants that float16 does not hold would stay in float32 by themselves."""


def make_chain(
    size: int, faults: dict[str, str], rng: np.random.Generator
) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """Makes the loss of a residual chain, and its arguments."""
    weights = {f"layer_{i}": jnp.asarray(rng.normal(size=(8, 8)) / 8**0.5, jnp.float32) for i in range(size)}
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)

    def loss_fn(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for name, weight in weights.items():
            with jax.named_scope(name):
                y = FAULTS[faults.get(name, "")](x, weight)
                x = x + 0.3 * jnp.tanh(y)
        return jnp.mean(jnp.square(x))

    return loss_fn, (weights, x)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A model to tune.

    Attributes:
      architecture: the model and its data.
      tolerance: the tolerance, by policy.
      by_hand: the patterns of modules that an expert would keep in float32.
    """

    architecture: Architecture
    tolerance: dict[str, float]
    by_hand: tuple[str, ...]


TOLERANCES = {"float16": 0.002, "bfloat16": 0.02}
NORMS = r"(.*/)?(\w*[Nn]orm\w*|bn_init)"


def list_models() -> dict[str, Tuned]:
    """Lists the models."""
    small = GPTConfig(width=32, depth=2, heads=2, context=32)
    resnet = ARCHITECTURES["ResNet-50"]
    make = functools.partial(ResNet, stage_sizes=(1, 1, 1, 1), num_classes=4, num_filters=8)
    shallow = dataclasses.replace(resnet, make=make)
    return {
        "demo GPT": Tuned(_repeat_batch(gpt(small)), TOLERANCES, (NORMS, "embed")),
        "transformer": Tuned(ARCHITECTURES["transformer"], TOLERANCES, (NORMS, "logits")),
        "ResNet, a block a stage": Tuned(shallow, TOLERANCES, (NORMS, "Dense_0")),
        "ResNet-50": Tuned(resnet, TOLERANCES, (NORMS, "Dense_0")),
    }


def _repeat_batch(architecture: Architecture) -> Architecture:
    """Repeats one batch for fifty steps, since random bytes have nothing else to learn."""
    batches = jax.tree.map(lambda batch: np.repeat(batch, 50, axis=0), architecture.batches)
    return dataclasses.replace(architecture, batches=batches)


def model_rows(name: str, tuned: Tuned, dtype: str, budget: int | None) -> list[list[str]]:
    """Makes the rows float32, half precision, by hand and tuned, with the error of a gradient and the final loss."""
    architecture = tuned.architecture
    model = architecture.without_policy()
    params, variables = jax.jit(model.init)(jax.random.key(0))
    policy = jmp.get_policy(HALF.replace("float16", dtype))
    args = params, variables, architecture.batch
    tolerance = tuned.tolerance[dtype]
    tuning = jmp.tune(model.loss, args, policy, tolerance=tolerance, has_aux=True, budget=budget, progress=False)
    by_hand = jmp.PolicyMap(dict.fromkeys(tuned.by_hand, HALF.replace("float16", "float32")), policy)
    share = f"{len(tuning.scopes)} of {len(tuning.candidates)}"
    count = f"{len(tuning.trials)}{'' if tuning.is_minimal else ', budget spent'}"
    kept = ", ".join(f"`{scope or '(outside)'}`" for scope in tuning.scopes[:6])
    kept += f" and {len(tuning.scopes) - 6} more" if len(tuning.scopes) > 6 else ""
    contestants: dict[str, tuple[Any, str]] = {
        "float32": (None, ""),
        "all half": (policy, "0"),
        "norms and head by hand": (by_hand, ""),
        f"`tune`, {100 * tolerance:g} %": (tuning.policy_map, f"{share}: {kept}" if kept else share),
    }
    rows = []
    for label, (given, in_float32) in contestants.items():
        loss = train_loss(model, architecture, given, params, variables)
        error = "" if given is None else _measure(model, args, given, tuning.loss_scale)
        rows.append([name, dtype, label, in_float32, error, f"{loss:.4f}", count if given is tuning.policy_map else ""])
    return rows


def _measure(model: Model, args: tuple[Any, ...], given: Any, scale: float) -> str:
    """Returns the error of a map by the measure of `tune`."""
    from jmp_policy.numerics._tune._subject import Subject
    from jmp_policy.numerics._tune._tuning import measure_error

    subject = Subject(model.loss, args, True, True, 0)
    results = []
    for policy, loss_scale in ((None, jmp.NoOpLossScale()), (given, jmp.StaticLossScale(scale))):
        run, arrays = subject.make_run(policy, loss_scale)
        results.append(jax.jit(run)(arrays))
    return f"{100 * float(measure_error(results[1], results[0])):.2g} %"


def train_loss(model: Model, architecture: Architecture, given: Any, params: Any, variables: Any) -> float:
    """Returns the mean loss of the last ten of fifty steps."""
    loss = model.loss if given is None else jmp.autocast(model.loss, given)
    scale = jmp.DynamicLossScale(2.0**10) if "float16" in str(given) else jmp.NoOpLossScale()
    initial = jax.tree.map(lambda leaf: leaf[None], (params, variables))
    return float(train_model(Model(model.init, loss), architecture, scale, initial).final[0])


_SEARCH_HEADER = ["ranking", "culprits", "found", "most extra", "trials", "most trials over 2 log2(n) + 2k"]
_MODEL_HEADER = ["model", "policy", "map", "in float32", "error", "loss", "trials"]


def summarize(name: str, plantings: Sequence[Planting]) -> list[str]:
    """Makes a row that summarizes several plantings."""
    found = sum(planting.missed == 0 for planting in plantings)
    average = statistics.mean(planting.trials for planting in plantings)
    worst = max(planting.trials / planting.bound for planting in plantings)
    culprits = statistics.mean(planting.culprits for planting in plantings)
    most_extra = max(planting.extra for planting in plantings)
    return [name, f"{culprits:.1f}", f"{found} of {len(plantings)}", str(most_extra), f"{average:.1f}", f"{worst:.2f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plantings", type=int, default=100, metavar="N", help="how many searches for each ranking")
    parser.add_argument("--chains", type=int, default=100, metavar="N", help="how many chains in float16")
    parser.add_argument("--first-chain", type=int, default=0, metavar="N", help="the seed of the first of them")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="some models, for example 'transformer'")
    parser.add_argument("--budget", type=int, metavar="N", help="how many trials for each model")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"], metavar="DTYPE")
    given = parser.parse_args(argv)
    print(f"jax {jax.__version__}, {jax.default_backend()}")
    with jax.numpy_dtype_promotion("standard"):
        if given.plantings:
            print_tables([search_table(given.plantings)])
        if given.chains:
            print_tables([chains_table(range(given.first_chain, given.first_chain + given.chains))])
        models = [name for name in list_models() if given.only is None or name in given.only]
        if models:
            print_tables([models_table(models, given.dtypes, given.budget)])


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the table of the search alone."""
    yield search_table(5 if quick else 100)


def model_tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the tables of chains in float16, and of models."""
    yield chains_table(range(1 if quick else 100))
    if not quick:
        yield models_table(list(list_models()), ["float16", "bfloat16"], None)


def search_table(plantings: int) -> ResultTable:
    """Makes the table of the search, by ranking."""
    rows = [summarize(ranking, [*search_plantings(ranking, plantings)]) for ranking in RANKINGS]
    notes = [
        "Above 1 in the last column: the ranking was wrong, and a search that asks a few times its logarithm cannot be "
        "had then. `tune` ranks by measured errors."
    ]
    title = f"The search alone: {plantings} plantings of 1 to 4 culprits among 12 to 96 scopes"
    return ResultTable.of("search", title, _SEARCH_HEADER, rows, notes=notes)


def chains_table(seeds: Sequence[int]) -> ResultTable:
    """Makes the table of `tune` in chains of layers."""
    chains: dict[str, list[Planting]] = {}
    for kind, planting in tune_chains(seeds):
        print(kind, planting, flush=True)
        chains.setdefault(kind, []).append(planting)
    everything = [planting for some in chains.values() for planting in some]
    rows = [summarize(kind, some) for kind, some in {**chains, "all": everything}.items()]
    title = f"{len(everything)} chains of layers in float16, some of which break"
    return ResultTable.of("chains", title, ["layers", *_SEARCH_HEADER[1:]], rows)


def models_table(names: Sequence[str], dtypes: Sequence[str], budget: int | None) -> ResultTable:
    """Makes the table of the maps of models."""
    models, rows = list_models(), []
    for name in names:
        for dtype in dtypes:
            rows += model_rows(name, models[name], dtype, budget)
            print("\n".join(map(str, rows[-4:])), flush=True)
    return ResultTable.of("models", "Models with the map that was found", _MODEL_HEADER, rows)


if __name__ == "__main__":
    main()
