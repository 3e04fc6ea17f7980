"""Ways to train, the state of a run in each, and what each saver gives back of it."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization

import jmp_policy as jmp
from jmp_policy.optim import kahan, loss_scaled, master_weights, skip_nonfinite, stochastic_rounding


@dataclasses.dataclass(frozen=True)
class Run:
    """A way to train: the policy, and the optimizer around Adam."""

    policy: str
    wrap: Callable[[Any], Any]

    @property
    def tx(self) -> Any:
        return self.wrap(optax.adamw(1e-3))

    @property
    def dtype(self) -> Any:
        return jmp.get_policy(self.policy).param_dtype


SCALE = jmp.DynamicLossScale(2.0**12, period=50)
RUNS = {
    "float32": Run("float32", lambda tx: tx),
    "mixed_float16": Run("mixed_float16", lambda tx: loss_scaled(tx, SCALE)),
    "static": Run("mixed_float16", lambda tx: loss_scaled(tx, jmp.StaticLossScale(64.0))),
    "bfloat16": Run("bfloat16", lambda tx: tx),
    "masters": Run("bfloat16", lambda tx: skip_nonfinite(master_weights(tx))),
    "masters_float16": Run("float16", lambda tx: loss_scaled(master_weights(tx), SCALE)),
    "split": Run("bfloat16", lambda tx: master_weights(tx, mode="split")),
    "kahan": Run("bfloat16", lambda tx: skip_nonfinite(kahan(tx))),
    "stochastic": Run("bfloat16", lambda tx: stochastic_rounding(tx, jax.random.key(3))),
}


def save_with_orbax(state: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(Path(folder) / "state")


def save_with_msgpack(state: Any) -> Any:
    return serialization.msgpack_restore(serialization.to_bytes(state))


SAVERS = {"structure": lambda state: state, "orbax": save_with_orbax, "msgpack": save_with_msgpack}


def make_state(run: Run, wide: Any, saved_under: Run | None = None) -> dict[str, Any]:
    """The state of a run whose parameters have these float32 values, and whose moments and counters are not zero.

    Args:
      run: the way to train.
      wide: the exact values of the parameters.
      saved_under: what the state was converted from: it has the numbers that this run had, and no others.
    """
    params = jmp.cast_floating(wide, run.dtype)
    opt_state = run.tx.init(params)
    if _is_half(opt_state):
        params, opt_state = jmp.optim.with_master_params(opt_state, params, wide)
    numbers = dict(_NUMBERS)
    source = run if saved_under is None else saved_under
    saved = source.tx.init(jmp.cast_floating(wide, source.dtype))
    if not _has(saved, jmp.optim.LossScaledState):
        del numbers["skipped_steps"], numbers["consecutive_skips"]
    if not _has(saved, jmp.DynamicLossScale):
        del numbers["loss_scale"], numbers["counter"]
    has_half_moments = saved_under is not None and saved_under.policy == "bfloat16" and not _is_half(saved)
    rounded = "bfloat16" if has_half_moments else "float32"

    def move(path: Any, leaf: jax.Array) -> jax.Array:
        names = [getattr(key, "name", getattr(key, "key", "")) for key in path]
        if {"mu", "nu"} & set(names):
            moments = (jnp.arange(leaf.size, dtype=jnp.float32) / 7 + 0.1).reshape(leaf.shape)
            return moments.astype(rounded).astype(leaf.dtype)
        return jnp.full_like(leaf, numbers[names[-1]]) if names[-1] in numbers else leaf

    return {"params": params, "opt_state": jax.tree_util.tree_map_with_path(move, opt_state)}


def fresh_state(run: Run, like: Any) -> dict[str, Any]:
    """The state of a run that begins, with parameters of its own."""
    params = jax.tree.map(lambda x: jnp.ones(x.shape, run.dtype), like)
    return {"params": params, "opt_state": run.tx.init(params)}


def random_params() -> Any:
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    return {"dense": {"kernel": draw(2, 3), "bias": draw(2, 3)}, "value": {"kernel": draw(2, 3)}}


def assert_same(one: Any, other: Any) -> None:
    """Structures, classes, dtypes and every bit are the same."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(_bits(a), _bits(b), strict=True), one, other)


_HALF = ("MasterWeightsState", "SplitWeightsState", "KahanState", "StochasticRoundingState")
_NUMBERS = {"count": 7, "skipped_steps": 3, "consecutive_skips": 1, "loss_scale": 1024.0, "counter": 5}


def _is_half(opt_state: Any) -> bool:
    return any(_has(opt_state, getattr(jmp.optim, name)) for name in _HALF)


def _has(tree: Any, kind: type) -> bool:
    return any(isinstance(x, kind) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)))


def _bits(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    x = np.asarray(jax.random.key_data(x) if is_key else x)
    return x.view(np.uint16) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x
