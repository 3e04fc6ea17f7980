"""Flax's two kinds of training take the steps of `optim.step` with half-precision parameters, bit for bit."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from half_parameter_registry import METHODS
from optimizer_registry import bits

import jmp_policy as jmp
from jmp_policy import optim

INNER = optax.sgd(0.5, momentum=0.5)  # whose products are exact, so that no fusion of XLA's can round them differently
TXS = {name: make(INNER) for name, make in METHODS.items()}
TXS |= {f"scaled {name}": optim.loss_scaled(tx, jmp.DynamicLossScale()) for name, tx in TXS.items()}


class Net(nnx.Module):
    """Half-precision parameters, of which one stays -0.0, as no sum with an update does, and a float32 one."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs, bias_init=lambda key, shape, dtype: jnp.full(shape, -0.0, dtype))
        self.norm = nnx.RMSNorm(4, rngs=rngs)


def model_of_halves():
    return jmp.nnx.cast_params(Net(nnx.Rngs(0)), jmp.PolicyMap({"norm": "float32"}, "bfloat16"))


def params_of_halves():
    return nnx.to_pure_dict(nnx.state(model_of_halves(), nnx.Param))


def grads_of(params):
    return jax.tree.map(lambda p: -0.3 * p.astype(jnp.float32), params)


@jax.jit
def step(trainings):
    return {name: optim.step(tx, grads_of(trainings[name][0]), *trainings[name][::-1]) for name, tx in TXS.items()}


@pytest.fixture(scope="module")
def expected():
    """The bits of parameters and state after two steps by `optim.step`."""
    with jax.numpy_dtype_promotion("standard"):
        trainings = {name: (params_of_halves(), tx.init(params_of_halves())) for name, tx in TXS.items()}
        return {name: bits(training) for name, training in step(step(trainings)).items()}


def assert_donated(tree):
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    assert not [leaf for leaf in arrays if leaf.ndim and not leaf.is_deleted()]


@pytest.mark.exhaustive
def test_a_train_state_takes_the_same_steps_in_place(expected):
    def apply(states):
        return {name: state.apply_gradients(grads=grads_of(state.params)) for name, state in states.items()}

    create = jmp.linen.TrainState.create
    first = {name: create(apply_fn=None, params=params_of_halves(), tx=tx) for name, tx in TXS.items()}
    train_step = jax.jit(apply, donate_argnums=0)
    states = train_step(train_step(first))
    assert_donated(first)
    assert {name: bits((state.params, state.opt_state)) for name, state in states.items()} == expected
    assert {int(state.step) for state in states.values()} == {2}


@pytest.mark.slow
def test_an_nnx_optimizer_takes_the_same_steps_in_place(expected):
    models = {name: model_of_halves() for name in TXS}
    optimizers = {name: jmp.nnx.Optimizer(models[name], tx, wrt=nnx.Param) for name, tx in TXS.items()}
    first = jax.tree.leaves((models, optimizers))

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(models, optimizers):
        for name, optimizer in optimizers.items():
            assert optimizer.update(models[name], grads_of(nnx.state(models[name], nnx.Param))) is None

    for _ in range(2):
        train_step(models, optimizers)
    assert_donated(first)
    for name, optimizer in optimizers.items():
        params, opt_state = nnx.state(models[name], nnx.Param), optimizer.opt_state
        got = bits((nnx.to_pure_dict(params), pure(opt_state)))
        assert got == expected[name], name
        assert int(optimizer.step[...]) == 2
        master = optim.master_params(optimizer, params)
        assert bits(pure(master)) == bits(pure(optim.master_params(pure(opt_state), pure(params))))


def pure(tree):
    """A tree with dicts and arrays where nnx has States and Variables."""
    is_state = lambda node: isinstance(node, nnx.State)
    return jax.tree.map(lambda x: nnx.to_pure_dict(x) if is_state(x) else x, nnx.as_pure(tree), is_leaf=is_state)
