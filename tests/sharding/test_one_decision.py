"""Under `jit` on sharded arrays, a step decides as on one device: what is skipped, scaled, rounded and remembered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from sharded_models import make_auto_mesh, place

import jmp_policy as jmp

SPECS = {
    "fsdp": ({"fsdp": 4}, {"w": P("fsdp"), "v": P(None, "fsdp"), "b": P()}),
    "fsdp x tensor": ({"fsdp": 2, "tensor": 2}, {"w": P("fsdp", "tensor"), "v": P("tensor"), "b": P("tensor")}),
}
SHAPES = {"w": (16, 8), "v": (4, 64), "b": (64,)}


def draw(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.uniform(0.5, 2.0, shape), dtype) for name, shape in SHAPES.items()}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SPECS)
def test_one_infinity_in_one_part_is_one_decision(layout):
    """Against one device, bit for bit: gradients without sums, so that nothing is rounded in another order."""
    sizes, specs = SPECS[layout]
    mesh = make_auto_mesh(**sizes)
    tx = jmp.optim.loss_scaled(optax.adam(0.1), jmp.DynamicLossScale(2.0**4, period=2))
    params = draw(0)
    state_specs = jmp.sharding.state_shardings(tx, params, specs)
    step = jax.jit(functools.partial(jmp.optim.step, tx))
    alone, sharded = (params, tx.init(params)), place(mesh, (params, tx.init(params)), (specs, state_specs))
    for name, where in [(None, 0), ("w", 127), (None, 0), ("v", 3), ("b", 40), (None, 0), (None, 0)]:
        grads = draw(1)
        if name is not None:
            grads[name] = grads[name].reshape(-1).at[where].set(jnp.nan).reshape(SHAPES[name])
        alone = step(grads, alone[1], alone[0])
        sharded = step(place(mesh, grads, specs), sharded[1], sharded[0])
        assert bits(sharded) == bits(alone)
    assert int(alone[1].skipped_steps) == 3
    assert float(alone[1].loss_scale.loss_scale) == 2.0**2


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "check_vma"), [*zip(SPECS, (True, False), strict=True)])
def test_noise_is_that_of_one_device_under_jit_and_in_shard_map_by_specs(layout, check_vma):
    sizes, specs = SPECS[layout]
    params, grads = draw(0, jnp.bfloat16), jax.tree.map(lambda g: g * 1e-3, draw(1))

    def take_two_steps(tx, grads, params):
        state = tx.init(params)
        for _ in range(2):
            params, state = jmp.optim.step(tx, grads, state, params)
        return params

    make = functools.partial(jmp.optim.stochastic_rounding, optax.sgd(1.0), jax.random.key(3))
    alone = jax.jit(functools.partial(take_two_steps, make()))(grads, params)
    mesh = make_auto_mesh(**sizes)
    placed = place(mesh, grads, specs), place(mesh, params, specs)
    assert bits(jax.jit(functools.partial(take_two_steps, make()))(*placed)) == bits(alone)
    moved = jax.tree.map(lambda a, b: float(jnp.mean(a != b)), alone, params)
    assert all(0.02 < share < 0.98 for share in jax.tree.leaves(moved))  # some are rounded up, and some down
    options = {"mesh": mesh, "in_specs": (specs, specs), "out_specs": specs, "check_vma": check_vma}
    mapped = jax.jit(jax.shard_map(functools.partial(take_two_steps, make(specs=specs)), **options))(grads, params)
    assert bits(mapped) == bits(alone)


def test_specs_of_noise_that_fit_nothing_are_refused():
    params, key = {"w": jnp.ones(4, jnp.bfloat16)}, jax.random.key(0)
    for specs, error, message in [
        ({"w": P("data")}, ValueError, "'data' in the specs of stochastic_rounding is not a mapped axis"),
        ({"v": P()}, ValueError, "specs does not fit the parameters: it has none for ['w'], and has ['v'] beside it."),
        ({"w": "data"}, TypeError, "specs['w'] must be a PartitionSpec or a NamedSharding, got 'data'."),
        ({"w": P(None, None)}, ValueError, "specs is P(None, None), for an array of 1 dimensions."),
    ]:
        tx = jmp.optim.stochastic_rounding(optax.sgd(1.0), key, specs=specs)
        with pytest.raises(error, match=re.escape(message)):
            jmp.optim.step(tx, params, tx.init(params), params)
