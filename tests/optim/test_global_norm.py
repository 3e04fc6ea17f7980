"""The norm of the gradients of parameters, among which float8 state does not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float8_problem import STATE, variables_of

import jmp_policy as jmp

VARIABLES = variables_of()
NORM = np.sqrt(sum(np.sum(np.asarray(w, np.float64) ** 2) for w in VARIABLES["params"].values()))
PLACES = {
    "in a collection": VARIABLES,
    "bare": {"w": VARIABLES["params"], "fp8": VARIABLES[STATE]},
    "in nnx": nnx.State({n: {"w": nnx.Param(w), STATE: VARIABLES[STATE][n]} for n, w in VARIABLES["params"].items()}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", PLACES)
def test_float8_state_does_not_count(place):
    of_all = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(PLACES[place])))
    assert of_all > 1.01 * NORM
    # 512 squares and their sum are rounded in float32; 2^-20 is 16 roundings.
    np.testing.assert_allclose(jax.jit(jmp.optim.global_norm)(PLACES[place]), NORM, rtol=2**-20)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_the_norm_is_that_of_float64_in_every_dtype(dtype):
    numbers = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        turn = 1 + 2j if dtype == "complex64" else 1.0
        x = jnp.asarray(numbers.normal(scale=300, size=(3, 50)) * turn, dtype)
        norm = jmp.optim.global_norm({"a": x, "b": [jnp.ones(2, jnp.float32)]})
        wide = np.asarray(x).astype(np.complex128)
    expected = np.sqrt((np.abs(wide) ** 2).sum() + 2)
    np.testing.assert_allclose(float(norm), expected, rtol=2**-20)
    assert norm.dtype == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_gradient_that_is_not_finite_shows(bad):
    assert not jnp.isfinite(jmp.optim.global_norm({"w": jnp.ones(5000).at[1].set(bad)}))


def test_integers_and_empty_trees_count_as_zero():
    grads = jax.grad(lambda p: p["w"] * 3.0, allow_int=True)({"w": 2.0, "n": jnp.arange(2)})
    assert float(jmp.optim.global_norm(grads)) == 3.0
    assert float(jmp.optim.global_norm({"n": jnp.arange(3), "none": None})) == 0.0
