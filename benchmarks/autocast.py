"""Compares `autocast` of models written in float32 with the same models with dtypes written by hand.

Run from the root of the repository:

    python -m benchmarks.autocast [--quick]

Makes two tables: the costs of a train step over the step by hand, and the time to trace with autocast over the time
without.
"""

import argparse
import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_policy as jmp
from benchmarks._loss import cross_entropy
from benchmarks._measure import cost
from benchmarks._models_linen import HandGPT
from benchmarks._programs import Program
from benchmarks._results import ResultTable, print_tables
from benchmarks.architectures._architecture import Architecture, Model
from benchmarks.architectures._programs import by_hand, shapes
from benchmarks.architectures._registry import ARCHITECTURES
from benchmarks.architectures._training import make_state, train_step
from benchmarks.many_modules import count_calls, seconds
from examples.gpt.model import GPTConfig

HALVES = ("bfloat16", "float16")
POLICIES = {half: jmp.Policy("float32", half, None) for half in HALVES}
"""Output as traced: the author's float32."""

_MATMUL = re.compile(r"stablehlo\.(?:dot_general|convolution).*-> tensor<(?:\d+x)*(\w+)>")


def gpt(config: GPTConfig, batch: int = 8) -> Architecture:
    """Makes the example's GPT, on random bytes."""

    def loss_fn(apply_fn: Callable[..., Any], variables: Any, batch: Any) -> tuple[jax.Array, Any]:
        tokens = batch["tokens"]
        return cross_entropy(apply_fn(variables, tokens[:, :-1]), tokens[:, 1:]), {}

    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (1, batch, config.context + 1))
    make = lambda dtype=None: HandGPT(config, dtype)
    return Architecture("linen", make, loss_fn, {"tokens": tokens}, optax.adamw(1e-3), inputs=("tokens",))


def autocasted(architecture: Architecture, policy: jmp.Policy) -> Model:
    """Returns the model as its author wrote it, with one decorator on its loss."""
    model = architecture.without_policy()
    return Model(model.init, jmp.autocast(model.loss, policy))


def step(architecture: Architecture, policy: jmp.Policy) -> Program:
    """Makes a train step of the model."""
    model = autocasted(architecture, policy)
    make = functools.partial(make_state, model, architecture.tx, policy.loss_scale())
    state = jax.eval_shape(make, *shapes(model))
    return Program(jax.jit(train_step, donate_argnums=0), (state, architecture.batch))


def matmul_dtypes(program: Program, platform: str) -> collections.Counter[str]:
    """Counts forward and backward matmuls and convolutions by output dtype, lowered for a platform."""
    lowered = program.step.trace(*program.args).lower(lowering_platforms=(platform,))
    return collections.Counter(_MATMUL.findall(lowered.as_text()))


def unrolled(layers: int) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Makes the loss of a chain of dense layers in plain JAX, and its arguments."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for weight, bias in params:
            x = x + jnp.tanh(jnp.dot(x, weight) + bias)
        return jnp.mean(x**2)

    return loss, ([(jnp.ones((4, 4)), jnp.ones(4))] * layers, jnp.ones((2, 4)))


def tracing(fun: Callable[..., Any], args: tuple, repeats: int, transform: Any = lambda fun: fun) -> list[str]:
    """Returns the calls and the process time of tracing, with autocast over without, of a function or its gradients."""
    cast = jmp.autocast(fun, POLICIES["bfloat16"])
    traces = [functools.partial(_trace, transform(f), args) for f in (cast, fun)]
    (calls, plain_calls), (time, plain_time) = map(count_calls, traces), seconds(traces, repeats)
    return [f"{calls / plain_calls:.2f}", f"{time / plain_time:.2f}"]


def _trace(fun: Callable[..., Any], args: tuple) -> None:
    jax.make_jaxpr(lambda *args: fun(*args))(*args)  # a new function each time: JAX would not trace one twice


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, timed once")
    quick = parser.parse_args(argv).quick
    with jax.numpy_dtype_promotion("standard"):
        print(f"jax {jax.__version__}, {jax.default_backend()}")
        print_tables(tables(quick))


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the tables of the costs of a train step, and of tracing."""
    small = GPTConfig(width=32, depth=1, heads=2, context=16)
    architectures = {"GPT": gpt(small if quick else GPTConfig())} | ({} if quick else ARCHITECTURES)
    halves = HALVES[:1] if quick else HALVES
    rows = [cost_row(name, a, half) for name, a in architectures.items() for half in halves]
    title = "A train step under `autocast`, over the same step with dtypes written by hand"
    yield ResultTable.of("costs", title, _COST_HEADER, rows, notes=_COST_NOTES)
    title = "Tracing with `autocast` over tracing without"
    notes = ["Tracing without is faster: autocast walks through the traced program once more."]
    yield ResultTable.of("tracing", title, _TRACING_HEADER, tracing_rows(quick), ["time"], notes)


_COST_NOTES = (
    "Above 1: autocast keeps a softmax, norms and sums in float32 inside, where the model by hand has them in half. "
    "Half matmuls are counted in the program lowered for a GPU.",
)
_COST_HEADER = ["architecture", "autocast to", "half matmuls", "operations", "flops", "bytes", "temporaries"]
_TRACING_HEADER = ["traced", "calls", "time"]


def cost_row(name: str, architecture: Architecture, half: str) -> list[str]:
    """Makes a row with the cost of a step over the step by hand."""
    program = step(architecture, POLICIES[half])
    dtypes = matmul_dtypes(program, "cuda")
    in_half = dtypes[{"bfloat16": "bf16", "float16": "f16"}[half]]
    ratios = cost(program).over(cost(by_hand(architecture, jmp.get_policy(f"mixed_{half}"))))
    return [name, half, f"{in_half} of {dtypes.total()}", *(f"{r:.3f}" for r in dataclasses.astuple(ratios))]


def tracing_rows(quick: bool) -> list[list[str]]:
    """Makes the rows of tracing times."""
    repeats = 1 if quick else 5
    rows = []
    for layers in (5, 10) if quick else (100, 1000, 10000):
        fun, args = unrolled(layers)
        rows.append([f"{layers} dense layers, unrolled", *tracing(fun, args, repeats)])
        if layers <= 1000:
            rows.append([f"gradients of {layers} dense layers", *tracing(fun, args, repeats, jax.grad)])
    small = GPTConfig(width=32, depth=1 if quick else 12, heads=2, context=16)
    model, batch = gpt(small).without_policy(), gpt(small).batch
    args = (*shapes(model), batch)
    loss = lambda params, variables, batch: model.loss(params, variables, batch)[0]
    rows.append([f"GPT of {small.depth} blocks in linen", *tracing(loss, args, repeats)])
    rows.append([f"gradients of a GPT of {small.depth} blocks", *tracing(loss, args, repeats, jax.grad)])
    return rows


if __name__ == "__main__":
    main()
