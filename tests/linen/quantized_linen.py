"""The registry of linen modules with weights that a quantized policy is for. A law holds for every entry."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

RANDOM = np.random.default_rng(0)


class Case(NamedTuple):
    module: nn.Module
    inputs: tuple[Any, ...]
    method: str = "__call__"
    stacked: tuple[str, ...] = ()  # what `quantize` is told of stacks without biases


class OwnSum(nn.Dense):
    """A subclass that uses the layer's code and adds its own."""

    def __call__(self, x):
        return x[..., :16] + super().__call__(x)


class OwnProduct(nn.Dense):
    """A subclass with a product of its own."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        return x @ kernel.astype(x.dtype)


class OwnAttend(nn.Embed):
    def attend(self, query):
        return query @ self.embedding.T.astype(query.dtype)


class Doubled(nn.Embed):
    def __call__(self, tokens):
        return 2 * super().__call__(tokens)


class Tied(nn.Embed):
    def scores(self, tokens):
        return self.attend(self(tokens))


class OwnKernel(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 16))
        return x @ kernel.astype(x.dtype)


class Inside(nn.Module):
    """A module around another one."""

    inner: nn.Module
    method: str = "__call__"

    @nn.compact
    def __call__(self, *inputs):
        return getattr(self.inner, self.method)(*inputs)


class Scanned(nn.Module):
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        step = nn.remat(lambda dense, x, _: (jnp.tanh(dense(x)), None))
        over_layers = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return over_layers(nn.Dense(x.shape[-1], use_bias=self.use_bias, name="layers"), x, None)[0]


class Mapped(nn.Module):
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        over_examples = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        return over_examples(16, use_bias=self.use_bias, name="layers")(x)


def _normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


X, IMAGE, TOKENS = _normal(2, 4, 32), _normal(2, 5, 5, 8), jnp.arange(6).reshape(2, 3)
CARRY = jnp.zeros((2, 8))
MASK = jnp.ones((3, 3, 8, 8)).at[0].set(0)


def own_dot_general(*args, **kwargs):
    return jax.lax.dot_general(*args, **kwargs)


CASES = {
    "Dense": Case(nn.Dense(16), (X,)),
    "Dense without bias": Case(nn.Dense(16, use_bias=False), (X,)),
    "Dense with a dot_general of its author's": Case(nn.Dense(16, dot_general=own_dot_general), (X,)),
    "DenseGeneral to heads": Case(nn.DenseGeneral((4, 8)), (X,)),
    "DenseGeneral to heads without bias": Case(nn.DenseGeneral((4, 8), use_bias=False), (X,)),
    "DenseGeneral over two axes": Case(nn.DenseGeneral(16, axis=(-2, -1)), (X,)),
    "DenseGeneral of a batch": Case(nn.DenseGeneral(16, axis=(-1,), batch_dims=(0,)), (X,)),
    "DenseGeneral of a batch without bias": Case(
        nn.DenseGeneral(16, axis=(-1,), batch_dims=(0,), use_bias=False), (X,)
    ),
    "Einsum": Case(nn.Einsum((32, 16), "...c,cd->...d"), (X,)),
    "Einsum to heads without bias": Case(nn.Einsum((32, 4, 8), "btc,chd->bthd", use_bias=False), (X,)),
    "Einsum in another order": Case(nn.Einsum((16, 32, 4), "abc,dce->adbe"), (X,)),
    "Einsum with the sum last": Case(nn.Einsum((16, 32), "abc,dc->abd"), (X,)),
    "Einsum with its equation at the call": Case(nn.Einsum((32, 16)), (X, "abc,cd->abd")),
    "Conv of a line": Case(nn.Conv(16, (3,)), (X,)),
    "Conv in groups around": Case(nn.Conv(8, (3, 3), feature_group_count=2, padding="CIRCULAR"), (IMAGE,)),
    "Conv with a mask": Case(nn.Conv(8, (3, 3), mask=MASK), (IMAGE,)),
    "ConvTranspose": Case(nn.ConvTranspose(8, (3, 3)), (IMAGE,)),
    "ConvLocal": Case(nn.ConvLocal(4, (3, 3)), (IMAGE,)),
    "Embed": Case(nn.Embed(8, 32), (TOKENS,)),
    "Embed of one": Case(nn.Embed(1, 32), (TOKENS * 0,)),
    "Embed attended to": Case(nn.Embed(16, 32), (X,), "attend"),
    "attention": Case(nn.MultiHeadDotProductAttention(4), (X,)),
    "LSTM cells": Case(nn.RNN(nn.LSTMCell(8)), (X,)),
    "optimized LSTM cell": Case(nn.OptimizedLSTMCell(8), ((CARRY, CARRY), X[:, 0])),
    "subclass that adds": Case(OwnSum(16), (X,)),
    "subclass with its own product": Case(OwnProduct(16), (X,)),
    "subclass with its own attend": Case(OwnAttend(16, 32), (X,), "attend"),
    "subclass that reads twice": Case(Doubled(8, 32), (TOKENS,)),
    "subclass whose methods call each other": Case(Tied(8, 32), (TOKENS,), "scores"),
    "the same inside": Case(Inside(Tied(8, 32), "scores"), (TOKENS,)),
    "module with its own kernel": Case(OwnKernel(), (X,)),
    "scan of rematerialised layers": Case(Scanned(), (X,)),
    "scan of layers without bias": Case(Scanned(use_bias=False), (X,), stacked=("layers",)),
    "vmap of layers": Case(Mapped(), (X,)),
    "vmap of layers without bias": Case(Mapped(use_bias=False), (X,), stacked=("layers",)),
    "nn.jit of a layer": Case(nn.jit(nn.Dense)(16), (X,)),
}


def call(case: Case, module: nn.Module, variables: Any) -> Any:
    return module.apply(variables, *case.inputs, method=case.method)


def init(case: Case, module: nn.Module) -> Any:
    return module.init(jax.random.key(0), *case.inputs, method=case.method)


@functools.cache
def variables_of_all() -> dict[str, Any]:
    """Random variables for each case; drawn by numpy, which compiles nothing."""
    abstract = jax.eval_shape(lambda: {name: init(case, case.module) for name, case in CASES.items()})
    random = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 4, leaf.dtype), abstract)
