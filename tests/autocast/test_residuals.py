"""Norms written by hand keep no more for the backward pass than with dtypes by hand, and have the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_policy as jmp

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

HALVES = ["bfloat16", "float16"]
WIDTH = 64


def rms_norm(h, scale):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * scale


def layer_norm(h, scale):
    centred = h - h.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * scale


NORMS = [rms_norm, layer_norm]


def in_half(norm, half):
    """A norm with the dtypes of those of Flax: float32 inside, its scale too, and half out."""
    return lambda h, scale: norm(h.astype(jnp.float32), scale).astype(half)


def between_matmuls(norm, half=None):
    def fun(x, scale, weight):
        x, weight = (x, weight) if half is None else (x.astype(half), weight.astype(half))
        return norm(x @ weight, scale) @ weight

    return fun


def arguments():
    rng = np.random.default_rng(0)
    sizes = (256, WIDTH), (WIDTH,), (WIDTH, WIDTH)
    return [jnp.asarray(rng.normal(size=size) / 8, jnp.float32) for size in sizes]


def kept(fun):
    """The bytes that the backward pass is given."""
    _, backward = jax.eval_shape(lambda *args: jax.vjp(fun, *args), *arguments())
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_by_hand_keeps_what_it_keeps_with_dtypes_by_hand(norm, half):
    ours = kept(jmp.autocast(between_matmuls(norm), jmp.Policy("float32", half, half)))
    with jax.numpy_dtype_promotion("standard"):
        assert ours <= 1.1 * kept(between_matmuls(in_half(norm, half), half))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_by_hand_has_the_numbers_that_it_has_in_float32(norm, half):
    """Two roundings of the matmuls' operands, each way."""
    fun = jmp.autocast(between_matmuls(norm), jmp.Policy("float32", half, None))
    value, backward = jax.vjp(jax.jit(fun), *arguments())
    expected, exact_backward = jax.vjp(jax.jit(between_matmuls(norm)), *arguments())
    unit = float(jnp.finfo(half).eps)
    for ours, exact in zip((value, *backward(value)), (expected, *exact_backward(expected)), strict=True):
        assert ours.dtype == jnp.float32
        assert np.abs(ours - exact).mean() < 2 * unit * np.abs(exact).mean()


def test_the_square_of_a_large_number_is_one_in_float16_however_it_is_written():
    x = jnp.full((8, 8), 1000.0)
    squares = [lambda h: h * h, jnp.square, lambda h: h**2]
    for square in squares:
        fun = jmp.autocast(lambda x, square=square: square(x @ jnp.eye(8)), jmp.Policy("float32", "float16", None))
        np.testing.assert_array_equal(fun(x), 1e6)


TRANSFORMS = {
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
    "jvp": lambda fun: lambda x: jax.jvp(fun, (x,), (x,)),
    "second derivative": lambda fun: lambda x: jax.grad(lambda x: jnp.vdot(jax.grad(fun)(x), x))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_run_that_is_computed_again_is_transformed_like_any_other(name):
    x, scale, weight = arguments()
    fun = lambda x: between_matmuls(rms_norm)(x[None] if x.ndim == 1 else x, scale, weight).sum()
    results = [TRANSFORMS[name](f)(x) for f in (jmp.autocast(fun, jmp.Policy("float32", "bfloat16", None)), fun)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.5), *results)
