"""Optax's own transformations promote (`b1 ** count`), so these tests run under JAX's standard promotion."""

import jax
import pytest

# Parameters of the usual size of a chunk would take ten times as long.
from jmp_policy.optim import _quantized_update


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def small_chunks(monkeypatch):
    """Makes chunks of 2,500 elements, so that small parameters have several, of which the last may overlap."""
    monkeypatch.setattr(_quantized_update, "_SMALL", 2500)
