"""Faults in linen models: parameters are abstract, nothing is initialised."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from planted import bf16, f16, f32, ints, planted

X = bf16(4, 8)


def grads(model, x):
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    return jax.grad(lambda params: jnp.sum(model.apply(params, x).astype(jnp.float32) ** 2))(zeros)


def applied(model, x):
    return model.init_with_output(jax.random.key(0), x)[0]


@planted(X)
class dense_without_a_dtype:
    def faulty(x):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(2, use_bias=False)(jnp.tanh(x))  # fault: float32-matmul

        return applied(Net(), x)

    def clean(x):
        return applied(nn.Sequential([jnp.tanh, nn.Dense(2, use_bias=False, dtype=jnp.bfloat16)]), x)


@planted(X)
class dense_without_a_dtype_under_grad:
    def faulty(x):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dense(8, use_bias=False, dtype=jnp.bfloat16)(x)
                return nn.Dense(2, use_bias=False)(x)  # fault: float32-matmul

        return grads(Net(), x)

    def clean(x):
        dense = [nn.Dense(size, use_bias=False, dtype=jnp.bfloat16) for size in (8, 2)]
        return grads(nn.Sequential(dense), x)


@planted(X)
class parameter_of_ones_own:
    def faulty(x):
        class Scale(nn.Module):
            @nn.compact
            def __call__(self, x):
                scale = self.param("scale", nn.initializers.ones, (8,))
                return x * scale  # fault: accidental-promotion

        return applied(Scale(), x)

    def clean(x):
        class Scale(nn.Module):
            @nn.compact
            def __call__(self, x):
                scale = self.param("scale", nn.initializers.ones, (8,))
                return x * scale.astype(x.dtype)

        return applied(Scale(), x)


@planted(f16(1, 4, 8))
class attention_in_float16:
    def faulty(x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                attention = nn.MultiHeadDotProductAttention(2, use_bias=False, dtype=jnp.float16)
                return attention(x)  # fault: float16-softmax

        return applied(Block(), x)

    def clean(x):
        return applied(nn.MultiHeadDotProductAttention(2, use_bias=False, dtype=jnp.bfloat16), x)


@planted(f16(4, 8))
class norm_with_reductions_in_float16:
    def faulty(x):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.RMSNorm(dtype=jnp.float16, force_float32_reductions=False)(x)  # fault: float16-norm

        return applied(Net(), x)

    def clean(x):
        return applied(nn.RMSNorm(dtype=jnp.float16), x)


@planted(X)
class pooling_in_half:
    def faulty(x):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dense(4, dtype=jnp.bfloat16)(x)
                return jax.lax.reduce_sum(x, axes=(0,)) / 4  # fault: half-reduction

        return applied(Net(), x)

    def clean(x):
        return applied(nn.Sequential([nn.Dense(4, dtype=jnp.bfloat16), lambda x: x.mean(0)]), x)


@planted(ints(4, 6))
class embedding_cast_before_the_lookup:
    def faulty(tokens):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                return nn.Embed(9, 8, dtype=jnp.bfloat16)(tokens)  # fault: half-gradient

        return grads(Net(), tokens)

    def clean(tokens):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                return nn.Embed(9, 8)(tokens).astype(jnp.bfloat16)

        return grads(Net(), tokens)


@planted(X)
class remat_around_a_float32_layer:
    def faulty(x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return jnp.tanh(nn.Dense(8, use_bias=False)(x))  # fault: float32-matmul

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.remat(Block)()(x)

        return grads(Net(), x)

    def clean(x):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.remat(nn.Dense)(8, use_bias=False, dtype=jnp.bfloat16)(x)

        return grads(Net(), x)


@planted(X, ints(4))
class loss_of_a_half_model:
    def faulty(x, labels):
        logits = applied(nn.Dense(3, dtype=jnp.bfloat16), x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()  # fault: half-logits

    def clean(x, labels):
        logits = applied(nn.Dense(3, dtype=jnp.bfloat16), x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@planted(X)
class scanned_layer_with_a_running_sum:
    def faulty(x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, total, x):
                y = nn.Dense(8, use_bias=False, dtype=jnp.bfloat16)(x)
                return total + y, None  # fault: half-reduction

        return applied_to_rows(Layer, x, x.dtype)

    def clean(x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, total, x):
                y = nn.Dense(8, use_bias=False, dtype=jnp.bfloat16)(x)
                return total + y.astype(jnp.float32), None

        return applied_to_rows(Layer, x, jnp.float32)


def applied_to_rows(layer, x, dtype):
    scanned = nn.scan(layer, variable_broadcast="params", split_rngs={"params": False})()
    return scanned.init_with_output(jax.random.key(0), jnp.zeros(8, dtype), x)[0]


@planted(f32(2, 8))
class mask_of_a_half_model:
    def faulty(x):
        y = applied(nn.Dense(4, dtype=jnp.float16), x)
        return jnp.where(jnp.tri(2, 4) > 0, y, -1e9)  # fault: infinite-constant

    def clean(x):
        y = applied(nn.Dense(4, dtype=jnp.float16), x)
        return jnp.where(jnp.tri(2, 4) > 0, y, -jnp.inf)
