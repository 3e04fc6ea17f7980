"""`numerics.collect` on models that were written for other purposes, and on whole training steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from observed import assert_row_is, assert_same, check_collect, find, find_sites, observe

import jmp_policy as jmp
import jmp_policy.linen
import jmp_policy.nnx
from benchmarks.architectures._registry import ARCHITECTURES
from jmp_policy.demo import _gpt_linen, _gpt_nnx
from jmp_policy.demo._gpt import GPTConfig
from jmp_policy.numerics import audit

CONFIG = GPTConfig(width=8, depth=2, heads=2, context=4, vocabulary=16)
WINDOWS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 5)))
X, Y = (jnp.asarray(np.random.default_rng(seed).normal(size=(4, 3)), jnp.float32) for seed in (1, 2))


@pytest.fixture(autouse=True)
def _standard_promotion():
    """As authors run their models: the norms of Flax rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_linen_gpt():
    model = _gpt_linen.GPT(CONFIG)
    variables = jax.eval_shape(model.init, jax.random.key(0), WINDOWS[:, :-1])
    loss = lambda variables, windows: _gpt_linen._loss_fn(variables, model.apply, windows)
    return jax.value_and_grad(loss), variables, WINDOWS


def make_nnx_gpt():
    model = nnx.eval_shape(lambda: _gpt_nnx.GPT(CONFIG, rngs=nnx.Rngs(0)))
    return nnx.value_and_grad(lambda model, windows: _gpt_nnx._loss_fn(model, windows)), model, WINDOWS


GPTS = {
    "linen": (make_linen_gpt, "blocks_1/attention/qkv", "params/blocks_1/attention/qkv/kernel"),
    "nnx": (make_nnx_gpt, "blocks/1/attention/qkv", "blocks/1/attention/qkv/kernel"),
}


@pytest.mark.parametrize("api", GPTS)
def test_rows_of_a_gpt_have_the_paths_of_its_modules_and_of_its_gradients(api):
    make, path, leaf = GPTS[api]
    grad, model, windows = make()
    stats = nnx.eval_shape(observe(grad), model, windows)[1]
    sites = stats.layout.sites
    assert [site.direction for site in sites if site.path == path] == ["forward", "backward", "backward"]
    [dw] = [site for site in sites if site.path == f"result/1/{leaf}"]
    assert dw.shape == (8, 24) and dw.direction == "result"
    matmuls = [site for site in sites if site.primitive == "dot_general"]
    report = audit(grad)(model, windows)
    assert {(site.path, site.direction == "backward") for site in matmuls} == {
        (matmul.path, matmul.backward) for matmul in report.matmuls
    }
    assert len(matmuls) == sum(matmul.count for matmul in report.matmuls)


