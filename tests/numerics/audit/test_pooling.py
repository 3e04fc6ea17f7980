"""A ConvNet whose pooling Flax computes in half precision: audit and explain say so, and what they advise mends it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

SIZE, FEATURES, CLASSES = 64, 8, 5
MIXED = "params=float32,compute=bfloat16,output=float32"
X = np.float32(np.random.default_rng(0).normal(size=(2, SIZE, SIZE, 3)))


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax divides by the window, an integer of NumPy's
        yield


def average(x, pool):
    return pool(x, (SIZE, SIZE)).reshape(-1, FEATURES)  # pooled here


class LinenNet(nn.Module):
    pool: object = nn.avg_pool

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(average(nn.relu(nn.Conv(FEATURES, (3, 3))(x)), self.pool))


class NnxNet(nnx.Module):
    def __init__(self, pool=nn.avg_pool):
        self.conv = nnx.Conv(3, FEATURES, (3, 3), rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(1))
        self.pool = pool

    def __call__(self, x):
        return self.dense(average(nnx.relu(self.conv(x)), self.pool))


def make(kind, policy, pool):
    """`(params, x) -> logits`, its parameters, and the model."""
    model = kind(pool) if policy is None else jmp.with_policy(kind(pool), policy)
    if kind is LinenNet:
        return model.apply, LinenNet().init(jax.random.key(0), X), model
    graph, state = nnx.split(model)
    return lambda state, x: nnx.merge(graph, state)(x), state, model


KINDS = pytest.mark.parametrize("kind", [LinenNet, NnxNet])


def error(kind, apply, params):
    """That of the logits, over the largest of them. The bound is 1,000 times what float32 loses."""
    exact, true_params, _ = make(kind, None, nn.avg_pool)
    expected = jax.jit(exact)(true_params, X)
    return np.abs(jax.jit(apply)(params, X) - expected).max() / np.abs(expected).max()


def findings(fun, params):
    return jmp.numerics.audit(fun)(params, X).findings


def in_a_loss(fun):
    return jax.grad(lambda params, x: jnp.mean(jax.nn.log_softmax(fun(params, x)) ** 2))


def test_explain_and_audit_find_the_pooling_of_a_policied_convnet_unless_it_is_of_few_elements():
    model = jmp.with_policy(LinenNet(), MIXED)  # adds in bfloat16 on a CPU: the logits are .066 off
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    for fun in (model.apply, in_a_loss(model.apply)):
        [finding] = findings(fun, params)
        assert (finding.id, finding.dtypes, finding.backward) == ("half-reduction", ("bfloat16",), False)
        assert "reduce_window_sum of 4096 numbers in bfloat16" in finding.message
        assert "jmp.force_full_precision(nn.avg_pool)" in finding.message
        assert re.search(r"test_pooling.py:\d+ \(average\)$", finding.source)
    explanation = jmp.explain(model, X)
    assert explanation[""].half_sums == ("reduce_window_sum of 4096 numbers in bfloat16",)
    assert [row.path for row in explanation.rows if row.half_sums] == [""]
    text = " ".join(str(explanation).split())
    assert "the model itself (!): reduce_window_sum of 4096 numbers in bfloat16, whose error grows" in text
    small = jmp.with_policy(LinenNet(lambda x, _: nn.avg_pool(x, (2, 2)).mean((1, 2))), MIXED)
    assert jmp.explain(small, X)[""].half_sums == ()


@pytest.mark.slow
@KINDS
def test_what_audit_and_explain_advise_makes_the_logits_right(kind):
    apply, params, model = make(kind, MIXED, jmp.force_full_precision(nn.avg_pool))
    assert error(kind, apply, params) <= 2.0**-7
    assert findings(apply, params) == findings(in_a_loss(apply), params) == ()
    assert not any(row.half_sums for row in jmp.explain(model, X).rows)


@pytest.mark.slow
@KINDS
def test_autocast_pools_in_float32(kind):
    apply, params, _ = make(kind, None, nn.avg_pool)
    apply = jmp.autocast(apply, MIXED)
    assert error(kind, apply, params) <= 2.0**-7
    assert findings(apply, params) == findings(in_a_loss(apply), params) == ()
