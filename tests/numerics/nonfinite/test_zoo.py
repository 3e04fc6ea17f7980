"""The laws of the zoo: what is looked at runs as it did, and a nan among the arguments is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specimen import is_floating
from zoo import ZOO

# Says which specimens act twice where a step is repeated.
from jmp_policy._jaxpr import find_unrepeatable
from jmp_policy.numerics import first_nonfinite

QUICKLY = {"xla_backend_optimization_level": 0}

MAKES_FLOATS_OF_BITS = ("dtypes_by_name",)
"""What goes through integers, which nobody follows: the operation that makes floats of them is the origin."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ZOO][::3])
def test_results_keep_their_bits_and_arguments_are_named(name):
    animal = ZOO[name]
    with animal.context():
        fun = animal.with_gradient(animal.fun)
        if find_unrepeatable(jax.make_jaxpr(fun)(*animal.args).jaxpr) is not None:
            with pytest.raises(ValueError, match="would then act twice"):
                first_nonfinite(fun)(*animal.args)
            return
        plain, watched = (jax.jit(fun, compiler_options=QUICKLY) for fun in (fun, first_nonfinite(fun)))
        expected, (out, origin) = plain(*animal.args), watched(*animal.args)
        assert not origin.found
        for mine, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            if not jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))

        place = next(i for i, arg in enumerate(animal.args) if is_floating(arg))
        bad = [arg * jnp.full_like(arg, jnp.nan) if i == place else arg for i, arg in enumerate(animal.args)]
        out, origin = watched(*bad)
        is_finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out) if is_floating(leaf))
        assert origin.found != is_finite
        if not is_finite and name not in MAKES_FLOATS_OF_BITS:
            assert (origin.kind, bool(origin.argument)) == ("nan", True)
