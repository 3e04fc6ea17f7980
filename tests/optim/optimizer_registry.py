"""The optimizers that every law of `loss_scaled` is tested on, and a problem small enough to do it fast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import jmp_policy as jmp


def _matrices(params):
    return jax.tree.map(lambda x: jnp.ndim(x) == 2, params)


def _vectors(params):
    return jax.tree.map(lambda x: jnp.ndim(x) < 2, params)


def _labels(params):
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) == 2 else "rest", params)


def _clipped_with_schedule():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "acprop": lambda: contrib.acprop(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adam": lambda: optax.adam(1e-2),
    "adamax": lambda: optax.adamax(1e-2),
    "adamaxw": lambda: optax.adamaxw(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "adamw_half_moments": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "adan": lambda: optax.adan(1e-2),
    "ademamix": lambda: contrib.ademamix(1e-2),
    "adopt": lambda: contrib.adopt(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "apply_every": lambda: optax.chain(optax.sgd(1e-2), optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(1e-2), max_consecutive_errors=2),
    "clip_schedule": _clipped_with_schedule,
    "cocob": lambda: contrib.cocob(),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(1e-2), lambda step: step < 2),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.ema(0.9), lambda step: step < 2),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(),
    "differentially_private_aggregate": lambda: optax.chain(
        contrib.differentially_private_aggregate(1.0, noise_multiplier=0.5, key=jax.random.key(0)), optax.sgd(1e-2)
    ),
    "dog": lambda: contrib.dog(),
    "dowg": lambda: contrib.dowg(),
    "ema": lambda: optax.chain(optax.sgd(1e-2), optax.ema(0.9)),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
    "galore": lambda: contrib.galore(1e-2, rank=1),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 10)),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "lion": lambda: optax.lion(1e-2),
    "lookahead": lambda: optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5),
    "madgrad": lambda: contrib.madgrad(1e-2),
    "masked": lambda: optax.masked(optax.adam(1e-2), _matrices),
    "mechanize": lambda: contrib.mechanize(optax.sgd(1e-2)),
    "momo": lambda: contrib.momo(),
    "momo_adam": lambda: contrib.momo_adam(),
    "muon": lambda: contrib.muon(1e-2),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "named_chain": lambda: optax.named_chain(("momentum", optax.trace(0.9)), ("rate", optax.scale(-1e-2))),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "novograd": lambda: optax.novograd(1e-2),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1e-2),
    "partition": lambda: optax.partition({"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-2)}, _labels),
    "prodigy": lambda: contrib.prodigy(),
    "quantize_state": lambda: jmp.optim.quantize_state(optax.adamw(1e-2)),
    "quantize_state_stochastic": lambda: jmp.optim.quantize_state(optax.lion(1e-3), stochastic=jax.random.key(0)),
    "radam": lambda: optax.radam(1e-2),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "rprop": lambda: optax.rprop(1e-2),
    "sam": lambda: contrib.sam(optax.adam(1e-2), optax.chain(contrib.normalize(), optax.sgd(1e-2))),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(2),
    "scale_by_distance_over_gradients": lambda: optax.scale_by_distance_over_gradients(),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(1e-2), 1e-2),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(1e-2),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(1e-2),
    "selective_transform": lambda: optax.selective_transform(optax.adam(1e-2), freeze_mask=_vectors(params_of())),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "signum": lambda: optax.signum(1e-2),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "sophia": lambda: contrib.sophia(1e-2),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(1e-2)),
    "yogi": lambda: optax.yogi(1e-2),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(1e-2)),
}


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


def _raw(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
