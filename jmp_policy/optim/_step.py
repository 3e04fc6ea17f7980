"""One step of an optimizer, from gradients to new parameters."""

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import Var

from .._base import PyTree, is_half, join_state, keeps_small_updates, next_state, split_state, warn_once
from ..loss_scale import was_step_taken
from ._transformation import LossScaledState, ParameterUpdate, Transformation, check_transformation, with_extra_args

MASKED = optax.MaskedNode()  # replaces float8 state: optax transformations skip it


def fill_zeros(rest: PyTree, state: PyTree) -> PyTree:
    """Puts zeros in the place of float8 state. They make no update, and add nothing to the norm of a tree."""
    return join_state(rest, jax.tree.map(jnp.zeros_like, state))


def overwrite_state(state: PyTree, gradient: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Returns the next float8 state, or `state` itself if the step between two optimizer states was skipped."""
    if state is None:
        return None
    if isinstance(state, optax.LookaheadParams):
        return optax.LookaheadParams(*[overwrite_state(state.fast, gradient, before, after)] * 2)
    # In the middle of `optax.MultiSteps` the amaxes of microbatches combine by maximum.
    new = next_state(state, gradient, _is_first(before))
    taken = was_step_taken(after)
    return new if taken is True else jax.tree.map(lambda new, old: lax.select(taken, new, old), new, state)


def _is_first(opt_state: PyTree) -> Any:
    """True if the step has no earlier microbatch. A step ends when all groups of parameters have taken theirs."""
    is_multi_steps = lambda node: isinstance(node, optax.MultiStepsState)
    nodes = filter(is_multi_steps, jax.tree.leaves(opt_state, is_leaf=is_multi_steps))
    return functools.reduce(jnp.logical_and, [node.mini_step == 0 for node in nodes] or [True])


def zero_float0(grads: PyTree) -> PyTree:
    """Replaces `float0` gradients by integer zeros."""
    return jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.int32) if _is_float0(g) else g, grads)


def restore_float0(grads: PyTree, tree: PyTree, otherwise: PyTree) -> PyTree:
    """Replaces the leaves of `tree` with a `float0` gradient by the leaves of `otherwise`."""
    if not any(map(_is_float0, jax.tree.leaves(grads))):
        return tree
    return jax.tree.map(lambda g, x, y: y if _is_float0(g) else x, grads, tree, otherwise)


def _is_float0(grad: object) -> bool:
    return getattr(grad, "dtype", None) == jax.dtypes.float0


State = TypeVar("State")
Params = TypeVar("Params")


def warn_of_half_params(tx: Transformation, params: PyTree, state: PyTree) -> None:
    """Warns once for an optimizer that adds its updates to half-precision parameters, which rounds small ones away."""
    leaves = jax.tree.leaves_with_path(params)
    if not any(is_half(leaf) for _, leaf in leaves):
        return
    if keeps_small_updates(state):
        _warn_of_later_changes(tx, state)
        return
    trained = zip(leaves, list_trained(tx, params), strict=True)
    path, leaf = next((pair for pair, is_trained in trained if is_trained and is_half(pair[1])), ((), None))
    if leaf is None:
        return
    name = f" {jax.tree_util.keystr(path, simple=True, separator='/')!r}" if path else ""
    warn_once(
        tx.init,
        f"The parameter{name} is stored in {leaf.dtype}; an update below 2**{-2 - int(jnp.finfo(leaf.dtype).nmant)} of "
        "it changes nothing, and moments in float16 underflow. Wrap the optimizer in master_weights, kahan or "
        "stochastic_rounding, and choose the dtype of moments by cast_state. "
        "For example: loss_scaled(optim.master_weights(optax.adamw(1e-3)), scale).",
    )


# Transformations that change the updates of one inside, and how to write them inside of it.
_CHANGES_UPDATES: dict[type, str] = {
    optax.LookaheadState: "optax.lookahead(optax.adamw(1e-3), 5, 0.5)",
    optax.contrib.ScheduleFreeState: "optax.contrib.schedule_free(optax.adamw(1e-3), 1e-3)",
    tuple: "optax.chain(optax.adamw(1e-3), optax.contrib.reduce_on_plateau())",
}
# States of transformations that leave updates alone, or are of other parameters.
_KEEPS_UPDATES = ("MaskedState", "MonitorState", "PartitionState", "SnapshotState")


def _warn_of_later_changes(tx: Transformation, state: PyTree) -> None:
    """Warns once if updates are changed after they were made for half-precision parameters and their masters."""

    def is_changed(node: Any) -> bool:
        if type(node) not in (tuple, collections.OrderedDict):  # of a chain, or of a named one
            return type(node) in _CHANGES_UPDATES and keeps_small_updates(node)
        parts = list(node) if type(node) is tuple else list(node.values())
        keeping = [keeps_small_updates(part) for part in parts]
        later = parts[keeping.index(True) + 1 :] if any(keeping) else []
        return any(isinstance(part, tuple) and type(part).__name__ not in _KEEPS_UPDATES for part in later)

    found = next(filter(is_changed, jax.tree.leaves(state, is_leaf=is_changed)), None)
    if found is not None:
        outer = tuple if isinstance(found, collections.OrderedDict) else type(found)
        kind = "a chain that goes on after it" if outer is tuple else f"the state {outer.__name__}"
        warn_once(
            tx.init,
            f"master_weights, kahan and stochastic_rounding go around transformations that change their updates, but "
            f"one is inside of {kind}: master_weights reverts the change in the next step, and the others round it. "
            f"For example: loss_scaled(optim.master_weights({_CHANGES_UPDATES[outer]}), scale).",
        )


def list_trained(tx: Transformation, params: PyTree) -> list[bool]:
    """Returns for each parameter if its update depends on gradients; it does not if `optax.partition` freezes it."""
    try:
        state = jax.eval_shape(tx.init, params)
        take = lambda grads, state, params: with_extra_args(tx).update(grads, state, params)[0]
        program = jax.make_jaxpr(take)(params, state, params).jaxpr
    except Exception:  # it needs more arguments, or an axis that only the step has
        return [True] * len(jax.tree.leaves(params))
    reached = set(program.invars[: len(jax.tree.leaves(params))])
    for eqn in program.eqns:
        if any(isinstance(atom, Var) and atom in reached for atom in eqn.invars):
            reached.update(eqn.outvars)
    return [isinstance(atom, Var) and atom in reached for atom in program.outvars]


def step(tx: Transformation, grads: PyTree, opt_state: State, params: Params, **extra: Any) -> tuple[Params, State]:
    """Updates the parameters.

    If `tx` is `loss_scaled` or `skip_nonfinite`, a non-finite step skips update and application together, so that every
    bit of the parameters stays, and a finite step writes no array of updates. Transformations for half-precision
    parameters round them here. For any other transformation this is `tx.update` and `optax.apply_updates`.

    Args:
      tx: an optax transformation.
      grads: true gradients, a tree like `params`. The parameter of a `float0` gradient, as for integers, does not
        change.
      opt_state: the state of `tx`.
      params: the parameters; their dtypes are kept. Float8 state among them takes the value of its gradient. `tx` sees
        zeros for it, and an optimizer inside `loss_scaled` or `skip_nonfinite` nothing.
      **extra: extra arguments for `tx.update`, such as the `value` of `optax.contrib.reduce_on_plateau`.

    Returns:
      `(params, opt_state)`.

    Raises:
      ValueError: gradients do not have the shapes of their parameters; or `tx` is an optax transformation with a
        `loss_scaled` inside (only `optax.inject_hyperparams` of numbers may be outside).

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.skip_nonfinite(optax.sgd(1.0))
    >>> params = {"w": jnp.ones(2)}
    >>> params, opt_state = jmp.optim.step(tx, {"w": jnp.array([1.0, jnp.nan])}, tx.init(params), params)
    >>> params["w"].tolist(), bool(opt_state.grads_finite)
    ([1.0, 1.0], False)
    """
    check_transformation(tx, "tx")
    grads = fast_params(grads)
    _check_shapes(grads, params)
    with explain_step_errors(grads, params, tx, opt_state):
        real_grads = zero_float0(grads)
        if isinstance(tx.update, ParameterUpdate) and tx.update.overwrites:
            new_params, after = tx.update.step(real_grads, opt_state, params, extra)
            return restore_float0(grads, new_params, params), after
        (rest, state), (rest_grads, gradient) = split_state(params), split_state(real_grads)
        filled, filled_grads = fill_zeros(rest, state), fill_zeros(rest_grads, gradient)
        after: Any
        if isinstance(tx.update, ParameterUpdate):
            new_params, after = tx.update.step(filled_grads, opt_state, filled, extra)
        else:
            LossScaledState._check_outermost(opt_state, in_step=True)
            update: Any = with_extra_args(tx).update
            updates, after = update(filled_grads, opt_state, filled, **extra)
            new_params = optax.apply_updates(filled, updates)
        _check_new_shapes(filled, new_params)
        new_params = join_state(new_params, overwrite_state(state, gradient, opt_state, after))
        return restore_float0(grads, new_params, params), after


def fast_params(params: PyTree) -> PyTree:
    """Returns the parameters that have gradients, or their gradients: of `optax.lookahead` the fast ones, else all."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _check_shapes(grads: PyTree, params: PyTree) -> None:
    if jax.tree.structure(grads) != jax.tree.structure(params):  # as for lookahead; else optax raises
        return
    for (path, grad), param in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(params), strict=True):
        shape, expected = np.shape(grad), np.shape(param)
        if expected != shape and expected != shape[1:]:  # some optimizers take one per example
            raise ValueError(
                f"The gradients do not fit the parameters: {jax.tree_util.keystr(path) or 'the gradient'} has the "
                f"shape {shape}, but the parameter has the shape {expected}. Differentiate the same "
                "parameters, for example: loss, grads = jmp.value_and_grad(loss_fn, loss_scale=opt_state)(params)."
            )


