"""The registry of Flax's APIs: a law writes its model once, as a plain class, and each API makes a module of it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

import jmp_policy as jmp

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
"""An input of every layer below, which have 4 features where nothing else is said."""
BF16_INSIDE = "params=float32,compute=bfloat16,output=float32"
F16_INSIDE = BF16_INSIDE.replace("bfloat16", "float16")
CHEAP = nn.initializers.constant(1 / 3)  # which is traced in no time, and which half precision rounds
STATE = ["batch_stats", "cache", "counters", "intermediates"]


def is_rounded_to_bfloat16(x):
    """True if a float32 array holds values of bfloat16."""
    return x.dtype == jnp.float32 and bool((x == x.astype(jnp.bfloat16).astype(jnp.float32)).all())


class FlaxApi:
    """What a law asks of an API. A kind is a class, or a function that makes a module."""

    name: str
    base: type
    cell_base: type
    constructor: str
    """The method that makes the submodules."""

    def module(self, params=(), base=None, **layers):
        """Decorates a plain class: it becomes a module with these submodules, `name=make`, and Params of shape (4,)."""
        base = base or self.base

        def decorate(written):
            def construct(module):
                for name, make in layers.items():
                    setattr(module, name, make())
                for name in params:
                    setattr(module, name, self.make_param(module, name))

            construct.__name__ = self.constructor
            body = {name: value for name, value in vars(written).items() if name not in ("__dict__", "__weakref__")}
            return type(base)(written.__name__, (base,), body | {self.constructor: construct})

        return decorate

    def under(self, kind, policy, **options):
        """A model of a kind under a policy, with abstract parameters where it has any, stored as the policy says."""
        return jmp.with_policy(self.make(kind, policy), policy, **options)


class Linen(FlaxApi):
    name = "linen"
    base = nn.Module
    cell_base = nn.RNNCellBase
    constructor = "setup"
    dense_type = nn.Dense

    @staticmethod
    def dense(features=4, inputs=4, **options):
        return nn.Dense(features, **{"kernel_init": CHEAP} | options)

    @staticmethod
    def norm(features=4):
        return nn.LayerNorm()

    @staticmethod
    def batch_norm():
        return nn.BatchNorm(use_running_average=False)

    @staticmethod
    def embed(num_embeddings=7, features=4):
        return nn.Embed(num_embeddings, features, embedding_init=CHEAP)

    @staticmethod
    def conv(features, kernel_size, kind="Conv", **options):
        return getattr(nn, kind)(features, kernel_size, kernel_init=CHEAP, **options)

    @staticmethod
    def attention(features=64, **options):
        return nn.MultiHeadDotProductAttention(num_heads=2, **options)

    @staticmethod
    def cell(kind):
        """A recurrent cell of 3 features, of the class of this name."""
        return getattr(nn, kind)(3)

    @staticmethod
    def rnn(cell):
        return nn.RNN(cell, return_carry=True)

    @staticmethod
    def make_param(module, name):
        return module.param(name, nn.initializers.ones, (4,))

    @staticmethod
    def make(kind, policy=None):
        return kind()

    make_drawn = make

    @staticmethod
    def init(model, *args, **kwargs):
        """The abstract variables of a model, from a call of the method that is named."""
        return jax.eval_shape(lambda: model.init({"params": jax.random.key(0)}, *args, **kwargs))

    def run(self, model, *args, method="__call__", **kwargs):
        """The abstract outputs of a call."""
        call = lambda variables: model.apply(variables, *args, method=method, mutable=STATE, **kwargs)[0]
        return jax.eval_shape(call, self.init(model, *args, method=method, **kwargs))

    @staticmethod
    def call(model, *args, method="__call__", **kwargs):
        """The outputs of a call of a model from `make_drawn`."""
        variables = jax.jit(lambda: model.init(jax.random.key(0), *args, method=method, **kwargs))()
        return model.apply(variables, *args, method=method, mutable=STATE, **kwargs)[0]

    @staticmethod
    def make_jitted_call(model, *args):
        """One jitted function `(model, *args) -> out` of models of this kind, with the same parameters."""
        variables = model.init(jax.random.key(0), *args)
        apply = jax.jit(lambda model, variables, *args: model.apply(variables, *args), static_argnums=0)
        return lambda model, *args: apply(model, variables, *args)

    def trace(self, model, *args):
        """The jaxpr of a call."""
        return jax.make_jaxpr(lambda variables: model.apply(variables, *args))(self.init(model, *args))

    def find_stored_dtypes(self, model, *args, collection="params"):
        """The dtypes of the parameters by path, or of the running statistics."""
        leaves = jax.tree.leaves_with_path(self.init(model, *args).get(collection, {}))
        return {"/".join(key.key for key in path): str(leaf.dtype) for path, leaf in leaves}


class Nnx(FlaxApi):
    name = "nnx"
    base = nnx.Module
    cell_base = nnx.RNNCellBase
    constructor = "__init__"
    dense_type = nnx.Linear

    @staticmethod
    def dense(features=4, inputs=4, **options):
        return nnx.Linear(inputs, features, rngs=nnx.Rngs(0), **{"kernel_init": CHEAP} | options)

    @staticmethod
    def norm(features=4):
        return nnx.LayerNorm(features, rngs=nnx.Rngs(0))

    @staticmethod
    def batch_norm():
        return nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    @staticmethod
    def embed(num_embeddings=7, features=4):
        return nnx.Embed(num_embeddings, features, embedding_init=CHEAP, rngs=nnx.Rngs(0))

    @staticmethod
    def conv(features, kernel_size, kind="Conv", **options):
        return getattr(nnx, kind)(features, features, kernel_size, kernel_init=CHEAP, rngs=nnx.Rngs(0), **options)

    @staticmethod
    def attention(features=64, **options):
        return nnx.MultiHeadAttention(2, features, decode=False, rngs=nnx.Rngs(0), **options)

    @staticmethod
    def cell(kind):
        return getattr(nnx, kind)(4, 3, rngs=nnx.Rngs(0))

    @staticmethod
    def rnn(cell):
        return nnx.RNN(cell, return_carry=True)

    @staticmethod
    def make_param(module, name):
        return nnx.Param(jnp.ones(4))

    @staticmethod
    def make(kind, policy=None):
        model = nnx.eval_shape(lambda: kind())
        return model if policy is None else jmp.nnx.cast_params(model, policy)

    @staticmethod
    def make_drawn(kind):
        return kind()

    @staticmethod
    def run(model, *args, method="__call__", **kwargs):
        return nnx.eval_shape(lambda model: getattr(model, method)(*args, **kwargs), model)

    @staticmethod
    def call(model, *args, method="__call__", **kwargs):
        return getattr(model, method)(*args, **kwargs)

    @staticmethod
    def make_jitted_call(model, *args):
        return nnx.jit(lambda model, *args: model(*args))

    @staticmethod
    def trace(model, *args):
        graphdef, state = nnx.split(model)
        return jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(*args))(state)

    @staticmethod
    def find_stored_dtypes(model, *args, collection="params"):
        kind = {"params": nnx.Param, "batch_stats": nnx.BatchStat}[collection]
        leaves = nnx.to_flat_state(nnx.state(model, kind))
        return {"/".join(map(str, path)): str(variable.dtype) for path, variable in leaves}


LINEN, NNX = Linen(), Nnx()
APIS: list[Any] = [LINEN, NNX]
