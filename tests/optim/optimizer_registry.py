"""The optimizers that the laws of `loss_scaled` are tested on, and a problem small enough to do it fast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import jmp_policy as jmp
from jmp_policy import optim


def _labels(params):
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) == 2 else "rest", params)


def _clipped_with_schedule():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(1e-2), max_consecutive_errors=2),
    "clip_schedule": _clipped_with_schedule,
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(1e-2), lambda step: step < 2),
    "dog": lambda: contrib.dog(),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 10)),
    "lamb": lambda: optax.lamb(1e-2),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "lookahead": lambda: optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5),
    "masked": lambda: optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda x: jnp.ndim(x) == 2, params)),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "partition": lambda: optax.partition({"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-2)}, _labels),
    "quantize_state": lambda: optim.quantize_state(optax.lion(1e-3), stochastic=jax.random.key(0)),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
    "sam": lambda: contrib.sam(optax.adam(1e-2), optax.chain(contrib.normalize(), optax.sgd(1e-2))),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
}

METHODS = {
    "masters": optim.master_weights,
    "split": lambda inner: optim.master_weights(inner, mode="split"),
    "kahan": optim.kahan,
    "stochastic": lambda inner: optim.stochastic_rounding(inner, jax.random.key(0)),
}
"""The transformations for half-precision parameters."""

LARGE = 17 * 256
"""The length of a large leaf: from some 4,096 numbers on, XLA:CPU reduces them in another way, which can lose a nan.

These are whole blocks of `quantize_state`."""


def params_of(dtype: Any = jnp.float32) -> dict[str, Any]:
    """A small and a large leaf with negative zeros, which a skipped step must keep as they are, and a `None`."""
    w = jnp.array([[1.0, -0.0, 2.0], [-1.5, 0.0, 0.25]], dtype)
    return {"w": w, "b": jnp.resize(jnp.array([-0.0, 0.5, -3.0], dtype), LARGE), "frozen": None}


def grads_of(seed: int, bad: float | None = None, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random gradients, with one number of `b` replaced by `bad`."""
    rng = np.random.default_rng(seed)
    w, b = rng.normal(size=(2, 3)), rng.choice([-1.0, 1.0], LARGE) * rng.uniform(0.1, 2.0, LARGE)
    if bad is not None:
        b[1] = bad
    return {"w": jnp.asarray(w, dtype), "b": jnp.asarray(b, dtype), "frozen": None}


def bits(tree: Any) -> list[tuple[str, bytes]]:
    """What two trees must share to be the same: -0.0 is not +0.0, and nan is itself."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path), _raw(leaf).tobytes()) for path, leaf in leaves]


def types(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of a tree."""
    return [(jnp.shape(x), jnp.asarray(x).dtype) for x in jax.tree.leaves(tree)]


def by_step(tx: Any, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """One step by `optim.step`."""
    return jmp.optim.step(tx, grads, state, params, **extra)


def by_update(tx: Any, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
    """One step by `tx.update` and `optax.apply_updates`."""
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


WAYS = {"step": by_step, "update": by_update}


def _sum_of_squares(params: Any) -> jax.Array:
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params))


EXTRA: dict[str, Callable[[Any], dict[str, Any]]] = {
    "reduce_on_plateau": lambda grads: {"value": jnp.float32(1)},
    "lbfgs": lambda grads: {"value": jnp.float32(1), "grad": grads, "value_fn": _sum_of_squares},
}
"""The extra arguments of optimizers that need some."""


def start_all(txs: dict[str, Any]) -> dict[str, Any]:
    """The parameters and the state of each optimizer of the registry."""
    start = lambda name: optax.LookaheadParams.init_synced(params_of()) if name == "lookahead" else params_of()
    return {name: (start(name), tx.init(start(name))) for name, tx in txs.items()}


def step_all(txs: dict[str, Any], way: str, carries: dict[str, Any], grads: Any, **more: Any) -> dict[str, Any]:
    """One step of each optimizer, for a program of all of them."""
    extra = {name: EXTRA.get(name, lambda grads: {})(grads) | more for name in txs}
    run = lambda name: WAYS[way](txs[name], grads, carries[name][1], carries[name][0], **extra[name])
    return {name: run(name) for name in txs}


def _raw(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