def _check_new_shapes(params: PyTree, new_params: PyTree) -> None:
    for (path, param), new in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(new_params), strict=True):
        if np.shape(param) != np.shape(new):
            raise ValueError(
                f"This optimizer would change the shape of {jax.tree_util.keystr(path) or 'the parameter'} from "
                f"{np.shape(param)} to {np.shape(new)}. optax.scale_by_distance_over_gradients, for example, needs "
                "parameters that are not scalars: jnp.ones((1,)) in place of jnp.ones(())."
            )


@contextlib.contextmanager
def explain_step_errors(
    grads: PyTree, params: PyTree, tx: Transformation | None = None, opt_state: PyTree = None
) -> Iterator[None]:
    """Adds notes to errors about trees that differ in structure or dtype, and about arguments that are missing."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        is_new = not any(note.startswith(_MISFIT) for note in getattr(error, "__notes__", ()))
        misfit = _describe_misfit(tx, params, opt_state) if tx is not None and is_new else None
        if misfit is not None:
            error.add_note(misfit)
        if jax.tree.structure(grads) != jax.tree.structure(params):
            error.add_note(
                f"The gradients are a {type(grads).__name__} and the parameters a {type(params).__name__} of another "
                "structure. Differentiate the same parameters, for example: loss, grads = "
                "jmp.value_and_grad(loss_fn, loss_scale=opt_state)(params)."
            )
        note = (
            "This optimizer needs extra arguments. Pass them to optim.step, to update of an nnx.Optimizer, or to "
            "apply_gradients of a linen.TrainState; optim.minimize passes none. For example: loss, grads = "
            "jmp.value_and_grad(loss_fn, loss_scale=opt_state)(params), then "
            "params, opt_state = jmp.optim.step(tx, grads, opt_state, params, value=loss)."
        )
        # Branches of `optax.novograd` and `optax.apply_if_finite`, and operands of `optax.contrib.mechanize`, must have
        # one dtype.
        half = next((x.dtype for x in jax.tree.leaves(params) if is_half(x)), None)
        if half is not None and ("dtypes do not match" in str(error) or "the same dtypes" in str(error)):
            text = (
                f"This optimizer needs parameters, gradients and state of one dtype, and parameters are {half} here. "
                "Give it float32 parameters. Write loss_scaled(master_weights(optax.novograd(1e-3)), loss_scale)."
            )
            if text not in getattr(error, "__notes__", ()):
                error.add_note(text)
        # `step` calls itself under `loss_scaled`.
        is_missing = "required keyword-only argument" in str(error) or "_fn must be provided" in str(error)
        if is_missing and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


_MISFIT = "The optimizer state does not fit the parameters"


def _describe_misfit(tx: Transformation, params: PyTree, opt_state: PyTree) -> str | None:
    """Returns a note if the state of an optimizer is not of its parameters, or of another optimizer."""
    try:
        fresh = jax.eval_shape(tx.init, params)
    except Exception:  # the error to explain says more
        return None
    expected, given = (
        {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (fresh, opt_state)
    )
    name = next((name for name in (*expected, *given) if expected.get(name) != given.get(name)), None)
    if name is None:
        return None
    spell = lambda shape: "nothing" if shape is None else f"the shape {shape}"
    return (
        f"{_MISFIT}: it has {spell(given.get(name))} at {name}, where the state "
        f"that tx.init makes of them has {spell(expected.get(name))}. For example: opt_state = tx.init(params)."
    )


def keep_dtypes(old: PyTree, new: PyTree) -> PyTree:
    """Casts `new` to the dtypes of `old`. Under wider gradients, an optimizer promotes its state."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        before, after = ([jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(x)] for x in (old, new))
        changed = ", ".join(sorted(set(before) ^ set(after))[:3])
        raise ValueError(
            "The state of this optimizer has another structure after a step than init gives it, so that a step cannot "
            f"be skipped: {changed or 'its nodes differ'}. In place of optax.monitor, which is such a one, write for "
            "example: optax.snapshot('grad_norm', optax.tree.norm)."
        )

    def like(old_leaf: Any, new_leaf: Any) -> Any:
        dtype = getattr(old_leaf, "dtype", None)
        if dtype is None or getattr(new_leaf, "dtype", None) == dtype:
            return new_leaf
        return lax.convert_element_type(new_leaf, dtype)

    return jax.tree.map(like, old, new)
