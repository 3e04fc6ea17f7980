"""The registry of linen modules under float8 policies: what each computes in 8 bits, and why not what it does not."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jmp_policy._jaxpr import walk

DELAYED = "float8/4(min_size=0)_from_mixed_bfloat16"
CURRENT = "float8(recipe=current,min_size=0)_from_mixed_bfloat16"
BY_ROW = "float8(recipe=current/row,min_size=0)_from_mixed_bfloat16"
OVERWRITE = "_overwrite_with_gradient"

AS_CONVOLUTION = "float8/4(min_size=0), computed with as numbers: it is a convolution"
LEFT_BY_ROWS = "left: the number of its rows is not a multiple of 16"
LEFT_BY_CODE = "left: it multiplies by a function of its own"
LEFT_TABLE = "left: the rows of a table are read, and its logits want all the bits"


def left_by(length: int) -> str:
    return f"left: the length {length} is not a multiple of 16"


class Case(NamedTuple):
    module: nn.Module
    inputs: tuple[Any, ...]
    quantization: dict[str, str]  # by path, as `explain` has it
    method: str = "__call__"


class OwnSum(nn.Dense):
    """A subclass that uses the layer's code and adds its own."""

    def __call__(self, x):
        return x + super().__call__(x)


class OwnProduct(nn.Dense):
    """A subclass with a product of its own."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        return x @ kernel.astype(x.dtype)


class OwnKernel(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 16))
        return x @ kernel.astype(x.dtype)


class LowRank(nn.Module):
    """A layer and a correction of low rank beside it, as LoRA has it."""

    rank: int

    @nn.compact
    def __call__(self, x):
        low = nn.Dense(self.rank, use_bias=False, name="a")(x)
        return nn.Dense(16, name="base")(x) + nn.Dense(16, use_bias=False, name="b")(low)


class Scanned(nn.Module):
    """Layers that are scanned over, with the collection of their state."""

    @nn.compact
    def __call__(self, x):
        step = nn.remat(lambda dense, x, _: (jnp.tanh(dense(x)), None))
        axes = {"params": 0, OVERWRITE: 0}
        over_layers = nn.scan(step, variable_axes=axes, split_rngs={"params": True}, length=3)
        return over_layers(nn.Dense(x.shape[-1], name="layers"), x, None)[0]


class Chosen(nn.Module):
    """A layer that `nn.cond` calls, and one of `nn.switch`."""

    @nn.compact
    def __call__(self, x):
        dense, other = nn.Dense(16, name="dense"), nn.Dense(16, name="other")
        if self.is_initializing():
            return dense(x) + other(x)
        x = nn.cond(x[0, 0] > 0, lambda dense, x: dense(x), lambda dense, x: -dense(x), dense, x)
        return nn.switch(1, [lambda other, x: x, lambda other, x: other(x)], other, x)


def _normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def own_dot_general(*args: Any, **kwargs: Any) -> Any:
    return jax.lax.dot_general(*args, **kwargs)


X, XS = _normal(16, 16), _normal(16, 2, 16)
LINE, IMAGE, VIDEO = _normal(2, 4, 16), _normal(2, 3, 3, 16), _normal(1, 2, 2, 2, 16)
TOKENS = jnp.arange(16)
CARRY = jnp.zeros((16, 16))
FLOAT8 = DELAYED.partition("_from_")[0]


def _all(quantization: str, *paths: str) -> dict[str, str]:
    return dict.fromkeys(paths, quantization)


_ROOT = {"": FLOAT8}
_HEADS = _all(FLOAT8, "query", "key", "value", "out")
_LSTM = [f"{of}{gate}" for of in "ih" for gate in "ifgo"]
_GRU = _all(FLOAT8, *[f"{of}{gate}" for of in "ih" for gate in "rzn"])


def _inside(path: str, quantization: dict[str, str]) -> dict[str, str]:
    return {f"{path}/{name}": value for name, value in quantization.items()}


CASES = {
    "Dense": Case(nn.Dense(32), (XS,), _ROOT),
    "Dense of rows that are odd": Case(nn.Dense(16), (X[:3],), {"": LEFT_BY_ROWS}),
    "Dense of a width that is odd": Case(nn.Dense(10), (X,), {"": left_by(10)}),
    "Dense with a dot_general": Case(nn.Dense(16, dot_general=own_dot_general), (X,), {"": LEFT_BY_CODE}),
    "DenseGeneral to heads": Case(nn.DenseGeneral((2, 8)), (X,), _ROOT),
    "DenseGeneral over two axes": Case(nn.DenseGeneral(16, axis=(-2, -1)), (XS,), _ROOT),
    "DenseGeneral of a batch": Case(nn.DenseGeneral(16, axis=-1, batch_dims=(0,)), (XS.swapaxes(0, 1),), _ROOT),
    "Einsum": Case(nn.Einsum((16, 2, 8), "bc,chd->bhd"), (X,), _ROOT),
    "Einsum with the sum last": Case(nn.Einsum((32, 16), "...a,ba->...b", use_bias=False), (XS,), _ROOT),
    "Conv of a line": Case(nn.Conv(16, (3,)), (LINE,), {"": AS_CONVOLUTION}),
    "Conv of an image": Case(nn.Conv(16, (2, 2), strides=2), (IMAGE,), {"": AS_CONVOLUTION}),
    "Conv of a video": Case(nn.Conv(16, (2, 2, 2), padding="CIRCULAR"), (VIDEO,), {"": AS_CONVOLUTION}),
    "Conv in groups": Case(
        nn.Conv(16, (2, 2), feature_group_count=2), (IMAGE,), {"": "left: its convolution is one of groups"}
    ),
    "ConvTranspose": Case(nn.ConvTranspose(16, (2, 2)), (IMAGE,), {"": LEFT_BY_CODE}),
    "ConvLocal": Case(nn.ConvLocal(16, (2, 2)), (IMAGE,), {"": LEFT_BY_CODE}),
    "Embed": Case(nn.Embed(16, 16), (TOKENS,), {"": LEFT_TABLE}),
    "Embed attended to": Case(nn.Embed(16, 16), (X,), {"": LEFT_TABLE}, "attend"),
    "attention": Case(nn.MultiHeadDotProductAttention(2), (XS,), _HEADS),
    "optimized LSTM cell": Case(nn.OptimizedLSTMCell(16), ((CARRY, CARRY), X), _all(LEFT_BY_CODE, *_LSTM)),
    "RNNs in both directions": Case(
        nn.Bidirectional(nn.RNN(nn.GRUCell(16)), nn.RNN(nn.SimpleCell(16))),
        (XS,),
        _inside("forward_rnn/cell", _GRU) | _inside("backward_rnn/cell", _all(FLOAT8, "i", "h")),
    ),
    "WeightNorm": Case(nn.WeightNorm(nn.Dense(16)), (X,), {"layer_instance": FLOAT8}),
    "Sequential": Case(
        nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(16)]), (X,), _all(FLOAT8, "layers_0", "layers_2")
    ),
    "layer of low rank": Case(LowRank(4), (X,), {"a": left_by(4), "base": FLOAT8, "b": left_by(4)}),
    "subclass that adds": Case(OwnSum(16), (X,), _ROOT),
    "subclass with its own product": Case(
        OwnProduct(16), (X,), {"": f"{LEFT_BY_ROWS}, or its code is no layer of Flax's"}
    ),
    "module with its own kernel": Case(OwnKernel(), (X,), {"": LEFT_BY_CODE}),
    "scan of rematerialised layers": Case(Scanned(), (X,), {"layers": FLOAT8}),
    "cond and switch": Case(Chosen(), (X,), _all(FLOAT8, "dense", "other")),
    "jit of a layer": Case(nn.Sequential([nn.jit(nn.Dense)(16)]), (X,), {"layers_0": FLOAT8}),
}


@functools.cache
def abstract_variables(name: str) -> Any:
    """The variables of a case without a policy: shapes and dtypes."""
    case = CASES[name]
    return jax.eval_shape(lambda: case.module.init(jax.random.key(0), *case.inputs, method=case.method))


def float8_products(jaxpr: Any) -> int:
    """The number of matrix products of 8-bit numbers in a traced program."""
    steps = (step for step in walk(jaxpr) if step.name == "dot_general")
    return sum(all(str(operand.aval.dtype).startswith("float8") for operand in step.operands) for step in steps)
