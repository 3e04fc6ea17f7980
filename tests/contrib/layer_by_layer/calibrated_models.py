"""Models and inputs for `gptq` and `awq`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

import jmp_policy as jmp

POLICY = "int4/16(min_size=0)_from_float32"
ROWS = jnp.ones((2, 16))


def draw_inputs(inputs, rows=96, seed=0):
    """Draws inputs that depend on each other, of different magnitudes."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(rows, inputs // 2)) @ rng.normal(size=(inputs // 2, inputs))
    return ((mixed + rng.normal(size=mixed.shape)) * np.exp(rng.normal(size=inputs))).astype(np.float32)


def linear(policy=POLICY):
    return jmp.with_policy(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), policy)


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16, name="dense", use_bias=False)(nn.relu(x)), None


class Linen(nn.Module):
    """A scan of two layers, a layer that is called twice, `last` (in `vmap` if `maps`), and a tied table of logits."""

    maps: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32, 16, name="embed", embedding_init=nn.initializers.normal(1))
        scan = nn.scan(Residual, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scan(name="blocks")(embed(tokens), None)
        twice = nn.Dense(16, name="twice")
        x = nn.relu(twice(nn.relu(twice(x))))
        mapped = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
        last = nn.vmap(nn.Dense, **mapped) if self.maps else nn.Dense
        return embed.attend(last(16, name="last")(x))


class Nnx(nnx.Module):
    """Two layers with one weight, and a masked convolution; its inputs are `(..., 2, 8)`."""

    def __init__(self, rngs: nnx.Rngs):
        mask = jnp.ones((3, 8, 16)).at[2].set(0)
        self.first = nnx.LinearGeneral((2, 8), (4, 4), axis=(-2, -1), rngs=rngs)
        self.tied = nnx.LinearGeneral((2, 8), (4, 4), axis=(-2, -1), rngs=rngs)
        self.tied.kernel = self.first.kernel
        self.masked = nnx.Conv(16, 16, (3,), feature_group_count=2, mask=mask, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x)).reshape(*x.shape[:-2], 2, 8)
        return self.masked(nnx.relu(self.tied(x)).reshape(*x.shape[:-2], 16))


def draw_nnx_inputs():
    return jnp.asarray(draw_inputs(16, 240).reshape(2, 8, 15, 2, 8))


def read_shares(text):
    """Reads the path of each matrix that was rounded, and its share of the error of nearest."""
    lines = text.splitlines()
    shares = [float(line.split(": ")[2].split()[0]) for line in lines]
    return [line.split(", ")[1].split(":")[0] for line in lines], shares


def check_errors(made, nearest, apply, expected):
    """Asserts that a calibrated model is closer to the floating one than a model rounded to nearest."""
    errors = [float(jnp.linalg.norm(apply(one) - expected)) for one in (made, nearest)]
    assert errors[0] < errors[1]


def check_resumed(run, path, made, capsys):
    """Asserts that an interrupted run goes on where it stopped, and ends with the same arrays."""
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('{"matrix"') + 30])
    again = run()
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert path.read_text() == whole
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), again, made))
