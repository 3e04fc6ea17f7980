"""Fixtures of the example's tests."""

import os
from pathlib import Path

import jax
import pytest
import tiny

from examples.gpt import train as train_module

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def standard_promotion():
    """JAX's own promotion, for what is not ours: Flax's norms and optax's Adam rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a text to train on; child processes in it find the example."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    tiny.write_text(tmp_path / "text.txt")
    return tmp_path


@pytest.fixture
def table(monkeypatch):
    """Trains a table instead of a GPT: nothing to compile."""
    monkeypatch.setattr(train_module, "make_trainer", lambda api, config: tiny.TableTrainer(config))
