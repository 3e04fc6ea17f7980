"""Whole training steps in half precision, from a batch to new parameters, of an MLP that is all parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

import jmp_policy as jmp
from benchmarks import _peer_steps
from benchmarks._compiled import count_bytes
from benchmarks._loss import cross_entropy
from benchmarks._optimizer_updates import ADAMW, update_and_apply
from benchmarks._peer_problems import mlp
from benchmarks._peer_steps import SCALE as SCALE
from benchmarks._programs import Program


class Steps:
    """The steps of an MLP of about `size` parameters; none is ever made, unless they are asked to be `real`.

    Attributes:
      problem: the MLP, whose parameters have the dtype of the policy.
      params: the shapes and dtypes of the parameters, or the parameters.
      dtype: the compute dtype of the policy.
    """

    def __init__(self, size: int, policy: str = "mixed_float16", depth: int = 6, real: bool = False):
        self._policy = jmp.get_policy(policy)
        problem = mlp(round((size / depth) ** 0.5), depth, steps=int(real))
        cast = self._policy.cast_to_param
        self.params = cast(problem.params) if real else jax.eval_shape(cast, problem.params)
        self.problem = dataclasses.replace(problem, params=self.params)
        self.dtype = self._policy.compute_dtype

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
        return _peer_steps.unscaled(self.problem, self.dtype, tx)

    def minimized(self, tx: optax.GradientTransformation) -> Program:
        """With `optim.minimize`."""
        return _peer_steps.minimized(self.problem, self._policy, tx)

    def ours(self, tx: optax.GradientTransformation, update: Callable[..., tuple[Any, Any]]) -> Program:
        """With `value_and_grad`, and an update `(tx, grads, opt_state, params) -> (params, opt_state)`."""
        model = jmp.with_policy(self.problem.module(None), self._policy)
        loss_fn = lambda params, batch: cross_entropy(model.apply({"params": params}, batch[0]), batch[1])

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, opt_state = state
            loss, grads = jmp.value_and_grad(loss_fn, loss_scale=opt_state)(params, batch)
            return update(tx, grads, opt_state, params), loss

        return _peer_steps.make_program(self.problem, step, lambda params: (params, tx.init(params)))


def float16_steps() -> dict[str, Callable[[Steps], Program]]:
    """The contestants in float16, by name."""
    scaled = jmp.optim.loss_scaled(ADAMW, jmp.DynamicLossScale(SCALE))
    if_finite = optax.apply_if_finite(ADAMW, max_consecutive_errors=5)
    return {
        "no scale, no check": Steps.unscaled,
        "by hand, `lax.cond`": lambda steps: _peer_steps.scaled_by_hand(steps.problem, steps.dtype),
        "by hand, `lax.cond`, gradients of copies": lambda steps: _peer_steps.scaled_by_hand(
            steps.problem, steps.dtype, copies=steps.dtype
        ),
        "loss_scaled, `optim.minimize`": lambda steps: steps.minimized(scaled),
        "loss_scaled, value_and_grad + `optim.step`": lambda steps: steps.ours(scaled, jmp.optim.step),
        "loss_scaled, value_and_grad + update + apply": lambda steps: steps.ours(scaled, update_and_apply),
        "jmp": lambda steps: _peer_steps.with_jmp(steps.problem, steps.dtype),
        "mixed-precision-for-jax": lambda steps: _peer_steps.with_mpx(steps.problem, steps.dtype),
        "flax DynamicScale": lambda steps: _peer_steps.with_dynamic_scale(steps.problem, steps.dtype),
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
