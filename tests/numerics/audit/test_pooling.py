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
        x = nn.relu(nn.Conv(FEATURES, (3, 3))(x))
        return nn.Dense(CLASSES)(average(x, self.pool))


class NnxNet(nnx.Module):
    def __init__(self, pool=nn.avg_pool):
        self.conv = nnx.Conv(3, FEATURES, (3, 3), rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(1))
        self.pool = pool

    def __call__(self, x):
        return self.dense(average(nnx.relu(self.conv(x)), self.pool))


def linen_function(policy, pool):
    """`(params, x) -> logits`, the parameters as `arrays` has them, and the model."""
    model = LinenNet(pool) if policy is None else jmp.with_policy(LinenNet(pool), policy)

    def apply(arrays, x):
        conv, dense = ({"kernel": kernel, "bias": bias} for kernel, bias in (arrays["conv"], arrays["dense"]))
        return model.apply({"params": {"Conv_0": conv, "Dense_0": dense}}, x)

    return apply, model


def nnx_function(policy, pool):
    model = NnxNet(pool) if policy is None else jmp.with_policy(NnxNet(pool), policy)
    graph, state = nnx.split(model)

    def apply(arrays, x):
        for name, (kernel, bias) in arrays.items():
            state[name]["kernel"], state[name]["bias"] = nnx.Param(kernel), nnx.Param(bias)
        return nnx.merge(graph, state)(x)

    return apply, model


FUNCTIONS = {"linen": linen_function, "nnx": nnx_function}


def problem():
    rng = np.random.default_rng(0)
    arrays = {
        "conv": (rng.normal(size=(3, 3, 3, FEATURES)) / 5, rng.normal(size=FEATURES) / 5),
        "dense": (rng.normal(size=(FEATURES, CLASSES)), rng.normal(size=CLASSES)),
    }
    return jax.tree.map(np.float32, arrays), np.float32(rng.normal(size=(2, SIZE, SIZE, 3)))


def by_hand(arrays, x):
    """The logits in float64."""
    (kernel, bias), (weight, offset) = jax.tree.map(np.float64, (arrays["conv"], arrays["dense"]))
    padded = np.pad(np.float64(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    mean = np.maximum(np.einsum("byxcij,ijcf->byxf", patches, kernel) + bias, 0).mean((1, 2))
    return mean @ weight + offset


def error(fun):
    """That of the logits, over the largest of them."""
    arrays, x = problem()
    expected = by_hand(arrays, x)
    return np.abs(np.float64(jax.jit(fun)(arrays, x)) - expected).max() / np.abs(expected).max()


def findings(fun):
    return jmp.numerics.audit(fun)(*problem()).findings


def in_a_loss(fun):
    return jax.grad(lambda arrays, x: jnp.mean(jax.nn.log_softmax(fun(arrays, x)) ** 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("api", FUNCTIONS)
def test_audit_and_explain_find_the_pooling_of_a_policied_convnet(api):
    apply, model = FUNCTIONS[api](MIXED, nn.avg_pool)  # adds in bfloat16 on a CPU: the logits are .066 off
    for fun in (apply, in_a_loss(apply)):
        [finding] = findings(fun)
        assert (finding.id, finding.dtypes, finding.backward) == ("half-reduction", ("bfloat16",), False)
        assert "reduce_window_sum of 4096 numbers in bfloat16" in finding.message
        assert "jmp.force_full_precision(nn.avg_pool)" in finding.message
        assert re.search(r"test_pooling.py:\d+ \(average\)$", finding.source)
    explanation = jmp.explain(model, problem()[1])
    assert explanation[""].half_sums == ("reduce_window_sum of 4096 numbers in bfloat16",)
    assert [row.path for row in explanation.rows if row.half_sums] == [""]
    text = " ".join(str(explanation).split())
    assert "the model itself (!): reduce_window_sum of 4096 numbers in bfloat16, whose error grows" in text


def test_explain_does_not_report_pooling_of_few_elements():
    model = jmp.with_policy(LinenNet(lambda x, _: nn.avg_pool(x, (2, 2)).mean((1, 2))), MIXED)
    assert jmp.explain(model, problem()[1])[""].half_sums == ()


@pytest.mark.slow
@pytest.mark.parametrize("api", FUNCTIONS)
def test_what_audit_and_explain_advise_makes_the_logits_right(api):
    apply, model = FUNCTIONS[api](MIXED, jmp.force_full_precision(nn.avg_pool))
    assert error(apply) <= 2.0**-7
    assert findings(apply) == findings(in_a_loss(apply)) == ()
    explanation = jmp.explain(model, problem()[1])
    assert not any(row.half_sums for row in explanation.rows)
    assert "whose error grows" not in str(explanation)
    pooled = jmp.force_full_precision(nn.avg_pool)(jnp.ones((1, 4, 4, 1), jnp.bfloat16), (2, 2))
    assert pooled.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("api", FUNCTIONS)
def test_autocast_pools_in_float32(api):
    apply = jmp.autocast(FUNCTIONS[api](None, nn.avg_pool)[0], MIXED)
    assert error(apply) <= 2.0**-7
    assert findings(apply) == findings(in_a_loss(apply)) == ()
