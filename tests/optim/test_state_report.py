"""The report of a state has its bits, its bytes to the last one, and why moments are left."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from quantized_moments import make_params

import jmp_policy as jmp
from jmp_policy import optim

PARAMS = make_params() | {"large": jnp.ones((1024, 512), jnp.bfloat16)}


def _bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


WRAPPED = {
    "plain": optax.adamw(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "quantize_state": optim.quantize_state(optax.adamw(1e-3), min_size=500),
    "stochastic": optim.quantize_state(optax.lion(1e-3), min_size=500, stochastic=jax.random.key(0)),
    "masters": optim.loss_scaled(
        optim.master_weights(optim.quantize_state(optax.adan(1e-3), min_size=500)), jmp.DynamicLossScale()
    ),
    "partition": optax.partition(
        {"matrix": optim.quantize_state(optax.adam(1e-3)), "rest": optax.adam(1e-3)},
        lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params),
    ),
    "key": optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(0)), optax.trace(0.9)),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", WRAPPED)
def test_bytes_are_those_of_the_state(name):
    state = jax.eval_shape(WRAPPED[name].init, PARAMS)
    report = optim.state_report(state, PARAMS)
    plain = jax.tree.map(
        lambda x: jax.eval_shape(jax.random.key_data, x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state
    )
    assert report.moment_bytes + report.other_bytes == _bytes(plain)
    assert report.bytes_per_param == pytest.approx(_bytes(plain) / sum(p.size for p in jax.tree.leaves(PARAMS)))
    assert sum(row.dtype == "uint8" for row in report.rows) == sum(x.dtype == jnp.uint8 for x in jax.tree.leaves(plain))
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["path"] == "b"


def test_large_leaves_take_little_more_than_two_bytes_a_parameter():
    params = {"kernel": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    report = optim.state_report(jax.eval_shape(optim.quantize_state(optax.adamw(1e-3)).init, params), params)
    assert report["kernel"].bytes == 4096 * 1024 * (1 + 4 / 256)
    assert 2.03 < report.bytes_per_param < 2.04
    assert [(row.role, row.bits, row.block) for row in report.rows] == [("mu", 8, (32, 8)), ("nu", 8, (32, 8))]


def test_what_is_left_says_why():
    report = optim.state_report(WRAPPED["quantize_state"].init(PARAMS), PARAMS)
    assert report["large"].left == ""
    assert report["odd"].left == "no blocks of 256 divide its axes"
    assert report["embed"].left == "embeddings"
    assert optim.state_report(optax.trace(0.9).init(PARAMS), PARAMS)["embed"].left == ""
    params = {"n": jnp.ones((64, 64), jnp.int32), "norm": jnp.ones(256), "w": jnp.ones((64, 64))}
    report = optim.state_report(optim.quantize_state(optax.trace(0.9)).init(params), params)
    assert report["n"].left == "no floating numbers"
    assert report["norm"].left == "256 numbers: fewer than min_size, or by a rule"
    with pytest.raises(KeyError, match=r"No moment at 'v'\. Those stored are 'n', 'norm', 'w'\."):
        report["v"]
    assert repr(report) == "<StateReport: 3 moments; print it for the table>"


def test_a_state_without_moments_has_an_empty_report():
    report = optim.state_report(optax.sgd(1e-2).init(PARAMS), PARAMS)
    assert (report.rows, report.moment_bytes, report.other_bytes) == ((), 0, 0)
    assert "moments: 0 B" in str(report)
