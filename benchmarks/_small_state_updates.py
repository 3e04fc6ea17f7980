"""AdamW with its moments in float32, bfloat16 and 8 bits: the optimizers, and one update of each."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmp
from benchmarks._optimizer_updates import ADAMW
from benchmarks._programs import Program


def small_state_optimizers() -> dict[str, optax.GradientTransformation]:
    """AdamW with moments of fewer and fewer bits, by name."""
    return {
        "adamw": ADAMW,
        "cast_state, bfloat16": jmp.optim.cast_state(ADAMW, mu_dtype="bfloat16", nu_dtype="bfloat16"),
        "quantize_state": jmp.optim.quantize_state(ADAMW),
        "quantize_state, stochastic": jmp.optim.quantize_state(ADAMW, stochastic=jax.random.key(0)),
    }


def describe_params(width: int, depth: int) -> dict[str, Any]:
    """Shapes of float32 parameters: square matrices, each with a vector."""
    shapes = {"w": (width, width), "b": (width,)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return {f"layer{index}": layer for index in range(depth)}


def update_program(tx: optax.GradientTransformation, params: Any) -> Program:
    """From gradients to updates, which take their place, as they do in a training step; the state is donated, too."""
    return Program(jax.jit(tx.update, donate_argnums=(0, 1)), (params, jax.eval_shape(tx.init, params), params))
