"""The laws of the zoo: autocast in float32 changes nothing, and in bfloat16 only how precise the results are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import operations, program_text
from zoo import ZOO, Specimen

from jmp_policy.autocast import autocast

FLOAT32, BFLOAT16 = (f"params=float32,compute={dtype},output=none" for dtype in ("float32", "bfloat16"))
QUICKLY = {"xla_backend_optimization_level": 0}
SOME = [pytest.param(name, marks=() if name in ("while_loop", "custom_vjp") else pytest.mark.slow) for name in ZOO]


def lowered(animal: Specimen, fun):
    return jax.jit(animal.with_gradient(fun)).lower(*animal.args)


def flops(program):
    return program.compile().cost_analysis()["flops"]


@pytest.mark.parametrize("name", SOME)
def test_float32_gives_the_same_program_forward_and_backward(name):
    animal = ZOO[name]
    with animal.context():
        plain, ours = lowered(animal, animal.fun), lowered(animal, autocast(animal.fun, FLOAT32))
        if program_text(ours) == program_text(plain):
            return
        # A program that was traced before it is differentiated, as that of a jitted function is.
        traced = [lowered(animal, jax.jit(animal.fun, inline=inline)) for inline in (True, False)]
        if program_text(ours) not in map(program_text, traced):
            if operations(ours) != operations(plain):  # a function that forward pass and gradient do not share
                assert flops(ours) == flops(plain)
            results = [program.compile(QUICKLY)(*animal.args) for program in (ours, plain)]
            assert_near(*results, error=1e-6)  # fused in another way


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast casts no matmul to bfloat16")
@pytest.mark.parametrize("name", [*ZOO][::3])  # each is compiled
def test_bfloat16_keeps_dtypes_and_comes_close(name):
    animal = ZOO[name]
    with animal.context():
        both = jax.jit(lambda *args: (animal.fun(*args), autocast(animal.fun, BFLOAT16)(*args)))
        wide, half = both.lower(*animal.args).compile(QUICKLY)(*animal.args)
    assert jax.tree.structure(half) == jax.tree.structure(wide)
    assert_near(half, wide, animal.error)


def assert_near(ours, theirs, error):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if jnp.issubdtype(a.dtype, jnp.floating) and a.size:
            scale = np.max(np.abs(b)) or 1.0
            np.testing.assert_allclose(np.float64(a) / scale, np.float64(b) / scale, rtol=0, atol=error)
