"""What every test and doctest runs under."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np, jmp=jmp, optax=optax)
