"""Running a program: results are arrays, names and lines stay, eager calls compile once and free memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.autocast import autocast

X, W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4), jnp.linspace(0.0, 1.0, 16).reshape(4, 4)
BFLOAT16 = "params=float32,compute=bfloat16,output=none"


def test_results_that_are_numbers_in_the_program_are_arrays():
    results = autocast(lambda x: (1.0, 3, True, np.float32(2), x), BFLOAT16)(X)
    assert [(r.dtype.name, r.shape) for r in results[:4]] == [
        ("float32", ()), ("int32", ()), ("bool", ()), ("float32", ()),
    ]  # fmt: skip
    assert [r.item() for r in results[:4]] == [1.0, 3, True, 2.0]
    assert results[4] is X
