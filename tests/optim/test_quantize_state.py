"""`quantize_state` stores what a model in NumPy stores, and steps on pieces as on the whole."""

import functools

import jax
import numpy as np
import optax
import pytest
from optimizer_registry import bits, types
from quantized_moments import ELEMENTWISE, SIDES, Model, list_stored, make_grads, make_params

from jmp_policy import optim

STEPS = 10
ROUNDED_OTHERWISE = ("adabelief", "adadelta", "rmsprop")  # XLA rounds a product before a sum, or not, as it fuses them
QUICK = ("adamw", "lion", "rmsprop")


def quantize(inner, **options):
    return optim.quantize_state(inner, min_size=500, **options)


@functools.cache
def trained(name, elementwise=True):
    """Ten steps of an optimizer: the updates and the state of each."""
    tx = quantize(ELEMENTWISE[name](), elementwise=elementwise)
    params = make_params()
    state, update = tx.init(params), jax.jit(tx.update)
    history = []
    for step in range(STEPS):
        updates, state = update(make_grads(params, step), state, params)
        params = optax.apply_updates(params, updates)
        history.append((updates, state))
    return history


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_ten_steps_store_what_a_model_in_numpy_stores(name):
    params = make_params()
    model = Model(ELEMENTWISE[name](), params, SIDES)
    for step, (updates, state) in enumerate(trained(name)):
        expected = model.update(make_grads(params, step), params)
        params = optax.apply_updates(params, expected)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), updates, expected)
        for stored, (codes, scales) in zip(model.stored, list_stored(state), strict=True):
            assert (stored is None) == (codes.dtype != np.uint8)
            if stored is not None:
                np.testing.assert_array_equal(codes, stored[0])
                np.testing.assert_allclose(scales, stored[1], rtol=1e-6)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ELEMENTWISE]
)
def test_steps_on_pieces_are_those_on_whole_moments(name):
    whole = quantize(ELEMENTWISE[name](), elementwise=False)
    params = make_params()
    state, update = whole.init(params), jax.jit(whole.update)
    for step, (updates, expected) in enumerate(trained(name)):
        new, state = update(make_grads(params, step), state, params)
        params = optax.apply_updates(params, new)
        assert types(state) == types(expected)
        if name not in ROUNDED_OTHERWISE:
            assert bits(state) == bits(expected)
        for (codes, scales), (expected_codes, expected_scales) in zip(
            list_stored(state), list_stored(expected), strict=True
        ):
            np.testing.assert_allclose(codes, expected_codes, rtol=1e-6)  # of bytes: the same
            np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), updates, new)
