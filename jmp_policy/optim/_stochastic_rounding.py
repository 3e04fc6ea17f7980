"""Optimizers of half-precision parameters that round at random, or compensate rounding."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from .._base import (
    PyTree,
    check_axes,
    complete_spec,
    is_half,
    list_axes,
    round_as_float32,
    round_stochastically,
    round_to_half,
    spread_specs,
)
from ._half_parameters import Storage, half_parameters, pair_storage, widen, widen_half
from ._transformation import Transformation


class KahanState(NamedTuple):
    """State of `kahan`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      compensation: the rounding error of each half-precision parameter, to be added to it, in its dtype.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.kahan(optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.bfloat16)})
    >>> state.compensation["w"].dtype, state.compensation["w"].tolist()
    (dtype(bfloat16), [0.0, 0.0])
    """

    KEEPS_SMALL_UPDATES = True
    inner_state: Any
    compensation: Any


def kahan(inner: Transformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the rounding errors of half-precision parameters, in as many bytes as the parameters.

    A parameter and its compensation together have about 16 significant bits in bfloat16 (22 in float16): updates that
    are too small to move the parameter add up. `inner` sees the sum of the two, and gradients, as float32, and its
    state has float32 moments. Parameters of other dtypes are updated as by `inner` alone.

    It goes inside `loss_scaled` and around `optax.MultiSteps`.

    Args:
      inner: the transformation to wrap.

    Returns:
      A transformation whose state is a `KahanState`.

    Raises:
      TypeError: `inner` is not an optax transformation.
      ValueError: `inner` holds a `loss_scaled`.

    Source: Kahan, Further remarks on reducing truncation errors, 1965; Zamirai et al., Revisiting BFloat16 Training,
    2020.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.kahan(optax.sgd(1.0))
    >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> for _ in range(40):
    ...     params, state = jmp.optim.step(tx, {"w": jnp.array([1e-4, 0.0])}, state, params)
    >>> params["w"].tolist()
    [0.99609375, 1.0]
    """
    return half_parameters(inner, COMPENSATED)


