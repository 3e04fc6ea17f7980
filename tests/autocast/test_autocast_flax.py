"""Whole train steps of linen and nnx under `autocast`: what they write, and in which dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from programs import products

import jmp_policy as jmp
from benchmarks._measure import count_calls
from benchmarks.autocast import unrolled
from jmp_policy import PolicyMap, autocast

LOW = "params=float32,compute=bfloat16,output=none"
X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
Y = jnp.arange(4) % 3


@pytest.fixture(autouse=True)
def adam_needs_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def dtypes(program):
    """The dtypes of the matrix products of a traced program."""
    return [dtype for _, dtype in products(program)]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8, name="inner")(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        self.sow("intermediates", "hidden", x)
        return nn.Dense(3, name="head")(x)


TX = optax.adamw(1e-2)


def linen_step(variables, opt_state, key):
    def loss_fn(params):
        logits, changed = Net().apply(
            {**variables, "params": params}, X, rngs={"dropout": key}, mutable=["batch_stats", "intermediates"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean(), changed

    (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
    updates, opt_state = TX.update(grads, opt_state, variables["params"])
    params = optax.apply_updates(variables["params"], updates)
    return {"params": params, "batch_stats": changed["batch_stats"]}, opt_state, loss, grads, changed["intermediates"]


@pytest.fixture(scope="module")
def linen_state():
    variables = jax.jit(Net().init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    variables = {name: variables[name] for name in ("params", "batch_stats")}
    return variables, TX.init(variables["params"])


@pytest.mark.slow
def test_a_linen_train_step_runs_low_and_keeps_the_dtypes_of_all_state(linen_state):
    key = jax.random.key(2)
    plain = jax.eval_shape(linen_step, *linen_state, key)
    cast = jax.eval_shape(autocast(linen_step, LOW), *linen_state, key)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cast) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), plain
    )
    assert dtypes(jax.make_jaxpr(autocast(linen_step, LOW))(*linen_state, key)) == ["bfloat16"] * 5


class Twin(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.inner(x))))
        self.calls[...] += 1
        self.hidden = nnx.Intermediate(x)
        return self.head(x)


def nnx_loss(model, x):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), Y).mean()


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, grads)
    return loss


def nnx_state():
    model = Twin(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def nnx_program(fun, *objects):
    """The program of a function of nnx objects and `X`, with all that it writes among the results."""
    graphdef, state = nnx.split(objects)

    def pure(state):
        merged = nnx.merge(graphdef, state)
        return fun(*merged, X), nnx.state(merged)

    return jax.make_jaxpr(pure)(state)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [LOW, PolicyMap({"head": "float32"}, LOW)], ids=["policy", "map"])
def test_what_a_function_of_nnx_modules_writes_lands_in_them(policy):
    model = Twin(nnx.Rngs(0))
    kinds = {path: type(module) for path, module in nnx.iter_modules(model)}
    before = jax.tree.map(lambda leaf: leaf.dtype, nnx.state(model))
    loss = nnx.jit(autocast(nnx_loss, policy))(model, X)
    assert loss.dtype == jnp.float32
    assert int(model.calls[...]) == 1
    assert int(model.dropout.rngs.count[...]) == 1
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0
    assert model.hidden[...].dtype == jnp.float32  # as it was traced
    del model.hidden
    assert jax.tree.map(lambda leaf: leaf.dtype, nnx.state(model)) == before
    assert {path: type(module) for path, module in nnx.iter_modules(model)} == kinds


@pytest.mark.slow
def test_a_whole_nnx_train_step_runs_low_and_keeps_its_state_in_float32():
    model, optimizer = nnx_state()
    plain = nnx_program(nnx_step, model, optimizer)
    cast = nnx_program(autocast(nnx_step, LOW), model, optimizer)
    assert dtypes(cast) == ["bfloat16"] * 5
    assert [aval.dtype for aval in cast.out_avals] == [aval.dtype for aval in plain.out_avals]


@pytest.mark.slow
def test_a_decorated_method_of_an_nnx_module_writes_to_it():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))
            self.total = nnx.data(jnp.zeros(()))

        @autocast(LOW)
        def __call__(self, x):
            self.count[...] += 1
            self.total = self.total + 1
            return x @ x.T

    counter = Counter()
    program = nnx_program(lambda counter, x: counter(x), counter)
    assert dtypes(program) == ["bfloat16"]
    counter(X)
    assert float(counter.count[...]) == float(counter.total) == 1


@pytest.mark.slow
def test_results_of_an_nnx_function_have_the_output_dtype_and_its_state_has_not():
    model = Twin(nnx.Rngs(0))
    returned, logits = autocast(lambda model, x: (model, model(x)), "mixed_bfloat16")(model, X)
    assert logits.dtype == jnp.bfloat16
    assert returned is model
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_an_nnx_module_that_is_closed_over_cannot_be_written_to():
    model = Twin(nnx.Rngs(0))
    with pytest.raises(Exception, match="different trace level") as caught:
        autocast(lambda x: model(x), LOW)(X)
    assert any("pass an object that it writes to as an argument" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_a_module_with_a_policy_of_its_own_keeps_it():
    model = jmp.with_policy(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), "params=float32,compute=float16,output=float32")
    assert dtypes(jax.make_jaxpr(autocast(lambda x: model(x), LOW))(X)) == ["float16"]


# Objects that a function only reads may belong to a trace outside, and stay what they are.

ROWS = jax.random.normal(jax.random.key(1), (8, 16))


class Teacher(nnx.Module):
    """Has statistics, RNG state, and a child that is shared."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.up

    def __call__(self, x):
        return self.again(self.dropout(nnx.relu(self.norm(self.up(x)))))


