"""`cast_state`: dtypes for the moments of an optimizer, by role."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._base import DTypeLike, PyTree, cast_floating, did_you_mean, is_half, parse_dtype, quote, round_stochastically
from ._half_parameters import widen_half
from ._moment_blocks import make_thresholds, number_positions
from ._moment_codes import MU, NU, find_step, has_moments, map_moments, roles_of
from ._step import keep_dtypes
from ._transformation import Transformation, check_not_outermost, check_transformation, with_extra_args

Rounding = Literal["nearest", "dither"]


def cast_state(
    inner: Transformation,
    *,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
    rounding: Rounding = "nearest",
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of any optimizer in given dtypes.

    For example, Adam's second moments in float32 under bfloat16 parameters, or momentum in bfloat16 under float32
    parameters. The optimizer computes with float32 moments, gradients and parameters in any case, its updates are
    float32, and all stored dtypes stay the same after each step.

    A bfloat16 second moment does not change if its change is less than 1/512 per step. An average over 500 steps or
    more (`b2=0.998`) decays by at most 1/500, so it grows and hardly decays again. Keep it in float32, or round by
    `"dither"`: 1,500 steps after gradients shrank to a tenth, updates are then within 5 % of updates with a
    float32 moment. With rounding to nearest, they are 0.47 times as large.

    The state is the state of `inner`. It goes next to the optimizer, inside all other transformations of
    `jmp_policy.optim`.

    Args:
      inner: the transformation to wrap.
      mu_dtype: a floating dtype for averages of gradients: `mu` of adam and lion, the trace of momentum. `None` keeps
        their dtype.
      nu_dtype: a floating dtype for averages of squares: `nu` of adam, the factors of adafactor.
      rounding: `"nearest"`, or `"dither"`, which rounds half-precision moments up or down by a threshold that differs
        for each element and changes in each step, so that small changes add up. It needs no key and repeats exactly.
        In `jax.shard_map` the thresholds are those of the shard's own positions.

    Raises:
      TypeError: `inner` is not an optax transformation.
      ValueError: no dtype is given, or one is not a floating dtype of 16 bits or more; `rounding` is unknown; `inner`
        is a transformation of `jmp_policy.optim` that goes outside; at `init`, `inner` has no such moments, or has no
        `count` of steps to dither by.

    Source: Weyl, Über die Gleichverteilung von Zahlen mod. Eins, 1916 (thresholds that are multiples of the golden
    ratio, modulo 1).

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.cast_state(optax.adamw(1e-3), mu_dtype="bfloat16", nu_dtype="float32")
    >>> state = tx.init({"w": jnp.ones(2, jnp.float16)})
    >>> state[0].mu["w"].dtype, state[0].nu["w"].dtype
    (dtype(bfloat16), dtype('float32'))
    """
    check_transformation(inner)
    check_not_outermost(inner, "cast_state")
    given = {MU: mu_dtype, NU: nu_dtype}
    dtypes = {role: _moment_dtype(dtype, role) for role, dtype in given.items() if dtype is not None}
    if not dtypes:
        raise ValueError("cast_state needs a dtype. For example: cast_state(optax.adamw(1e-3), nu_dtype='float32').")
    if rounding not in get_args(Rounding):
        hint = did_you_mean(rounding, get_args(Rounding))
        raise ValueError(f"Unknown rounding {quote(rounding)}. {hint} For example: rounding='dither'.")
    update_inner = with_extra_args(inner).update

    def init(params: PyTree) -> Any:
        state = inner.init(params)
        _check_roles(state, dtypes)
        if rounding == "dither" and find_step(state) is None:
            raise ValueError(
                "rounding='dither' changes by the count of steps, and the state of this optimizer has no integer "
                "'count'. For example: cast_state(optax.adamw(1e-3), nu_dtype='bfloat16', rounding='dither')."
            )
        return map_moments(lambda role, x: cast_floating(x, dtypes[role]) if role in dtypes else x, state)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        wide = map_moments(lambda _, moments: widen_half(moments), state)
        updates, new_state = update_inner(widen_half(updates), wide, widen_half(params), **extra)
        if rounding == "dither":
            new_state = _dither(state, new_state)
        return updates, keep_dtypes(state, new_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _moment_dtype(dtype: DTypeLike, role: str) -> np.dtype:
    parsed = parse_dtype(dtype, where=f" for {role}_dtype")
    if parsed.itemsize < 2:
        raise ValueError(
            f"{role}_dtype must have 16 bits or more, got {parsed.name!r}: moments in a narrower format need scales, "
            f"which quantize_state stores. For example: {role}_dtype='bfloat16'."
        )
    return parsed


def _dither(old: PyTree, new: PyTree) -> Any:
    """Rounds float32 leaves of a new state to the half precision of the old one."""
    leaves, structure = jax.tree.flatten(old)
    step = find_step(old)
    assert step is not None, "init has checked it"

    def narrow(i: int, x: Any, like: Any) -> Any:
        if not is_half(like) or x.dtype != jnp.float32:
            return x
        return round_stochastically(x, like.dtype, make_thresholds(number_positions(x.shape), step, i))

    rows = zip(structure.flatten_up_to(new), leaves, strict=True)
    return structure.unflatten([narrow(i, x, like) for i, (x, like) in enumerate(rows)])


def _check_roles(state: PyTree, dtypes: dict[str, np.dtype]) -> None:
    nodes = [node for node in jax.tree.leaves(state, is_leaf=has_moments) if has_moments(node)]
    kinds = {(type(node).__name__, name, role) for node in nodes for name, role in roles_of(node).items()}
    found = sorted(f"{kind}.{name} ({role}_dtype)" for kind, name, role in kinds)
    for role in dtypes:
        if not any(role in roles_of(node).values() for node in nodes):
            raise ValueError(
                f"{role}_dtype is for moments that this optimizer does not have. It has {', '.join(found) or 'none'}. "
                "For example: cast_state(optax.adamw(1e-3), nu_dtype='float32')."
            )
