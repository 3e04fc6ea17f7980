"""The states of half-precision parameters are saved, restored, reshaped and sharded as any state of optax."""

from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from half_parameter_registry import METHODS
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh
from optimizer_registry import LARGE, WAYS, bits, grads_of, types

import jmp_policy as jmp
from jmp_policy import optim

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

MAKE = METHODS | {"cast_state": lambda inner: optim.cast_state(inner, mu_dtype="bfloat16", nu_dtype="float32")}
TXS = {name: optim.loss_scaled(make(optax.adamw(1e-2)), jmp.DynamicLossScale(2.0**10)) for name, make in MAKE.items()}
MEMORY = {"masters": "master", "split": "remainder", "kahan": "compensation", "stochastic": "key"}


def params_of_both_kinds():
    half = jnp.bfloat16([[1.0, -0.0, 2.0], [-1.5, 0.0, 0.25]])
    return {"w": half, "b": jnp.resize(jnp.float32([0.5, -1.0, 3.0]), LARGE), "frozen": None}


def fresh():
    """Parameters and state of every transformation."""
    params = params_of_both_kinds()
    return {name: (params, tx.init(params)) for name, tx in TXS.items()}


@jax.jit  # one program for all of them, compiled once
def step(trainings, grads):
    return {name: optim.step(TXS[name], grads, state, params) for name, (params, state) in trainings.items()}


@pytest.fixture(scope="module")
def trained():
    """Every training after a good and a skipped step."""
    with jax.numpy_dtype_promotion("standard"):
        trainings = fresh()
        for seed, bad in enumerate([None, np.nan]):
            trainings = step(trainings, grads_of(seed, bad))
    return trainings


def by_orbax(trainings, path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", trainings)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", jax.eval_shape(fresh))


def by_flax_bytes(trainings, path):
    del path
    return flax.serialization.from_bytes(fresh(), flax.serialization.to_bytes(trainings))


def by_flax_state_dict(trainings, path):
    del path
    return flax.serialization.from_state_dict(fresh(), flax.serialization.to_state_dict(trainings))


@pytest.mark.filterwarnings("default")  # those of orbax
@pytest.mark.parametrize("saved", [by_orbax, by_flax_bytes, by_flax_state_dict])
def test_a_restored_state_has_every_bit_and_goes_on_as_if_nothing_had_happened(saved, trained, tmp_path):
    restored = jax.tree.map(np.asarray, saved(trained, tmp_path))
    assert jax.tree.structure(restored) == jax.tree.structure(trained)
    assert types(restored) == types(trained)
    assert bits(restored) == bits(trained)
    assert bits(step(restored, grads_of(2))) == bits(step(trained, grads_of(2)))


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_state_is_made_of_names_and_arrays(method, trained):
    _, state = trained[method]
    saved = flax.serialization.to_state_dict(state.inner_state)
    assert set(saved) == {"inner_state", MEMORY[method]}
    assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in jax.tree.leaves(saved))


@pytest.mark.parametrize("leaf", [jax.ShapeDtypeStruct((2,), jnp.int8), object(), "text", None, PartitionSpec("d"), 3])
def test_trees_of_other_leaves_are_states_too(leaf, trained):
    """JAX and checkpoint libraries rebuild states with shapes, shardings and names in place of arrays."""
    other = jax.tree.map(lambda _: leaf, trained)
    assert jax.tree.leaves(other, is_leaf=lambda x: x is None).count(leaf) >= len(jax.tree.leaves(trained))
    assert {name: type(state.inner_state) for name, (_, state) in other.items()} == {
        name: type(state.inner_state) for name, (_, state) in trained.items()
    }


def test_states_are_made_and_steps_lowered_from_shapes_alone(trained):
    abstract = jax.eval_shape(fresh)
    assert jax.tree.structure(abstract) == jax.tree.structure(trained)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(abstract)] == types(trained)
    lowered = step.lower(abstract, jax.eval_shape(lambda: grads_of(0)))
    assert jax.tree.structure(lowered.out_info) == jax.tree.structure(trained)


