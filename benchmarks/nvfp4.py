"""Effect of each part of NVFP4's recipe on gradients: the error of one draw of its noise, and of the mean of many.

Run from the root of the repository:

    python -m benchmarks.nvfp4 [--quick]

Gradients of a dense layer, an MLP and a transformer block, and of a dense layer with some elements much larger than the
rest, against float64. The mean of many draws removes noise but not bias: rounding to nearest has the same error each
time. Weights and inputs are rounded to nearest in all of them, so no mean is exact.
"""

import argparse
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import jmp_policy as jmp
from benchmarks._float8_contestants import relative_error
from benchmarks._float8_models import MODELS
from benchmarks._results import ResultTable, print_tables

SHAPE = (4, 64, 256)
"""The shape of the input: batch, length, width."""

DRAWS = 20

VARIANTS = {
    "bfloat16": "mixed_bfloat16",
    "mxfp8": "mxfp8(min_size=0)_from_mixed_bfloat16",
    "nvfp4, the default": "nvfp4(min_size=0)_from_mixed_bfloat16",
    "all parts": "nvfp4(hadamard=true,stochastic_rounding=true,min_size=0)_from_mixed_bfloat16",
    "without the transform": "nvfp4(stochastic_rounding=true,min_size=0)_from_mixed_bfloat16",
    "without stochastic rounding": "nvfp4(hadamard=true,min_size=0)_from_mixed_bfloat16",
    "without square blocks": "nvfp4(hadamard=true,stochastic_rounding=true,square_weights=false,min_size=0)"
    "_from_mixed_bfloat16",
    "without any of the three": "nvfp4(square_weights=false,min_size=0)_from_mixed_bfloat16",
}

Data = Callable[[jax.Array], jax.Array]
"""Makes the input, or the gradient of the output, of random normal numbers."""


def keep_numbers(x: jax.Array) -> jax.Array:
    """Returns all numbers unchanged."""
    return x


def add_outliers(x: jax.Array) -> jax.Array:
    """Makes one number of 256 a hundred times as large, at random places."""
    return jnp.where(jax.random.bernoulli(jax.random.key(9), 1 / 256, x.shape), 100 * x, x)


CASES: dict[str, tuple[type[linen.Module], Data]] = {
    **{name: (made, keep_numbers) for name, made in MODELS.items()},
    "dense layer, outliers": (MODELS["dense layer"], add_outliers),
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small dense layer alone, of two draws")
    quick = parser.parse_args(argv).quick
    with jax.numpy_dtype_promotion("standard"):
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax")]
        print(", ".join([*versions, jax.default_backend()]))
        print_tables(tables(quick))


def tables(quick: bool) -> Iterator[ResultTable]:
    """The errors of each variant."""
    cases, draws, shape = (dict(list(CASES.items())[:1]), 2, (1, 32, 32)) if quick else (CASES, DRAWS, SHAPE)
    columns = [column for name in cases for column in (name, f"{name}, mean of {draws}")]
    title = f"Errors of gradients against float64: of one draw, and of the mean of {draws}"
    yield ResultTable.of("errors", title, ["variant", *columns], error_rows(cases, draws, shape), notes=_NOTES)


_NOTES = (
    "The default has none of the three parts but square blocks: the transform earns nothing here, and stochastic "
    "rounding makes a draw worse and the mean better.",
    "bfloat16 and mxfp8 have more bits, and are nearer.",
)


def error_rows(
    cases: dict[str, tuple[type[linen.Module], Data]], draws: int, shape: tuple[int, ...]
) -> list[list[str]]:
    """For each variant, and each case, the mean error of a draw, and the error of the mean of all draws."""
    rows = {name: [name] for name in VARIANTS}
    for made, data in cases.values():
        x, target = (data(jax.random.normal(jax.random.key(seed), shape)) for seed in range(2))
        variables = made().init(jax.random.key(2), x)
        expected = reference_gradients(made, variables, x, target)
        for name, policy in VARIANTS.items():
            model = jmp.with_policy(made(), policy)
            step = jax.jit(jax.grad(functools.partial(_loss, model), (0, 1)))
            drawn = [
                step(variables, x, target, {"rounding": jax.random.key(n)})
                for n in range(draws if "stochastic" in policy else 1)
            ]
            mean = jax.tree.map(lambda *leaves: np.mean(np.asarray(leaves, np.float64), axis=0), *drawn)
            errors = [relative_error(each, expected) for each in drawn]
            rows[name] += [f"{np.mean(errors):.4f}", f"{relative_error(mean, expected):.4f}"]
    return list(rows.values())


def reference_gradients(made: type[linen.Module], variables: Any, x: jax.Array, target: jax.Array) -> Any:
    """The gradients of parameters and input in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (variables, x, target))
        return jax.grad(functools.partial(_loss, made(dtype=jnp.float64)), (0, 1))(*wide, None)


def _loss(model: linen.Module, variables: Any, x: jax.Array, target: jax.Array, rngs: Any) -> jax.Array:
    out = model.apply(variables, x, rngs=rngs)
    assert isinstance(out, jax.Array)
    return jnp.mean(out.astype(target.dtype) * target)


if __name__ == "__main__":
    main()