def _compensate(wide: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    lost = wide - round_as_float32(wide, dtype)
    return round_to_half(wide, dtype), jnp.where(jnp.isfinite(lost), lost, 0.0).astype(dtype)


COMPENSATED = pair_storage(
    "kahan", KahanState, "compensations", jnp.zeros_like, lambda p, c: widen(p) + widen(c), _compensate
)


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      key: the data of the random key for the next step, uint32.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> jmp.optim.stochastic_rounding(optax.sgd(1.0), jax.random.key(3)).init({"w": jnp.ones(2, jnp.bfloat16)}).key
    Array([0, 3], dtype=uint32)
    """

    KEEPS_SMALL_UPDATES = True
    inner_state: Any
    key: jax.Array


def stochastic_rounding(
    inner: Transformation, key: jax.Array, *, specs: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Rounds half-precision parameters to one of their two neighbors; the nearer one is more likely.

    The average over many roundings is the float32 result, so updates that rounding to nearest would lose add up,
    without any memory beside the parameters. `inner` sees parameters and gradients as float32, and its state has
    float32 moments; `optim.cast_state` stores them in fewer bytes.

    The result depends on the key alone. Under `jit` it has the same bits on any mesh, and also in `jax.shard_map` with
    `specs`, where each device takes its shard of the noise of the whole array. Without `specs`, replicated parameters
    are rounded alike on all devices, and shards independently (with `check_vma=False`, shards with equal values are
    rounded alike too).

    It goes inside `loss_scaled` and around `optax.MultiSteps`. Parameters of other dtypes are updated as by `inner`
    alone.

    Args:
      inner: the transformation to wrap.
      key: a random key, `jax.random.key(seed)`.
      specs: for steps in `jax.shard_map`, a `jax.P` for each parameter or subtree, as in its `in_specs`.

    Returns:
      A transformation whose state is a `StochasticRoundingState`.

    Raises:
      TypeError: `inner` is not an optax transformation, `key` is not one random key, or a leaf of `specs` is not a
        spec.
      ValueError: `inner` holds a `loss_scaled`; or in a step, `specs` does not fit the parameters, or names an axis
        that is not mapped.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015; Zamirai et al., Revisiting BFloat16
    Training, 2020.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    >>> params = {"w": jnp.ones(10_000, jnp.bfloat16)}
    >>> params, _ = jmp.optim.step(tx, {"w": jnp.full(10_000, 1e-3)}, tx.init(params), params)
    >>> sorted(set(params["w"].tolist())), abs(float(params["w"].astype(jnp.float32).mean()) - 0.999) < 1e-4
    ([0.99609375, 1.0], True)
    """
    return half_parameters(inner, _build_storage(check_key(key), specs))


def _build_storage(key: jax.Array, specs: Any) -> Storage:
    """Builds a storage whose memory is the data of the random key for the next step."""
    data, implementation = jax.random.key_data(key), jax.random.key_impl(key)

    def encode(wide: PyTree, params: PyTree, memory: PyTree) -> tuple[PyTree, Any]:
        key, of_step = jax.random.split(jax.random.wrap_key_data(memory, impl=implementation))
        leaves, structure = jax.tree.flatten(params)
        # As operands of equal kernels, which XLA compiles once for all leaves of a shape.
        keys = lax.optimization_barrier([*jax.random.split(of_step, len(leaves))])
        each = [None] * len(leaves) if specs is None else spread_specs(specs, params)
        rows = zip(leaves, structure.flatten_up_to(wide), keys, each, strict=True)
        narrowed = [_round_parameter(p, w, k, spec) if is_half(p) else w for p, w, k, spec in rows]
        return structure.unflatten(narrowed), jax.random.key_data(key)

    return Storage(
        "stochastic_rounding",
        StochasticRoundingState,
        init=lambda params: jnp.array(data),  # a copy, since a state may be donated
        decode=lambda params, memory: widen_half(params),
        encode=encode,
    )


def _round_parameter(param: jax.Array, wide: jax.Array, key: jax.Array, spec: Any) -> jax.Array:
    if spec is None:
        noise = jax.random.bits(fold_in_devices(key, wide), wide.shape, jnp.uint16)
    else:
        noise = _draw_part(key, wide.shape, complete_spec(spec, wide.ndim, "specs"))
    return round_stochastically(wide, param.dtype, noise)


def fold_in_devices(key: jax.Array, x: jax.Array) -> jax.Array:
    """Makes the key different on devices along the axes of `jax.shard_map` that split an array."""
    for axis in sorted(jax.typeof(x).manual_axis_type.varying):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def _draw_part(key: jax.Array, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
    """Returns this device's shard of the noise of a whole array. `shape` is the shape of the shard."""
    splits = [tuple(axis for axis in list_axes(entry) if axis is not None) for entry in spec]
    check_axes(tuple(axis for axes in splits for axis in axes), "the specs of stochastic_rounding")
    counts = [math.prod(lax.axis_size(axis) for axis in axes) for axes in splits]
    noise = jax.random.bits(key, [count * length for count, length in zip(counts, shape, strict=True)], jnp.uint16)
    starts = [lax.axis_index(axes) * length if axes else 0 for axes, length in zip(splits, shape, strict=True)]
    return lax.dynamic_slice(noise, starts, shape)


def check_key(key: Any, name: str = "key") -> jax.Array:
    """Returns one random key, also from the uint32 array of `jax.random.PRNGKey`. Anything else is a `TypeError`."""
    is_array = isinstance(key, jax.Array)
    if is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if is_array and key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(key)
    got = f"{jax.typeof(key)}" if is_array else repr(key)
    raise TypeError(f"{name} must be one random key, got {got}. For example: jax.random.key(0).")
