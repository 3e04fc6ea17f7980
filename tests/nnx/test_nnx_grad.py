"""Gradients of nnx modules under a loss scale, and steps that are skipped as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_policy as jmp

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
BAD = X.at[0, 0].set(jnp.inf)


def rngs():
    return nnx.Rngs(0)


class Net(nnx.Module):
    """A model with every kind of state that a step carries."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.untouched = nnx.Cache(jnp.zeros(3, jnp.float32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


def loss_fn(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)(model, x)
    optimizer.update(model, grads)
    return loss


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote their own float32 statistics
        yield


def training(tx, policy="mixed_float16"):
    model = jmp.with_policy(Net, policy)(rngs=rngs())
    return model, jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)


def values(node):
    pure = nnx.to_pure_dict(nnx.state(node, nnx.Not(nnx.RngState)))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(pure)}


def changed(before, after):
    return {name for name in before if before[name].tobytes() != after[name].tobytes()}


@pytest.mark.slow
def test_a_skipped_step_keeps_every_kind_of_state_but_does_not_use_random_keys_twice():
    model, optimizer = training(jmp.optim.skip_nonfinite(optax.adamw(1e-2)), "mixed_bfloat16")
    train_step(model, optimizer, X)
    before = values(model), values(optimizer)
    keys = model.dropout.rngs.count[...]
    train_step(model, optimizer, BAD)
    assert changed(before[0], values(model)) == set()
    assert all("inner_state" not in name and "step'" not in name for name in changed(before[1], values(optimizer)))
    assert model.dropout.rngs.count[...] == keys + 1  # random keys are not used twice
    assert jmp.metrics(optimizer)["skipped_steps"] == 1
    train_step(model, optimizer, X)
    assert {"['norm']['mean']", "['calls']", "['linear']['kernel']"} <= changed(before[0], values(model))
    assert int(optimizer.step[...]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("scale", [jmp.StaticLossScale(2.0**10), jmp.DynamicLossScale(2.0**10)])
def test_loss_and_gradients_are_true_whatever_the_scale(scale):
    model, expected = (Net(rngs=rngs()) for _ in range(2))
    loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=scale)(model, X)
    expected_loss, expected_grads = nnx.value_and_grad(loss_fn)(expected, X)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, expected_grads)


@pytest.mark.slow
def test_state_is_kept_of_every_argument_of_a_skipped_step():
    """A GAN's generator, called in the discriminator's step, kept infinite statistics."""
    first, second, other = (Net(rngs=rngs()) for _ in range(3))

    def loss(first, other, second, x):
        return loss_fn(first, x) + loss_fn(second, x) + loss_fn(other["generator"], x)

    argnums = (0, nnx.DiffState(2, nnx.Param))
    differentiated = jmp.nnx.grad(loss, argnums, loss_scale=jmp.StaticLossScale(8.0))
    before = values(other)
    assert len(differentiated(first, {"generator": other}, second, BAD)) == 2
    assert (int(first.calls[...]), int(second.calls[...]), int(other.calls[...])) == (0, 0, 0)
    assert changed(before, values(other)) == set()
    differentiated(first, {"generator": other}, second, X)
    assert (int(first.calls[...]), int(second.calls[...]), int(other.calls[...])) == (1, 1, 1)


@pytest.mark.slow
def test_metrics_that_are_an_argument_do_not_count_a_skipped_step():
    """The average of `nnx.MultiMetric` was nan until it was reset."""
    model, scale = nnx.Linear(4, 1, rngs=rngs()), jmp.DynamicLossScale(8.0)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def loss(model, metrics, x):
        value = model(x).sum()
        metrics.update(loss=value)
        return value

    differentiated = nnx.jit(lambda model, metrics, x: jmp.nnx.grad(loss, loss_scale=scale)(model, metrics, x))
    differentiated(model, metrics, X)
    before = float(metrics.compute()["loss"])
    differentiated(model, metrics, BAD)
    assert float(metrics.compute()["loss"]) == before


@pytest.mark.slow
def test_auxiliary_data_and_options_are_passed_on():
    def with_aux(model, x):
        return loss_fn(model, x), x

    model = Net(rngs=rngs())
    scale = jmp.StaticLossScale(8.0)
    (_, aux), _ = jmp.nnx.value_and_grad(with_aux, has_aux=True, loss_scale=scale, graph=True)(model, X)
    assert aux is X
    _, aux = jmp.nnx.grad(with_aux, has_aux=True, loss_scale=scale)(model, X)
    assert aux is X


@pytest.mark.slow
def test_state_without_a_loss_scale_is_an_error():
    model = Net(rngs=rngs())
    optimizer = jmp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match="Expected a state that holds exactly one loss scale, got Optimizer with 0"):
        jmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)


