"""The module of a user, in the folder where the command line is used."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULE = """
import functools
import jax, jax.numpy as jnp

number = 3

class Model:
    @staticmethod
    def apply(x):
        return jnp.cumsum(x)

def product(x, w):
    with jax.named_scope("head"):
        return x @ w

def noisy(x, w):
    print("running"); return product(x, w)

def doubled(x, w):
    with jax.named_scope("head"):
        return 2 * (x @ w)

def net(x, w):
    print("running")
    with jax.named_scope("big"):
        x = (x @ (w[:, :3] * 1e6)) / 1e6
    with jax.named_scope("head"):
        return x @ w

def noisy_sum(x): print("running"); return jnp.cumsum(x)
def named(x, *, scale: float): return x * scale
def variadic(x, y=2, *rest): return x
def branch(x): return x if x.sum() > 0 else -x
def failing(x, w): raise RuntimeError("no data")
def silent(x): raise ValueError
def outer(x): return silent(x)
def nan(x, w): return x * jnp.nan
def train(net, x, w): return net(x, w).mean()
def none(): return 1
def forgetful(x, w): x @ w
partial = functools.partial(named, scale=2.0)

def trainer(params, tokens):
    with jax.named_scope("head"):
        return params[tokens]

def sampler(params, tokens):
    with jax.named_scope("head"):
        return 1.25 * params[tokens]

def tokens():
    return jnp.sin(jnp.arange(32.0)).reshape(4, 8), jnp.array([[0, 1, 2], [2, 0, 1]])

def mask():
    return jnp.array([[True, True, True], [False, True, True]])

def arguments():
    return jnp.full((2, 3), 2.0**-13), jnp.full((3, 4), 2.0**-13)  # products of 3 * 2**-26: half of float16's least

def ones():
    return jnp.ones((2, 3)), jnp.ones((3, 4))

def shapes():
    return jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)

def one():
    return jax.ShapeDtypeStruct((8,), jnp.float16)

def unfit():
    return jnp.ones((2, 3)), jnp.ones((2, 3))

def no_arguments():
    raise RuntimeError("no data")
"""
MODEL = """
import jax.numpy as jnp
from flax import nnx

model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

def inputs():
    return jnp.ones((2, 4))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the modules `user` and `user_model`, which is the current one."""
    (tmp_path / "user.py").write_text(MODULE)
    (tmp_path / "user_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


@pytest.fixture
def line_of() -> object:
    """Where a function of one line, or a line below its first one, stands in `user`."""
    lines = MODULE.splitlines()
    return lambda code: next(f"user.py:{i} " for i, line in enumerate(lines, 1) if code in line)
