"""`contrib.diverge`: iterations of a scan are aligned with the layers of a Python loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_policy as jmp
from jmp_policy.contrib import diverge

RNG = np.random.default_rng(0)
WEIGHTS, X = (jnp.asarray(RNG.normal(size=shape) / 3, jnp.float32) for shape in ((3, 8, 8), (6, 8)))
LOW = "params=float32,compute=bfloat16,output=float32"


def layer(w, x, dtype=jnp.float32):
    with jax.named_scope("dense"):
        x = (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
    with jax.named_scope("wave"):
        return jnp.sin(3 * x)


def scanned(weights, x):
    with jax.named_scope("layers"):
        return lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0]


def loop(weights, x, name="layers_{}", low=1):
    for i, w in enumerate(weights):
        with jax.named_scope(name.format(i)):
            x = layer(w, x, jnp.bfloat16 if i == low else jnp.float32)
    return x


def relative(reference, value):
    return np.linalg.norm(np.asarray(value - reference, np.float64)) / np.linalg.norm(np.asarray(reference, np.float64))


@pytest.mark.parametrize("is_flipped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layer_in_half_of_a_loop_is_found_by_iteration(is_flipped):
    divergence = diverge(*((loop, scanned) if is_flipped else (scanned, loop)))(WEIGHTS, X)
    found = {row.path: row.introduced for row in divergence.rows() if row.introduced > 1e-6}
    assert list(found) == ["layers_1/dense"]
    x, dtype = layer(WEIGHTS[0], X), jnp.bfloat16
    low = jax.jit(lambda x, w: (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32))(x, WEIGHTS[1])
    np.testing.assert_allclose(found["layers_1/dense"], relative(x @ WEIGHTS[1], low), rtol=0.1)
    assert divergence.unaligned == ()


@pytest.mark.parametrize("name", ["layer_{}", "layers/{}", "layer{}", "h/{}"])
def test_layers_are_iterations_by_name_or_by_the_scopes_inside_them(name):
    divergence = jax.eval_shape(diverge(scanned, lambda weights, x: loop(weights, x, name)), WEIGHTS, X)
    paths = {row.plan.scope.path for row in divergence.layout.rows}
    assert paths >= {f"{name.format(i)}/{inner}" for i in range(3) for inner in ("dense", "wave")}
    assert divergence.unaligned == ()


def test_calls_of_one_scope_are_the_iterations_of_a_scan():
    divergence = diverge(scanned, lambda weights, x: loop(weights, x, "layers"))(WEIGHTS, X)
    assert [row.path for row in divergence.rows() if row.introduced > 1e-6] == ["layers/dense"]
    assert divergence.unaligned == ()


def test_scan_and_loop_of_unlike_names_are_not_aligned():
    def unlike(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"stage{i}"):
                x = x @ w
        return x

    divergence = jax.eval_shape(diverge(scanned, unlike), WEIGHTS, X)
    assert divergence.unaligned[0] == "stage0 is only in the second function (forward)"
    assert any(line.endswith("only in the first function (forward)") for line in divergence.unaligned)


@pytest.mark.slow
def test_a_scan_inside_a_scan_is_unrolled_too():
    def named(weights, x):
        with jax.named_scope("rounds"):
            return lax.scan(lambda x, _: (scanned(weights, x), None), x, length=2)[0]

    def unrolled(weights, x):
        for i in range(2):
            with jax.named_scope(f"round_{i}"):
                x = loop(weights, x, low=1 if i else None)
        return x

    divergence = diverge(named, unrolled)(WEIGHTS, X)
    assert [row.path for row in divergence.rows() if row.introduced > 1e-6] == ["round_1/layers_1/dense"]
    assert divergence.unaligned == ()


class ResidualBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(h))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        kwargs = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(nn.remat(ResidualBlock), **kwargs)(name="layers")(x)[0]


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x, _ = ResidualBlock(name=f"layers_{i}")(x)
        return x


@pytest.mark.slow
def test_linen_scan_with_remat_aligns_with_a_loop_in_gradients():
    low = jmp.with_policy(Unrolled(), jmp.PolicyMap({"layers_1/up": LOW}, "float32"))
    variables = Scanned().init(jax.random.key(0), X)
    unstack = lambda layers: {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(3)}
    f = jax.grad(lambda variables: jnp.mean(Scanned().apply(variables, X) ** 2))
    g = jax.grad(lambda variables: jnp.mean(low.apply({"params": unstack(variables["params"]["layers"])}, X) ** 2))
    divergence = diverge(g, f)(variables)
    found = {(row.path, row.direction) for row in divergence.rows() if row.introduced > 1e-6}
    assert found == {("layers_1/up", "forward"), ("layers_1/up", "backward")}
    assert divergence.unaligned == ()


def test_gradient_that_a_loop_adds_up_is_not_compared_with_the_weights():
    def step(x, w):
        with jax.named_scope("layers"):
            return jnp.tanh(x @ w), None

    def indexed(weights, x):
        for i in range(3):
            with jax.named_scope(f"layers_{i}"):
                x = jnp.tanh(x @ weights[i])
        return jnp.sum(x)

    f, g = jax.grad(lambda weights, x: jnp.sum(lax.scan(step, x, weights)[0])), jax.grad(indexed)
    rows = diverge(f, g)(WEIGHTS, X).rows()
    assert {row.direction for row in rows} == {"forward", "backward"}
    assert max(row.introduced for row in rows) < 1e-5


def test_backward_pass_of_a_scan_reads_the_residuals_that_its_own_forward_pass_rounds():
    def make_loss(dtype, is_scan):
        def act(x, w):
            return jnp.sin((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32))

        def step(x, w):
            with jax.named_scope("layers"):
                return act(x, w), None

        def loss(weights, x):
            if is_scan:
                return jnp.mean(lax.scan(step, x, weights)[0] ** 2)
            for i, w in enumerate(weights):
                with jax.named_scope(f"layers_{i}"):
                    x = act(x, w)
            return jnp.mean(x**2)

        return jax.grad(loss)

    found = []
    for is_scan in (False, True):
        rows = diverge(*(make_loss(dtype, is_scan) for dtype in (jnp.float32, jnp.bfloat16)))(4 * WEIGHTS, X).rows()
        found.append({row.path: row for row in rows if row.direction == "backward" and row.path})
    loops = [found[0][f"layers_{i}"].introduced for i in (1, 2)]
    np.testing.assert_allclose(found[1]["layers"].iterations[1:], loops, rtol=0.2)
