"""`numerics.collect` around whole training steps: what they write is what it would be without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from observed import assert_row_is, assert_same, check_collect, find, observe

import jmp_policy as jmp
import jmp_policy.linen
import jmp_policy.nnx

X, Y = (jnp.asarray(np.random.default_rng(seed).normal(size=(4, 3)), jnp.float32) for seed in (1, 2))


@pytest.fixture(autouse=True)
def _standard_promotion():
    """The norms of Flax and the accumulators of optax rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Regularized(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


def mean_square(model, x, y):
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


def make_nnx_step(make_model, make_optimizer, grad=nnx.value_and_grad):
    """A training step of objects, and a function that makes those."""

    def step(model, optimizer, x, y):
        options = {} if grad is nnx.value_and_grad else {"loss_scale": optimizer}
        loss, grads = grad(mean_square, **options)(model, x, y)
        optimizer.update(model, grads)
        return loss

    def make():
        model = make_model()
        return model, make_optimizer(model, wrt=nnx.Param)

    return step, make


SCALED = jmp.optim.loss_scaled(optax.sgd(1e-2), jmp.DynamicLossScale(2.0**8))
NNX_STEPS = {
    "MultiSteps": lambda: make_nnx_step(
        Regularized, functools.partial(nnx.Optimizer, tx=optax.MultiSteps(optax.adam(1e-2), 2))
    ),
    "float16, loss_scaled": lambda: make_nnx_step(
        lambda: jmp.with_policy(Regularized(), "mixed_float16"),
        functools.partial(jmp.nnx.Optimizer, tx=SCALED),
        jmp.nnx.value_and_grad,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NNX_STEPS)
def test_nnx_objects_are_written_as_without(name):
    step, make = NNX_STEPS[name]()
    objects, observed = make(), make()
    collected = nnx.jit(observe(step, of="forward"))
    plain = nnx.jit(step)
    for _ in range(2):
        loss = plain(*objects, X, Y)
        out, stats = collected(*observed, X, Y)
        assert_same(out, loss)
    assert_same(*(list(map(nnx.to_pure_dict, map(nnx.state, each))) for each in (observed, objects)))
    dtype = "float16" if "float16" in name else "float32"
    assert [(row.path, row.dtype) for row in find(stats, "forward")] == [("head", dtype)]


@pytest.mark.slow
def test_gradients_inside_of_a_step_are_observed():
    """The statistics leave as auxiliary results of a step that is jitted as a whole, and its objects are written."""
    model = Regularized()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        (_, grads), stats = observe(nnx.value_and_grad(mean_square), of="results")(model, x, y)
        optimizer.update(model, grads)
        return grads, stats

    for count in (1, 2):
        grads, stats = step(model, optimizer, X, Y)
        assert model.dropout.rngs.count[...] == count
    assert_row_is(find(stats, "result", path="result/1/head/kernel")[0], grads["head"]["kernel"][...])


PARAMS = {"w": jnp.asarray(np.random.default_rng(3).normal(size=(3, 3)), jnp.float32), "b": jnp.zeros(3)}


def loss_fn(params, x, y):
    half = lambda x: x.astype(jnp.float16)
    return jnp.mean((half(x) @ half(params["w"]) + half(params["b"]) - half(y)).astype(jnp.float32) ** 2)


def step_by_hand(tx, params, state, x, y):
    scale = {"loss_scale": state} if tx is SCALED else {"loss_scale": jmp.NoOpLossScale()}
    loss, grads = jmp.value_and_grad(loss_fn, **scale)(params, x, y)
    return *jmp.optim.step(tx, grads, state, params), loss


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "loss_scaled": SCALED,
    "skip_nonfinite": jmp.optim.skip_nonfinite(optax.sgd(0.1)),
}


def minimize(tx, *args):
    return jmp.optim.minimize(loss_fn, tx)(*args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    [("adamw", minimize), ("loss_scaled", minimize), ("skip_nonfinite", step_by_hand)],
)
def test_a_step_with_its_optimizer_is_the_one_without(name, make):
    tx = OPTIMIZERS[name]
    step = functools.partial(make, tx)
    _, stats = check_collect(step, PARAMS, tx.init(PARAMS), X, Y, of=("forward", "backward"))
    assert [(row.direction, row.dtype) for row in stats] == [("forward", "float16"), ("backward", "float16")]


@pytest.mark.slow
def test_a_step_that_overflows_says_so():
    """All numbers of a gradient are nan or infinite: there is no smallest one."""
    (params, *_), stats = check_collect(
        functools.partial(step_by_hand, SCALED), PARAMS, SCALED.init(PARAMS), X * 1e6, Y, of=("forward", "results")
    )
    np.testing.assert_array_equal(params["w"], PARAMS["w"])
    [row] = find(stats, "result", path="result/2")
    assert (row.nans + row.infs, row.min_nonzero, row.amax) == (1, None, 0)
    assert find(stats, "forward")[0].nonfinite == 1


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_tensors_without_a_number_have_no_smallest_one(shape, value):
    _, stats = check_collect(lambda x: x, jnp.full(shape, value), of="results")
    assert [row.min_nonzero for row in stats] == [None]


@pytest.mark.exhaustive
def test_a_linen_train_state_can_be_donated():
    model = jmp.with_policy(nn.Dense(3, use_bias=False), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    make = functools.partial(jmp.linen.TrainState.create, apply_fn=model.apply, tx=SCALED)

    def step(state, x, y):
        loss = lambda params: mean_square(lambda x: state.apply_fn({"params": params}, x), x, y)
        loss, grads = jmp.value_and_grad(loss, loss_scale=state)(state.params)
        return state.apply_gradients(grads=grads), loss

    given = jax.tree.map(jnp.copy, variables["params"])
    state = make(params=given)
    expected = jax.jit(step)(make(params=variables["params"]), X, Y)
    out, stats = jax.jit(observe(step), donate_argnums=0)(state, X, Y)
    assert_same(out[0].params, expected[0].params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert_row_is(find(stats, "argument", path="state/params/kernel")[0], variables["params"]["kernel"])
    assert_row_is(find(stats, "result", path="result/0/params/kernel")[0], out[0].params["kernel"])
    assert find(stats, "forward")[0].dtype == "float16"
