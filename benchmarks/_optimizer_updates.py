"""Steps from given gradients to new parameters: an optimizer, and a way to skip non-finite steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp as deepmind_jmp
import optax

import jmp_policy as jmp
from benchmarks._optimizer_cost import count_bytes
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


def float32_updates() -> list[Update]:
    """AdamW over float32 parameters: alone, with our wrappers, and with wrappers of other libraries."""
    scaled = jmp.optim.loss_scaled(ADAMW, jmp.DynamicLossScale())
    skipping = jmp.optim.skip_nonfinite(ADAMW)
    if_finite = optax.apply_if_finite(ADAMW, max_consecutive_errors=5)
    peers = [
        ("optax.apply_if_finite", if_finite, update_and_apply),
        ("jmp: all_finite, select_tree", ADAMW, _jmp_select),
        ("flax: is_finite, where", ADAMW, _flax_where),
        *_mpx(),
    ]
    return [
        Update("adamw", ADAMW, jnp.float32, False, update_and_apply),
        Update("loss_scaled, `optim.step`", scaled, jnp.float32, True, jmp.optim.step),
        Update("loss_scaled, update + apply", scaled, jnp.float32, True, update_and_apply),
        Update("skip_nonfinite, `optim.step`", skipping, jnp.float32, True, jmp.optim.step),
        Update("skip_nonfinite, update + apply", skipping, jnp.float32, True, update_and_apply),
        *(Update(name, tx, jnp.float32, True, step) for name, tx, step in peers),
    ]


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


def _jmp_select(tx: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    stepped = update_and_apply(tx, grads, opt_state, params)
    return deepmind_jmp.select_tree(deepmind_jmp.all_finite(grads), stepped, (params, opt_state))


def _flax_where(tx: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """The check inside of `DynamicScale.value_and_grad`, and the `where` that Flax's examples do with its result."""
    finite = jnp.array(True)
    for grad in jax.tree.leaves(grads):
        finite &= jnp.all(jax.lax.is_finite(grad))
    stepped = update_and_apply(tx, grads, opt_state, params)
    return jax.tree.map(functools.partial(jnp.where, finite), stepped, (params, opt_state))


def _mpx() -> list[tuple[str, optax.GradientTransformation, Callable[..., tuple[Any, Any]]]]:
    try:
        import mpx
    except ImportError:
        return []

    def step(tx: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        return mpx.optimizer_update(params, tx, opt_state, grads, mpx.all_finite(grads))

    return [("mixed-precision-for-jax", ADAMW, step)]
