"""The float32 values of half-precision parameters are read from any state that has them, and written into another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_registry import METHODS, bits

import jmp_policy as jmp
from jmp_policy import optim

PARAMS = {"w": jnp.bfloat16([1.0, -0.0, 2.0]), "b": jnp.ones(2), "frozen": None}
GRADS = {"w": jnp.float32([1e-4, 1e-6, 0.3]), "b": jnp.full(2, 0.5), "frozen": None}
WIDE = {"w": [np.float32(1.0) - np.float32(1e-4), np.float32(-1e-6), np.float32(2.0) - np.float32(0.3)]}


def _trained(method):
    """Parameters and state after a step of one, and the float32 number that each parameter stands for."""
    tx = optim.skip_nonfinite(METHODS[method](optax.sgd(1.0)))
    return optim.step(tx, GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_it_is_what_the_optimizer_works_on(method):
    params, state = _trained(method)
    master = optim.master_params(state, params)
    assert jax.tree.structure(master) == jax.tree.structure(params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(master)} == {"float32"}
    assert master["b"] is params["b"]
    if method == "stochastic":  # which remembers nothing
        np.testing.assert_array_equal(master["w"], params["w"].astype(jnp.float32))
    else:
        within = 2.0**-16 if method == "kahan" else 0.0  # of a float32 number; two bfloat16 have about 16 bits
        np.testing.assert_allclose(master["w"], WIDE["w"], rtol=within, atol=0.0)
        assert (master["w"] != params["w"].astype(jnp.float32)).all()
    abstract = jax.eval_shape(optim.master_params, state, params)
    assert abstract["w"] == jax.ShapeDtypeStruct((3,), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["split", "stochastic"])
def test_an_nnx_optimizer_gives_params_that_a_model_can_be_updated_with_and_takes_float32_values(method):
    model = jmp.nnx.cast_params(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "bfloat16")
    optimizer = jmp.nnx.Optimizer(model, METHODS[method](optax.sgd(1.0)), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    master = optim.master_params(optimizer, params)
    assert jax.tree.structure(master) == jax.tree.structure(params)
    wide = nnx.clone(model)
    nnx.update(wide, master)
    assert wide.kernel.dtype == wide.bias.dtype == jnp.float32
    np.testing.assert_array_equal(wide.kernel[...], model.kernel[...].astype(jnp.float32))
    if method == "stochastic":
        return
    params, opt_state = nnx.as_pure((nnx.state(model, nnx.Param), optimizer.opt_state))
    master = jax.tree.map(lambda p: p.astype(jnp.float32) + 2.0**-12, params)
    params, opt_state = optim.with_master_params(opt_state, params, master)
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    assert bits(nnx.as_pure(optim.master_params(optimizer, nnx.state(model, nnx.Param)))) == bits(master)


def test_float32_parameters_that_are_not_trained_are_rounded_and_read_as_they_are():
    tx = optim.skip_nonfinite(optax.masked(METHODS["split"](optax.sgd(1.0)), {"w": False, "b": True, "frozen": None}))
    wide = PARAMS | {"w": jnp.float32(WIDE["w"])}
    params, state = optim.with_master_params(tx.init(PARAMS), PARAMS, wide)
    np.testing.assert_array_equal(params["w"], wide["w"].astype(jnp.bfloat16))
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))
    master = optim.master_params(state, PARAMS)
    np.testing.assert_array_equal(master["w"], PARAMS["w"].astype(jnp.float32))
    assert jax.tree.structure(master) == jax.tree.structure(PARAMS)


def test_without_masters_the_parameters_are_returned_so_that_an_average_survives_a_change_of_policy():
    wide, tx = {"w": jnp.float32([0.1, 2.0]), "ids": jnp.arange(3)}, optim.skip_nonfinite(optax.adam(1e-3))
    state = tx.init(wide)
    same = optim.master_params(state, wide)
    assert all(one is other for one, other in zip(jax.tree.leaves(same), jax.tree.leaves(wide), strict=True))
    half = jmp.cast_floating(wide, "bfloat16")
    assert optim.master_params(state, half)["w"].dtype == jnp.float32
    back, kept = optim.with_master_params(state, half, wide)
    assert kept is state
    assert back["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(back["w"], half["w"])


ONE, OTHER, SHORT = {"w": PARAMS["w"]}, {"v": PARAMS["w"]}, {"w": jnp.ones(4, jnp.bfloat16)}
SPLIT = optim.master_weights(optax.sgd(1.0), mode="split").init(ONE)


ERRORS = {
    r"float32 values do not fit the parameters: \['w'\] is missing": lambda: optim.with_master_params(
        SPLIT, ONE, OTHER
    ),
    r"most one of master_weights, .*, got list with 2\. .*\(opt_state, p": lambda: optim.master_params(
        [SPLIT] * 2, ONE
    ),
    r"a \w+State, hold the state of an optimizer\. They come second: .*\(opt": lambda: optim.master_params(ONE, SPLIT),
    r"^The parameters do not fit the \w+State that was given with them\. For": lambda: optim.master_params(
        SPLIT, OTHER
    ),
    r"not fit the parameters: \['w'\] has the shape \(3,\), but the parame": lambda: optim.master_params(SPLIT, SHORT),
}


@pytest.mark.parametrize("text", ERRORS)
def test_values_and_parameters_of_another_model_or_in_the_other_order_are_errors(text):
    with pytest.raises(ValueError, match=text):
        ERRORS[text]()
