"""Compares `autocast` of models written in float32 with the same models with dtypes written by hand.

Run from the root of the repository:

    python -m benchmarks.autocast [--quick]

Makes a table of the costs of a train step over the step by hand.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
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
from benchmarks._results import ResultTable, run_alone
from benchmarks.architectures._architecture import Architecture, Model
from benchmarks.architectures._programs import by_hand, shapes
from benchmarks.architectures._registry import ARCHITECTURES
from benchmarks.architectures._training import make_state, train_step
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


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the table of the costs of a train step."""
    small = GPTConfig(width=32, depth=1, heads=2, context=16)
    architectures = {"GPT": gpt(small if quick else GPTConfig())} | ({} if quick else ARCHITECTURES)
    halves = HALVES[:1] if quick else HALVES
    rows = [cost_row(name, a, half) for name, a in architectures.items() for half in halves]
    title = "A train step under `autocast`, over the same step with dtypes written by hand"
    yield ResultTable.of("costs", title, _COST_HEADER, rows, notes=_COST_NOTES)


_COST_NOTES = (
    "Above 1: autocast keeps a softmax, norms and sums in float32 inside, where the model by hand has them in half. "
    "Half matmuls are counted in the program lowered for a GPU.",
)
_COST_HEADER = ["architecture", "autocast to", "half matmuls", "operations", "flops", "bytes", "temporaries"]


def cost_row(name: str, architecture: Architecture, half: str) -> list[str]:
    """Makes a row with the cost of a step over the step by hand."""
    program = step(architecture, POLICIES[half])
    dtypes = matmul_dtypes(program, "cuda")
    in_half = dtypes[{"bfloat16": "bf16", "float16": "f16"}[half]]
    ratios = cost(program).over(cost(by_hand(architecture, jmp.get_policy(f"mixed_{half}"))))
    return [name, half, f"{in_half} of {dtypes.total()}", *(f"{r:.3f}" for r in dataclasses.astuple(ratios))]


if __name__ == "__main__":
    run_alone(__doc__, tables)
