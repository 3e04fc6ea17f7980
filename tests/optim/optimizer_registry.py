"""The optimizers that every law of `loss_scaled` is tested on, and a problem small enough to do it fast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_policy as jmp


def _labels(params):
    return {name: "matrix" if name == "w" else "rest" for name in params}


def _clipped_with_schedule():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "adamw_half_moments": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "clip_schedule": _clipped_with_schedule,
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 10)),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False, "frozen": None}),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-2)}, _labels),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "sgd_ema": lambda: optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
}


def params_of(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters with a negative zero, which a skipped step must not turn into a positive one, and a `None`."""
    w = jnp.array([[1.0, -0.0, 2.0], [-1.5, 0.0, 0.25]], dtype)
    return {"w": w, "b": jnp.array([-0.0, 0.5, -3.0], dtype), "frozen": None}


def grads_of(seed: int, bad: float | None = None, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random gradients, with one number of `b` replaced by `bad`."""
    rng = np.random.default_rng(seed)
    w, b = rng.normal(size=(2, 3)), rng.normal(size=3)
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


def _raw(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
