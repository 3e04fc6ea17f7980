"""Functions, modules and classes with policies, as a user's file has them: what is to come back out of a pickle."""

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

import jmp_policy as jmp

POLICY = "p=f32,c=bf16,o=f16"
X = jnp.ones((16, 16))


@jmp.with_policy(POLICY)
def decorated(x):
    return x @ x


def plain(x):
    return x @ x


class Trainer:
    @jmp.with_policy(POLICY)
    def loss(self, x):
        return x @ x


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(x)


@jmp.with_policy(POLICY)
class Decorated(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.dense(x)

    def _scale(self, x):
        return x

    def setup(self):
        self.dense = nn.Dense(16)


class OfDecorated(Decorated):
    def both(self, x):
        return self(x) + self(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)
        self.embed = nnx.Embed(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(self.dense(x))


@jmp.with_policy(POLICY)
class NNXDecorated(NNXNet):
    pass


def nnx_model(policy=POLICY):
    return jmp.with_policy(NNXNet(nnx.Rngs(0)), policy)


def run_module(module):
    return module.init_with_output(jax.random.key(0), X)[0]


def run_parts(parts):
    return nnx.merge(*parts)(X)


INT8, FLOAT8 = f"int8(min_size=0)_from_{POLICY}", f"float8(min_size=0)_from_{POLICY}"
MXFP8 = f"mxfp8/16(min_size=0)_from_{POLICY}"
MAP = jmp.PolicyMap({"dense": "float32", nnx.Embed: POLICY}, POLICY)

# What to pickle, and how to run what comes back; all compute in bfloat16 and return float16.
CASES = {
    "a decorated function": (lambda: decorated, lambda fun: fun(X)),
    "a method": (lambda: Trainer().loss, lambda fun: fun(X)),
    "a decorated linen class": (lambda: Decorated, lambda kind: run_module(kind())),
    "a module of it": (Decorated, run_module),
    "a subclass of it": (lambda: OfDecorated, lambda kind: run_module(kind())),
    "a module of that": (OfDecorated, run_module),
    "a linen class": (lambda: jmp.with_policy(Net, POLICY), lambda kind: run_module(kind())),
    "a linen class of Flax": (lambda: jmp.with_policy(nn.Dense, POLICY), lambda kind: run_module(kind(16))),
    "a linen module": (lambda: jmp.with_policy(Net(), POLICY), run_module),
    "a quantized linen module": (lambda: jmp.with_policy(Net(), INT8), run_module),
    "an nnx model": (nnx_model, lambda model: model(X)),
    "its parts": (lambda: nnx.split(nnx_model()), run_parts),
    "those of a quantized one": (lambda: nnx.split(nnx_model(INT8)), run_parts),
    "a linen module in blocks": (lambda: jmp.with_policy(Net(), MXFP8), run_module),
    "those of one in blocks": (lambda: nnx.split(nnx_model(MXFP8)), run_parts),
    "those of a float8 one": (lambda: nnx.split(nnx_model(FLOAT8)), run_parts),
    "those of one with a map": (lambda: nnx.split(nnx_model(MAP)), run_parts),
    "a decorated nnx class": (lambda: NNXDecorated, lambda kind: kind(nnx.Rngs(0))(X)),
    "its instance's parts": (lambda: nnx.split(NNXDecorated(nnx.Rngs(0))), run_parts),
    "an nnx class": (lambda: jmp.with_policy(NNXNet, POLICY), lambda kind: kind(nnx.Rngs(0))(X)),
    "its instance": (lambda: jmp.with_policy(NNXNet, POLICY)(nnx.Rngs(0)), lambda model: model(X)),
}

BY_VALUE = {
    "a function": (lambda: jmp.with_policy(plain, POLICY), lambda fun: fun(X)),
    "a lambda that keeps": (lambda: jmp.with_policy(lambda x, t: x @ x, POLICY, no_cast=["t"]), lambda fun: fun(X, X)),
    "an autocasted function": (lambda: jmp.autocast(plain, POLICY), lambda fun: fun(X)),
    "one of jax.numpy": (lambda: jmp.autocast(jnp.tanh, POLICY), lambda fun: fun(X)),
    "one with a map": (lambda: jmp.autocast(plain, jmp.PolicyMap({}, POLICY)), lambda fun: fun(X)),
    "a decorator": (lambda: jmp.with_policy(POLICY), lambda decorate: decorate(plain)(X)),
}
