"""The benchmark of origins judges reports by its rule, and what it says of `first_nonfinite` holds."""

import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from benchmarks._origins_cost import check_bits, compare_entries, make_steps, measure
from benchmarks._targets import cpu

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def _loss_and_grads(weights, x):
    def loss(weights):
        y = x
        for weight in weights:
            y = y + jnp.tanh(y @ weight)
        return jnp.mean(y * y)

    return jax.value_and_grad(loss)(weights)


WEIGHTS, X = list(0.1 * jax.random.normal(jax.random.key(0), (3, 128, 128))), jnp.ones((2048, 128))


def test_a_good_step_has_the_same_bits_and_accesses_little_more():
    before = jax.jit(_loss_and_grads).lower(WEIGHTS, X).as_text()
    assert check_bits(_loss_and_grads, (WEIGHTS, X)) == 0
    ratios = measure(make_steps(_loss_and_grads, (WEIGHTS, X)), cpu(), repeats=1)
    assert 1 < ratios.bytes <= 1.02
    assert 1 <= ratios.temporaries <= 1.25
    jax.clear_caches()
    assert jax.jit(_loss_and_grads).lower(WEIGHTS, X).as_text() == before


def test_programs_that_differ_outside_of_the_conditional_are_told_apart():
    entry = """ENTRY %main (x: f32[2]) -> f32[2] {
      %x = f32[2]{0} parameter(0)
      %made = (f32[2]{0}) tuple(%x)
      %scalar = f32[] reduce(%x)
      ROOT %add.1 = f32[2]{0} add(%x, %x)
    }""".replace("\n    }", "\n}")
    other = entry.replace("add(", "multiply(").replace("tuple(%x)", "tuple(%x, %x)").replace("reduce", "fusion")
    assert compare_entries(entry, entry) == {}
    assert compare_entries(entry, other) == {"f32[2]{0} add": 1, "f32[2]{0} multiply": -1}


def test_the_search_is_left_out_of_the_good_step():
    good = make_steps(jnp.sin, (jnp.zeros(2),)).good.step
    infinite = jnp.full(2, jnp.inf)
    assert "cond" in str(jax.make_jaxpr(good)(infinite))
    assert not jmp.numerics.NonfiniteOrigin(*good(infinite)[1:]).found
