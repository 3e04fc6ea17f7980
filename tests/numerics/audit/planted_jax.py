"""Faults in plain JAX: matmuls, promotions, sums, casts, gradients, the range of half precision and constants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from planted import bf16, f16, f32, half, ints, plant, planted, wide

X, X16, W = bf16(4, 8), f16(4, 8), f32(8, 2)
ZERO = np.float32(0)
MASK = jnp.asarray(np.where(np.tri(8), 0, np.float32(-1e9)))

plant("float32 weight in a matmul", X, W)(
    faulty=lambda x, w: jnp.tanh(x) @ wide(w),  # fault: float32-matmul # fault: accidental-promotion
    clean=lambda x, w: jnp.tanh(x) @ half(w),
)
plant("widened matmul", X, W)(
    faulty=lambda x, w: half(wide(jnp.tanh(x)) @ w),  # fault: float32-matmul
    clean=lambda x, w: half(jnp.tanh(x) @ half(w)),
)
plant("float32 convolution", bf16(1, 8, 8), f32(3, 8, 4))(
    faulty=lambda x, w: lax.conv_general_dilated(wide(x), w, (1,), "SAME"),  # fault: float32-matmul
    clean=lambda x, w: lax.conv_general_dilated(x, half(w), (1,), "SAME"),
)
plant("mixed matmul in the backward pass", X, W)(
    faulty=lambda x, w: jax.grad(
        lambda w: jnp.sum(jnp.dot(x, half(w), preferred_element_type=jnp.float32) ** 2)  # fault: float32-matmul
    )(w),
    clean=lambda x, w: jax.grad(lambda w: jnp.sum(wide(x @ half(w)) ** 2))(w),
)
plant("NumPy array", X)(
    faulty=lambda x: x + np.arange(8, dtype=np.float32),  # fault: accidental-promotion
    clean=lambda x: x + np.arange(8).astype(x.dtype),
)
plant("numbers that the program counts", X)(
    faulty=lambda x: x * jnp.arange(8.0),  # fault: accidental-promotion
    clean=lambda x: x * jnp.arange(8, dtype=x.dtype),
)


@planted(X)
class table_that_the_program_computes:
    def faulty(x):
        angles = jnp.linspace(0, 1, 8) ** 2 * jnp.pi
        return x + jnp.cos(angles)  # fault: accidental-promotion

    def clean(x):
        angles = jnp.linspace(0, 1, 8) ** 2 * jnp.pi
        return x + half(jnp.cos(angles)) + half(jnp.cos(angles) * wide(x))  # meant


plant("noise of default dtype", X, jax.eval_shape(jax.random.key, 0))(
    faulty=lambda x, key: x + 0.1 * jax.random.normal(key, x.shape),  # fault: accidental-promotion
    clean=lambda x, key: x + 0.1 * jax.random.normal(key, x.shape, x.dtype),
)
plant("labels of default dtype", X, ints(4))(
    faulty=lambda x, labels: x * jax.nn.one_hot(labels, 8),  # fault: accidental-promotion
    clean=lambda x, labels: half(x * jnp.exp(wide(x))),  # what is computed from half numbers is float32 for a reason
)
plant("where with a float32 branch", X, f32(4, 8))(
    faulty=lambda x, y: jnp.where(x > 0, x, y),  # fault: accidental-promotion
    clean=lambda x, y: jnp.where(x > 0, x, half(y)),
)
plant("where with the least number of the other half precision", X)(
    faulty=lambda x: jnp.where(x > 0, x, jnp.finfo(jnp.float16).min),  # fault: accidental-promotion
    clean=lambda x: jnp.where(x > 0, x, jnp.asarray(jnp.finfo(jnp.float16).min, x.dtype)),
)
plant("sum of both half precisions", X, jax.ShapeDtypeStruct((4, 8), jnp.float16))(
    faulty=lambda x, y: x * y,  # fault: accidental-promotion
    clean=lambda x, y: half(wide(x) * wide(y)),
)
plant("join with a float32 array", X, f32(1, 8))(
    faulty=lambda x, token: jnp.concatenate([token, x]),  # fault: accidental-promotion
    clean=lambda x, token: (
        jnp.concatenate([half(token), x]),
        jnp.concatenate([token, wide(x)]).astype(x.dtype),  # no round trip: the token was float32
    ),
)
plant("stack with a float32 array", X)(
    faulty=lambda x: jnp.stack([x, jnp.ones_like(x, jnp.float32)]),  # fault: accidental-promotion
    clean=lambda x: jnp.stack([x, jnp.ones_like(x)]),
)
plant("einsum that only sums", X)(
    faulty=lambda x: jnp.einsum("ij->j", x),  # fault: half-reduction
    clean=lambda x: jnp.einsum("ij->j", wide(x)),
)
plant("running sum in half", X)(
    faulty=lambda x: lax.scan(
        lambda total, row: (total + row, None),  # fault: half-reduction
        jnp.zeros(8, x.dtype),
        x,
    )[0],
    clean=lambda x: (
        lax.scan(lambda total, row: (total + wide(row), None), jnp.zeros(8), x)[0],
        lax.scan(lambda h, _: (h + jnp.tanh(h), None), x, None, length=3)[0],  # a residual stream is no sum of rows
    ),
)
plant("count by windows in half", bf16(16))(
    faulty=lambda x: lax.reduce_window(half(x > 0), half(ZERO), lax.add, (16,), (1,), "VALID"),  # fault: half-reduction
    clean=lambda x: half(lax.reduce_window((x > 0).astype(int), 0, lax.add, (16,), (1,), "VALID")),
)
plant("count in half", bf16(16))(
    faulty=lambda x: lax.reduce_sum(x, axes=(0,)),  # fault: half-reduction
    clean=lambda x: lax.reduce_sum(half(x > 0), axes=(0,)),
)


@planted(bf16(1, 9, 9, 3))
class overlapping_max_pooling_in_the_backward_pass:
    def faulty(x):
        return jax.grad(lambda x: jnp.sum(wide(nn.max_pool(x, (3, 3), (2, 2))) ** 2))(x)  # fault: half-reduction

    def clean(x):
        def loss(x):
            pooled = nn.max_pool(nn.max_pool(wide(x), (3, 3), (2, 2)), (2, 2), (2, 2))
            return jnp.sum(wide(nn.max_pool(half(pooled), (2, 2), (2, 2))) ** 2)  # each number in one window

        return jax.grad(loss)(x)


plant("cumprod in half under vmap", f16(4, 16))(
    faulty=lambda x: jax.vmap(jnp.cumprod)(x),  # fault: half-cumulative
    clean=lambda x: jax.vmap(lambda row: jnp.cumprod(wide(row)).astype(row.dtype))(x),
)
plant("sampling in half", X, jax.eval_shape(jax.random.key, 0))(
    faulty=lambda x, key: jax.random.categorical(key, x),  # fault: half-sampling
    clean=lambda x, key: jax.random.categorical(key, wide(x)),
)
plant("sampling in float16", X16, jax.eval_shape(jax.random.key, 0))(
    faulty=lambda x, key: jax.random.categorical(key, x, mode="high"),  # fault: half-sampling
    clean=lambda x, key: jax.random.categorical(key, wide(x), mode="high"),
)
plant("tokens as numbers in half", X, ints(4))(
    faulty=lambda x, tokens: x[tokens.astype(x.dtype).astype(jnp.int32)],  # fault: rounded-integer
    clean=lambda x, tokens: (
        x[wide(tokens).astype(jnp.int32)],
        jnp.round(x * 127).astype(jnp.int8),  # quantized: 8 bits do not round
        half(x > 0).astype(jnp.int32),  # neither does a mask
    ),
)
plant("round trip", X)(
    faulty=lambda x: wide(x).reshape(8, 4).T.astype(x.dtype),  # fault: round-trip-cast
    clean=lambda x: half(jnp.exp(wide(x)).reshape(8, 4).T),
)


@planted(X)
class round_trip_out_of_a_checkpoint:
    def faulty(x):
        y = jax.checkpoint(lambda x: wide(jnp.tanh(x)))(x)
        return y.astype(x.dtype) * 2  # fault: round-trip-cast

    def clean(x):
        return jax.checkpoint(jnp.tanh)(x) * 2


plant("weight cast once and used twice", f32(8, 8), X)(
    faulty=lambda w, x: jax.grad(
        lambda w: (lambda w: jnp.sum(wide(jnp.tanh(x @ w) @ w)))(w.astype(x.dtype))  # fault: half-gradient
    )(w),
    clean=lambda w, x: jax.grad(lambda w: jnp.sum(wide(jnp.tanh(x @ half(w)) @ half(w))))(w),
)


@planted(f32(8, 8), X)
class weight_of_a_scan:
    def faulty(w, x):
        def loss(w):
            v = w.astype(x.dtype)  # fault: half-gradient
            return jnp.sum(wide(lax.scan(lambda c, _: (jnp.tanh(c @ v), None), x, None, length=3)[0]))

        return jax.grad(loss)(w)

    def clean(w, x):
        def loss(w):
            return jnp.sum(wide(lax.scan(lambda c, _: (jnp.tanh(c @ half(w)), None), x, None, length=3)[0]))

        return jax.grad(loss)(w)


plant("half weight used twice", bf16(8, 8), X)(
    faulty=lambda w, x: jax.grad(lambda w: jnp.sum(wide(jnp.tanh(x @ w) @ w)))(w),  # fault: half-gradient
    clean=lambda w, x: jax.grad(lambda w: jnp.sum(wide(jnp.tanh(x @ w))))(w),
)


@planted(f32(9, 8), ints(4))
class looked_up_rows:
    def faulty(table, tokens):
        def loss(table):
            rows = jnp.take(table.astype(jnp.bfloat16), tokens, axis=0)  # fault: half-gradient
            return jnp.sum(wide(rows) ** 2) + jnp.sum(table**2)

        return jax.grad(loss)(table)

    def clean(table, tokens):
        def loss(table):
            rows = jnp.take(half(table), jnp.arange(4), axis=0)  # each row once
            return jnp.sum(wide(rows) ** 2) + jnp.sum(wide(half(table[tokens])) ** 2)

        return jax.grad(loss)(table)


@planted(W, bf16(3, 4, 8))
class gradients_of_microbatches:
    def faulty(w, batches):
        def add(total, x):
            grads = jax.grad(lambda w: jnp.sum(wide(x @ w) ** 2))(half(w))
            return total + grads, None  # fault: half-gradient

        return lax.scan(add, jnp.zeros_like(w, jnp.bfloat16), batches)[0]

    def clean(w, batches):
        def add(total, x):
            return total + wide(jax.grad(lambda w: jnp.sum(wide(x @ w) ** 2))(half(w))), None

        return lax.scan(add, jnp.zeros_like(w), batches)[0]


@planted(bf16(8), f32(3, 8))
class parameters_that_a_loop_updates:
    def faulty(w, xs):
        def step(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(wide(w) * x)))(w), None  # fault: half-update

        return lax.scan(step, w, xs)[0]

    def clean(w, xs):
        def step(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(w * x)))(w), None

        return half(lax.scan(step, wide(w), xs)[0])


plant("all reduce in half", bf16(1, 8))(
    faulty=lambda grads: jax.vmap(lambda g: lax.psum(g, "data"), axis_name="data")(grads),  # fault: half-all-reduce
    clean=lambda grads: jax.vmap(lambda g: half(lax.psum(wide(g), "data")), axis_name="data")(grads),
)
plant("exp in float16", X16)(
    faulty=lambda x: jnp.exp(x),  # fault: float16-exp
    clean=lambda x: jnp.exp(wide(x)) + jnp.exp(-0.5 * x**2 - jnp.abs(x)) + jax.jvp(lax.erf, (x,), (x,))[1],  # at most 1
)
plant("exp of one branch", X16)(
    faulty=lambda x: jnp.expm1(jnp.maximum(x, 0)),  # fault: float16-exp
    clean=lambda x: jnp.expm1(jnp.minimum(jnp.maximum(0, x) * -2, x)),
)
plant("exp of any difference", X16)(
    faulty=lambda x: jnp.exp(x - jnp.min(x, -1, keepdims=True)),  # fault: float16-exp
    clean=lambda x: [jax.jvp(f, (x,), (x,)) for f in (jax.nn.elu, jax.nn.celu, jax.nn.selu, jax.nn.mish)],
)
plant("log in float16", X16)(
    faulty=lambda x: jnp.log(x + 1e-3),  # fault: float16-log
    clean=lambda x: jnp.log(wide(x) + 1e-3) + jax.nn.softplus(x),
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
