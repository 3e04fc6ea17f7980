"""Float32 master values of half-precision parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._base import PyTree, cast_floating, did_you_mean, join_float32, quote, round_to_half, split_float32
from ..loss_scale import strip_variables
from ._half_parameters import check_fits, half_parameters, map_half, pair_storage, widen, widen_half
from ._stochastic_rounding import COMPENSATED, KahanState, StochasticRoundingState
from ._transformation import Transformation


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      inner_state: the state of the wrapped transformation, initialized with float32 parameters.
      master: the float32 values of half-precision parameters.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> jmp.optim.master_weights(optax.sgd(1.0)).init({"w": jnp.ones(2, jnp.float16)}).master
    {'w': Array([1., 1.], dtype=float32)}
    """

    KEEPS_SMALL_UPDATES = True
    inner_state: Any
    master: Any


class SplitWeightsState(NamedTuple):
    """State of `master_weights(inner, mode="split")`.

    Attributes:
      inner_state: the state of the wrapped transformation, initialized with float32 parameters.
      remainder: the low 16 bits of the float32 values of bfloat16 parameters, uint16.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> jmp.optim.master_weights(optax.sgd(1.0), mode="split").init({"w": jnp.ones(2, jnp.bfloat16)}).remainder
    {'w': Array([0, 0], dtype=uint16)}
    """

    KEEPS_SMALL_UPDATES = True
    inner_state: Any
    remainder: Any


def master_weights(inner: Transformation, mode: str = "float32") -> optax.GradientTransformationExtraArgs:
    """Trains half-precision parameters like float32 parameters.

    `inner` sees float32 gradients and parameters, and keeps float32 moments. Parameters of other dtypes are updated as
    by `inner` alone.

    With `"float32"` the state has a float32 copy, and every parameter is its copy rounded to nearest: 6 bytes per
    parameter, without moments. With `"split"` a bfloat16 parameter is the high half of a float32 number, rounded to
    nearest with ties away from zero, and the state has the low half: 4 bytes per parameter, and exactly the same
    training.

    Float32 copies are trained. The next step reverts any other change of a parameter, by a later transformation in a
    chain or by a loop that clips weights; with `"split"` the parameter keeps it, with the low half of its old value. Do
    it in `inner`, or change both with `with_master_params`.

    It goes inside `loss_scaled` and around `optax.MultiSteps`, which then averages in float32. Use `optim.step`: with
    `update` and `optax.apply_updates`, a parameter that shrinks to a small fraction of itself in one step (`2**-16`;
    float16: `2**-13`) misses its target by a float32 rounding.

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


COPIES = pair_storage(
    "master_weights",
    MasterWeightsState,
    "master weights",
    begin=widen,
    join=lambda param, master: master,
    split=lambda wide, dtype: (round_to_half(wide, dtype), wide),
)
SPLIT = pair_storage(
    "master_weights",
    SplitWeightsState,
    "remainders",
    begin=lambda param: jnp.zeros_like(param, jnp.uint16),
    join=join_float32,
    split=lambda wide, dtype: split_float32(wide),
    dtypes=(jnp.bfloat16,),
    is_exact=True,
)
_STORAGES = {"float32": COPIES, "split": SPLIT}
_STORAGE_OF_STATE = {MasterWeightsState: COPIES, SplitWeightsState: SPLIT, KahanState: COMPENSATED}


def master_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the float32 values of half-precision parameters, for evaluation or export.

    These are the copies of `master_weights`, its two joined halves with `mode="split"`, or parameter plus compensation
    of `kahan`. Without masters, the parameter itself is upcast: under `stochastic_rounding` or any other
    optimizer, and for parameters that the optimizer does not train (`optax.masked`). Float32 parameters are returned
    as they are, so that the code of an average or of a checkpoint does not depend on the policy.

    Args:
      opt_state: a tree that holds at most one state of these transformations: an optax state, a `TrainState`, an
        `nnx.Optimizer`.
      params: the parameters that belong to it; for an nnx model `nnx.state(model, nnx.Param)`.

    Returns:
      A tree like `params`, with float32 in place of half precision. Float32 masters are the arrays of the state itself:
      a step to which the state is donated deletes them.

    Raises:
      ValueError: `opt_state` holds several of the states; `params` do not fit it, or hold such a state.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.kahan(optax.sgd(1.0))
    >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> params, opt_state = jmp.optim.step(tx, {"w": jnp.array([2.0**-10, 0.0])}, tx.init(params), params)
    >>> params["w"].tolist(), jmp.optim.master_params(opt_state, params)["w"].tolist()
    ([1.0, 1.0], [0.9990234375, 1.0])
    """
    state, plain = strip_variables((_find_state(opt_state, params), params))
    if state is None or isinstance(state, StochasticRoundingState):
        wide = widen_half(plain)
    else:
        trained = _trained(state, plain)
        wide = _or_else(_STORAGE_OF_STATE[type(state)].decode(trained, state[1]), widen_half(plain))
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(wide))


