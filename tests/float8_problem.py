"""A problem with float8 state among its variables, small enough to try every way to train it.

Its loss is linear in the outputs of its layer, so that their gradients are numbers of the batch, whatever a program
makes of the rest: amax histories can be compared bit for bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy import quant

STATE = "_overwrite_with_gradient"
FORMAT = "float8/4(min_size=0)"


def variables_of(quantization: str = FORMAT, seed: int = 0) -> dict[str, Any]:
    """Weights and state of the layers `used` and `idle`, which never runs; histories are full already."""
    layers = {name: filled(quant.float8_state(quantization), seed + i) for i, name in enumerate(("used", "idle"))}
    w = {name: jax.random.normal(jax.random.key(seed + i), (16, 16)) for i, name in enumerate(layers)}
    return {"params": w, STATE: layers}


def filled(state: dict[str, jax.Array], seed: int) -> dict[str, jax.Array]:
    """State of a layer that ran before, so that nothing in it is a number that could come about otherwise."""
    numbers = np.random.default_rng(seed)
    return {name: jnp.asarray(numbers.uniform(1.0, 2.0, x.shape), jnp.float32) for name, x in state.items()}


def batch_of(seed: int, size: int = 16) -> dict[str, jax.Array]:
    """Inputs, and what each output counts in the loss."""
    numbers = np.random.default_rng(seed)
    return {name: jnp.asarray(numbers.normal(size=(size, 16)), jnp.float32) for name in ("x", "count")}


def loss_fn(variables: Any, batch: Any, quantization: str = FORMAT) -> jax.Array:
    """A real scalar: what one product in float8 amounts to."""
    w, state = variables["params"]["used"], variables[STATE]["used"]
    out = quant.dot_general(batch["x"], w, (((1,), (0,)), ((), ())), quantization=quantization, state=state)
    return jnp.sum(out * batch["count"])


def joined(*batches: Any) -> Any:
    """Batches as one."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *batches)


def stacked(*trees: Any) -> Any:
    """Trees as one with a further axis."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def state_after(variables: Any, batch: Any, quantization: str = FORMAT) -> Any:
    """The state that one step on a batch leads to, by hand: of true gradients, and with what did not run as it was."""
    fresh = _gradient(variables, batch, quantization)[STATE]
    return fresh | {"idle": variables[STATE]["idle"]}


def assert_same(tree: Any, expected: Any) -> None:
    """Asserts that two trees are the same in every bit but the sign of zero."""
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


# LLVM's optimizations, on which nothing here depends, would take most of the time.
compiled: Any = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_gradient = compiled(jax.grad(loss_fn), static_argnums=2)
