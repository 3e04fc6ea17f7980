"""Arguments that half precision would ruin enter uncast: positions and timesteps, in functions, linen and nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_apis import APIS, LINEN

import jmp_policy as jmp

POLICY = "params=float32,compute=bfloat16,output=none"
POSITIONS = jnp.arange(0.0, 4096.5, 0.5)  # bfloat16 has 8 bits of precision: from 128 on it has no halves
X = jnp.ones(2)


def of_function(no_cast):
    policied = jmp.with_policy(lambda x, where: (x, where), POLICY, no_cast=no_cast)
    return policied, policied


def of_model(api, of_class, no_cast):
    @api.module()
    class Model:
        def __call__(self, x, where):
            return x, where

        def decode(self, x, *, where):
            return x, where

    model = jmp.with_policy(Model if of_class else Model(), POLICY, no_cast=no_cast)
    model = model() if of_class else model
    if api is LINEN:
        return lambda *a, **k: model.apply({}, *a, **k), lambda *a, **k: model.apply({}, *a, **k, method="decode")
    return model, model.decode


CALLS = {
    "positional": lambda call, decode, where: call(X, where),
    "keyword": lambda call, decode, where: call(X, where=where),
    "other method": lambda call, decode, where: decode(X, where=where),
    "jitted": lambda call, decode, where: jax.jit(call)(X, where),
}
MODELS = [
    lambda names, api=api, of_class=of_class: of_model(api, of_class, names) for api in APIS for of_class in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_function, *MODELS])
def test_whole_tree_of_a_kept_argument_enters_uncast_however_it_is_called(make):
    tree = {"time": jnp.float32(999.5), "grid": [POSITIONS, (jnp.arange(3), None)]}
    for call in CALLS.values():
        x, kept = call(*make(["where"]), tree)
        assert x.dtype == jnp.bfloat16
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), kept, tree)
        _, cast = call(*make(()), tree)
        assert (cast["time"].dtype, cast["grid"][0].dtype) == (jnp.bfloat16, jnp.bfloat16)


def test_float_positions_and_timesteps_collide_in_half_precision_and_kept_ones_do_not():
    _, ruined = of_function(())[0](X, POSITIONS)
    assert len(np.unique(ruined)) == 256 + 5 * 128 + 1  # of 8193: below 128, in the octaves from there, and 4096
    _, kept = of_function(["where"])[0](X, POSITIONS)
    # The highest frequency of a sinusoidal embedding turns by a radian each step: a rounded step is another angle.
    exact = np.sin(np.asarray(POSITIONS, np.float64))
    assert np.abs(np.sin(np.asarray(ruined, np.float64)) - exact).max() > 0.9
    assert np.abs(np.asarray(jnp.sin(kept), np.float64) - exact).max() < 1e-3