def teacher():
    made = Teacher(nnx.Rngs(0))
    made.eval()
    return made


def distill(weight, teacher, x):
    return jnp.mean((x @ weight - teacher(x)).astype(jnp.float32) ** 2)


def grad(fun):
    return lambda weight, model: jax.grad(fun)(weight, model, ROWS)


TRANSFORMS = {
    "grad": grad,
    "jitted grad": lambda fun: lambda w, m: jax.jit(lambda w: grad(fun)(w, m))(w),
    "vmapped grad": lambda fun: lambda w, m: jax.jit(jax.vmap(lambda w: grad(fun)(w, m)))(w[None])[0],
    "scanned": lambda fun: lambda w, m: jax.lax.scan(lambda c, x: (c, fun(w, m, x[None])), 0, ROWS)[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_objects_that_are_not_differentiated_may_be_read(transform):
    weight, model = jnp.ones((16, 16)), teacher()
    before = {path: v.get_raw_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    half = TRANSFORMS[transform](jmp.autocast(distill, LOW))(weight, model)
    full = TRANSFORMS[transform](distill)(weight, model)
    np.testing.assert_allclose(half, full, rtol=0, atol=0.02 * float(jnp.abs(full).max()))
    after = {path: v.get_raw_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    assert all(after[path] is value for path, value in before.items())  # not so much as an equal array


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "most"), [(lambda fun: fun, 1.6), (jax.grad, 2.0)], ids=["forward", "gradients"])
def test_tracing_plain_jax_takes_about_half_more_calls(transform, most):
    """1.48 inside `jit`, where the rewritten program is one call. Gradients: 1.88 in jax 0.12."""
    fun, args = unrolled(20)
    traces = [lambda f=f: jax.make_jaxpr(lambda *args: transform(f)(*args))(*args) for f in (fun, autocast(fun, LOW))]
    [trace() for trace in traces]
    plain, cast = map(count_calls, traces)
    assert cast <= most * plain


class Scoped(nnx.Module):
    """Opens scopes around and between its modules, as the models of bonsai do."""

    def __init__(self, rngs):
        self.block = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs))
        self.head = nnx.Linear(3, 3, rngs=rngs)

    @jax.named_scope("model")
    def __call__(self, x):
        with jax.named_scope("body"):
            x = self.block(x)
        return self.head(1e6 * x)


@pytest.mark.parametrize("key", [nnx.Sequential, "block", "model/body/block", "model/body"])
def test_a_rule_for_a_module_applies_inside_of_named_scopes(key):
    fun = autocast(lambda model: model(X), PolicyMap({key: "float32"}, LOW))
    rows = jmp.numerics.audit(fun)(Scoped(nnx.Rngs(0))).rows
    assert [row.dtype for row in rows if row.operation == "dot_general"] == ["float32", "bfloat16"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        with jax.named_scope("inside"):
            return nn.Dense(3, name="dense")(x)


class ScopedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        with jax.named_scope("body"):
            x = Block(name="block")(x)
        return nn.Dense(3, name="head")(x)


@pytest.mark.parametrize("key", [Block, "block", "body/block", "body", "body/block/inside"])
def test_a_rule_applies_where_another_transformation_observes_the_same_linen_modules(key):
    variables = ScopedLinen().init(jax.random.key(0), X)
    fun = autocast(ScopedLinen().apply, PolicyMap({key: "float32"}, LOW))
    rows = jmp.numerics.audit(fun)(variables, X).rows
    found = {row.path: row.dtype for row in rows if row.operation == "dot_general"}
    assert found == {"body/block/inside/dense": "float32", "head": "bfloat16"}
