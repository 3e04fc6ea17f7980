"""`contrib.diverge`: the scope with a planted fault introduces the largest error."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_models import FAULTS, POLICIES, block, find_path, make_arguments, make_loss

import jmp_policy as jmp
from jmp_policy.contrib import diverge


def assert_is_first(divergence, path, backward):
    rows = sorted(divergence.rows(), key=lambda row: -row.introduced)
    assert rows[0].path == path, str(divergence)
    assert rows[0].introduced > 1e-5
    others = [row for row in rows if row.path != path]
    assert all(row.introduced < 1e-2 * rows[0].introduced for row in others), str(divergence)
    if backward:
        assert all(row.introduced == 0 for row in rows if row.direction == "forward")


@pytest.mark.parametrize(
    "fault", [name if name in ("half", "eps") else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_fault_of_a_forward_pass_is_found(fault):
    params, x = make_arguments(3, layers=1)
    params = jax.tree.map(lambda leaf: leaf[0], params)
    f, g = (lambda params, x, planted=planted: block(params, x, planted, False) for planted in (None, fault))
    assert_is_first(diverge(f, g)(params, x), FAULTS[fault], False)


def test_scope_that_follows_a_wider_dtype_is_not_the_cause():
    """XLA of jax 0.12 rounds less inside of the scope after the fault, so that its error is the smaller one there."""
    f, g = (POLICIES["autocast"](make_loss("half", False, "plain", planted)) for planted in (False, True))
    divergence = diverge(f, g)(*make_arguments(0))
    introduced = {row.path: row.introduced for row in divergence.rows()}
    follows, text = introduced["block1/act"], " ".join(str(divergence).split())
    if follows > introduced["block1/up"]:
        assert " block1/up introduces 0.0" in text
        assert f" block1/act introduces {follows:.2g}: it only computes wider there." in text
    else:
        assert " block1/up introduces the largest error: 0.0" in text


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "wrap"), [*itertools.product(POLICIES, ("plain", "scan", "remat"))])
def test_fault_is_found_in_gradients(policy, wrap):
    case = 3 * list(POLICIES).index(policy) + ("plain", "scan", "remat").index(wrap)
    backward, fault = case % 2 == 1, list(FAULTS)[case % len(FAULTS)]
    losses = [POLICIES[policy](make_loss(fault, backward, wrap, planted)) for planted in (False, True)]
    divergence = diverge(*map(jax.value_and_grad, losses))(*make_arguments(list(FAULTS).index(fault)))
    assert_is_first(divergence, find_path(fault, wrap), backward)


@pytest.mark.slow
def test_quantized_layers_introduce_the_error_of_quantization():
    model, (_, x) = nn.Sequential([nn.Dense(8), jnp.tanh, nn.Dense(8)]), make_arguments(6)
    low = jmp.with_policy(model, "int8(min_size=0)_from_float32")
    variables = model.init(jax.random.key(0), x)
    rows = diverge(model.apply, low.apply)(variables, x).rows()
    assert {row.path for row in rows if row.introduced > 1e-6} == {"layers_0", "layers_2"}


def test_reordered_float32_introduces_noise_only():
    w, x = (jnp.asarray(np.random.default_rng(seed).normal(size=(8, 8)), jnp.float32) for seed in (0, 1))

    def f(w, x, move=lambda x, axis: x):  # or another order in which a sum over the axis adds up
        with jax.named_scope("dense"):
            x = move(x, 1) @ move(w, 0)
        with jax.named_scope("norm"):
            x = x - jnp.mean(move(x, -1), -1, keepdims=True)
            x = x / jnp.sqrt(jnp.mean(move(x, -1) ** 2, -1, keepdims=True) + 1e-5)
        with jax.named_scope("probabilities"):
            e = jnp.exp(x)
            return jnp.log(e / jnp.sum(move(e, -1), -1, keepdims=True))

    divergence = diverge(f, lambda w, x: f(w, x, jnp.flip))(w, x)
    assert max(row.introduced for row in divergence.rows()) < 2e-6
    assert "No scope introduces more than rounding errors of float32" in str(divergence)
