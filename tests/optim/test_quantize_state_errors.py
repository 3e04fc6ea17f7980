"""What `quantize_state` refuses, what it leaves as it is, and the report of its state: bits, bytes, and why."""

import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from quantized_moments import make_params

import jmp_policy as jmp
from jmp_policy import optim

PARAMS = {"w": jnp.ones((64, 24)), "b": jnp.ones(24)}
REFUSED = {
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9), ""),
    "lamb": (lambda: optax.lamb(1e-2), "reduce_sum at .*optax"),
    "clip_by_global_norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), "reduce_sum at"),
    "muon": (lambda: contrib.muon(1e-2), "reshape|dot_general|transpose"),
    "noise": (lambda: optax.chain(optax.add_noise(0.1, 0.1, 0), optax.adam(1e-2)), ""),
}


@pytest.mark.parametrize(
    "name", ["adafactor", "lamb", *(pytest.param(n, marks=pytest.mark.slow) for n in [*REFUSED][2:])]
)
def test_what_is_not_elementwise_is_refused_and_named(name):
    make, named = REFUSED[name]
    tx = optim.quantize_state(make(), min_size=500)
    text = (
        rf"^quantize_state runs an optimizer on one chunk of a parameter.* is not elementwise: .*({named})(?s:.*)"
        r"optax\.chain\(optax\.clip_by_global_norm\(1\.0\), quantize_state\(optax\.adamw\(1e-3\)\)\)(?s:.*)"
        r"quantize_state\(tx, elementwise=False\)\."
    )
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(tx.update, PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS)


ADAM = optax.adam(1e-2)


quantize = functools.partial(optim.quantize_state, min_size=500)


def _update(inner, state=None):
    tx = quantize(inner)
    return jax.eval_shape(lambda: tx.update(PARAMS, tx.init(PARAMS) if state is None else state))


POWER = r"^block_size must be a power of two from 16 to 4096, got .*{}.*\. For example: block_size=256"
VALUES = {
    r"^bits must be 8, got 4\. For example: quantize_state\(opt": lambda: quantize(ADAM, bits=4),
    **{POWER.format(n): lambda n=n: quantize(ADAM, block_size=n) for n in (0, 100, 8, 8192, 256.0, "'256'")},
    "quantize_state goes inside of": lambda: quantize(optim.kahan(ADAM)),
    r"moments, but the state of this one has none\. For ex": lambda: quantize(optax.sgd(1e-2)).init(PARAMS),
    r"no moments with the shape of a parameter: 'w'\. It is for .* For": lambda: quantize(optax.flatten(ADAM)).init(
        PARAMS
    ),
    r"^where='x' matches no parameter of 'b', 'w'\. A pattern": lambda: quantize(ADAM, where="x").init(PARAMS),
    r"^where=\['w', '\('\] contains an invalid regular expression: .* For": lambda: quantize(ADAM, where=["w", "("]),
    r"^where=3 contains an invalid regular expression": lambda: quantize(ADAM, where=3),
    "params": lambda: _update(optax.adamw(1e-2)),  # as the optimizer says itself
}
TYPES = {
    "adam": lambda: quantize(optax.adam),
    "stochastic .*key.*got 3": lambda: quantize(ADAM, stochastic=3),
    "stochastic .*key, got key<fry>": lambda: quantize(ADAM, stochastic=jax.random.split(jax.random.key(0), 3)),
    r"^Expected the state of quantize_state, got tuple\. Make one: tx\.init\(": lambda: _update(
        ADAM, ADAM.init(PARAMS)
    ),
    "missing 1 required keyword-only argument: 'value'": lambda: _update(
        optax.chain(contrib.reduce_on_plateau(), ADAM)
    ),
}


