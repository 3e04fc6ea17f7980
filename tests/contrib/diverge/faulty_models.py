"""Small models of named scopes, in one of which a fault can be planted, forward or in its backward pass alone."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jmp_policy as jmp

WIDTH = 8
FAULTS = {
    "half": "up",
    "constant": "act",
    "transposed": "mix",
    "eps": "norm",
    "softmax": "attend",
    "scale": "attend",
    "axis": "norm",
}
"""The scope that each fault is planted in."""

POLICIES = {
    "none": lambda fun: fun,
    "with_policy": lambda fun: jmp.with_policy(fun, "params=float32,compute=bfloat16,output=float32"),
    "autocast": lambda fun: jmp.autocast(fun, "mixed_bfloat16"),
}


def replace_backward(good, bad):
    @jax.custom_vjp
    def fun(*args):
        return good(*args)

    fun.defvjp(lambda *args: (good(*args), args), lambda args, cotangent: jax.vjp(bad, *args)[1](cotangent))
    return fun


def norm(x, scale, axis=-1, eps=1e-5):
    centered = x - jnp.mean(x, axis, keepdims=True)
    variance = jnp.mean(centered * centered, axis, keepdims=True)
    return centered * lax.rsqrt(variance + jnp.asarray(eps, x.dtype)) * scale


def attend(x, scaled=True, dtype=None):
    scores = x @ x.T
    if scaled:
        scores = scores * jnp.asarray(WIDTH**-0.5, x.dtype)
    return jax.nn.softmax(scores.astype(dtype or x.dtype)).astype(x.dtype) @ x


def act(x, cubic=0.044715):
    return 0.5 * x * (1 + jnp.tanh(0.7978 * (x + jnp.asarray(cubic, x.dtype) * x**3)))


def multiply(x, w, dtype=None):
    return (x.astype(dtype or x.dtype) @ w.astype(dtype or x.dtype)).astype(x.dtype)


BAD = {
    "half": functools.partial(multiply, dtype=jnp.float16),
    "constant": functools.partial(act, cubic=0.06),
    "transposed": lambda x, w: x @ w.T,
    "eps": functools.partial(norm, eps=0.1),
    "softmax": functools.partial(attend, dtype=jnp.float16),
    "scale": functools.partial(attend, scaled=False),
    "axis": functools.partial(norm, axis=0),
}


def reverse(fun):
    """The same function, which adds up features in reverse order."""
    return lambda x, *args: jnp.flip(fun(jnp.flip(x, -1), *args), -1)


def multiply_reversed(x, w):
    return jnp.flip(x, -1) @ jnp.flip(w, 0)


REORDERED = {"norm": lambda x, scale: reverse(norm)(x, jnp.flip(scale)), "attend": reverse(attend)} | dict.fromkeys(
    ("mix", "up"), multiply_reversed
)


def block(params, x, fault, backward, planted=True, down=multiply):
    def run(scope, good, *args):
        fun = good
        if FAULTS.get(fault) == scope:
            bad = BAD[fault] if planted else good
            fun = replace_backward(good, bad) if backward else bad
        elif fault == "reordered" and planted:
            fun = REORDERED.get(scope, good)
        with jax.named_scope(scope):
            return fun(*args)

    h = run("attend", attend, run("norm", norm, x, params["scale"]))
    x = x + run("mix", multiply, h, params["mix"])
    h = run("act", act, run("up", multiply, x, params["up"]))
    return x + run("down", down, h, params["down"])


def make_arguments(seed, layers=2):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(layers, *shape)) / np.sqrt(shape[-1]), jnp.float32)
    params = {"mix": draw(WIDTH, WIDTH), "up": draw(WIDTH, 2 * WIDTH), "down": draw(2 * WIDTH, WIDTH)}
    return params | {"scale": 1 + 0.1 * draw(WIDTH)}, jnp.asarray(rng.normal(size=(6, WIDTH)), jnp.float32)


def make_loss(fault, backward, wrap, planted):
    """Returns a loss with a place for a fault in its second block, or in all iterations of a scan."""

    def loss(params, x):
        if wrap == "scan":
            with jax.named_scope("blocks"):
                x, _ = lax.scan(lambda x, own: (block(own, x, fault, backward, planted), None), x, params)
        for i in range(0 if wrap == "scan" else len(params["scale"])):
            own = fault if i == 1 or fault == "reordered" else None
            fun = functools.partial(block, fault=own, backward=backward, planted=planted)
            with jax.named_scope(f"block{i}"):
                x = (jax.checkpoint(fun) if wrap == "remat" else fun)(
                    jax.tree.map(lambda leaf, i=i: leaf[i], params), x
                )
        with jax.named_scope("loss"):
            return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def find_path(fault, wrap="plain"):
    return f"{'blocks' if wrap == 'scan' else 'block1'}/{FAULTS[fault]}"


class ResidualBlock(nn.Module):
    """A residual block, for `nn.scan`."""

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(h))), None


class Scanned(nn.Module):
    """Three blocks in a rematerialized scan."""

    @nn.compact
    def __call__(self, x):
        kwargs = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(nn.remat(ResidualBlock), **kwargs)(name="layers")(x)[0]
