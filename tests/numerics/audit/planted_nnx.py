"""Faults in nnx models."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from planted import bf16, f16, ints, planted

BF16 = jnp.bfloat16


class Net(nnx.Module):
    def __init__(self, dtype, out=8):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 8, use_bias=False, dtype=BF16, rngs=rngs)
        self.second = nnx.Linear(8, out, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def made(make):
    """A module without arrays."""
    return nnx.eval_shape(make)


@planted(made(lambda: Net(None)), made(lambda: Net(BF16)), bf16(4, 8))
class linear_without_a_dtype:
    def faulty(wide, narrow, x):
        y = wide.first(x)
        return wide.second(y)  # fault: float32-matmul

    def clean(wide, narrow, x):
        return narrow(x)


@planted(made(lambda: Net(None)), made(lambda: Net(BF16)), bf16(4, 8))
class linear_without_a_dtype_under_grad:
    def faulty(wide, narrow, x):
        def loss(model):
            y = model.first(x)
            return jnp.sum(model.second(y).astype(jnp.float32))  # fault: float32-matmul

        return nnx.grad(loss)(wide)

    def clean(wide, narrow, x):
        return nnx.grad(lambda model: jnp.sum(model(x).astype(jnp.float32)))(narrow)


@planted(made(lambda: Net(BF16)), bf16(4, 8))
class tied_weights:
    def faulty(model, x):
        def loss(w):
            w = w.astype(BF16)  # fault: half-gradient
            return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32) + (x @ w.T).astype(jnp.float32))

        return jax.grad(loss)(model.first.kernel[...])

    def clean(model, x):
        def loss(w):
            return jnp.sum(jnp.tanh(x @ w.astype(BF16)).astype(jnp.float32) + (x @ w.astype(BF16).T).astype("float32"))

        return jax.grad(loss)(model.first.kernel[...])


@planted(made(lambda: Net(BF16, 3)), bf16(4, 8), ints(4))
class train_step_with_half_logits:
    def faulty(model, x, labels):
        def loss(model):
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()  # fault: half-logits

        return nnx.value_and_grad(loss)(model)

    def clean(model, x, labels):
        def loss(model):
            logits = model(x).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return nnx.value_and_grad(loss)(model)


@planted(made(lambda: nnx.RMSNorm(8, dtype=jnp.float16, rngs=nnx.Rngs(0))), f16(4, 8))
class norm_of_ones_own:
    def faulty(norm, x):
        scale = norm.scale[...].astype(x.dtype)
        return x * scale / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))  # fault: float16-norm

    def clean(norm, x):
        return norm(x)


@planted(made(lambda: Net(BF16)), bf16(4, 8))
class parameter_read_by_the_parent:
    def faulty(model, x):
        y = model.first(x)
        return y + model.second.kernel[0]  # fault: accidental-promotion

    def clean(model, x):
        y = model.first(x)
        return y + model.second.kernel[0].astype(y.dtype)


@planted(made(lambda: Net(BF16)), bf16(4, 8))
class cast_for_nothing:
    def faulty(model, x):
        y = model.first(x).astype(jnp.float32)
        return model.second(y)  # fault: round-trip-cast

    def clean(model, x):
        return model(x)


@planted(made(lambda: Net(BF16)), bf16(4, 8))
class cumulative_sum_in_a_jitted_model:
    def faulty(model, x):
        @nnx.jit
        def forward(model, x):
            y = model(x)
            return jnp.cumsum(y, axis=1)  # fault: half-cumulative

        return forward(model, x)

    def clean(model, x):
        return nnx.jit(lambda model, x: jnp.cumsum(model(x).astype(jnp.float32), axis=1))(model, x)


@planted(made(lambda: nnx.Linear(8, 8, param_dtype=BF16, rngs=nnx.Rngs(0))), bf16(4, 8))
class parameters_updated_in_place:
    def faulty(model, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x).astype(jnp.float32)))(model)
        model.bias[...] -= 0.1 * grads["bias"][...]  # fault: half-update

    def clean(model, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x).astype(jnp.float32)))(model)
        model.bias[...] = (model.bias[...].astype(jnp.float32) * 0.9).astype(BF16)
        return grads
