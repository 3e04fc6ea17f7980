"""The benchmarks that `python -m benchmarks` runs: the module of each, and its question."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Suite:
    """A benchmark, or a part of one.

    Attributes:
      module: where it is, in this package.
      question: its question, in a sentence.
      tables: the function of the module that measures: `(quick: bool) -> Iterator[ResultTable]`.
      is_long: whether it takes many minutes, and runs only when it is named, or with `--all`.
      has_quick: whether it has small sizes.
    """

    module: str
    question: str
    tables: str = "tables"
    is_long: bool = False
    has_quick: bool = True


SUITES = {
    "zero_cost": Suite("zero_cost", "What does a train step with a policy cost over the same step written by hand?"),
    "peers": Suite("peers", "What does a train step cost with each library, on the same model and data?"),
    "imports": Suite("imports", "How long does it take to import each library?"),
    "optimizer": Suite("optimizer", "How many bytes does an optimizer's step move, with a loss scale and a skip?"),
    "faults": Suite("faults", "Which state does a step with a gradient that is not finite corrupt?"),
    "small_state": Suite("small_state", "How large is AdamW's state in 8 bits, and what does its update cost?"),
    "float8": Suite("float8", "What does training in float8 and in blocks cost and lose?"),
    "quant": Suite("quant", "What do int8 and int4 cost, lose and hold?"),
    "autocast": Suite("autocast", "What does `autocast` make of a train step, over dtypes written by hand?"),
    "many_modules": Suite("many_modules", "What does a policy add to tracing a model of 1,000 modules?"),
    "numerics": Suite("numerics", "What do the statistics of `numerics.collect` cost?"),
    "origins": Suite("origins", "What does the search for the first number that is not finite cost?"),
    "small_state_training": Suite(
        "small_state", "Does a GPT learn as much with AdamW's moments in 8 bits?", "training_tables", is_long=True
    ),
    "quant_training": Suite("quant", "What does a trained GPT lose in int8 and int4?", "training_tables", is_long=True),
}  # fmt: skip
"""By name, in the order in which they run and are shown."""
