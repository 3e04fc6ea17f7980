"""`convert_state` from moments in 8 bits to float32 and back, and runs that are resumed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from saved_states import SAVERS, assert_same

import jmp_policy as jmp
from jmp_policy.optim import loss_scaled, quantize_state

SHAPES = {"block": {"w": (64, 16)}, "w": (64, 24), "b": (24,)}
OPTIMIZERS = {"adamw": lambda: optax.adamw(1e-2), "lion": lambda: optax.lion(1e-3), "adan": lambda: optax.adan(1e-2)}


def _quantize(inner, **options):
    return quantize_state(inner, min_size=500, **options)


WAYS = {
    "float32": lambda tx: tx,
    "8 bits": _quantize,
    "other blocks": lambda tx: _quantize(tx, block_size=64),
    "random": lambda tx: _quantize(tx, stochastic=jax.random.key(3)),
    "scaled": lambda tx: loss_scaled(_quantize(tx), jmp.DynamicLossScale()),
}


def _params(dtype=jnp.float32):
    random = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(random.normal(size=shape), dtype)
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def _grads(params, n):
    return jax.tree.map(lambda p: jnp.asarray(np.random.default_rng(n).normal(size=p.shape), p.dtype), params)


def _fresh(tx, dtype=jnp.float32):
    return {"params": _params(dtype), "opt_state": tx.init(_params(dtype))}


def _train(tx, state, first, last):
    step = jax.jit(functools.partial(jmp.optim.step, tx))
    for n in range(first, last):
        params, opt_state = step(_grads(state["params"], n), state["opt_state"], state["params"])
        state = {"params": params, "opt_state": opt_state}
    return state


@functools.cache
def _trained(optimizer, way):
    tx = WAYS[way](OPTIMIZERS[optimizer]())
    with jax.numpy_dtype_promotion("standard"):
        return tx, _train(tx, _fresh(tx), 0, 2)


@pytest.mark.slow
def test_a_run_that_is_restored_goes_on_bit_for_bit():
    tx, state = _trained("adamw", "random")
    restored = jmp.convert_state(SAVERS["msgpack"](state), _fresh(tx))
    assert_same(restored, state)
    with jax.numpy_dtype_promotion("standard"):
        assert_same(_train(tx, restored, 2, 4), _train(tx, state, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "saver", "way"),
    [("adan", "msgpack", "8 bits"), ("lion", "orbax", "scaled"), ("adamw", "structure", "random")],
)
def test_float32_moments_become_the_nearest_of_8_bits_and_these_become_floats(optimizer, saver, way):
    """Savers that drop classes sort fields by name: those of Adan are then in another order."""
    _, wide = _trained(optimizer, "float32")
    tx = WAYS[way](OPTIMIZERS[optimizer]())
    narrow = jmp.convert_state(SAVERS[saver](wide), _fresh(tx))
    assert jax.tree.structure(narrow) == jax.tree.structure(_fresh(tx))
    state = narrow["opt_state"].inner_state if way == "scaled" else narrow["opt_state"]
    paths = jax.tree_util.tree_leaves_with_path(wide["opt_state"])
    moments = [x for path, x in paths if x.shape == SHAPES["w"] and ".g" not in jax.tree_util.keystr(path)]
    for scales, moment in zip(state.scales, moments, strict=True):
        np.testing.assert_array_equal(np.abs(scales["w"]).max(), np.abs(moment).max())
    back = jmp.convert_state(SAVERS[saver](narrow), _fresh(OPTIMIZERS[optimizer]()))
    assert jax.tree.structure(back) == jax.tree.structure(wide)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(back), jax.tree.leaves(wide), strict=True):
        differ = np.abs(np.asarray(one, np.float64) - np.asarray(other))
        is_left = one.size < 500 or "'params'" in jax.tree_util.keystr(path) or "g" in jax.tree_util.keystr(path)
        limit = 0.0 if is_left else 0.07 * np.abs(other).max()
        assert differ.max() <= limit, jax.tree_util.keystr(path)
        assert is_left or differ.max() > 0
    assert_same(jmp.convert_state(back, _fresh(tx)), narrow)


@pytest.mark.slow
def test_codes_of_other_blocks_are_written_anew():
    _, saved = _trained("adamw", "8 bits")
    tx = WAYS["other blocks"](OPTIMIZERS["adamw"]())
    new = jmp.convert_state(saved, _fresh(tx))
    by_float32 = jmp.convert_state(jmp.convert_state(saved, _fresh(OPTIMIZERS["adamw"]())), _fresh(tx))
    assert_same(new, by_float32)
    assert new["opt_state"].scales[0]["w"].shape == (2, 12)


def test_a_moment_of_another_shape_is_named():
    _, saved = _trained("adamw", "float32")
    tx = WAYS["8 bits"](OPTIMIZERS["adamw"]())
    target = {"params": _params(), "opt_state": tx.init(_params() | {"w": jnp.ones((64, 32))})}
    with pytest.raises(ValueError, match=r"mu/w was saved in the shape \(64, 24\), the target has \(64, 32\)"):
        jmp.convert_state(saved, target)
