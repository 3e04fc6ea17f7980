"""Faults in plain JAX: the range of half precision, losses and constants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from planted import bf16, f16, f32, half, ints, plant, planted, wide

X, X16 = bf16(4, 8), f16(4, 8)
MASK = jnp.asarray(np.where(np.tri(8), 0, np.float32(-1e9)))

plant("exp in float16", X16)(
    faulty=lambda x: jnp.exp(x),  # fault: float16-exp
    clean=lambda x: jnp.exp(wide(x)),
)
plant("log in float16", X16)(
    faulty=lambda x: jnp.log(x + 1e-3),  # fault: float16-log
    clean=lambda x: jnp.log(wide(x) + 1e-3),
)
plant("softmax in float16", X16)(
    faulty=lambda x: jax.nn.softmax(x),  # fault: float16-softmax
    clean=lambda x: jax.nn.softmax(wide(x)).astype(x.dtype),
)


@planted(X16)
class norm_in_float16:
    def faulty(x):
        variance = jnp.mean(x * x, -1, keepdims=True)
        return x * lax.rsqrt(variance + 1e-3)  # fault: float16-norm

    def clean(x):
        variance = jnp.mean(jnp.square(wide(x)), -1, keepdims=True)
        return (wide(x) * lax.rsqrt(variance + 1e-3)).astype(x.dtype)


plant("linalg norm in float16", f16(8))(
    faulty=lambda x: x / jnp.linalg.norm(x),  # fault: float16-norm
    clean=lambda x: x / jnp.linalg.norm(wide(x)).astype(x.dtype),
)
plant("cross entropy of half logits", X, ints(4))(
    faulty=lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels),  # fault: half-logits
    clean=lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels),
)
plant("half logits under grad", f32(8, 8), X)(
    faulty=lambda w, x: jax.value_and_grad(
        lambda w: -jnp.mean(wide(jax.nn.log_softmax(x @ half(w))[:, 0]))  # fault: half-logits
    )(w),
    clean=lambda w, x: jax.value_and_grad(lambda w: -jnp.mean(jax.nn.log_softmax(wide(x @ half(w)))[:, 0]))(w),
)
plant("logsumexp by hand", X)(
    faulty=lambda x: jnp.log(jnp.sum(jnp.exp(x - jnp.max(x)))),  # fault: half-logits
    clean=lambda x: jnp.log(jnp.sum(jnp.exp(wide(x) - jnp.max(wide(x))))),
)
plant("log of softmax", X)(
    faulty=lambda x: -jnp.sum(jnp.log(jax.nn.softmax(x) + 1e-6)),  # fault: log-of-softmax
    clean=lambda x: -jnp.sum(jax.nn.log_softmax(wide(x))),
)
plant("log of softmax by hand", X)(
    faulty=lambda x: jnp.log(wide(jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True))),  # fault: log-of-softmax
    clean=lambda x: jax.nn.log_softmax(wide(x)),
)
plant("log of sigmoid", bf16(4))(
    faulty=lambda x: jnp.log(1 - jax.nn.sigmoid(x)),  # fault: log-of-sigmoid
    clean=lambda x: jax.nn.log_sigmoid(-wide(x)),
)
plant("log of sigmoid by hand", bf16(4))(
    faulty=lambda x: jnp.log(1 / (1 + jnp.exp(-x))),  # fault: log-of-sigmoid
    clean=lambda x: jnp.log(1 / (1 + jnp.exp(-wide(x)))),
)
plant("log of a negated sigmoid", bf16(4))(
    faulty=lambda x: jnp.log1p(-jax.nn.sigmoid(x)),  # fault: log-of-sigmoid
    clean=lambda x: jnp.log1p(-jax.nn.sigmoid(wide(x))),
)


@planted(X, ints(4))
class log_of_a_chosen_probability:
    def faulty(x, labels):
        p = jnp.sum(jax.nn.softmax(x) * jax.nn.one_hot(labels, 8, dtype=x.dtype), -1)
        return -jnp.log(p)  # fault: log-of-softmax

    def clean(x, labels):
        return -jnp.log(jnp.sum(jax.nn.softmax(wide(x)) * jax.nn.one_hot(labels, 8), -1))


plant("mask of minus a billion", X16)(
    faulty=lambda x: jnp.where(x > 0, x, -1e9),  # fault: infinite-constant
    clean=lambda x: jnp.where(x > 0, x, jnp.finfo(x.dtype).min),
)


@planted(X)
class float32_minimum_in_bfloat16:
    def faulty(x):
        y = jnp.where(x > 0, jnp.sin(wide(x)), jnp.finfo(jnp.float32).min)
        return jnp.exp(y.astype(x.dtype))  # fault: infinite-constant

    def clean(x):
        return jnp.exp(jnp.where(x > 0, half(jnp.sin(wide(x))), jnp.finfo(x.dtype).min))


plant("number that overflows when traced", X16)(
    faulty=lambda x: x + 1e6,  # fault: infinite-constant
    clean=lambda x: x + jnp.where(x > 0, 0, -jnp.inf),  # meant
)
plant("table of mask values", f16(8, 8))(
    faulty=lambda x: x + MASK.astype(x.dtype),  # fault: infinite-constant
    clean=lambda x: x + np.where(np.tri(8), 0, -1e4).astype(x.dtype),
)
