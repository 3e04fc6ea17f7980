"""Optax's own transformations promote (`b1 ** count`), so these tests run under JAX's standard promotion."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield
