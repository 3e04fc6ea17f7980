"""nnx objects that an autocasted function only reads: they may belong to a trace outside, and stay what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmp

MIXED = "p=f32,c=bf16,o=none"
X = jax.random.normal(jax.random.key(1), (8, 16))


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


def loss_fn(weight, teacher, x):
    return jnp.mean((x @ weight - teacher(x)).astype(jnp.float32) ** 2)


def merged_loss(weight, state, x):
    return loss_fn(weight, nnx.merge(nnx.graphdef(teacher()), state), x)


def grad(fun):
    return lambda weight, model: jax.grad(fun)(weight, model, X)


TRANSFORMS = {
    "grad": grad,
    "jitted grad": lambda fun: lambda w, m: jax.jit(lambda w: grad(fun)(w, m))(w),
    "vmapped grad": lambda fun: lambda w, m: jax.jit(jax.vmap(lambda w: grad(fun)(w, m)))(w[None])[0],
    "scanned": lambda fun: lambda w, m: jax.lax.scan(lambda c, x: (c, fun(w, m, x[None])), 0, X)[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_objects_that_are_not_differentiated_may_be_read(transform):
    weight, model = jnp.ones((16, 16)), teacher()
    before = {path: v.get_raw_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    half = TRANSFORMS[transform](jmp.autocast(loss_fn, MIXED))(weight, model)
    full = TRANSFORMS[transform](loss_fn)(weight, model)
    np.testing.assert_allclose(half, full, rtol=0, atol=0.02 * float(jnp.abs(full).max()))
    after = {path: v.get_raw_value() for path, v in nnx.to_flat_state(nnx.state(model))}
    assert all(after[path] is value for path, value in before.items())  # not so much as an equal array


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "model"), [(merged_loss, nnx.state), (loss_fn, nnx.clone)], ids=["state", "merged"])
def test_a_state_and_a_merged_model_may_be_read(loss, model):
    gradient = jax.grad(jmp.autocast(loss, MIXED))(jnp.ones((16, 16)), model(teacher()), X)
    assert gradient.dtype == jnp.float32


@pytest.mark.slow
def test_what_is_written_lands_and_all_else_stays():
    model = teacher()
    model.train()
    kernel, count = model.up.kernel.get_raw_value(), int(model.dropout.rngs.count[...])
    mean = model.norm.mean[...]
    jmp.autocast(lambda model, x: model(x), MIXED)(model, X)
    assert model.up.kernel.get_raw_value() is kernel
    assert int(model.dropout.rngs.count[...]) == count + 1
    assert (model.norm.mean[...] != mean).any()
    assert model.again is model.up


@pytest.mark.slow
def test_new_attributes_and_objects_land():
    def grow(model, x):
        model.seen = nnx.Intermediate(model.up(x))
        model.calls = 1
        return model, nnx.Param(x)

    model = teacher()
    returned, made = jmp.autocast(grow, MIXED)(model, X)
    assert returned is model
    assert (model.calls, model.seen.shape, type(made)) == (1, X.shape, nnx.Param)


def test_an_array_in_an_attribute_lands():
    class Counter(nnx.Module):
        def __init__(self):
            self.total = nnx.data(jnp.zeros(()))

        def __call__(self, x):
            self.total = self.total + 1
            return x

    counter = Counter()
    jmp.autocast(lambda counter, x: counter(x), MIXED)(counter, X)
    assert float(counter.total) == 1
