"""A skipped step leaves a training of either API as it was, all but the loss scale and the skip counters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training import train_state

import jmp_policy as jmp

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
BAD = X.at[0, 0].set(jnp.inf)
POLICY = "params=float32,compute=float16,output=float32"
TX = jmp.optim.loss_scaled(optax.adamw(optax.linear_schedule(1e-2, 0.0, 100)), jmp.DynamicLossScale(2.0**8))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(nn.Dense(4, name="linear")(x))
        return nn.Dense(1, name="head")(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.linear(x)))


class State(jmp.linen.TrainState):
    batch_stats: dict


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def mean_square(out):
    return jnp.mean((out - 1.0) ** 2)


def linen_loss(params, stats, x):
    out, new = jmp.with_policy(LinenNet(), POLICY).apply({"params": params, **stats}, x, mutable=["batch_stats"])
    return mean_square(out), new


def start_by_hand(tx=TX):
    variables = LinenNet().init(jax.random.key(1), X)
    return variables, tx.init(variables["params"])


def step_by_hand(training, x, tx=TX):
    """A loop in which one line keeps the statistics."""
    (params, stats), opt_state = (training[0]["params"], {"batch_stats": training[0]["batch_stats"]}), training[1]
    differentiate = jmp.value_and_grad(linen_loss, has_aux=True, loss_scale=opt_state)
    (_, new_stats), grads = differentiate(params, stats, x)
    params, opt_state = jmp.optim.step(tx, grads, opt_state, params)
    return {"params": params} | jmp.select_tree(opt_state.grads_finite, new_stats, stats), opt_state


def start_train_state():
    return State.create(apply_fn=None, tx=TX, **LinenNet().init(jax.random.key(1), X)).replace(step=jnp.int32(0))


def step_train_state(state, x):
    differentiate = jmp.value_and_grad(linen_loss, has_aux=True, loss_scale=state)
    (_, stats), grads = differentiate(state.params, {"batch_stats": state.batch_stats}, x)
    return state.apply_gradients(grads=grads, **stats)


def start_nnx():
    model = jmp.with_policy(NnxNet(nnx.Rngs(0)), POLICY)
    return nnx.state((model, jmp.nnx.Optimizer(model, TX, wrt=nnx.Param)))


def step_nnx(state, x):
    def training():
        model = jmp.with_policy(NnxNet(nnx.Rngs(0)), POLICY)
        return model, jmp.nnx.Optimizer(model, TX, wrt=nnx.Param)

    model, optimizer = nnx.merge(nnx.graphdef(nnx.eval_shape(training)), state)
    _, grads = jmp.nnx.value_and_grad(lambda model: mean_square(model(x)), loss_scale=optimizer)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer))


WAYS = {
    "linen by hand": (start_by_hand, step_by_hand),
    "linen's train state": (start_train_state, step_train_state),
    "nnx": (start_nnx, step_nnx),
}
FREE = {"loss_scale", "grads_finite", "skipped_steps", "consecutive_skips"}


def leaves_of(training):
    """The arrays of a training by their paths."""
    found = jax.tree.leaves_with_path(training)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in found}


@functools.cache
def trained(name):
    """The jitted step, and a training after a good step."""
    start, step = WAYS[name][0], jax.jit(WAYS[name][1])
    with jax.numpy_dtype_promotion("standard"):
        before = jax.jit(start)()
        return step, before, step(before, X)


def changed(before, after):
    before, after = leaves_of(before), leaves_of(after)
    return {path for path in before if before[path].tobytes() != after[path].tobytes()}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_good_step_advances_parameters_moments_statistics_and_counters(name):
    _, before, after = trained(name)
    found = changed(before, after)
    assert {path for path in leaves_of(before) if "kernel" in path or "norm/mean" in path} <= found
    assert any("count" in path.split("/") for path in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_skipped_step_changes_nothing_but_the_loss_scale_and_the_counters(name):
    """The imagenet example of Flax advances batch statistics, and loses them for ever where an input is infinite."""
    step, _, before = trained(name)
    found = changed(before, step(before, BAD))
    assert {path for path in found if not FREE & set(path.split("/"))} == set()
    assert any("skipped_steps" in path for path in found)
    assert any("loss_scale" in path for path in found)


@pytest.mark.slow
def test_a_loss_scale_that_is_too_high_skips_the_step_of_a_good_batch():
    step, _, (variables, opt_state) = trained("linen by hand")
    too_high = opt_state._replace(loss_scale=jmp.DynamicLossScale(2.0**24))
    after, skipped = step((variables, too_high), X)
    assert not skipped.grads_finite
    jax.tree.map(np.testing.assert_array_equal, (after, skipped.inner_state), (variables, opt_state.inner_state))
    naive = linen_loss(variables["params"], {"batch_stats": variables["batch_stats"]}, X)[1]
    assert (naive["batch_stats"]["norm"]["mean"] != after["batch_stats"]["norm"]["mean"]).any()


def test_a_skipped_step_keeps_what_a_model_of_nnx_counts_and_the_step_of_its_optimizer():
    class Counting(nnx.Module):
        def __init__(self):
            self.w, self.calls = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1.0
            return (self.w[...] * x).sum()

    model = Counting()
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)
    for x, w, calls in ((2.0, -1.0, 1), (jnp.inf, -1.0, 1), (1.0, -2.0, 2)):
        _, grads = jmp.nnx.value_and_grad(lambda model, x=x: model(x), loss_scale=optimizer)(model)
        optimizer.update(model, grads)
        assert (model.w[...].tolist(), int(model.calls[...]), int(optimizer.step[...])) == ([w, w], calls, calls)
    assert int(jmp.metrics(optimizer)["skipped_steps"]) == 1


def test_a_skipped_step_keeps_the_statistics_and_the_step_of_a_train_state():
    state = State.create(
        apply_fn=None, params={"w": jnp.ones(2)}, batch_stats={"m": 0.0}, tx=jmp.optim.skip_nonfinite(optax.sgd(1.0))
    )
    good = state.apply_gradients(grads={"w": jnp.ones(2)}, batch_stats={"m": 1.0})
    bad = good.apply_gradients(grads={"w": jnp.full(2, jnp.nan)}, batch_stats={"m": 2.0})
    assert (int(good.step), float(good.batch_stats["m"]), good.params["w"].tolist()) == (1, 1.0, [0.0, 0.0])
    assert (int(bad.step), float(bad.batch_stats["m"]), bad.params["w"].tolist()) == (1, 1.0, [0.0, 0.0])


def test_without_a_loss_scale_it_is_flaxs_train_state():
    create = {"apply_fn": None, "params": {"w": jnp.ones(2)}, "tx": optax.adam(0.1)}
    grads = {"w": jnp.array([1.0, jnp.nan])}
    ours = jmp.linen.TrainState.create(**create).apply_gradients(grads=grads)
    flaxs = train_state.TrainState.create(**create).apply_gradients(grads=grads)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(flaxs))


def test_a_collection_that_gradients_overwrite_is_overwritten_on_good_steps_only():
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    make = lambda w, amax: {"params": {"w": jnp.full(2, w)}, "_overwrite_with_gradient": {"amax": jnp.full(1, amax)}}
    state = jmp.linen.TrainState.create(apply_fn=None, params=make(1.0, 0.0), tx=tx)
    good = state.apply_gradients(grads=make(1.0, 3.0))
    assert good.params["_overwrite_with_gradient"]["amax"].tolist() == [3.0]
    bad = good.apply_gradients(grads=make(jnp.inf, jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, bad.params, good.params)


def test_collections_beside_the_overwritten_one_stay_as_they_are():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": jnp.zeros(1)}, "cache": jnp.ones(3)}
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    stepped = jax.eval_shape(lambda state: state.apply_gradients(grads=params), state)
    assert jax.tree.structure(stepped.params) == jax.tree.structure(params)


def test_a_train_step_is_traced_once():
    """Flax starts from the Python int 0: a step counter of another type afterwards would mean compiling twice."""
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return state.apply_gradients(grads={"w": jnp.ones(2)})

    params, tx = {"w": jnp.ones(2)}, jmp.optim.skip_nonfinite(optax.sgd(1.0))
    state = jmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    for _ in range(3):
        state = step(state)
    assert (int(state.step), len(traces)) == (3, 1)
