"""nnx models for float8 policies, and how their state is read."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_policy as jmp

DELAYED = "float8/4(min_size=0)_from_mixed_bfloat16"
CURRENT = "float8(recipe=current,min_size=0)_from_mixed_bfloat16"
SCALE = jmp.StaticLossScale(8.0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)


def waves(key, shape, dtype):
    """Numbers of both signs: to draw them would take a compilation."""
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape) / 3, dtype)


def linear(inputs=16, outputs=16, **options):
    return nnx.Linear(inputs, outputs, kernel_init=waves, rngs=nnx.Rngs(0), **options)


class Net(nnx.Module):
    def __init__(self):
        self.hidden = linear(16, 32)
        self.head = linear(32, 16)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def mean_square(model, x=X):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def state_of(node):
    """The float8 state of a model, or of gradients, by path."""
    state = nnx.to_flat_state(nnx.state(node, jmp.nnx.Float8State))
    return {"/".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in state}


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(ours[name], expected[name], err_msg=name, strict=True)


def trained(model, steps=1):
    """A model after steps that change nothing but its state."""
    optimizer = jmp.nnx.Optimizer(model, optax.set_to_zero(), wrt=nnx.Param)
    for _ in range(steps):
        optimizer.update(model, gradients(model))
    return model


gradients = nnx.jit(jmp.nnx.grad(mean_square, loss_scale=SCALE))
