"""Steps from given gradients to new parameters: an optimizer, and a way to skip non-finite steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmp
from benchmarks._compiled import count_bytes
from benchmarks._programs import Program

ADAMW = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True)
class Update:
    """A way to update parameters.

    Attributes:
      name: what to call it.
      tx: the optimizer.
      dtype: of parameters and gradients.
      checked: whether a step whose gradients are not finite is skipped.
      step: `(tx, grads, opt_state, params) -> (params, opt_state)`.
    """

    name: str
    tx: optax.GradientTransformation
    dtype: Any
    checked: bool
    step: Callable[..., tuple[Any, Any]]

    def program(self, size: int) -> Program:
        """The jitted update of about `size` parameters, whose parameters and state are donated."""
        params = self.params(size)
        update = lambda params, opt_state, grads: self.step(self.tx, grads, opt_state, params)
        arguments = (params, jax.eval_shape(self.tx.init, params), params)
        # A step reads its parameters, in the model; here not all optimizers do, and JAX would drop the argument.
        return Program(jax.jit(update, donate_argnums=(0, 1), keep_unused=True), arguments)

    def params(self, size: int) -> dict[str, Any]:
        """About `size` parameters: four matrices, each with a vector."""
        width = round((size / 4) ** 0.5)
        shapes = {"w": (width, width), "b": (width,)}
        layer = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}
        return {f"layer{i}": layer for i in range(4)}

    def state_bytes(self, size: int) -> int:
        """The bytes of the optimizer's state for about `size` parameters."""
        return count_bytes(jax.eval_shape(self.tx.init, self.params(size)))

    def floor(self, size: int) -> int:
        """The bytes to access if each array is read once and written once.

        Parameters and state are both, gradients are read only; twice with a check, because before the last gradient
        is seen nothing may be written.
        """
        params = count_bytes(self.params(size))
        return 2 * (params + self.state_bytes(size)) + params * (2 if self.checked else 1)


def half_updates() -> list[Update]:
    """AdamW over bfloat16 parameters, in each way to keep its small updates, alone and with steps skipped."""
    half = functools.partial(Update, dtype=jnp.bfloat16, step=jmp.optim.step)
    updates = []
    for name, tx in half_optimizers().items():
        updates.append(half(name, tx, checked=False))
        updates.append(half(f"{name}, skip_nonfinite", jmp.optim.skip_nonfinite(tx), checked=True))
    return updates


def half_optimizers() -> dict[str, optax.GradientTransformation]:
    """Returns the updates for bfloat16 parameters, by name."""
    return {
        "adamw": ADAMW,
        "cast_state, float32 nu": jmp.optim.cast_state(ADAMW, nu_dtype="float32"),
        "master_weights, float32": jmp.optim.master_weights(ADAMW),
        "master_weights, split": jmp.optim.master_weights(ADAMW, mode="split"),
        "kahan": jmp.optim.kahan(ADAMW),
        "stochastic_rounding": jmp.optim.stochastic_rounding(ADAMW, jax.random.key(0)),
    }


def update_and_apply(tx: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """The two calls of every loop with optax."""
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