@pytest.mark.parametrize("method", METHODS)
def test_float32_training_goes_on_in_half_precision_and_comes_back(method):
    """A float32 step, one in half precision and one in float32 again are three float32 steps where no bit is lost."""
    inner = optax.sgd(0.5, momentum=0.5)  # whose products are exact, so that no fusion of XLA's rounds them differently
    tx = METHODS[method](inner)
    params = {"w": jnp.float32([1.0, 0.3]), "b": jnp.float32([0.1])}
    grads = jax.tree.map(lambda p: p / 3, params)
    expected, expected_state = one = optim.step(inner, grads, inner.init(params), params)
    for _ in range(2):
        expected, expected_state = optim.step(inner, grads, expected_state, expected)

    wide, restored = one
    half = jmp.cast_floating(wide, "bfloat16")
    half, state = optim.with_master_params(tx.init(half)._replace(inner_state=restored), half, wide)
    half, state = optim.step(tx, grads, state, half)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half)} == {"bfloat16"}
    wide, restored = optim.master_params(state, half), state.inner_state
    got, got_state = optim.step(inner, grads, restored, wide)
    assert bits(got_state) == bits(expected_state)
    if method in ("masters", "split"):
        assert bits(got) == bits(expected)
    else:
        within = 2.0**-14 if method == "kahan" else 2.0**-6  # two roundings
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=within), got, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_state_that_was_saved_without_the_wrapper_is_an_error_that_says_where_it_goes(method):
    inner, params = optax.sgd(0.5, momentum=0.5), {"w": jnp.bfloat16([1.0, 0.25])}
    tx, grads = METHODS[method](inner), {"w": jnp.float32([0.5, 0.5])}
    scaled = optim.skip_nonfinite(tx).init(params)
    for restored in (inner.init(params), scaled):
        text = rf"of \w+, got {type(restored).__name__}\. Make .* tx.init\(params\)\._replace\(inner_state=restored"
        with pytest.raises(TypeError, match=text):
            optim.step(tx, grads, restored, params)
        with pytest.raises(TypeError, match=text):
            tx.update(grads, restored, params)
    with_float32_moments = tx.init(params)._replace(inner_state=inner.init(jmp.cast_to_full(params)))
    assert types(optim.step(tx, grads, with_float32_moments, params)[1]) == types(tx.init(params))


@pytest.mark.parametrize("explicit", [False, True])
def test_shards_stay_where_they_are(explicit):
    """What is remembered of a parameter lies where the parameter lies, at first and after a step."""
    axis_type = AxisType.Explicit if explicit else AxisType.Auto
    mesh = make_mesh((4,), ("d",), axis_types=(axis_type,))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    params = {"w": jax.device_put(jnp.ones((8, 2), jnp.bfloat16), rows), "b": jax.device_put(jnp.ones(8), everywhere)}
    txs = {name: METHODS[name](optax.sgd(0.5, momentum=0.5)) for name in METHODS}
    states = {name: tx.init(params) for name, tx in txs.items()}

    @jax.jit
    def train_step(states, params):
        return {name: optim.step(tx, params, states[name], params) for name, tx in txs.items()}

    after = train_step(states, params)
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
        count = state.count + 1
        count = jnp.asarray(count, jnp.int32) if as_array else count
        updates = jax.tree.map(lambda g: -0.5 * g, grads)
        return updates, Counted(count, state.rate * 0.5, grads)

    return optax.GradientTransformation(lambda params: Counted(0, 1.0, jax.tree.map(jnp.zeros_like, params)), update)


COUNTING = {**METHODS, "cast_state": lambda inner: optim.cast_state(inner, mu_dtype="float32")}


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", COUNTING)
def test_an_optimizer_may_keep_numbers_of_python_in_its_state(method, way, wrap, as_array):
    tx = COUNTING[method](counting(as_array))
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    step = wrap(lambda state, params: WAYS[way](tx, {"w": jnp.full(4, 0.25)}, state, params))
    state = tx.init(params)
    for _ in range(2):
        params, state = step(state, params)
    (inner,) = (x for x in jax.tree.leaves(state, is_leaf=_is_counted) if _is_counted(x))
    assert (int(inner.count), float(inner.rate)) == (2, 0.25)
    assert params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["w"].astype(jnp.float32), 0.75)


def _is_counted(node):
    return isinstance(node, Counted)
