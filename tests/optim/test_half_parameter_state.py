"""The states of half-precision parameters are saved, restored, reshaped and sharded as any state of optax."""

from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh
from optimizer_registry import LARGE, METHODS, WAYS, bits, grads_of, types

import jmp_policy as jmp
from jmp_policy import optim

EXACT = optax.sgd(0.5, momentum=0.5)  # whose products are exact, so that no fusion of XLA's rounds them differently
MAKE = METHODS | {"cast_state": lambda inner: optim.cast_state(inner, mu_dtype="bfloat16", nu_dtype="float32")}
TXS = {name: optim.loss_scaled(make(optax.adamw(1e-2)), jmp.DynamicLossScale(2.0**10)) for name, make in MAKE.items()}
MEMORY = {"masters": "master", "split": "remainder", "kahan": "compensation", "stochastic": "key"}


def fresh():
    """Parameters of both kinds, and the state of every transformation."""
    half = jnp.bfloat16([[1.0, -0.0, 2.0], [-1.5, 0.0, 0.25]])
    params = {"w": half, "b": jnp.resize(jnp.float32([0.5, -1.0, 3.0]), LARGE), "frozen": None}
    return {name: (params, tx.init(params)) for name, tx in TXS.items()}


@jax.jit  # one program for all of them, compiled once
def step(trainings, grads):
    return {name: optim.step(TXS[name], grads, state, params) for name, (params, state) in trainings.items()}


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.filterwarnings("default")  # those of orbax
def test_a_restored_state_has_every_bit_and_goes_on_as_if_nothing_had_happened(tmp_path):
    trained = step(step(fresh(), grads_of(0)), grads_of(1, np.nan))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", trained)
        checkpointer.wait_until_finished()
        by_orbax = checkpointer.restore(tmp_path / "state", jax.eval_shape(fresh))
    by_flax = flax.serialization.from_bytes(fresh(), flax.serialization.to_bytes(trained))
    expected = bits(step(trained, grads_of(2)))
    for saved in (by_orbax, by_flax):
        restored = jax.tree.map(np.asarray, saved)
        assert jax.tree.structure(restored) == jax.tree.structure(trained)
        assert (types(restored), bits(restored)) == (types(trained), bits(trained))
        assert bits(step(restored, grads_of(2))) == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_state_is_made_of_names_and_arrays(method):
    saved = flax.serialization.to_state_dict(METHODS[method](EXACT).init({"w": jnp.bfloat16([1.0])}))
    assert set(saved) == {"inner_state", MEMORY[method]}
    assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in jax.tree.leaves(saved))


@pytest.mark.parametrize("leaf", [jax.ShapeDtypeStruct((2,), jnp.int8), object(), "text", None, PartitionSpec("d"), 3])
def test_trees_of_other_leaves_are_states_too(leaf):
    """JAX and checkpoint libraries rebuild states with shapes, shardings and names in place of arrays."""
    states = jax.eval_shape(fresh)
    other = jax.tree.map(lambda _: leaf, states)
    assert jax.tree.leaves(other, is_leaf=lambda x: x is None).count(leaf) >= len(jax.tree.leaves(states))
    kinds = lambda trainings: {name: type(state.inner_state) for name, (_, state) in trainings.items()}
    assert kinds(other) == kinds(states)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shards_stay_where_they_are(axis_type):
    """What is remembered of a parameter lies where the parameter lies, at first and after a step."""
    mesh = make_mesh((4,), ("d",), axis_types=(axis_type,))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    params = {"w": jax.device_put(jnp.ones((8, 2), jnp.bfloat16), rows), "b": jax.device_put(jnp.ones(8), everywhere)}
    txs = {name: make(EXACT) for name, make in METHODS.items()}
    states = {name: tx.init(params) for name, tx in txs.items()}
    train_step = lambda states: {name: optim.step(tx, params, states[name], params) for name, tx in txs.items()}
    after = jax.jit(train_step)(states)
    for name in METHODS:
        new_params, new_state = after[name]
        for state in (states[name], new_state):
            remembered = [] if name == "stochastic" else [state[1]["w"]]
            for leaf in (new_params["w"], state.inner_state[0].trace["w"], *remembered):
                assert leaf.sharding.is_equivalent_to(rows, 2), name


class Counted(NamedTuple):
    count: Any
    rate: Any
    mu: Any


def counting(as_array):
    """An optimizer that begins with Python's numbers, and counts on with them or with arrays."""

    def update(grads, state, params=None):
        count = jnp.asarray(state.count + 1, jnp.int32) if as_array else state.count + 1
        return jax.tree.map(lambda g: -0.5 * g, grads), Counted(count, state.rate * 0.5, grads)

    return optax.GradientTransformation(lambda params: Counted(0, 1.0, jax.tree.map(jnp.zeros_like, params)), update)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "way", "wrap", "as_array"),
    [
        ("masters", "step", jax.jit, True),
        ("split", "update", jax.jit, False),
        ("kahan", "step", lambda step: step, False),
        ("stochastic", "update", lambda step: step, True),
        ("cast_state", "step", jax.jit, False),
    ],
)
def test_an_optimizer_may_keep_numbers_of_python_in_its_state(method, way, wrap, as_array):
    cast_state = lambda inner: optim.cast_state(inner, mu_dtype="float32")
    tx = METHODS.get(method, cast_state)(counting(as_array))
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    step = wrap(lambda state, params: WAYS[way](tx, {"w": jnp.full(4, 0.25)}, state, params))
    state = tx.init(params)
    for _ in range(2):
        params, state = step(state, params)
    inner = state if method == "cast_state" else state.inner_state
    assert (int(inner.count), float(inner.rate)) == (2, 0.25)
    assert params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["w"].astype(jnp.float32), 0.75)
