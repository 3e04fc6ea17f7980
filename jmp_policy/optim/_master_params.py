"""Reading the float32 value of parameters that are stored in half precision."""

from typing import Any

import jax
import optax

from .._scaled_state import without_variables
from .._tree import PyTree
from ._half_parameters import widened_alone
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
      A tree like `params`, float32 where those are half precision. The arrays of float32 masters are those of the state
      itself: a step that is given the state to donate deletes them.

    Raises:
      ValueError: `opt_state` holds none of the states, or several; `params` do not fit it.

    >>> tx = jmp.optim.kahan(optax.sgd(1.0))
    >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> params, opt_state = jmp.optim.step(tx, {"w": jnp.array([2.0**-10, 0.0])}, tx.init(params), params)
    >>> params["w"].tolist(), master_params(opt_state, params)["w"].tolist()
    ([1.0, 1.0], [0.9990234375, 1.0])
    """
    state = without_variables(_only_state(opt_state))
    plain = without_variables(params)
    if isinstance(state, StochasticRoundingState):
        wide = widened_alone(plain)
    else:
        wide = _widened(state, plain)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(wide))


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


def _widened(state: Any, params: PyTree) -> PyTree:
    memory = state[1]
    try:
        trained = jax.tree.map(lambda m, p: m if _is_masked(m) else p, memory, params, is_leaf=_is_masked)
    except ValueError as error:
        raise ValueError(f"The parameters do not fit the {type(state).__name__} that was given with them.") from error
    wide = _STORAGES[type(state)].widen(trained, memory)
    return jax.tree.map(lambda w, p: widened_alone(p) if _is_masked(w) else w, wide, params, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
