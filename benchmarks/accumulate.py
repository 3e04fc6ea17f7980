"""Effects of an accumulate dtype: errors, costs of compiled programs, and the loss of a small GPT.

Run from the root of the repository:

    python -m benchmarks.accumulate [--quick]

A head of a language model against float64, with elements that bfloat16 represents, so that only its own rounding
counts; the costs of a step of the example's GPT, for this machine and for a TPU v5e if its compiler is installed; and
the GPT's loss on text that it did not see.
"""

import argparse
import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import jmp_policy as jmp
from benchmarks._compiled import compile_for_figures, figures, products
from benchmarks._programs import Program
from benchmarks._results import ResultTable, print_tables
from benchmarks._targets import TARGETS
from examples.gpt.data import Corpus, load_corpus, sample_batch, validation_batches
from examples.gpt.model import GPTConfig, TrainerConfig, make_trainer, measure_bits_per_byte

POLICIES = {
    "a=none": "params={p},compute=bfloat16,output=float32",
    "a=f32": "params={p},compute=bfloat16,output=float32,accumulate=float32",
}
SHAPE, VOCABULARY = (8, 64, 512), 2048
"""Of the input of the head: batch, length, width; and of its logits."""

BATCH, RATE = 16, 5e-3


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, two steps, and this machine alone")
    quick = parser.parse_args(argv).quick
    with jax.numpy_dtype_promotion("standard"):
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax")]
        print(", ".join([*versions, jax.default_backend()]))
        print_tables(tables(quick))
        print_tables(training_tables(quick))


def tables(quick: bool) -> Iterator[ResultTable]:
    """The errors of a head, and the figures of a step."""
    shape, vocabulary = ((1, 8, 32), 64) if quick else (SHAPE, VOCABULARY)
    header = ["weights", "policy", "largest error of logits", "error of logits", "of dx", "of dw"]
    title = f"A head of {shape[-1]} to {vocabulary} against float64"
    notes = ["The result, and dw, are sums over many products. dx is rounded to bfloat16 in both, as the input is."]
    yield ResultTable.of("errors", title, header, error_rows(shape, vocabulary), notes=notes)
    header = ["target", "policy", "flops", "bytes accessed", "temporaries", "products"]
    notes = ["XLA:CPU computes all products in float32 anyway. For a TPU wider results are more bytes: the price."]
    title = f"Loss and gradients of the demo's GPT, batch {BATCH}"
    yield ResultTable.of("costs", title, header, cost_rows([] if quick else ["tpu"]), notes=notes)


def training_tables(quick: bool) -> Iterator[ResultTable]:
    """The losses of the GPT."""
    steps, seeds = (2, 1) if quick else (150, 2)
    title = f"Bits per byte of text that a GPT did not see, after {steps} steps"
    header = ["seed", "policy", "bits per byte"]
    notes = ["Two seeds differ by more than two policies do."]
    yield ResultTable.of("losses", title, header, loss_rows(steps, range(seeds)), notes=notes)


def error_rows(shape: tuple[int, ...], vocabulary: int) -> list[list[str]]:
    """The errors of a head's logits and gradients, for weights in two dtypes."""
    rows = []
    for param_dtype in ("float32", "bfloat16"):
        head = linen.Dense(vocabulary, bias_init=linen.initializers.normal(1.0))
        x, grad = (
            _hold(jax.random.normal(jax.random.key(seed), (*shape[:2], n)))
            for seed, n in ((0, shape[2]), (1, vocabulary))
        )
        variables = jax.tree.map(_hold, head.init(jax.random.key(2), x))
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (variables, x, grad))
            true = _differentiate(linen.Dense(vocabulary, dtype=jnp.float64), *wide)
        for name, policy in POLICIES.items():
            model = jmp.with_policy(head, policy.format(p=param_dtype))
            stored = jmp.cast_floating(variables, param_dtype)
            found = _differentiate(model, stored, x, grad)
            largest = np.abs(np.float64(found[0]) - true[0]).max()
            rows.append(
                [
                    param_dtype,
                    name,
                    f"{largest:.1e}",
                    *(f"{_error(*pair):.1e}" for pair in zip(found, true, strict=True)),
                ]
            )
    return rows


def cost_rows(targets: Sequence[str]) -> list[list[str]]:
    """The figures of a step of the GPT under each policy: on this machine, and compiled for others."""
    rows = []
    for target in ["this machine", *targets]:
        for name, policy in POLICIES.items():
            try:
                compile_program = compile_for_this_machine if target == "this machine" else TARGETS[target]().compile
            except ModuleNotFoundError as error:
                rows.append([target, name, f"not measured: needs {error.name or 'its compiler'}", "", "", ""])
                continue
            trainer = make_trainer("linen", TrainerConfig(jmp.get_policy(policy.format(p="float32"))))
            windows = jax.ShapeDtypeStruct((BATCH, GPTConfig().context + 1), jnp.uint8)
            step = jax.jit(jax.value_and_grad(trainer.loss_fn))
            program = Program(step, (trainer.params, windows))
            lowered = compile_program(program)
            found = figures(lowered)
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(products(lowered).items()))
            rows.append(
                [target, name, f"{found.flops:.4g}", f"{found.bytes_accessed:.4g}", f"{found.temporaries:.4g}", counted]
            )
    return rows


def compile_for_this_machine(program: Program) -> Any:
    """Compiles a program that will not run."""
    return compile_for_figures(program.lower())


def loss_rows(steps: int, seeds: Sequence[int]) -> list[list[str]]:
    """The loss of the GPT after some steps, on bytes that it did not see."""
    corpus = load_corpus()
    return [
        [str(seed), name, f"{_train(corpus, policy.format(p='float32'), steps, seed):.4f}"]
        for seed in seeds
        for name, policy in {"float32": "float32", **POLICIES}.items()
    ]


def _train(corpus: Corpus, policy: str, steps: int, seed: int) -> float:
    config = GPTConfig()
    trainer = make_trainer("linen", TrainerConfig(jmp.get_policy(policy), config, seed, RATE))  # type: ignore[arg-type]
    options = {"batch_size": BATCH, "context": config.context}
    for step in range(steps):
        trainer.step(sample_batch(corpus.train, seed=seed, step=step, **options))
    return measure_bits_per_byte(
        trainer.loss_fn, trainer.params, validation_batches(corpus.validation, count=8, **options)
    )


def _differentiate(model: linen.Module, variables: Any, x: jax.Array, grad: jax.Array) -> tuple[np.ndarray, ...]:
    """The logits, and the gradients of the input and of the kernel."""
    out, vjp = jax.vjp(lambda variables, x: model.apply(variables, x), variables, x)
    grads, x_grad = vjp(grad.astype(out.dtype))
    return tuple(np.asarray(leaf.astype(grad.dtype)) for leaf in (out, x_grad, grads["params"]["kernel"]))


def _error(found: np.ndarray, true: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(found) - true) / np.linalg.norm(true))


def _hold(x: jax.Array) -> jax.Array:
    """The nearest numbers of bfloat16, in float32."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


if __name__ == "__main__":
    main()
