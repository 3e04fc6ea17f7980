"""Faults in plain JAX: the range of half precision, losses, gradients and constants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from planted import bf16, f16, f32, ints, planted


def wide(x):
    return x.astype(jnp.float32)


def half(x):
    return x.astype(jnp.bfloat16)


@planted(f16(4, 8))
class exp_in_float16:
    def faulty(x):
        return jnp.exp(x)  # fault: float16-exp

    def clean(x):
        return jnp.exp(wide(x))


@planted(f16(4, 8))
class exp_in_a_branch:
    def faulty(x):
        return lax.cond(x[0, 0] > 0, lambda x: jnp.exp(x), lambda x: x, x)  # fault: float16-exp

    def clean(x):
        return lax.cond(x[0, 0] > 0, lambda x: jnp.exp(wide(x)), wide, x)


@planted(f16(4, 8))
class log_in_float16:
    def faulty(x):
        return jnp.log(x + 1e-3)  # fault: float16-log

    def clean(x):
        return jnp.log(wide(x) + 1e-3)


@planted(f16(4, 8))
class softmax_in_float16:
    def faulty(x):
        return jax.nn.softmax(x)  # fault: float16-softmax

    def clean(x):
        return jax.nn.softmax(wide(x)).astype(x.dtype)


@planted(f16(4, 8))
class norm_in_float16:
    def faulty(x):
        variance = jnp.mean(x * x, -1, keepdims=True)
        return x * lax.rsqrt(variance + 1e-3)  # fault: float16-norm

    def clean(x):
        variance = jnp.mean(jnp.square(wide(x)), -1, keepdims=True)
        return (wide(x) * lax.rsqrt(variance + 1e-3)).astype(x.dtype)


@planted(f16(8))
class linalg_norm_in_float16:
    def faulty(x):
        return x / jnp.linalg.norm(x)  # fault: float16-norm

    def clean(x):
        return x / jnp.linalg.norm(wide(x)).astype(x.dtype)


@planted(bf16(4, 8), ints(4))
class cross_entropy_of_half_logits:
    def faulty(logits, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)  # fault: half-logits
        return jnp.mean(wide(losses))

    def clean(logits, labels):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels))


@planted(f32(8, 8), bf16(4, 8))
class half_logits_under_grad:
    def faulty(w, x):
        def loss(w):
            logits = x @ half(w)
            return -jnp.mean(wide(jax.nn.log_softmax(logits)[:, 0]))  # fault: half-logits

        return jax.value_and_grad(loss)(w)

    def clean(w, x):
        def loss(w):
            logits = wide(x @ half(w))
            return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

        return jax.value_and_grad(loss)(w)


@planted(bf16(4, 8))
class logsumexp_by_hand:
    def faulty(x):
        total = jnp.sum(jnp.exp(x - jnp.max(x)))
        return jnp.log(total)  # fault: half-logits

    def clean(x):
        x = wide(x)
        return jnp.log(jnp.sum(jnp.exp(x - jnp.max(x))))


@planted(bf16(4), bf16(4))
class binary_cross_entropy_in_half:
    def faulty(logits, labels):
        return optax.sigmoid_binary_cross_entropy(logits, labels)  # fault: half-logits

    def clean(logits, labels):
        return optax.sigmoid_binary_cross_entropy(wide(logits), wide(labels))


@planted(bf16(4), bf16(4))
class squared_error_in_half:
    def faulty(predictions, targets):
        return jnp.mean(wide(optax.l2_loss(predictions, targets)))  # fault: half-logits

    def clean(predictions, targets):
        return jnp.mean(optax.l2_loss(wide(predictions), wide(targets)))


@planted(bf16(4), bf16(4))
class hinge_loss_in_half:
    def faulty(scores, targets):
        return jnp.mean(wide(optax.hinge_loss(scores, targets)))  # fault: half-logits

    def clean(scores, targets):
        return jnp.mean(optax.hinge_loss(wide(scores), wide(targets)))


@planted(bf16(4, 8))
class log_of_softmax:
    def faulty(x):
        p = jax.nn.softmax(x)
        return -jnp.sum(jnp.log(p + 1e-6))  # fault: log-of-softmax

    def clean(x):
        return -jnp.sum(jax.nn.log_softmax(wide(x)))


@planted(bf16(4, 8))
class log_of_softmax_by_hand:
    def faulty(x):
        p = jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)
        return jnp.log(wide(p))  # fault: log-of-softmax

    def clean(x):
        return jax.nn.log_softmax(wide(x))


@planted(bf16(4))
class log_of_sigmoid:
    def faulty(x):
        return jnp.log(1 - jax.nn.sigmoid(x))  # fault: log-of-sigmoid

    def clean(x):
        return jax.nn.log_sigmoid(-wide(x))


@planted(bf16(4))
class log_of_a_negated_sigmoid:
    def faulty(x):
        return jnp.log1p(-jax.nn.sigmoid(x))  # fault: log-of-sigmoid

    def clean(x):
        return jnp.log1p(-jax.nn.sigmoid(wide(x)))


@planted(bf16(4, 8), ints(4))
class log_of_a_chosen_probability:
    def faulty(x, labels):
        p = jnp.sum(jax.nn.softmax(x) * jax.nn.one_hot(labels, 8, dtype=x.dtype), -1)
        return -jnp.log(p)  # fault: log-of-softmax

    def clean(x, labels):
        return -jnp.log(jnp.sum(jax.nn.softmax(wide(x)) * jax.nn.one_hot(labels, 8), -1))


@planted(f32(8, 8), bf16(4, 8))
class weight_cast_once_and_used_twice:
    def faulty(w, x):
        def loss(w):
            w = w.astype(x.dtype)  # fault: half-gradient
            return jnp.sum(wide(jnp.tanh(x @ w) @ w))

        return jax.grad(loss)(w)

    def clean(w, x):
        return jax.grad(lambda w: jnp.sum(wide(jnp.tanh(x @ half(w)) @ half(w))))(w)


@planted(f32(8, 8), bf16(4, 8))
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


@planted(bf16(8, 8), bf16(4, 8))
class half_weight_used_twice:
    def faulty(w, x):
        def loss(w):
            return jnp.sum(wide(jnp.tanh(x @ w) @ w))  # fault: half-gradient

        return jax.grad(loss)(w)

    def clean(w, x):
        return jax.grad(lambda w: jnp.sum(wide(jnp.tanh(x @ w))))(w)


@planted(f32(9, 8), ints(4, 8))
class looked_up_rows:
    def faulty(table, tokens):
        def loss(table):
            rows = table.astype(jnp.bfloat16)[tokens]  # fault: half-gradient
            return jnp.sum(wide(rows) ** 2)

        return jax.grad(loss)(table)

    def clean(table, tokens):
        return jax.grad(lambda table: jnp.sum(wide(half(table[tokens])) ** 2))(table)


@planted(f32(9, 8), ints(4))
class looked_up_positions:
    def faulty(table, positions):
        def loss(table):
            rows = jnp.take(table.astype(jnp.bfloat16), positions, axis=0)  # fault: half-gradient
            return jnp.sum(wide(rows) ** 2) + jnp.sum(table**2)

        return jax.grad(loss)(table)

    def clean(table, positions):
        def loss(table):
            rows = jnp.take(half(table), jnp.arange(4), axis=0)  # each row once
            return jnp.sum(wide(rows) ** 2) + jnp.sum(table**2)

        return jax.grad(loss)(table)


@planted(f32(8, 2), bf16(3, 4, 8))
class gradients_of_microbatches:
    def faulty(w, batches):
        def body(total, x):
            grads = jax.grad(lambda w: jnp.sum(wide(x @ w) ** 2))(half(w))
            return total + grads, None  # fault: half-gradient

        return lax.scan(body, jnp.zeros_like(w, jnp.bfloat16), batches)[0]

    def clean(w, batches):
        def body(total, x):
            grads = jax.grad(lambda w: jnp.sum(wide(x @ w) ** 2))(half(w))
            return total + wide(grads), None

        return lax.scan(body, jnp.zeros_like(w), batches)[0]


@planted(f16(4, 8))
class mask_of_minus_a_billion:
    def faulty(x):
        return jnp.where(x > 0, x, -1e9)  # fault: infinite-constant

    def clean(x):
        return jnp.where(x > 0, x, jnp.finfo(x.dtype).min)


@planted(bf16(4, 8))
class float32_minimum_in_bfloat16:
    def faulty(x):
        y = jnp.where(x > 0, jnp.sin(wide(x)), jnp.finfo(jnp.float32).min)
        return jnp.exp(y.astype(x.dtype))  # fault: infinite-constant

    def clean(x):
        return jnp.exp(jnp.where(x > 0, half(jnp.sin(wide(x))), jnp.finfo(x.dtype).min))


@planted(f16(4, 8))
class number_that_overflows_when_traced:
    def faulty(x):
        return x + 1e6  # fault: infinite-constant

    def clean(x):
        return x + jnp.where(x > 0, 0, -jnp.inf)  # meant


@planted(f16(8, 8))
class table_of_mask_values:
    def faulty(x):
        mask = np.where(np.tri(8), 0, -1e9).astype(np.float32)
        return x + jnp.asarray(mask).astype(x.dtype)  # fault: infinite-constant

    def clean(x):
        return x + np.where(np.tri(8), 0, -1e4).astype(x.dtype)


@planted(bf16(1, 8))
class all_reduce_in_half:
    def faulty(grads):
        return jax.vmap(lambda g: lax.psum(g, "data"), axis_name="data")(grads)  # fault: half-all-reduce

    def clean(grads):
        return jax.vmap(lambda g: half(lax.psum(wide(g), "data")), axis_name="data")(grads)


@planted(bf16(8), f32(3, 8))
class parameters_that_a_loop_updates:
    def faulty(w, xs):
        def step(w, x):
            grads = jax.grad(lambda w: jnp.sum(jnp.tanh(wide(w) * x)))(w)
            return w - 0.1 * grads, None  # fault: half-update

        return lax.scan(step, w, xs)[0]

    def clean(w, xs):
        def step(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(w * x)))(w), None

        return half(lax.scan(step, wide(w), xs)[0])


@planted(bf16(8), f32(3, 8))
class gradients_that_a_loop_adds_up:
    def faulty(w, xs):
        def add(total, x):
            grads = jax.grad(lambda w: jnp.sum(jnp.tanh(wide(w) * x)))(w)
            return total + grads, None  # fault: half-gradient

        return lax.scan(add, jnp.zeros(8, jnp.bfloat16), xs)[0]

    def clean(w, xs):
        def add(total, x):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(wide(w) * x)))(w).astype(jnp.float32), None

        return lax.scan(add, jnp.zeros(8), xs)[0]
