"""The classic: everything in half precision, norms and the last softmax in float32, each by one line."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

BF16 = jnp.bfloat16
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
FULL = "params=float32,compute=float32,output=bfloat16"  # float32 inside, and no more memory for what follows
HALF = "params=float32,compute=bfloat16,output=float32"


class Softmax(nn.Module):
    """A softmax with a place of its own."""

    def __call__(self, x):
        return nn.softmax(x)


class Linen(nn.Module):
    """A residual block and a classifier; by hand its author writes every dtype and every cast."""

    by_hand: bool = False

    @nn.compact
    def __call__(self, x):
        half, full = (BF16, jnp.float32) if self.by_hand else (None, None)
        x = _cast(x, half)
        h = nn.Dense(4, dtype=half)(x)
        h = _cast(nn.LayerNorm(dtype=full)(_cast(h, full)), half)
        x = x + nn.Dense(4, dtype=half)(nn.gelu(h))
        x = _cast(nn.BatchNorm(use_running_average=False, dtype=full)(_cast(x, full)), half)
        return Softmax(name="softmax")(_cast(nn.Dense(3, dtype=half)(x), full))


class NnxSoftmax(nnx.Module):
    """A softmax with a place of its own."""

    def __call__(self, x):
        return nnx.softmax(x)


class Nnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, by_hand: bool = False, *, rngs: nnx.Rngs):
        self._half, self._full = half, full = (BF16, jnp.float32) if by_hand else (None, None)
        self.up, self.down = (nnx.Linear(4, 4, dtype=half, rngs=rngs) for _ in range(2))
        self.first, self.second = nnx.LayerNorm(4, dtype=full, rngs=rngs), nnx.BatchNorm(4, dtype=full, rngs=rngs)
        self.head, self.softmax = nnx.Linear(4, 3, dtype=half, rngs=rngs), NnxSoftmax()

    def __call__(self, x):
        half, full = self._half, self._full
        x = _cast(x, half)
        h = _cast(self.first(_cast(self.up(x), full)), half)
        x = x + self.down(nnx.gelu(h))
        x = _cast(self.second(_cast(x, full)), half)
        return self.softmax(_cast(self.head(x), full))


def _cast(x: Any, dtype: Any) -> Any:
    return x if dtype is None else x.astype(dtype)


def program_of_linen(model):
    """Its probabilities, statistics and gradients, as text."""

    def program(key, x):
        variables = model.init(key, x)

        def loss(params):
            out, updated = model.apply(variables | {"params": params}, x, mutable=["batch_stats"])
            return jnp.sum(out**2), (out, updated)

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    return jax.jit(program).lower(jax.random.key(0), X)


def program_of_nnx(model):
    """The same for nnx."""

    def loss(model, x):
        out = model(x)
        return jnp.sum(out**2), out

    return nnx.jit(nnx.value_and_grad(loss, has_aux=True)).lower(model, X)


def linen(make):
    return program_of_linen(make(Linen()) if make else Linen(by_hand=True))


def of_nnx(make):
    plain = nnx.eval_shape(lambda: Nnx(by_hand=make is None, rngs=nnx.Rngs(0)))
    return program_of_nnx(make(plain) if make else plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "rules"),
    [
        (linen, {r".*Norm_\d+": FULL, "softmax": "float32"}),
        (linen, {nn.LayerNorm: FULL, nn.BatchNorm: FULL, Softmax: "float32"}),
        (of_nnx, {"first|second": FULL, "softmax": "float32"}),
        (of_nnx, {nnx.LayerNorm: FULL, nnx.BatchNorm: FULL, NnxSoftmax: "float32"}),
    ],
    ids=["linen by path", "linen by type", "nnx by path", "nnx by type"],
)
def test_half_with_norms_and_softmax_in_float32_is_the_program_by_hand(program, rules):
    ours = program(lambda model: jmp.with_policy(model, jmp.PolicyMap(rules, HALF)))
    assert ours.as_text() == program(None).as_text()
