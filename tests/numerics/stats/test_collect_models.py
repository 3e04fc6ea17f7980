"""`numerics.collect` on models that were written for other purposes: paths, turns, policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from observed import assert_row_is, assert_same, check_collect, find, find_sites, observe

import jmp_policy as jmp
import jmp_policy.nnx
from benchmarks.architectures._registry import ARCHITECTURES
from examples.gpt import gpt_linen, gpt_nnx
from examples.gpt.model import GPTConfig, cross_entropy, split_windows
from jmp_policy.numerics import audit

CONFIG = GPTConfig(width=8, depth=2, heads=2, context=4, vocabulary=16)
WINDOWS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 5)))
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
W = jnp.asarray(np.random.default_rng(2).normal(size=(3, 3)), jnp.float32)


@pytest.fixture(autouse=True)
def _standard_promotion():
    """As authors run their models: the norms of Flax rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_linen_gpt():
    model = gpt_linen.GPT(CONFIG)
    variables = jax.eval_shape(model.init, jax.random.key(0), WINDOWS[:, :-1])

    def loss_fn(variables, windows):
        tokens, targets = split_windows(windows)
        return cross_entropy(model.apply(variables, tokens), targets)

    return jax.value_and_grad(loss_fn), variables, WINDOWS


def make_nnx_gpt():
    model = nnx.eval_shape(lambda: gpt_nnx.GPT(CONFIG, rngs=nnx.Rngs(0)))
    return nnx.value_and_grad(lambda model, windows: gpt_nnx.loss_fn(model, windows)), model, WINDOWS


GPTS = {
    "linen": (make_linen_gpt, "blocks_1/attention/qkv", "params/blocks_1/attention/qkv/kernel"),
    "nnx": (make_nnx_gpt, "blocks/1/attention/qkv", "blocks/1/attention/qkv/kernel"),
}


@pytest.mark.slow
@pytest.mark.parametrize("api", GPTS)
def test_rows_of_a_gpt_have_the_paths_of_its_modules_and_of_its_gradients(api):
    make, path, leaf = GPTS[api]
    grad, model, windows = make()
    stats = nnx.eval_shape(observe(grad), model, windows)[1]
    sites = stats.layout.sites
    assert [site.direction for site in sites if site.path == path] == ["forward", "backward", "backward"]
    [dw] = [site for site in sites if site.path == f"result/1/{leaf}"]
    assert (dw.shape, dw.direction) == ((8, 24), "result")
    matmuls = [site for site in sites if site.primitive == "dot_general"]
    report = audit(grad)(model, windows)
    assert {(site.path, site.direction == "backward") for site in matmuls} == {
        (matmul.path, matmul.backward) for matmul in report.matmuls
    }
    assert len(matmuls) == sum(matmul.count for matmul in report.matmuls)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:collect measures 697 tensors")  # of ResNet-50; nothing is compiled here
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


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_have_rows_by_turn(remat):
    model = Layers(remat)
    variables = model.init(jax.random.key(0), X)
    grad = jax.grad(lambda variables, x: jnp.sum(model.apply(variables, x) ** 2))
    grads, stats = check_collect(grad, variables, X, of=("forward", "backward"))
    kernels, x = variables["params"]["layers"]["dense"]["kernel"], X
    for row, kernel in zip(find(stats, "forward"), kernels, strict=True):
        product = x @ kernel
        assert (row.path, row.shape) == ("layers/dense", product.shape)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_autocast_decides_is_what_is_measured():
    fun = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    for observed, dtype in (
        (observe(jmp.autocast(fun, "mixed_bfloat16")), "bfloat16"),
        (observe(jax.grad(jmp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), "mixed_bfloat16"))), "bfloat16"),
    ):
        stats = jax.eval_shape(observed, W, X)[1]
        products = [site for site in stats.layout.sites if site.primitive]
        assert [(site.direction, site.dtype) for site in products] == [("forward", dtype), ("backward", dtype)]


@pytest.mark.slow
def test_a_policy_casts_no_statistics():
    policy = "params=float32,compute=float32,output=bfloat16"
    observed = jmp.with_policy(observe(lambda w, x: x @ w, of="arguments"), policy)
    product, stats = observed(W, X)
    assert product.dtype == jnp.bfloat16
    assert_row_is(find(stats, "argument", path="w")[0], W)


POLICIES = {
    "mixed_float16": "float16",
    "int8_from_mixed_bfloat16": "bfloat16",
    "float8/4(min_size=0)_from_mixed_bfloat16": "bfloat16",
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_layers_with_a_policy_have_rows_in_its_dtypes(api, policy):
    x = jnp.tile(X, (4, 16))[:, :16]
    if api == "linen":
        model = jmp.with_policy(nn.Dense(16, use_bias=False), policy)
        variables = model.init(jax.random.key(0), x)
        fun = jax.grad(lambda variables, x: jnp.sum(model.apply(variables, x).astype(jnp.float32)), allow_int=True)
    else:
        variables = jmp.with_policy(nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)), policy)
        fun = jmp.nnx.grad(lambda model, x: jnp.sum(model(x).astype(jnp.float32)), loss_scale=jmp.NoOpLossScale())
    expected = nnx.jit(fun)(variables, x)
    grads, stats = nnx.jit(observe(fun, of=("forward", "backward")))(variables, x)
    assert_same(*(nnx.to_pure_dict(each) if api == "nnx" else each for each in (grads, expected)), bound=1e-2)
    assert {row.dtype for row in stats} == {POLICIES[policy]}
    assert all(row.times == 1 for row in stats)
