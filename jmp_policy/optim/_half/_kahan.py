"""Compensated summation: what rounding took from a parameter is added to its next update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._base import PyTree, round_as_float32, round_to_half
from .._steps import Transformation
from ._half_parameters import Storage, check_fits, half_parameters, map_half, no_memory, widen


class KahanState(NamedTuple):
    """The state of `kahan`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      compensation: what to add to a half-precision parameter to get nearer to its true value, in its dtype.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.kahan(optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.bfloat16)})
    >>> state.compensation["w"].dtype, state.compensation["w"].tolist()
    (dtype(bfloat16), [0.0, 0.0])
    """

    inner_state: Any
    compensation: Any


def kahan(inner: Transformation) -> optax.GradientTransformationExtraArgs:
    """Keeps what rounding takes from half-precision parameters, in as many bytes as they have.

    A parameter and its compensation together have about 16 significant bits in bfloat16 (22 in float16, above its
    smallest numbers): updates that each are too small to move the parameter add up. `inner` sees the sum of the two,
    and gradients, as float32, and its state has float32 moments; `optim.cast_state` stores them in fewer bytes.

    It goes inside `loss_scaled` and around `optax.MultiSteps`. Parameters of other dtypes are updated as `inner`
    would alone.

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


class _Compensated(Storage):
    name = "kahan"
    state_type = KahanState

    def init(self, params: PyTree) -> Any:
        return map_half(jnp.zeros_like, params, otherwise=no_memory)

    def widen(self, params: PyTree, memory: PyTree) -> PyTree:
        check_fits(params, memory, "compensations")
        return map_half(lambda p, c: widen(p) + widen(c), params, memory, otherwise=lambda p, _: p)

    def narrow(self, wide: PyTree, params: PyTree, memory: PyTree) -> tuple[PyTree, Any]:
        del memory
        narrowed = map_half(lambda p, w: round_to_half(w, p.dtype), params, wide, otherwise=lambda p, w: w)
        return narrowed, map_half(_compensation, params, wide, otherwise=no_memory)


def _compensation(param: jax.Array, wide: jax.Array) -> jax.Array:
    lost = wide - round_as_float32(wide, param.dtype)
    return jnp.where(jnp.isfinite(lost), lost, 0.0).astype(param.dtype)


COMPENSATED: Storage = _Compensated()