def with_master_params(opt_state: PyTree, params: PyTree, master: PyTree) -> tuple[PyTree, PyTree]:
    """Returns half-precision parameters and their state for given float32 values.

    The inverse of `master_params`. `master_weights` keeps every bit, `kahan` as much as two half-precision numbers can
    hold; `stochastic_rounding` rounds to nearest. In nnx, pass the results of `nnx.as_pure`, and write back with
    `nnx.update(model, params)` and `nnx.update(optimizer.opt_state, nnx.state(opt_state))`.

    Args:
      opt_state: a tree that holds at most one state of these transformations, for example `tx.init(params)`. Without
        one it is returned as it is.
      params: parameters with the dtypes of the results.
      master: a tree like `params` of the values, float32 in place of half precision.

    Returns:
      `(params, opt_state)`.

    Raises:
      ValueError: `opt_state` holds several of the states; `params` or `master` do not fit it.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.master_weights(optax.sgd(1.0), mode="split")
    >>> wide = {"w": jnp.float32([0.1])}
    >>> params = jmp.cast_floating(wide, "bfloat16")
    >>> params, opt_state = jmp.optim.with_master_params(tx.init(params), params, wide)
    >>> params["w"].tolist(), jmp.optim.master_params(opt_state, params)["w"] == wide["w"]
    ([0.10009765625], Array([ True], dtype=bool))
    """
    state = _find_state(opt_state, params)
    check_fits(params, master, "float32 values")
    master = map_half(lambda p, m: cast_floating(m, jnp.float32), params, master, otherwise=lambda p, m: m)
    rounded = map_half(lambda p, m: round_to_half(m, p.dtype), params, master, otherwise=lambda p, m: m)
    if state is None or isinstance(state, StochasticRoundingState):
        return rounded, opt_state
    storage = _STORAGE_OF_STATE[type(state)]
    encoded, memory = storage.encode(_trained(state, master), _trained(state, params), state[1])
    new_state = type(state)(state[0], memory)
    replaced = jax.tree.map(lambda node: new_state if node is state else node, opt_state, is_leaf=lambda x: x is state)
    return _or_else(encoded, rounded), replaced


def _find_state(opt_state: PyTree, params: PyTree) -> Any:
    """Returns the one state of these transformations in a state, or None: parameters without masters."""
    kinds = (*_STORAGE_OF_STATE, StochasticRoundingState)
    list_found = lambda tree: [
        node for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(node, kinds)
    ]
    found = list_found(opt_state)
    if len(found) > 1:
        raise ValueError(
            "Expected a state that holds at most one of master_weights, kahan and stochastic_rounding, got "
            f"{type(opt_state).__name__} with {len(found)}. For example, of each optimizer: "
            "jmp_policy.optim.master_params(opt_state, params)."
        )
    if list_found(params):
        raise ValueError(
            f"The parameters, a {type(params).__name__}, hold the state of an optimizer. They come second: "
            "jmp_policy.optim.master_params(opt_state, params)."
        )
    return found[0] if found else None


def _trained(state: PyTree, params: PyTree) -> PyTree:
    """Returns the parameters without those that the optimizer does not train (`optax.masked`)."""
    try:
        return jax.tree.map(lambda m, p: m if _is_masked(m) else p, state[1], params, is_leaf=_is_masked)
    except ValueError as error:
        raise ValueError(
            f"The parameters do not fit the {type(state).__name__} that was given with them. For example, in nnx: "
            "jmp_policy.optim.master_params(optimizer, nnx.state(model, nnx.Param))."
        ) from error


def _or_else(trained: PyTree, others: PyTree) -> PyTree:
    return jax.tree.map(lambda t, other: other if _is_masked(t) else t, trained, others, is_leaf=_is_masked)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)
