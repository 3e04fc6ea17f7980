"""`convert_state` of linen's train states and of nnx models with their optimizers: training goes on in each."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from saved_states import RUNS, Run, assert_same, save_with_msgpack, save_with_orbax

import jmp_policy as jmp

SCALE = jmp.DynamicLossScale(16.0, period=50)  # which no step of these models overflows
FLOAT8 = "float8(min_size=0,amax_history_length=4)_from_float32"
FLAX_RUNS = {name: RUNS[name] for name in ("float32", "masters", "split", "kahan", "stochastic")} | {
    "mixed_float16": Run("mixed_float16", lambda tx: jmp.optim.loss_scaled(tx, SCALE)),
    "int8": Run("int8(min_size=0)_from_mixed_bfloat16", jmp.optim.skip_nonfinite),
    "float8": Run(FLOAT8, lambda tx: jmp.optim.loss_scaled(tx, SCALE)),
}
PAIRS = [("mixed_float16", "float8"), ("float8", "masters"), ("masters", "split"), ("kahan", "int8"), ("int8", "kahan")]
X = jnp.linspace(-1.0, 1.0, 16 * 16).reshape(16, 16)


@pytest.fixture(autouse=True)
def promote_as_flax():
    with jax.numpy_dtype_promotion("standard"):  # Flax's BatchNorm promotes half precision to float32 implicitly
        yield


def measure_loss(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def scale_of(opt_state):
    is_scale = lambda node: isinstance(node, jmp.LossScale)
    has_scale = any(map(is_scale, jax.tree.leaves(opt_state, is_leaf=is_scale)))
    return jmp.get_loss_scale(opt_state) if has_scale else jmp.NoOpLossScale()


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(16)(x)))


class State(jmp.linen.TrainState):
    batch_stats: dict


def fresh_state(name, seed=1):
    run = FLAX_RUNS[name]
    model = jmp.with_policy(Net(), run.policy)
    variables = dict(model.init(jax.random.key(seed), X))
    batch_stats = variables.pop("batch_stats")
    params = variables if len(variables) > 1 else variables["params"]
    return State.create(apply_fn=model.apply, tx=run.tx, params=params, batch_stats=batch_stats)


@jax.jit
def take_step(state):
    def loss_fn(params):
        variables = params if "params" in params else {"params": params}
        y, updated = state.apply_fn(variables | {"batch_stats": state.batch_stats}, X, mutable="batch_stats")
        return measure_loss(y), updated

    differentiate = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=scale_of(state.opt_state))
    (loss, updated), grads = differentiate(state.params)
    return state.apply_gradients(grads=grads, **updated), loss


def check_train_state(new, saved, target):
    assert jax.tree.structure(new) == jax.tree.structure(target)
    assert jax.tree.map(jnp.result_type, new) == jax.tree.map(jnp.result_type, target)
    assert_same(new.batch_stats, saved.batch_stats)
    assert int(new.step) == int(saved.step)
    if any(isinstance(x.opt_state, jmp.optim.SplitWeightsState) for x in (target, saved)):
        return  # whose parameters are rounded with ties away from zero
    params_of = lambda state: state.params.get("params", state.params)
    exact = jmp.optim.master_params(saved.opt_state, params_of(saved))
    assert_same(params_of(new), jax.tree.map(lambda x, like: x.astype(like.dtype), exact, params_of(target)))


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "target"), PAIRS)
def test_a_train_state_goes_on_as_another(saved, target):
    state, like = take_step(take_step(fresh_state(saved, seed=0))[0])[0], fresh_state(target)
    for raw in (save_with_orbax(state), save_with_msgpack(state), state):
        new = jmp.convert_state(raw, like)
        check_train_state(new, state, like)
    after, loss = take_step(new)
    assert int(after.step) == 3
    assert jnp.isfinite(loss)


def test_a_new_train_state_becomes_another_and_an_abstract_one():
    state, like = fresh_state("mixed_float16", seed=0).replace(step=2), fresh_state("float8")
    for raw in (save_with_msgpack(state), state):
        check_train_state(jmp.convert_state(raw, like), state, like)
    abstract = jax.eval_shape(lambda: like)
    assert_same(jmp.convert_state(state, abstract).replace(step=0), jmp.convert_state(state, like).replace(step=0))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, momentum=0.5, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.layers[1](self.layers[0](x))))


@functools.cache
def transformation(name):
    return FLAX_RUNS[name].tx


def new_model(name, seed):
    model = jmp.with_policy(Model, FLAX_RUNS[name].policy)(nnx.Rngs(seed))
    return model, jmp.nnx.Optimizer(model, transformation(name), wrt=nnx.Param)


@nnx.jit
def take_nnx_step(model, optimizer):
    loss_scale = scale_of(nnx.as_pure(optimizer.opt_state))
    loss, grads = jmp.nnx.value_and_grad(lambda model: measure_loss(model(X)), loss_scale=loss_scale)(model)
    optimizer.update(model, grads)
    return loss


def check_nnx(saved, target, raw):
    nnx.update(target, jmp.convert_state(raw, nnx.state(target)))
    assert int(target[1].step[...]) == int(saved[1].step[...])
    for kind in (nnx.BatchStat, nnx.RngState):
        assert_same(jax.tree.leaves(nnx.state(target[0], kind)), jax.tree.leaves(nnx.state(saved[0], kind)))
    read = lambda model, optimizer: jmp.optim.master_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    kept = isinstance(target[1].opt_state, jmp.optim.SplitWeightsState)
    for new, exact in zip(jax.tree.leaves(read(*target)), jax.tree.leaves(read(*saved)), strict=True):
        assert jnp.allclose(new, exact, atol=0, rtol=0 if kept else 2.0**-7)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "target"), PAIRS)
def test_an_nnx_model_goes_on_as_another(saved, target):
    trained = new_model(saved, 0)
    take_nnx_step(*trained)
    for raw in (save_with_orbax(nnx.state(trained)), nnx.state(trained)):
        goes_on = new_model(target, 1)
        check_nnx(trained, goes_on, raw)
    assert jnp.isfinite(take_nnx_step(*goes_on))
    assert int(goes_on[1].step[...]) == 2


def test_an_nnx_model_and_its_optimizer_become_others():
    saved, target = new_model("mixed_float16", 0), new_model("kahan", 1)
    check_nnx(saved, target, nnx.state(saved))
    model, optimizer = jmp.convert_state(nnx.state(saved), target)  # modules themselves will do
    assert_same(nnx.state((model, optimizer)), nnx.state(target))
    assert jmp.policy_of(model) == jmp.get_policy("bfloat16")
