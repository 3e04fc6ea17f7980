"""Float32 parameters behind half-precision ones: as copies, or as the bits that the half-precision ones lack."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..._base import PyTree, did_you_mean, is_half, join_float32, quote, round_to_half, split_float32
from .._steps import Transformation
from ._half_parameters import Storage, check_fits, half_parameters, map_half, no_memory, widen


class MasterWeightsState(NamedTuple):
    """The state of `master_weights`.

    Attributes:
      inner_state: the state of the wrapped transformation, which was initialised with float32 parameters.
      master: the float32 parameters, for each that is half precision.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> jmp.optim.master_weights(optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.float16)}).master
    {'w': Array([1., 1.], dtype=float32)}
    """

    inner_state: Any
    master: Any


class SplitWeightsState(NamedTuple):
    """The state of `master_weights(inner, mode="split")`.

    Attributes:
      inner_state: the state of the wrapped transformation, which was initialised with float32 parameters.
      remainder: the low 16 bits of the float32 parameters, uint16, for each that is bfloat16.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> jmp.optim.master_weights(optax.sgd(1.0), mode="split").init({"w": jnp.ones(2, jnp.bfloat16)}).remainder
    {'w': Array([0, 0], dtype=uint16)}
    """

    inner_state: Any
    remainder: Any


def master_weights(inner: Transformation, mode: str = "float32") -> optax.GradientTransformationExtraArgs:
    """Trains half-precision parameters as if they were float32.

    `inner` sees float32 gradients and parameters, keeps float32 moments, and never notices. Parameters of other dtypes
    are updated as `inner` would alone.

    With `"float32"` the state has a float32 copy, and every parameter is its copy rounded to nearest, bit for bit: 6
    bytes each, without moments. With `"split"` a bfloat16 parameter is the high half of a float32 number, rounded to
    nearest with ties away from zero, and the state has its low half: 4 bytes each, and exactly the same training.

    Float32 copies are what is trained: what else changes a parameter, a transformation after this one in a chain or a
    loop that clips weights, is undone by the next step. Put it into `inner`, or change both: `with_master_params`.

    It goes inside `loss_scaled` and around `optax.MultiSteps`, which then averages in float32. Use `optim.step`:
    with `update` and `optax.apply_updates`, a parameter that shrinks to less than about 2**-16 (float16: 2**-13) of
    itself in one step lands beside its target by a float32 rounding, and its float32 value moves there with it.

    Args:
      inner: the transformation to wrap.
      mode: `"float32"`, or `"split"` for bfloat16 parameters.

    Returns:
      A transformation whose state is a `MasterWeightsState`, or a `SplitWeightsState`.

    Raises:
      TypeError: `inner` is not an optax transformation.
      ValueError: the mode is unknown; `inner` holds a `loss_scaled`; at `init`, `"split"` finds a float16 parameter.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1; the split follows Split-SGD-BF16,
    Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.master_weights(optax.sgd(1.0), mode="split")
    >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> for _ in range(40):
    ...     params, state = jmp.optim.step(tx, {"w": jnp.array([1e-4, 0.0])}, state, params)
    >>> params["w"].tolist()
    [0.99609375, 1.0]
    """
    if mode not in _STORAGES:
        raise ValueError(f"Unknown mode {quote(mode)}. {did_you_mean(mode, _STORAGES)} For example: mode='split'.")
    return half_parameters(inner, _STORAGES[mode])


class _Copies(Storage):
    name = "master_weights"
    state_type = MasterWeightsState

    def init(self, params: PyTree) -> Any:
        return map_half(widen, params, otherwise=no_memory)

    def widen(self, params: PyTree, memory: PyTree) -> PyTree:
        check_fits(params, memory, "master weights")
        return map_half(lambda p, master: master, params, memory, otherwise=lambda p, _: p)

    def narrow(self, wide: PyTree, params: PyTree, memory: PyTree) -> tuple[PyTree, Any]:
        del memory
        narrowed = map_half(lambda p, w: round_to_half(w, p.dtype), params, wide, otherwise=lambda p, w: w)
        return narrowed, map_half(lambda p, w: w, params, wide, otherwise=no_memory)


class _Split(Storage):
    name = "master_weights"
    state_type = SplitWeightsState
    is_exact = True

    def init(self, params: PyTree) -> Any:
        for path, param in jax.tree_util.tree_leaves_with_path(params):
            if is_half(param) and param.dtype != jnp.bfloat16:
                raise ValueError(
                    f"mode='split' needs bfloat16 parameters, which are half of a float32, got {param.dtype} for "
                    f"{jax.tree_util.keystr(path) or 'the parameter'}. For float16: master_weights(inner)."
                )
        return map_half(lambda p: jnp.zeros_like(p, jnp.uint16), params, otherwise=no_memory)

    def widen(self, params: PyTree, memory: PyTree) -> PyTree:
        check_fits(params, memory, "remainders")
        return map_half(join_float32, params, memory, otherwise=lambda p, _: p)

    def narrow(self, wide: PyTree, params: PyTree, memory: PyTree) -> tuple[PyTree, Any]:
        del memory
        halves = map_half(lambda p, w: split_float32(w), params, wide, otherwise=lambda p, w: (w, no_memory()))
        narrowed = jax.tree.map(lambda p, pair: pair[0], params, halves)
        return narrowed, jax.tree.map(lambda p, pair: pair[1], params, halves)


COPIES: Storage = _Copies()
SPLIT: Storage = _Split()
_STORAGES = {"float32": COPIES, "split": SPLIT}
