"""A function that `collect` returns goes wherever a function goes: through caches, transformations and exports."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from compiles import alive_of, compiles
from flax import linen as nn, nnx
from jax import lax
from observed import assert_row_is, assert_same, check_collect, find, observe

from jmp_policy import autocast
from jmp_policy.numerics import audit, collect, first_nonfinite

X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
W = jnp.asarray(np.random.default_rng(2).normal(size=(3, 3)), jnp.float32)


def loss_fn(w, x):
    with jax.named_scope("net"):
        return jnp.sum(jnp.tanh(x @ w) @ w)


GRAD = jax.grad(loss_fn)


@pytest.mark.slow
def test_a_jitted_one_is_traced_and_compiled_once():
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


@pytest.mark.slow
def test_eagerly_a_fresh_one_compiles_nothing_again():
    observe(loss_fn)(W, X)
    with compiles() as count:
        observe(lambda w, x: loss_fn(w, x))(W, X)
    assert count[0] == 0


@pytest.mark.slow
def test_statistics_are_carried_by_a_scan():
    observed = observe(GRAD, of="results")
    xs = jnp.stack([X, 2 * X, X / 3])
    start = jax.eval_shape(observed, W, X)[1].empty()

    def step(carry, x):
        w, stats = carry
        grads, new = observed(w, x)
        return (w - 0.1 * grads, stats.merge(new)), grads

    (_, stats), grads = jax.jit(lambda: lax.scan(step, (W, start), xs))()
    assert_row_is(stats.rows()[0], *grads)


@pytest.mark.slow
def test_a_cond_of_the_user_skips_them():
    observed = observe(GRAD)
    empty = jax.eval_shape(observed, W, X)[1].empty()
    choose = jax.jit(lambda flag: lax.cond(flag, lambda: observed(W, X)[1], lambda: empty))
    assert [row.times for row in choose(True)] == [1] * len(empty)
    assert [row.times for row in choose(False)] == [0] * len(empty)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_it_is_exported_for_any_platform(platform):
    exported = jax.export.export(jax.jit(observe(GRAD)), platforms=[platform])(W, X)
    assert "custom_call" not in exported.mlir_module()
    if platform == jax.default_backend():
        grads, stats = exported.call(W, X)
        assert_row_is(find(stats, "result")[0], grads)


@pytest.mark.slow
def test_one_inside_of_another_measures_the_same():
    (out, inner), outer = observe(observe(GRAD, of=("forward", "backward")), of=("forward", "backward"))(W, X)
    assert_same(out, GRAD(W, X))
    assert inner.layout is outer.layout
    assert inner.to_dict() == outer.to_dict()


def test_an_audit_finds_nothing_in_what_is_measured():
    half = lambda w, x: loss_fn(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
    plain, observed = audit(half)(W, X), audit(observe(half))(W, X)
    assert [finding.id for finding in observed.findings] == [finding.id for finding in plain.findings]
    assert observed.matmuls == plain.matmuls


def test_numbers_of_64_bits_are_measured_as_they_are():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3)) * 1e-200, jnp.float64)
        grads, stats = check_collect(jax.grad(lambda w: jnp.sum(x @ w)), W.astype(jnp.float64))
        assert find(stats, "result")[0].amax == float(jnp.abs(grads).max()) < 1e-190


def use_method(_):
    class Trainer:
        weight = jnp.array(W)

        def loss(self, x):
            return jnp.sum(x @ self.weight)

    trainer = Trainer()
    observe(jax.grad(trainer.loss))(X)
    jax.jit(observe(trainer.loss))(X)
    return trainer


def use_array_in_loop(_):
    weight = jnp.array(W)
    jax.jit(observe(lambda x: lax.scan(lambda x, _: (x @ weight, None), x, length=2)[0]))(X)
    return weight


def use_linen(_):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    model = Net()
    variables = model.init(jax.random.key(0), X)
    observe(model.apply, where="Dense_0")(variables, X)
    return Net


def use_nnx(_):
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    observe(nnx.grad(lambda model, x: model(x).sum()))(model, X)
    return model


def use_layout(_):
    return observe(lambda x: x @ W)(X)[1].layout


@pytest.mark.exhaustive
@pytest.mark.parametrize("use", [use_method, use_array_in_loop, use_linen, use_nnx, use_layout])
def test_what_was_observed_is_freed(use):
    assert alive_of(3, use) == 0


@pytest.mark.slow
def test_the_work_of_tracing_grows_as_the_layers_do():
    """Bodies that are equal are copied once, and equal shapes share what measures them."""

    def count(layers):
        def fun(w, x):
            for _ in range(layers):
                x = jnp.tanh(x @ w)
            return jnp.sum(x)

        return len(str(jax.make_jaxpr(observe(jax.grad(fun), of=("forward", "backward")))(W, X)).splitlines())

    first, second, third = count(2), count(6), count(10)
    assert third - second <= 1.1 * (second - first)


NO_VALUES = {
    "float": lambda x: float(x[0, 0]) * x,
    "if": lambda x: x if x.sum() > 0 else -x,
    "numpy": lambda x: np.tanh(x),
    "index": lambda x: [x, -x][x[0, 0].astype(int)],
}


@pytest.mark.parametrize("name", NO_VALUES)
def test_what_needs_the_values_of_arrays_is_told_that_it_is_traced(name):
    with pytest.raises(jax.errors.JAXTypeError) as info:
        collect(NO_VALUES[name])(X)
    assert "collect traces the function as jax.jit does" in "".join(info.value.__notes__)


def test_errors_of_the_function_come_through():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        collect(lambda x: x @ x)(X)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        collect(loss_fn)(W)


@pytest.mark.parametrize("wrap", [lambda fun: fun, nnx.jit])
def test_an_object_that_is_closed_over_and_written_to_is_to_be_an_argument(wrap):
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"), pytest.raises(Exception, match="trace level") as info:
        collect(wrap(lambda x: model(x)))(X)
    assert "collect(lambda model, x: model(x))(model, x)" in "".join(info.value.__notes__)


NO_FUNCTIONS = {
    "a linen module": (nn.Dense(3), r"collect\(model.apply\)\(variables, x\)"),
    "a linen class": (nn.Dense, r"collect\(model.apply\)\(variables, x\)"),
    "an nnx class": (nnx.Linear, r"collect\(lambda model, x: model\(x\)\)\(model, x\)"),
    "an nnx module": (functools.partial(nnx.Linear, 3, 3), r"collect\(lambda model, x: model\(x\)\)\(model, x\)"),
    "another class": (dict, r"collect\(train_step\)\(state, batch\)"),
}


@pytest.mark.parametrize("name", NO_FUNCTIONS)
def test_what_is_no_function_is_told_how(name):
    target, example = NO_FUNCTIONS[name]
    target = target(rngs=nnx.Rngs(0)) if isinstance(target, functools.partial) else target
    with pytest.raises(TypeError, match=rf"collect takes a function, got .*For example: {example}"):
        collect(target)


def test_the_nearest_path_of_a_model_is_named():
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"where has 'layer/0', but.*Did you mean 'layers/0'\?"):
        collect(lambda model, x: model(x), where="layer/0")(model, X)


@pytest.mark.parametrize("option", ["of", "where"])
def test_what_are_no_strings_are_refused(option):
    with pytest.raises(TypeError, match=rf"{option} takes strings, got 3. For example: {option}=\('"):
        collect(loss_fn, **{option: 3})


@pytest.mark.parametrize("instrument", [collect, first_nonfinite])
def test_inside_of_autocast_it_is_refused_as_dtypes_would_be_those_before(instrument):
    message = rf"{instrument.__name__} inside autocast would report the dtypes before .* outside. For example: "
    for fun in (instrument(loss_fn), jax.grad(instrument(loss_fn), has_aux=True)):
        with pytest.raises(ValueError, match=message + rf"{instrument.__name__}\(autocast\(loss_fn, 'mixed_bf"):
            jax.eval_shape(autocast(fun, "mixed_bfloat16"), W, X)
    _, found = jax.eval_shape(instrument(autocast(loss_fn, "mixed_bfloat16")), W, X)
    assert found is not None
