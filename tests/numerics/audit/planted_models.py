"""Faults in models of linen and of nnx: parameters are abstract, nothing is initialised."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx
from planted import bf16, f16, plant, planted, wide

X, X16 = bf16(4, 8), f16(4, 8)
BF16 = jnp.bfloat16


class Calling(nn.Module):
    """Calls a function of itself and its input."""

    function: Callable

    @nn.compact
    def __call__(self, x):
        return self.function(self, x)


def applied(model, x):
    return model.init_with_output(jax.random.key(0), x)[0]


def grads(model, x):
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return jax.grad(lambda params: jnp.sum(wide(model.apply(params, x)) ** 2))(zeros)


plant("linen dense without a dtype in a remat", X)(
    faulty=lambda x: grads(
        nn.remat(Calling)(
            lambda _, x: jnp.tanh(nn.Dense(8, use_bias=False)(x))  # fault: float32-matmul
        ),
        x,
    ),
    clean=lambda x: grads(nn.remat(nn.Dense)(8, use_bias=False, dtype=BF16), x),
)
plant("linen parameter of one's own", X)(
    faulty=lambda x: applied(
        Calling(
            lambda module, x: x * module.param("scale", nn.initializers.ones, (8,))  # fault: accidental-promotion
        ),
        x,
    ),
    clean=lambda x: applied(Calling(lambda module, x: x * module.param("scale", nn.initializers.ones, (8,), BF16)), x),
)


class Net(nnx.Module):
    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 8, use_bias=False, dtype=BF16, rngs=rngs)
        self.second = nnx.Linear(8, 8, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


NET = nnx.eval_shape(lambda: Net(BF16))

plant("nnx linear without a dtype under grad", nnx.eval_shape(lambda: Net(None)), NET, X)(
    faulty=lambda model, _, x: nnx.grad(
        lambda model: jnp.sum(wide(model.second(model.first(x))))  # fault: float32-matmul
    )(model),
    clean=lambda _, model, x: nnx.grad(lambda model: jnp.sum(wide(model(x))))(model),
)


@planted(nnx.eval_shape(lambda: nnx.RMSNorm(8, dtype=jnp.float16, rngs=nnx.Rngs(0))), X16)
class nnx_norm_of_ones_own:
    def faulty(norm, x):
        scale = norm.scale[...].astype(x.dtype)
        return x * scale / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))  # fault: float16-norm

    def clean(norm, x):
        return norm(x)


plant("nnx parameter read by the parent", NET, X)(
    faulty=lambda model, x: model.first(x) + model.second.kernel[0],  # fault: accidental-promotion
    clean=lambda model, x: model.first(x) + model.second.kernel[0].astype(x.dtype),
)


@planted(nnx.eval_shape(lambda: nnx.Linear(8, 8, param_dtype=BF16, rngs=nnx.Rngs(0))), X)
class nnx_parameters_updated_in_place:
    def faulty(model, x):
        grads = nnx.grad(lambda model: jnp.sum(wide(model(x))))(model)
        model.bias[...] -= 0.1 * grads["bias"][...]  # fault: half-update

    def clean(model, x):
        grads = nnx.grad(lambda model: jnp.sum(wide(model(x))))(model)
        model.bias[...] = (wide(model.bias[...]) * 0.9).astype(BF16)
        return grads