@pytest.mark.parametrize("text", VALUES | TYPES)
def test_wrong_settings_patterns_states_and_missing_arguments_are_errors(text):
    with pytest.raises(ValueError if text in VALUES else TypeError, match=text):
        (VALUES | TYPES)[text]()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, {"w", "x", "blocks/v"}),
        ("w", {"w"}),
        ("blocks", {"blocks/v"}),
        (["blocks/.*", "embed"], {"blocks/v", "embed"}),
        (lambda path, param: param.shape == (64, 16) or path == "w", {"embed", "w", "wte", "my_Embedding/table"}),
    ],
)
def test_a_rule_chooses_by_path_and_without_it_small_ones_embeddings_and_integers_are_left(where, expected):
    params = make_params() | {"steps": jnp.ones((64, 64), jnp.int32), "none": None, "empty": jnp.ones((0, 64))}
    params |= {"wte": jnp.ones((64, 16)), "my_Embedding": {"table": jnp.ones((64, 16))}}
    tx = optim.quantize_state(optax.trace(0.9), min_size=500, **({} if where is None else {"where": where}))
    paths = jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, params).inner_state.trace)
    found = {jax.tree_util.keystr(path, simple=True, separator="/") for path, x in paths if x.dtype == jnp.uint8}
    assert found == expected


def test_blocks_have_the_size_that_was_asked_for():
    for block_size, shape in ((16, (4, 24)), (256, (2, 3)), (1024, (1, 3))):
        tx = optim.quantize_state(optax.trace(0.9), block_size=block_size, min_size=500)
        assert jax.eval_shape(tx.init, {"w": jnp.ones((64, 24))}).scales[0]["w"].shape == shape


LARGE = make_params() | {"large": jnp.ones((1024, 512), jnp.bfloat16)}
WRAPPED = {
    "plain": optax.adamw(1e-3),
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


@pytest.mark.parametrize("name", WRAPPED)
def test_reported_bytes_are_those_of_the_state(name):
    state = jax.eval_shape(WRAPPED[name].init, LARGE)
    report = optim.state_report(state, LARGE)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = [jax.eval_shape(jax.random.key_data, x) if is_key(x) else x for x in jax.tree.leaves(state)]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in plain)
    assert report.moment_bytes + report.other_bytes == size
    assert report.bytes_per_param == pytest.approx(size / sum(p.size for p in jax.tree.leaves(LARGE)))
    assert sum(row.dtype == "uint8" for row in report.rows) == sum(x.dtype == jnp.uint8 for x in plain)
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["path"] == "b"


def test_large_leaves_take_little_more_than_two_bytes_a_parameter():
    params = {"kernel": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}
    report = optim.state_report(jax.eval_shape(optim.quantize_state(optax.adamw(1e-3)).init, params), params)
    assert report["kernel"].bytes == 4096 * 1024 * (1 + 4 / 256)
    assert 2.03 < report.bytes_per_param < 2.04
    assert [(row.role, row.bits, row.block) for row in report.rows] == [("mu", 8, (32, 8)), ("nu", 8, (32, 8))]


def test_the_report_says_why_moments_are_left_and_may_be_empty():
    report = lambda tx, params: optim.state_report(jax.eval_shape(tx.init, params), params)
    rows = report(WRAPPED["quantize_state"], LARGE)
    assert rows["large"].left == ""
    assert rows["odd"].left == "no blocks of 256 divide its axes"
    assert rows["embed"].left == "embeddings"
    assert report(optax.trace(0.9), LARGE)["embed"].left == ""
    params = {"n": jnp.ones((64, 64), jnp.int32), "norm": jnp.ones(256), "w": jnp.ones((64, 64))}
    rows = report(optim.quantize_state(optax.trace(0.9)), params)
    assert rows["n"].left == "no floating numbers"
    assert rows["norm"].left == "256 numbers: fewer than min_size, or by a rule"
    with pytest.raises(KeyError, match=r"No moment at 'v'\. Those stored are 'n', 'norm', 'w'\."):
        rows["v"]
    assert repr(rows) == "<StateReport: 3 moments; print it for the table>"
    empty = report(optax.sgd(1e-2), LARGE)
    assert (empty.rows, empty.moment_bytes, empty.other_bytes) == ((), 0, 0)
    assert "moments: 0 B" in str(empty)
