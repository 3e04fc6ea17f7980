"""Peers in one run: they train the same model, and each is really itself."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmarks
from benchmarks import _peer_problems, peers
from benchmarks._peer_steps import (
    BY_HAND,
    KERAS,
    KERAS_UNSCALED,
    MINIMIZE,
    OURS,
    UNSCALED,
    steps,
)
from examples.gpt.model import GPTConfig

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of what Keras, PyTorch and qwix import
]

NEEDS = {
    "mixed-precision-for-jax": "mpx",
    KERAS: "benchmarks._peer_keras",
    KERAS_UNSCALED: "benchmarks._peer_keras",
}


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def _require(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], exc_type=ImportError)


@functools.cache
def _problem():
    return _peer_problems.mlp(64, 3, steps=3)


@functools.cache
def _trained(dtype, name):
    """The parameters after three steps."""
    problem = _problem()
    program = steps(dtype)[name](problem)
    stepping = peers.Stepping(program.step, program.args[0], None)
    for batch in problem.batches:
        stepping.take(batch)
    return stepping.params


@pytest.mark.parametrize(
    ("dtype", "ours", "by_hand"),
    [
        ("float16", MINIMIZE, "by hand, gradients of copies"),
        ("float16", f"{OURS}, `TrainState`", BY_HAND),
        ("bfloat16", MINIMIZE, BY_HAND),
    ],
)
def test_our_row_trains_to_the_bits_of_the_row_by_hand(dtype, ours, by_hand):
    jax.tree.map(np.testing.assert_array_equal, _trained(dtype, ours), _trained(dtype, by_hand))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(dtype, name) for dtype in ("float32", "float16", "bfloat16") for name in steps(dtype)],
)
def test_all_train_the_same_model(dtype, name):
    _require(name)
    begun, expected, got = _problem().params, _trained("float32", BY_HAND), _trained(dtype, name)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    moved, wrong = (_norm_of_difference(expected, other) for other in (begun, got))
    assert wrong < {"float32": 0.005, "float16": 0.05, "bfloat16": 0.2}[dtype] * moved


def _norm_of_difference(a, b):
    differences = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), a, b)
    return np.linalg.norm(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(differences)]))


def test_the_gpt_of_keras_computes_what_it_computes_in_linen():
    _require(KERAS)
    problem = _small_gpt()
    expected = problem.loss_in_float32(problem.params)
    program = steps("float32")[KERAS](problem)
    _, loss = program.step(*program.args)
    assert float(loss) == pytest.approx(expected, abs=1e-5)


def _small_gpt(steps=1):
    return _peer_problems.gpt(GPTConfig(width=16, depth=1, heads=2, context=8), steps=steps, batch=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make_problem", [lambda: _peer_problems.mlp(16, 2), _small_gpt], ids=["MLP", "GPT"])
def test_everybody_computes_in_the_dtype_of_the_table(make_problem, dtype):
    problem, short = make_problem(), {"float16": "f16", "bfloat16": "bf16"}[dtype]
    for name, make in steps(dtype).items():
        try:
            text = make(problem).lower().as_text()
        except ImportError:
            continue
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert products, name
        assert all(f"x{short}>" in line for line in products), name


def test_a_library_that_is_missing_has_a_row_that_says_so(monkeypatch):
    for module in ("mpx", "keras"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "benchmarks._peer_keras", raising=False)
    monkeypatch.delattr(benchmarks, "_peer_keras", raising=False)
    problem = _peer_problems.mlp(16, 2)
    costs = {name: peers._cost(problem, make) for name, make in steps("float16").items() if name in (*NEEDS, *_FEW)}
    table = peers.cost_table("float16", {problem: costs})
    rows = {row[1]: set(row[2:]) for row in table.rows}
    missing = ("mixed-precision-for-jax", KERAS, KERAS_UNSCALED)
    assert [name for name, cells in rows.items() if cells == {peers.MISSING}] == list(missing)


_FEW = (BY_HAND, UNSCALED, MINIMIZE)


@pytest.mark.cpu("the figures are those of XLA:CPU")
def test_a_scale_costs_fewer_bytes_than_with_any_peer():
    problem = _peer_problems.mlp(256, 4)
    nbytes = {}
    for name, make in steps("float16").items():
        if (cost := peers._cost(problem, make)) is not None:
            nbytes[name] = cost.bytes_accessed
    others = [its for name, its in nbytes.items() if not name.startswith((BY_HAND, OURS, KERAS_UNSCALED))]
    assert nbytes[MINIMIZE] < 0.95 * min(others)
    assert nbytes[f"{OURS}, `TrainState`"] < min(others)
    assert nbytes[MINIMIZE] <= nbytes["by hand, gradients of copies"] * 1.001


def test_losses_are_of_the_parameters_after_all_steps():
    problem = _peer_problems.mlp(16, 2, steps=2)
    stepping = {"float32": peers._compile_to_run(problem, "float32")}
    table = peers.loss_table(problem, stepping)
    [by_hand] = [row for row in table.rows if row[:2] == ("float32", BY_HAND)]
    assert by_hand[3] == "+0.000 %"
    assert float(by_hand[2]) == pytest.approx(problem.loss_in_float32(stepping["float32"][BY_HAND].params), abs=1e-4)
    assert float(by_hand[2]) < problem.loss_in_float32(problem.params)
    assert table.timed == (table.header[-1],)


def test_batches_are_the_same_each_time():
    made = [_small_gpt(steps=2) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, made[0].batches, made[1].batches)
    jax.tree.map(np.testing.assert_array_equal, made[0].params, made[1].params)
    x, labels = made[0].batches[0]
    assert jnp.array_equal(x[:, 1:], labels[:, :-1])
