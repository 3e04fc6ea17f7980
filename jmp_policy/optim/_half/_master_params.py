"""Reading and writing the float32 values of parameters that are stored in half precision."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..._base import PyTree, cast_floating, round_to_half
from ...loss_scale import strip_variables
from ._half_parameters import check_fits, map_half, widen_half
from ._kahan import COMPENSATED, KahanState
from ._master_weights import COPIES, SPLIT, MasterWeightsState, SplitWeightsState
from ._stochastic_rounding import StochasticRoundingState

_STORAGES = {MasterWeightsState: COPIES, SplitWeightsState: SPLIT, KahanState: COMPENSATED}


def master_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The float32 values of parameters that are trained in half precision, to evaluate or to export.

    They are what the optimizer inside works on: the copies of `master_weights`, its two halves joined with
    `mode="split"`, parameter plus compensation of `kahan`. Under `stochastic_rounding`, and where the optimizer does
    not train a parameter (`optax.masked`), the parameter is all there is, and becomes float32.

    Args:
      opt_state: a tree that holds exactly one state of these transformations: an optax state, a `TrainState`, an
        `nnx.Optimizer`.
      params: the parameters that belong to it; of an nnx model `nnx.state(model, nnx.Param)`.

    Returns:
      A tree like `params`, float32 where those are half precision. Float32 masters are the very arrays of the state:
      a step that is given the state to donate deletes them.

    Raises:
      ValueError: `opt_state` holds none of the states, or several; `params` do not fit it.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.kahan(optax.sgd(1.0))
    >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> params, opt_state = jmp.optim.step(tx, {"w": jnp.array([2.0**-10, 0.0])}, tx.init(params), params)
    >>> params["w"].tolist(), jmp.optim.master_params(opt_state, params)["w"].tolist()
    ([1.0, 1.0], [0.9990234375, 1.0])
    """
    state, plain = strip_variables((_only_state(opt_state), params))
    if isinstance(state, StochasticRoundingState):
        wide = widen_half(plain)
    else:
        trained = _trained(state, plain)
        wide = _or_else(_STORAGES[type(state)].widen(trained, state[1]), widen_half(plain))
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(wide))


def with_master_params(opt_state: PyTree, params: PyTree, master: PyTree) -> tuple[PyTree, PyTree]:
    """Half-precision parameters, and the state that goes with them, of given float32 values.

    The inverse of `master_params`: a run with float32 parameters, or with another of these transformations, goes on in
    half precision. `master_weights` keeps every bit of its parameters, `kahan` what two half-precision numbers can
    hold; under `stochastic_rounding` they are rounded to nearest. With nnx, give the results of `nnx.as_pure`, and
    write back with `nnx.update(model, params)` and `nnx.update(optimizer.opt_state, nnx.state(opt_state))`.

    Args:
      opt_state: a tree that holds exactly one state of these transformations, for example `tx.init(params)`.
      params: parameters in the dtypes that the results are to have.
      master: a tree like `params` of the values, float32 where those are half precision.

    Returns:
      `(params, opt_state)`.

    Raises:
      ValueError: `opt_state` holds none of the states, or several; `params` or `master` do not fit it.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.master_weights(optax.sgd(1.0), mode="split")
    >>> wide = {"w": jnp.float32([0.1])}
    >>> params = jmp.cast_floating(wide, "bfloat16")
    >>> params, opt_state = jmp.optim.with_master_params(tx.init(params), params, wide)
    >>> params["w"].tolist(), jmp.optim.master_params(opt_state, params)["w"] == wide["w"]
    ([0.10009765625], Array([ True], dtype=bool))
    """
    state = _only_state(opt_state)
    check_fits(params, master, "float32 values")
    master = map_half(lambda p, m: cast_floating(m, jnp.float32), params, master, otherwise=lambda p, m: m)
    rounded = map_half(lambda p, m: round_to_half(m, p.dtype), params, master, otherwise=lambda p, m: m)
    if isinstance(state, StochasticRoundingState):
        return rounded, opt_state
    narrow = _STORAGES[type(state)].narrow
    narrowed, memory = narrow(_trained(state, master), _trained(state, params), state[1])
    new_state = type(state)(state[0], memory)
    replaced = jax.tree.map(lambda node: new_state if node is state else node, opt_state, is_leaf=lambda x: x is state)
    return _or_else(narrowed, rounded), replaced


def _only_state(tree: PyTree) -> Any:
    kinds = (*_STORAGES, StochasticRoundingState)
    found = [node for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(node, kinds)]
    if len(found) != 1:
        raise ValueError(
            "Expected a state that holds exactly one of master_weights, kahan and stochastic_rounding, got "
            f"{type(tree).__name__} with {len(found)}. Without one, parameters have no other value than their own: "
            "jmp_policy.cast_to_full(params)."
        )
    return found[0]


def _trained(state: PyTree, params: PyTree) -> PyTree:
    """The parameters without those that the optimizer of this state leaves alone, as `optax.masked` does."""
    try:
        return jax.tree.map(lambda m, p: m if _is_masked(m) else p, state[1], params, is_leaf=_is_masked)
    except ValueError as error:
        raise ValueError(f"The parameters do not fit the {type(state).__name__} that was given with them.") from error


def _or_else(trained: PyTree, others: PyTree) -> PyTree:
    return jax.tree.map(lambda t, other: other if _is_masked(t) else t, trained, others, is_leaf=_is_masked)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)
