"""The benchmarks that `python -m benchmarks` runs."""

SUITES = {
    "zero_cost": "What does a train step with a policy cost over the same step written by hand?",
    "peers": "What does a train step cost with each library, on the same model and data?",
    "optimizer": "How many bytes does an optimizer's step move, with a loss scale and a skip?",
    "faults": "Which state does a step with a gradient that is not finite corrupt?",
    "small_state": "How large is AdamW's state in 8 bits, and what does its update cost?",
    "float8": "What does training in float8 and in blocks cost and lose?",
    "quant": "What do int8 and int4 cost, lose and hold?",
    "autocast": "What does `autocast` make of a train step, over dtypes written by hand?",
    "host": "What does the package cost on the host, and how does that grow?",
    "numerics": "What do the statistics of `numerics.collect` cost?",
}
"""Their questions, by the name of their module, whose `tables(quick: bool) -> Iterator[ResultTable]` measures. In the
order in which they run and are shown."""
