"""Whole training steps in half precision, from a batch to new parameters, of an MLP that is all parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp as deepmind_jmp
import optax
from flax import linen as nn
from flax.training.dynamic_scale import DynamicScale

import jmp_policy as jmp
from benchmarks import _peers
from benchmarks._by_hand import init_by_hand, step_by_hand
from benchmarks._loss import cross_entropy, cross_entropy_of
from benchmarks._optimizer_cost import count_bytes
from benchmarks._optimizer_updates import ADAMW, update_and_apply
from benchmarks._programs import Program

SCALE = 2.0**15
BATCH = 16

Step = Callable[..., tuple[Any, jax.Array]]


class MLP(nn.Module):
    """Square layers; `dtype` is for those who write it by hand."""

    width: int
    depth: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.dtype is None else x.astype(self.dtype)
        for _ in range(self.depth - 1):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(self.width, dtype=self.dtype)(x)


class Steps:
    """The steps of an MLP of about `size` parameters; none is ever made.

    Attributes:
      params: the shapes and dtypes of the parameters.
    """

    def __init__(self, size: int, policy: str = "mixed_float16", depth: int = 6):
        self._policy = jmp.get_policy(policy)
        self._width, self._depth = round((size / depth) ** 0.5), depth
        x = jax.ShapeDtypeStruct((BATCH, self._width), jnp.float32)
        self._batch = (x, jax.ShapeDtypeStruct((BATCH,), jnp.int32))
        self._policied = jmp.with_policy(MLP(self._width, depth), self._policy)
        self.params = jax.eval_shape(self._policied.init, jax.random.key(0), x)["params"]

    def floor(self, tx: optax.GradientTransformation = ADAMW) -> int:
        """The bytes to access if each array is written once and read once.

        Those are the parameters, the optimizer's state, gradients of the compute dtype, and copies of the parameters
        where that is another one. No step can do with that: the backward pass reads the copies again.
        """
        params, opt_state = count_bytes(self.params), count_bytes(jax.eval_shape(tx.init, self.params))
        narrow = count_bytes(jax.eval_shape(self._policy.cast_to_compute, self.params))
        copies = narrow if narrow != params else 0
        return 2 * (params + opt_state + copies + narrow)

    def unscaled(self, tx: optax.GradientTransformation = ADAMW) -> Program:
        """Without a loss scale."""
        create = lambda params: _peers.PlainState.create(apply_fn=None, params=params, tx=tx, variables={})
        return self._program(_peers.step_unscaled(self._by_hand()), create)

    def scaled_by_hand(self, copies: Any = None) -> Program:
        """With a loss scale and a `lax.cond`; or, of float16 copies, the cheapest step by hand that we know."""
        step = step_by_hand(cross_entropy_of(self._by_hand()), ADAMW, scaled=True, copies=copies)
        return self._program(step, lambda params: init_by_hand(params, {}, ADAMW))

    def ours(self, tx: optax.GradientTransformation, update: Callable[..., tuple[Any, Any]]) -> Program:
        """With `value_and_grad`, and an update `(tx, grads, opt_state, params) -> (params, opt_state)`."""

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, opt_state = state
            loss, grads = jmp.value_and_grad(self._loss, loss_scale=opt_state)(params, batch)
            return update(tx, grads, opt_state, params), loss

        return self._program(step, lambda params: (params, tx.init(params)))

    def minimized(self, tx: optax.GradientTransformation) -> Program:
        """With `optim.minimize`."""
        minimizing_step = jmp.optim.minimize(self._loss, tx)

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, opt_state, loss = minimizing_step(*state, batch)
            return (params, opt_state), loss

        return self._program(step, lambda params: (params, tx.init(params)))

    def with_jmp(self) -> Program:
        """With DeepMind's jmp: cast, unscale, select."""
        policy = deepmind_jmp.Policy(jnp.float32, self._policy.compute_dtype, self._policy.compute_dtype)
        create = lambda params: _peers.init_jmp(params, {}, ADAMW, scaled=True, scale=SCALE)
        return self._program(_peers.step_with_jmp(self._apply(None), ADAMW, policy), create)

    def with_dynamic_scale(self) -> Program:
        """With Flax's DynamicScale and a `where`."""

        def create(params: Any) -> _peers.FlaxState:
            scale = DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
            return _peers.FlaxState.create(apply_fn=None, params=params, tx=ADAMW, variables={}, dynamic_scale=scale)

        return self._program(_peers.step_with_dynamic_scale(self._by_hand()), create)

    def with_mpx(self) -> Program:
        """With mixed-precision-for-JAX. Raises ImportError where it is not installed."""
        create = lambda params: _peers.init_mpx(params, {}, ADAMW, SCALE)
        return self._program(_peers.step_with_mpx(self._by_hand(), ADAMW), create)

    def _program(self, step: Step, create: Callable[[Any], Any]) -> Program:
        return Program(jax.jit(step, donate_argnums=0), (jax.eval_shape(create, self.params), self._batch))

    def _by_hand(self) -> Callable[..., Any]:
        return self._apply(self._policy.compute_dtype)

    def _apply(self, dtype: Any) -> Callable[..., Any]:
        model = MLP(self._width, self._depth, dtype)
        return lambda params, variables, x: (model.apply({"params": params}, x), variables)

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        x, labels = batch
        return cross_entropy(self._policied.apply({"params": params}, x), labels)


def float16_steps() -> dict[str, Callable[[Steps], Program]]:
    """The contestants in float16, by name."""
    scaled = jmp.optim.loss_scaled(ADAMW, jmp.DynamicLossScale(SCALE))
    if_finite = optax.apply_if_finite(ADAMW, max_consecutive_errors=5)
    return {
        "no scale, no check": Steps.unscaled,
        "by hand, `lax.cond`": Steps.scaled_by_hand,
        "by hand, `lax.cond`, gradients of copies": lambda steps: steps.scaled_by_hand(copies=jnp.float16),
        "loss_scaled, `optim.minimize`": lambda steps: steps.minimized(scaled),
        "loss_scaled, value_and_grad + `optim.step`": lambda steps: steps.ours(scaled, jmp.optim.step),
        "loss_scaled, value_and_grad + update + apply": lambda steps: steps.ours(scaled, update_and_apply),
        "jmp": Steps.with_jmp,
        "mixed-precision-for-jax": Steps.with_mpx,
        "flax DynamicScale": Steps.with_dynamic_scale,
        "optax.apply_if_finite, no scale": lambda steps: steps.unscaled(if_finite),
    }


def bfloat16_steps() -> dict[str, Callable[[Steps], Program]]:
    """The contestants in bfloat16, which needs no scale, by name."""
    skipping = jmp.optim.skip_nonfinite(ADAMW)
    if_finite = optax.apply_if_finite(ADAMW, max_consecutive_errors=5)
    return {
        "no check": Steps.unscaled,
        "skip_nonfinite, `optim.minimize`": lambda steps: steps.minimized(skipping),
        "skip_nonfinite, value_and_grad + `optim.step`": lambda steps: steps.ours(skipping, jmp.optim.step),
        "optax.apply_if_finite": lambda steps: steps.unscaled(if_finite),
    }
