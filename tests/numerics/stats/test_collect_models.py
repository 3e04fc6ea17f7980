"""`numerics.collect` around models and training steps: paths, turns, dtypes, and what they write."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiles import alive_of, compiles
from flax import linen as nn, nnx
from observed import assert_row_is, assert_same, find, find_sites, observe, observe_quick

import jmp_policy as jmp
import jmp_policy.linen
import jmp_policy.nnx
from benchmarks.architectures._registry import ARCHITECTURES
from jmp_policy.numerics import audit

X, Y = (jnp.asarray(np.random.default_rng(seed).normal(size=(4, 3)), jnp.float32) for seed in (1, 2))
W = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3)), jnp.float32)


@pytest.fixture(autouse=True)
def _standard_promotion():
    """The norms of Flax and the accumulators of optax rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(w, x):
    return jnp.sum(jnp.tanh(x @ w) @ w)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:collect measures 697 tensors")  # of ResNet-50; nothing is compiled here
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_matmul_of_an_architecture_has_a_row(name):
    architecture = ARCHITECTURES[name]
    model = architecture.without_policy()
    grad = jax.value_and_grad(model.loss, has_aux=True)
    args = *jax.eval_shape(model.init, jax.random.key(0)), architecture.batch
    sites = find_sites(grad, *args)
    matmuls = audit(grad)(*args).matmuls
    products = [site for site in sites if site.primitive]
    assert len(products) == sum(matmul.count for matmul in matmuls)
    assert {(site.path, site.direction == "backward") for site in products} == {(m.path, m.backward) for m in matmuls}
    gradients = [site.path for site in sites if site.path.startswith("result/1/")]
    assert len(gradients) == len(jax.tree.leaves(args[0]))


@pytest.mark.slow
def test_a_linen_cell_in_a_scan_has_its_path_once():
    model = nn.RNN(nn.SimpleCell(2))
    xs = jnp.ones((2, 3, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), xs)
    sites = find_sites(model.apply, variables, xs, of="forward", loops="merge")
    assert {site.path for site in sites} == {"cell/i", "cell/h"}
    assert {matmul.path for matmul in audit(model.apply)(variables, xs).matmuls} == {"cell/i", "cell/h"}


@pytest.mark.slow
def test_what_autocast_decides_is_what_is_measured():
    cast = lambda fun: jmp.autocast(fun, "mixed_bfloat16")
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    for fun in (cast(jax.grad(loss)), jax.grad(cast(loss))):
        products = [site for site in find_sites(fun, W, X) if site.primitive]
        assert [(site.direction, site.dtype) for site in products] == [
            ("forward", "bfloat16"),
            ("backward", "bfloat16"),
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "policy", "dtype"),
    [
        ("linen", "mixed_float16", "float16"),
        ("nnx", "int8_from_mixed_bfloat16", "bfloat16"),
        ("linen", "float8/4(min_size=0)_from_mixed_bfloat16", "bfloat16"),
        ("nnx", "float8/4(min_size=0)_from_mixed_bfloat16", "bfloat16"),
    ],
)
def test_layers_with_a_policy_have_rows_in_its_dtypes(api, policy, dtype):
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
    assert {(row.dtype, row.times) for row in stats} == {(dtype, 1)}


class Regularized(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


def mean_square(model, x, y):
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


SCALED = jmp.optim.loss_scaled(optax.sgd(1e-2), jmp.DynamicLossScale(2.0**8))


@pytest.mark.slow
def test_objects_of_an_nnx_step_are_written_as_without():
    def step(model, optimizer, x, y):
        (loss, grads), stats = collected(model, x, y, optimizer)
        optimizer.update(model, grads)
        return loss, grads, stats

    def plain(model, optimizer, x, y):
        loss, grads = jmp.nnx.value_and_grad(mean_square, loss_scale=optimizer)(model, x, y)
        optimizer.update(model, grads)
        return loss

    collected = observe(
        lambda model, x, y, scale: jmp.nnx.value_and_grad(mean_square, loss_scale=scale)(model, x, y),
        of=("forward", "results"),
    )
    runs = []
    for run in (nnx.jit(step), nnx.jit(plain), nnx.jit(observe(plain, of="forward"))):
        model = jmp.with_policy(Regularized(), "mixed_float16")
        optimizer = jmp.nnx.Optimizer(model, SCALED, wrt=nnx.Param)
        for count in (1, 2):
            out = run(model, optimizer, X, Y)
            assert model.dropout.rngs.count[...] == count
        runs.append((out, [nnx.to_pure_dict(nnx.state(each)) for each in (model, optimizer)]))
    (_, grads, stats), (_, outside) = runs[0][0], runs[2][0]
    assert_same(runs[0][1], runs[1][1])
    assert_same(runs[2][1], runs[1][1])
    assert_row_is(find(stats, "result", path="result/1/head/kernel")[0], grads["head"]["kernel"][...])
    for each in (stats, outside):
        assert [(row.path, row.dtype) for row in find(each, "forward")] == [("head", "float16")]


@pytest.mark.slow
def test_a_jitted_one_is_traced_and_compiled_once_and_eagerly_a_fresh_one_compiles_nothing_again():
    traces = []

    def fun(w, x):
        traces.append(1)
        return loss_fn(w, x)

    observed, other = jax.jit(observe(jax.grad(fun))), 2 * W
    _, first = observed(W, X)
    with compiles() as count:
        _, second = observed(other, X)
    assert (count[0], len(traces)) == (0, 1)
    assert first.layout is second.layout
    observe(loss_fn)(W, X)
    with compiles() as count:
        observe(lambda w, x: loss_fn(w, x))(W, X)
    assert count[0] == 0


def use_method(_):
    class Trainer:
        weight = jnp.array(W)

        def loss(self, x):
            return jnp.sum(x @ self.weight)

    trainer = Trainer()
    jax.jit(observe_quick(trainer.loss))(X)
    return trainer


def use_linen(_):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    variables = Net().init(jax.random.key(0), X)
    observe_quick(Net().apply, where="Dense_0")(variables, X)
    return Net


@pytest.mark.slow
@pytest.mark.parametrize("use", [use_method, use_linen, lambda _: observe_quick(lambda x: x @ W)(X)[1].layout])
def test_what_was_observed_is_freed(use):
    assert alive_of(3, use) == 0