@pytest.mark.slow
def test_loss_scale_and_metrics_are_found_in_an_optimizer():
    _, optimizer = training(jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale(4.0)))
    assert float(jmp.get_loss_scale(optimizer).loss_scale) == 4.0
    assert {name: float(value) for name, value in jmp.metrics(optimizer).items()} == {
        "loss_scale": 4.0,
        "steps_since_growth": 0.0,
        "grads_finite": 1.0,
        "skipped_steps": 0.0,
        "consecutive_skips": 0.0,
    }


@pytest.mark.slow
def test_only_what_the_filter_names_is_trained():
    model = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs())
    tx = jmp.optim.loss_scaled(optax.sgd(0.5), jmp.StaticLossScale(8.0))
    optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    before = values(model)
    lora = nnx.DiffState(0, nnx.LoRAParam)
    grads = jmp.nnx.grad(lambda m: m(X).sum(), lora, loss_scale=optimizer)(model)
    optimizer.update(model, grads)
    assert changed(before, values(model)) == {"['lora']['lora_b']"}  # which starts at zero, and so hides lora_a


@pytest.mark.slow
def test_extra_arguments_reach_the_transformation():
    model = nnx.Linear(4, 4, rngs=rngs())
    plateau = optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1))
    optimizer = jmp.nnx.Optimizer(model, jmp.optim.skip_nonfinite(plateau), wrt=nnx.Param)
    grads = nnx.grad(lambda m: m(X).sum())(model)
    assert optimizer.update(model, grads, value=jnp.float32(1.0)) is None
    assert int(optimizer.step[...]) == 1
    plain = jmp.nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    before = model.kernel[...]
    updates = plain.update(model, grads)  # as Flax's does
    np.testing.assert_array_equal(before + updates["kernel"], model.kernel[...])


@pytest.mark.slow
@pytest.mark.parametrize("value_and_grad", [jmp.nnx.value_and_grad, jmp.value_and_grad], ids=["nnx", "core"])
def test_function_made_once_outside_of_the_loop_reads_the_scale_of_each_step(value_and_grad):
    """It was read where the function was made: the first step that overflowed would have overflowed for ever."""
    model = nnx.Linear(1, 1, rngs=rngs())
    tx, seen = jmp.optim.loss_scaled(optax.sgd(0.0), jmp.DynamicLossScale(2.0)), []
    optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)

    @jax.custom_vjp
    def watch(x):
        return x

    watch.defvjp(lambda x: (x, None), lambda _, cotangent: (seen.append(float(cotangent)) or cotangent,))
    of_model = value_and_grad is jmp.nnx.value_and_grad
    call = (lambda model: model(jnp.ones((1, 1))).sum()) if of_model else (lambda w: w * 1.0)
    argument = model if of_model else 1.0
    differentiated = value_and_grad(lambda x: watch(call(x)), loss_scale=optimizer)
    differentiated(argument)
    optimizer.update(model, jax.tree.map(lambda x: x * jnp.inf, nnx.state(model, nnx.Param)))
    differentiated(argument)
    assert seen == [2.0, 1.0]


NORM = (lambda: nnx.BatchNorm(4, rngs=rngs()), "BatchStat '.*mean'")
DROPOUT = (lambda: nnx.Dropout(0.5, rngs=rngs()), "RngCount '.*count'")


@pytest.mark.parametrize(
    ("differentiate", "layer", "state"),
    [
        (jmp.value_and_grad, *NORM), (jmp.grad, *DROPOUT), (jmp.optim.minimize, *NORM), ("jit", *DROPOUT),
        ("tree", *NORM),
    ],
)  # fmt: skip
def test_core_functions_refuse_a_model_whose_batch_statistics_they_would_freeze(differentiate, layer, state):
    """Batch statistics kept their first values without a word, and Dropout ended in an error about uint32."""
    model, scale = nnx.Dict(layer=layer()), jmp.DynamicLossScale()
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), scale)
    call = {
        jmp.optim.minimize: lambda: jmp.optim.minimize(lambda m: m.layer(X).sum(), tx)(model, tx.init(jnp.ones(2))),
        "jit": lambda: jax.jit(jmp.grad(lambda m: m.layer(X).sum(), loss_scale=scale))(model),
        "tree": lambda: jmp.grad(lambda x, tree: tree["m"].layer(x).sum(), 1, loss_scale=scale)(X, {"m": model}),
    }.get(differentiate, lambda: differentiate(lambda m: m.layer(X).sum(), loss_scale=scale)(model))
    name = "minimize" if differentiate is jmp.optim.minimize else "value_and_grad"
    example = r"For example: optimizer = jmp_policy\.nnx\.Optimizer.* jmp_policy\.nnx\.value_and_grad\(loss_fn, loss_sc"
    with pytest.raises(TypeError, match=f"{name} got an nnx module with the {state}, which it would.*{example}"):
        call()


def test_core_functions_still_differentiate_a_model_of_parameters_alone():
    model = nnx.Linear(4, 4, rngs=rngs())
    grads = jax.eval_shape(jmp.grad(lambda m: m(X).sum(), loss_scale=jmp.DynamicLossScale()), model)
    assert grads.kernel.shape == (4, 4)
