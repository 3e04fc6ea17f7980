"""Stochastic rounding is a function of its key, on one device and on several."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmp_policy import optim

ONES = {"w": jnp.ones(64, jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}
GRADS = {"w": jnp.full(64, 1e-3), "b": jnp.full(64, 1e-3)}


def _step(key, state=None):
    tx = optim.stochastic_rounding(optax.sgd(1.0), key)
    return optim.step(tx, GRADS, tx.init(ONES) if state is None else state, ONES)


@pytest.mark.slow
def test_a_key_decides_and_every_parameter_and_step_draws_its_own_bits():
    first, state = _step(jax.random.key(0))
    again, _ = _step(jax.random.key(0))
    np.testing.assert_array_equal(first["w"], again["w"])
    other, _ = _step(jax.random.key(1))
    later, _ = _step(jax.random.key(0), state)
    for different in (first["b"], other["w"], later["w"]):
        assert (first["w"] != different).any()


@pytest.mark.slow
def test_keys_of_both_kinds_are_taken_and_nothing_else():
    typed, _ = _step(jax.random.key(7))
    raw, _ = _step(jax.random.PRNGKey(7))
    np.testing.assert_array_equal(typed["w"], raw["w"])
    for bad in (7, jnp.ones(2), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(TypeError, match=r"key must be one random key, got .*\. For example: jax.random.key\(0\)"):
            optim.stochastic_rounding(optax.sgd(1.0), bad)


@pytest.mark.slow
def test_a_donated_state_leaves_the_key_alone():
    key = jax.random.key(0)
    tx = optim.stochastic_rounding(optax.sgd(1.0), key)
    step = jax.jit(lambda state, params: optim.step(tx, GRADS, state, params)[1], donate_argnums=0)
    step(tx.init(ONES), ONES)
    assert tx.init(ONES).key.tolist() == jax.random.key_data(key).tolist()


_ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jmp_policy import optim

tx = optim.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
params, grads = jnp.ones(64, jnp.bfloat16), jnp.full(64, 1e-3)
one_device, _ = jax.jit(lambda g, p: optim.step(tx, g, tx.init(p), p))(grads, params)
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

sharded = jax.device_put((grads, params), NamedSharding(mesh, P("d")))
under_jit, _ = jax.jit(lambda g, p: optim.step(tx, g, tx.init(p), p))(*sharded)
np.testing.assert_array_equal(under_jit, one_device)

def on_each_device(grads, params):
    return optim.step(tx, grads, tx.init(params), params)[0]

replicated = jax.jit(jax.shard_map(on_each_device, mesh=mesh, in_specs=(P(), P()), out_specs=P()))(grads, params)
assert len({np.asarray(shard.data).tobytes() for shard in replicated.addressable_shards}) == 1
shards = jax.jit(jax.shard_map(on_each_device, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d")))(grads, params)
assert len({np.asarray(shard.data).tobytes() for shard in shards.addressable_shards}) == 4
"""


@pytest.mark.exhaustive
def test_replicas_are_rounded_alike_and_shards_each_for_itself():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", _ON_FOUR_DEVICES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
