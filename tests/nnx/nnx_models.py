"""Models that tell what they were called with."""

import jax
import jax.numpy as jnp
from flax import nnx

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
BF16_INSIDE = "params=float32,compute=bfloat16,output=float32"


def rngs():
    return nnx.Rngs(0)


class Probe(nnx.Module):
    """Returns its input, and remembers its dtype."""

    def __call__(self, x):
        self.saw = str(x.dtype)
        return x


class Scale(nnx.Module):
    """A module without a `dtype` that has a Param, and remembers how it reads it."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (4,), jnp.float32))

    def __call__(self, x):
        self.read = str(self.scale[...].dtype)
        return x * self.scale


class Net(nnx.Module):
    """A model of layers, containers and modules with Params of their own; its public methods call each other."""

    def __init__(self, *, rngs):
        self.probe = Probe()
        self.embed = nnx.Linear(4, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.scale = Scale(rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def encode(self, x):
        self.entered = str(x.dtype)
        x = self.probe(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.scale(x)

    def __call__(self, x):
        encoded = self.encode(x)
        self.encoded = str(encoded.dtype)
        return self.head(encoded)


def dtype_of(model, *args):
    """The dtype of what a model returns."""
    return str(model(*args).dtype)


def is_bfloat16(x):
    """Whether an array of float32 holds what was rounded to bfloat16."""
    return x.dtype == jnp.float32 and bool((x == x.astype(jnp.bfloat16).astype(jnp.float32)).all())