@pytest.mark.parametrize(
    "name", [name if name == "transformer" else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_every_matmul_of_an_architecture_has_a_row(name):
    architecture = ARCHITECTURES[name]
    model = architecture.without_policy()
    grad = jax.value_and_grad(model.loss, has_aux=True)
    args = *jax.eval_shape(model.init, jax.random.key(0)), architecture.batch
    sites = find_sites(grad, *args)
    matmuls = audit(grad)(*args).matmuls
    products = [site for site in sites if site.primitive]
    assert len(products) == sum(matmul.count for matmul in matmuls)
    assert {site.path for site in products} == {matmul.path for matmul in matmuls}
    gradients = [site.path for site in sites if site.path.startswith("result/1/")]
    assert len(gradients) == len(jax.tree.leaves(args[0]))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(3, name="dense")(x)), None


class Layers(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        scan = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(name="layers")(x, None)[0]


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_have_rows_by_turn(remat):
    model = Layers(remat)
    variables = model.init(jax.random.key(0), X)
    grad = jax.grad(lambda variables, x: jnp.sum(model.apply(variables, x) ** 2))
    grads, stats = check_collect(grad, variables, X, of=("forward", "backward"))
    kernels, x = variables["params"]["layers"]["dense"]["kernel"], X
    for row, kernel in zip(find(stats, "forward"), kernels, strict=True):
        product = x @ kernel
        assert row.path == "layers/dense" and row.shape == product.shape
        np.testing.assert_allclose(row.amax, np.abs(product).max(), rtol=1e-5)
        x = jnp.tanh(product)
    dws = find(stats, "backward", shape=(3, 3))
    assert sorted(row.turn for row in dws) == [0, 1, 2]
    for row in dws:
        dw = grads["params"]["layers"]["dense"]["kernel"][row.turn]
        np.testing.assert_allclose(row.amax, np.abs(dw).max(), rtol=1e-5)


class Member(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def make_members():
    return nnx.vmap(lambda key: Member(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 2))


def run_in_turn(model, x):
    return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)


def run_each(model, x):
    return nnx.vmap(lambda model, x: model(x), in_axes=(0, None))(model, x)


@pytest.mark.parametrize(("run", "turns"), [(run_in_turn, [0, 1]), (run_each, [None])])
def test_stacked_nnx_modules_have_rows(run, turns):
    model = make_members()
    grad = nnx.value_and_grad(lambda model, x: jnp.sum(run(model, x) ** 2))
    expected = nnx.jit(grad)(model, X)
    of = ("forward", "results") if run is run_each else "forward"
    (loss, grads), stats = nnx.jit(observe(grad, of=of))(model, X)
    assert_same((loss, nnx.to_pure_dict(grads)), (expected[0], nnx.to_pure_dict(expected[1])))
    assert [row.turn for row in find(stats, "forward")] == turns
    if run is run_each:  # a model that nnx hands on by itself has no path there, as in `audit`
        assert_row_is(find(stats, "result", path="result/1/linear/kernel")[0], grads["linear"]["kernel"][...])
        return
    [first, second] = find(stats, "forward")
    product = X @ model.linear.kernel[...][0]
    np.testing.assert_allclose(first.rms, np.sqrt(np.mean(product**2)), rtol=1e-5)
    assert second.shape == product.shape


def test_a_linen_cell_in_a_scan_has_its_path_once():
    model = nn.RNN(nn.SimpleCell(2))
    xs = jnp.ones((2, 3, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), xs)
    sites = find_sites(model.apply, variables, xs, of="forward", loops="merge")
    assert {site.path for site in sites} == {"cell/i", "cell/h"}
    assert {matmul.path for matmul in audit(model.apply)(variables, xs).matmuls} == {"cell/i", "cell/h"}


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


SCALED = jmp.optim.loss_scaled(optax.adamw(1e-2), jmp.DynamicLossScale(2.0**8))
NNX_STEPS = {
    "adamw": lambda: make_nnx_step(Regularized, functools.partial(nnx.Optimizer, tx=optax.adamw(1e-2))),
    "MultiSteps": lambda: make_nnx_step(
        Regularized, functools.partial(nnx.Optimizer, tx=optax.MultiSteps(optax.adam(1e-2), 2))
    ),
    "float16, loss_scaled": lambda: make_nnx_step(
        lambda: jmp.with_policy(Regularized(), "mixed_float16"),
        functools.partial(jmp.nnx.Optimizer, tx=SCALED),
        jmp.nnx.value_and_grad,
    ),
}


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


def test_gradients_inside_of_a_step_are_observed():
    """The statistics leave as auxiliary results of a step that is jitted as a whole, and its objects are written."""
    model = Regularized()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        (loss, grads), stats = observe(nnx.value_and_grad(mean_square), of="results")(model, x, y)
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
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "loss_scaled": SCALED,
    "skip_nonfinite": jmp.optim.skip_nonfinite(optax.sgd(0.1, momentum=0.9)),
}


def minimize(tx, *args):
    return jmp.optim.minimize(loss_fn, tx)(*args)


@pytest.mark.parametrize(
    ("name", "make"),
    [("adamw", step_by_hand), ("MultiSteps", minimize), ("loss_scaled", minimize), ("skip_nonfinite", step_by_hand)],
)
def test_a_step_with_its_optimizer_is_the_one_without(name, make):
    tx = OPTIMIZERS[name]
    step = functools.partial(make, tx)
    of = ("forward", "backward", "results")
    (params, *_), stats = check_collect(step, PARAMS, tx.init(PARAMS), X, Y, of=of)
    assert [row.dtype for row in (*find(stats, "forward"), *find(stats, "backward"))] == ["float16", "float16"]
    assert_row_is(find(stats, "result", path="result/0/w")[0], params["w"])


def test_a_step_that_overflows_says_so():
    """All numbers of a gradient are nan or infinite: there is no smallest one."""
    (params, state, loss), stats = check_collect(
        functools.partial(step_by_hand, SCALED), PARAMS, SCALED.init(PARAMS), X * 1e6, Y, of=("forward", "results")
    )
    np.testing.assert_array_equal(params["w"], PARAMS["w"])
    [row] = find(stats, "result", path="result/2")
    assert (row.nans + row.infs, row.min_nonzero, row.amax) == (1, None, 0)
    assert find(stats, "forward")[0].nonfinite == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_tensors_without_a_number_have_no_smallest_one(shape, value):
    _, stats = check_collect(lambda x: x, jnp.full(shape, value), of="results")
    assert [row.min_nonzero for row in stats] == [None]


@pytest.mark.parametrize("policy", [None, "mixed_float16"])
def test_a_linen_train_state_can_be_donated(policy):
    model = nn.Dense(3) if policy is None else jmp.with_policy(nn.Dense(3), policy)
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
    assert find(stats, "forward")[0].dtype == ("float32" if policy is None else "float16")
