"""Fixtures of the demo's tests."""

import jax
import pytest
import tiny

from examples.gpt import _train as train_module


@pytest.fixture
def standard_promotion():
    """JAX's own promotion, for what is not ours: Flax's norms and optax's Adam rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def folder(tmp_path):
    """A folder with a text to train on."""
    tiny.write_text(tmp_path / "text.txt")
    return tmp_path


@pytest.fixture
def table(monkeypatch):
    """Trains a table instead of a GPT: nothing to compile."""
    monkeypatch.setattr(train_module, "make_trainer", lambda api, config: tiny.TableTrainer(config))
