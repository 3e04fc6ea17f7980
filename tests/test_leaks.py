"""What had a policy is freed as what had none, and a policy that is applied again compiles nothing again."""

import functools
import gc

import jax
import jax.numpy as jnp
import optax
import pytest
from compiles import alive_of, compiles
from flax import linen as nn, nnx

import jmp_policy as jmp
import jmp_policy.nnx
from jmp_policy.autocast import AutocastRules
from jmp_policy.modules import Observation

MIXED = "p=f32,c=bf16,o=f32"
X = jnp.ones(3)

inside = jax.jit(lambda x: jnp.tanh(x) + 1)


def plain(target, policy):
    return target


class Trainer:
    """Holds its parameters, and a method of its own that has a policy."""

    def __init__(self, give, weight=X):
        self.weight = jnp.array(weight)
        self.loss_fn = give(self.loss, MIXED)
        self.train_step = jax.jit(lambda x: self.loss_fn(x))

    def loss(self, x):
        return jnp.sum(inside(x) * self.weight.astype(x.dtype))


class Callable:
    def __call__(self, x):
        return inside(x) * jnp.cos(x)


KINDS = {
    "a function": lambda: lambda x: inside(x) * jnp.cos(x),
    "a closure": lambda: (lambda weight: lambda x: inside(x) * weight.astype(x.dtype))(jnp.ones(3)),
    "a partial": lambda: functools.partial(lambda scale, x: inside(x) * scale, 2),
    "a callable object": Callable,
    "a bound method": lambda: Callable().__call__,
    "a jitted function": lambda: jax.jit(lambda x: inside(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("give", [plain, jmp.with_policy])
def test_trainers_whose_method_has_a_policy_are_freed(give):
    def train(_):
        trainer = Trainer(give)
        trainer.loss_fn(X)
        trainer.train_step(X)
        return trainer

    assert alive_of(30, train) == 0


@pytest.mark.slow
@pytest.mark.parametrize("are_kept", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_functions_under_a_policy_compile_nothing_again(kind, are_kept):
    def compiled(give):
        kept = []

        def run():
            fun = give(KINDS[kind](), MIXED)
            fun(X)
            kept.append(fun if are_kept else None)

        run()
        with compiles() as count:
            for _ in range(30):
                run()
        return count[0]

    assert compiled(jmp.with_policy) == compiled(plain)


def redefined(give):
    """Redefines a linen class, as a cell of a notebook that is run again, and uses it under what `give` gives it."""

    def define_and_run(number):
        class Inner(nn.Module):
            def setup(self):
                self.dense = nn.Dense(2)

            def __call__(self, x):
                return self.dense(x)

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.relu(Inner()(x))

        model = give(Net, Inner)
        variables = jax.eval_shape(model.init, jax.random.key(0), X)
        jax.eval_shape(model.apply, variables, X)
        if number % 15 == 0:  # compiled and run, which takes longer
            variables = jax.jit(model.init)(jax.random.key(0), X)
            jax.jit(model.apply)(variables, X)
            model.apply(variables, X)
        return Net

    return define_and_run


GIVEN = {
    "a policy": lambda net, inner: jmp.with_policy(net(), MIXED),
    "a map by type": lambda net, inner: jmp.with_policy(net(), jmp.PolicyMap({inner: "float32"}, MIXED)),
    "quantized": lambda net, inner: jmp.with_policy(net(), f"int8_from_{MIXED}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("given", GIVEN)
def test_redefined_linen_classes_under_a_policy_are_freed(given):
    assert alive_of(30, redefined(GIVEN[given])) == 0


@pytest.mark.slow
def test_explaining_redefined_linen_classes_does_not_keep_them():
    def define_and_explain(_):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(2)(x)

        jmp.explain(jmp.with_policy(Net(), MIXED), X)
        return Net

    assert alive_of(5, define_and_explain) == 0
    assert not [kept for kept in gc.get_objects() if isinstance(kept, Observation)]


@pytest.mark.slow
def test_trainers_with_nnx_models_under_a_policy_are_freed():
    def train(_):
        model = jmp.with_policy(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), MIXED)
        optimizer = jmp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        grads = nnx.jit(nnx.grad(lambda model, x: model(x).sum()))(model, X)
        optimizer.update(model, grads)
        return model

    assert alive_of(10, train) == 0


@pytest.mark.slow
def test_maps_that_a_linen_model_had_are_freed_but_for_the_last_few():
    def give(number):
        rules = jmp.PolicyMap({f"(layer_{number})?": "float32"}, MIXED)  # matches the root
        model = jmp.with_policy(nn.Dense(2), rules)
        assert type(model) is type(jmp.with_policy(nn.Dense(2), rules))
        if number > 35:
            jax.eval_shape(model.init, jax.random.key(0), X)
        return rules

    assert alive_of(40, give) <= 16


@pytest.mark.slow
def test_redefined_classes_in_the_rules_of_autocast_are_freed():
    def define_and_run(_):
        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x):
                return inside(nn.Dense(2)(x))

        model = nn.Sequential([Inner()])
        variables = jax.eval_shape(model.init, jax.random.key(0), X)
        apply = jmp.autocast(model.apply, MIXED, rules=AutocastRules(scopes={Inner: "full"}))
        jax.eval_shape(apply, variables, X)
        return Inner

    assert alive_of(10, define_and_run) == 0


def test_a_function_under_autocast_by_scopes_compiles_nothing_again():
    fun = jmp.autocast(lambda x: inside(x) * jnp.cos(x), MIXED, rules=AutocastRules(scopes={"": "full"}))
    fun(X)
    with compiles() as count:
        for _ in range(5):
            fun(X)
    assert count[0] == 0


OBSERVERS = {
    "audit": lambda fun: jmp.numerics.audit(fun)(X),
    "collect": lambda fun: jax.eval_shape(jmp.numerics.collect(fun), X),
    "first_nonfinite": lambda fun: jax.eval_shape(jmp.numerics.first_nonfinite(fun), X),
}


@pytest.mark.parametrize("observe", OBSERVERS.values(), ids=OBSERVERS)
def test_observers_leave_nothing_in_the_caches_of_jax(observe):
    model = nn.Dense(3)
    variables = model.init(jax.random.key(0), X)

    def trace():
        observe(lambda x: jnp.linalg.norm(model.apply(variables, x)))

    for _ in range(3):
        trace()
    gc.collect()
    gc.freeze()  # what lives now is neither searched nor counted below
    for _ in range(5):
        trace()
    gc.collect()
    assert len(gc.get_objects()) < 5 * 15


def test_observers_see_modules_inside_of_a_jitted_function_each_time():
    model = nn.Sequential([nn.Dense(3)])
    variables = model.init(jax.random.key(0), X)
    apply = jax.jit(model.apply)
    for _ in range(2):
        _, stats = jmp.numerics.collect(lambda x: apply(variables, x))(X)
        assert "layers_0" in [row.path for row in stats]
        jmp.numerics.audit(jnp.tanh)(X)  # without modules
