"""Modules without a `dtype` read their own Params in compute dtype, and nothing else changes about those."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, rngs

import jmp_policy as jmp

W = jnp.linspace(0.5, 1.5, 16).reshape(4, 4)


class Reader(nnx.Module):
    """Applies a function to its Param."""

    def __init__(self, read):
        self.w = nnx.Param(W)
        self.statistics = nnx.BatchStat(W)
        self._read = read

    def __call__(self):
        return self._read(self)


READS = {
    "the whole": lambda m: m.w[...],
    "a part": lambda m: m.w[0],
    "get_value": lambda m: m.w.get_value(),
    "an operator": lambda m: m.w + m.w,
    "a reflected operator": lambda m: jnp.ones(4, jnp.bfloat16) @ m.w,
    "a unary operator": lambda m: -m.w,
    "a function of jax.numpy": lambda m: jnp.sum(m.w),
    "an attribute of the array": lambda m: m.w.T,
    "a method of the array": lambda m: m.w.reshape(-1),
    "iteration": lambda m: next(iter(m.w)),
}


@pytest.mark.parametrize("read", READS)
def test_own_params_are_read_in_compute_dtype_however_they_are_read(read):
    model = jmp.with_policy(Reader(READS[read]), "p=f32,c=bf16,o=none")
    assert nnx.eval_shape(lambda model: model(), model).dtype == jnp.bfloat16
    assert model.w.dtype == jnp.float32


def test_other_variables_are_read_as_they_are():
    assert jmp.with_policy(Reader(lambda m: m.statistics[...]), "p=f32,c=bf16,o=none")().dtype == jnp.float32


def test_params_in_containers_are_read_in_compute_dtype():
    class Contained(nnx.Pytree):
        def __init__(self):
            self.w = nnx.Param(W)

    class Containers(nnx.Module):
        def __init__(self):
            self.listed = nnx.List([nnx.Param(W)])
            self.named = nnx.Dict(a=nnx.Param(W))
            self.builtin = nnx.data({"a": [nnx.Param(W)], "b": (nnx.Param(W),)})
            self.contained = Contained()

        def __call__(self):
            nested = self.builtin["a"][0], self.builtin["b"][0]
            return [p[...].dtype for p in (self.listed[0], self.named.a, *nested, self.contained.w)]

    model = Containers()
    assert jmp.with_policy(model, "p=f32,c=bf16,o=none")() == [jnp.bfloat16] * 5
    assert model() == [jnp.float32] * 5


def test_what_a_call_writes_into_a_param_is_stored_in_param_dtype():
    def double(m):
        m.w[...] = 2 * m.w
        m.w[0] = jnp.zeros(4)

    model = jmp.with_policy(Reader(double), "p=f32,c=bf16,o=none")
    model()
    expected = 2 * W.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(model.w[...], expected.at[0].set(0.0), strict=True)


def test_attributes_that_a_call_sets_and_deletes_are_the_modules():
    def swap(m):
        m.first, m.alias = nnx.BatchStat(W), m.w
        del m.statistics

    plain = Reader(swap)
    model = jmp.with_policy(plain, "p=f32,c=bf16,o=none")
    model()
    assert model.first[...].dtype == jnp.float32
    assert model.alias is model.w is plain.w
    assert not hasattr(model, "statistics")
    assert not hasattr(plain, "first")


def test_items_that_a_call_puts_into_containers_of_params_stay_there():
    class Counter(nnx.Pytree):
        def __init__(self):
            self.w, self.calls = nnx.Param(W), 0

    class Containers(nnx.Module):
        def __init__(self):
            self.listed = nnx.List([nnx.Param(W)])
            self.named = nnx.Dict(a=nnx.Param(W), old=nnx.Param(W))
            self.builtin = nnx.data({"a": [nnx.Param(W)], "fixed": (nnx.Param(W),)})
            self.counter = Counter()

        def __call__(self):
            self.listed.append(self.named.a)
            del self.named["old"]
            self.named.new = self.builtin["a"][0]
            self.builtin["a"].append(self.listed[0])
            self.builtin["b"] = "set"
            self.counter.calls += 1

    model = jmp.with_policy(Containers(), "p=f32,c=bf16,o=none")
    model()
    assert model.listed[1] is model.named.a
    assert model.named.new is model.builtin["a"][0]
    assert "old" not in model.named
    assert model.builtin["a"][1] is model.listed[0]
    assert model.builtin["b"] == "set"
    assert model.counter.calls == 1
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.slow
def test_gradients_of_many_uses_are_summed_in_param_dtype():
    """A weight cast once and used many times would sum the gradients of its uses in half precision."""

    class Chain(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.float32(0.0).reshape(1))

        def __call__(self, x):
            return sum(((x[i] * self.w) for i in range(1, 64)), start=x[0] * self.w)

    x = jax.random.uniform(jax.random.key(0), (64, 1))
    model = jmp.with_policy(Chain(), BF16_INSIDE)
    gradient = nnx.grad(lambda m: m(x).sum())(model)["w"][...]
    exact = np.asarray(x.astype(jnp.bfloat16), np.float64).sum()
    assert gradient.dtype == jnp.float32
    assert abs(gradient[0] - exact) < 1e-6 * exact


@pytest.mark.slow
def test_an_embedding_whose_table_was_cast_computes_in_the_compute_dtype_of_the_policy():
    """Flax's `Embed` takes its dtype from its table, and keeps it when the table is cast."""
    cast = jmp.nnx.cast_params(nnx.Embed(4, 8, rngs=rngs()), "bfloat16")
    assert jmp.with_policy(cast, "bfloat16").dtype == jnp.bfloat16
    assert jmp.with_policy(nnx.Embed(4, 8, dtype=jnp.float16, rngs=rngs()), "mixed_bfloat16").dtype == jnp.float16
