"""One step of an optimizer, from gradients to new parameters, by the shortest way that the optimizer offers."""

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._base import PyTree, describe, join_state, split_state
from ...loss_scale import check_outermost, has_scaled_state
from ._combine import fill_zeros, has_float0, overwrite_state, restore_float0, zero_float0
from ._provenance import take_provenance

Transformation = optax.GradientTransformation | optax.MultiSteps
State = TypeVar("State")
Params = TypeVar("Params")


class ParameterUpdate(abc.ABC):
    """The `update` of a transformation that can also make the new parameters itself, which `optim.step` then takes.

    It has its reasons: `loss_scaled` takes or skips update and application together, and a half-precision parameter
    that is rounded in a way of its own cannot always be reached by adding an update.

    Attributes:
      overwrites: whether it sees to float8 state among the parameters itself.
    """

    overwrites = False

    @abc.abstractmethod
    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        """The updates and the next state; `updates` are gradients, as optax calls them."""

    @abc.abstractmethod
    def step(self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, Any]:
        """The updated parameters and the next state."""


def step(tx: Transformation, grads: PyTree, opt_state: State, params: Params, **extra: Any) -> tuple[Params, State]:
    """Updates the parameters.

    Where `tx` is `loss_scaled` or `skip_nonfinite`, update and application are skipped together, by a branch or a
    select, whichever costs less on the platform that the step is compiled for: an overflowed step keeps every bit, and
    a good one writes no array of updates. The transformations for half-precision parameters round them here, and bit
    for bit. For any other transformation this is `tx.update` followed by `optax.apply_updates`.

    Args:
      tx: an optax transformation.
      grads: true gradients, a tree like `params`. Where they are `float0`, as for integers, the parameter
        stays as it is.
      opt_state: the state of `tx`.
      params: the parameters; their dtypes are kept. The state of float8 layers among them takes the value of its
        gradient, and `tx` sees zeros for it; inside of `loss_scaled` and `skip_nonfinite` it sees nothing, which
        optimizers that remember distances or draw noise (`optax.contrib.dog`, `optax.noisy_sgd`) need.
      **extra: extra arguments for `tx.update`, such as the `value` that `optax.contrib.reduce_on_plateau` takes, and
        the `provenance` of the gradients where `tx` carries it, as `numerics.first_nonfinite` found it.

    Returns:
      `(params, opt_state)`.

    Raises:
      ValueError: gradients do not have the shapes of their parameters; or `tx` is a transformation of optax with a
        `loss_scaled` inside. `optax.inject_hyperparams` of numbers may be outside of it, and nothing else. Or there
        is a provenance, and `tx` does not carry it.
      TypeError: `tx` carries provenance, and there is none.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.skip_nonfinite(optax.sgd(1.0))
    >>> params = {"w": jnp.ones(2)}
    >>> params, opt_state = jmp.optim.step(tx, {"w": jnp.array([1.0, jnp.nan])}, tx.init(params), params)
    >>> params["w"].tolist(), bool(opt_state.grads_finite)
    ([1.0, 1.0], False)
    """
    check_transformation(tx, "tx")
    _check_shapes(grads, params)
    with _explain_structure(grads, params):
        return _step_any(tx, grads, opt_state, params, extra)


def _step_any(
    tx: Transformation, grads: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """Steps with gradients that may be `float0`, and with float8 state among the parameters."""
    if has_float0(grads):
        new_params, opt_state = _step_any(tx, zero_float0(grads), opt_state, params, extra)
        return restore_float0(grads, new_params, params), opt_state
    if isinstance(tx.update, ParameterUpdate) and tx.update.overwrites:
        return _step(tx, grads, opt_state, params, extra)
    take_provenance(opt_state, extra)  # which a transformation of optax would pass over without a word
    (rest, state), (grads, gradient) = split_state(params), split_state(grads)
    new_params, after = _step(tx, fill_zeros(grads, gradient), opt_state, fill_zeros(rest, state), extra)
    return join_state(new_params, overwrite_state(state, gradient, opt_state, after)), after


def _step(
    tx: Transformation, grads: PyTree, opt_state: PyTree, params: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    if isinstance(tx.update, ParameterUpdate):
        return tx.update.step(grads, opt_state, params, extra)
    check_outermost(opt_state)
    updates, opt_state = with_extra_args(tx).update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state


def _check_shapes(grads: PyTree, params: PyTree) -> None:
    if jax.tree.structure(grads) != jax.tree.structure(params):  # of lookahead, say; or optax says so
        return
    for (path, grad), param in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(params), strict=True):
        if jnp.shape(param) not in (jnp.shape(grad), jnp.shape(grad)[1:]):  # of each example, as some optimizers take
            raise ValueError(
                f"The gradients do not fit the parameters: {jax.tree_util.keystr(path) or 'the gradient'} has the "
                f"shape {jnp.shape(grad)}, where the parameter has the shape {jnp.shape(param)}. Take them of the "
                "same parameters, for example: loss, grads = jmp.value_and_grad(loss_fn, loss_scale=opt_state)(params)."
            )


@contextlib.contextmanager
def _explain_structure(grads: PyTree, params: PyTree) -> Iterator[None]:
    """Adds to the error of JAX about two trees that differ, which of the step's arguments these are."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if jax.tree.structure(grads) != jax.tree.structure(params):
            error.add_note(
                f"The gradients are a {type(grads).__name__} of another structure than the parameters, a "
                f"{type(params).__name__}. Take them of the same parameters, for example: loss, grads = "
                "jmp.value_and_grad(loss_fn, loss_scale=opt_state)(params)."
            )
        raise


def with_extra_args(tx: Transformation) -> optax.GradientTransformationExtraArgs:
    """`optax.with_extra_args_support`, and `MultiSteps` too, which takes extra arguments but would lose them there."""
    if isinstance(tx, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)  # pyright: ignore[reportArgumentType]
    return optax.with_extra_args_support(tx)


def check_transformation(tx: object, name: str = "inner") -> None:
    """Checks that an argument of this name is an optax transformation.

    Raises:
      TypeError: it is not.
    """
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        called = f"{getattr(tx, '__name__', 'optax.adamw')}(1e-3)" if callable(tx) else "optax.adamw(1e-3)"
        raise TypeError(f"{name} must be an optax transformation, got {describe(tx)}. For example: {called}.")


def check_not_loss_scaled(inner_state: PyTree, name: str) -> None:
    """Checks that no loss scaling happens inside the transformation `name`.

    Raises:
      ValueError: it does, and `name` would go on where it skips a step.
    """
    if has_scaled_state(inner_state):
        raise ValueError(
            f"loss_scaled and skip_nonfinite go outside of {name}, which would change parameters on a step that they "
            f"skip. For example: loss_scaled({name}(optax.adamw(1e-3)), policy.loss_scale())."
        )


def check_not_outermost(inner: Transformation, name: str) -> None:
    """Checks that a transformation may stand inside the transformation `name`.

    Raises:
      ValueError: it makes parameters itself, and so must not stand inside.
    """
    if isinstance(inner.update, ParameterUpdate):
        raise ValueError(
            f"{name} goes inside of loss_scaled, master_weights, kahan and stochastic_rounding, and only one of the "
            f"last three around an optimizer. For example: loss_scaled(kahan(optax.adamw(1e-3)), policy.loss_scale()), "
            "kahan(cast_state(optax.adamw(1e-3), mu_dtype='bfloat16'))."
        )


def keep_dtypes(old: PyTree, new: PyTree) -> PyTree:
    """`new` in the dtypes of `old`: an optimizer under wider gradients than its state would widen its state.

    Python's numbers have no dtype to keep.
    """

    def like(old_leaf: Any, new_leaf: Any) -> Any:
        dtype = getattr(old_leaf, "dtype", None)
        if dtype is None or getattr(new_leaf, "dtype", None) == dtype:
            return new_leaf
        return lax.convert_element_type(new_leaf, dtype)

    return jax.tree.map(like, old, new)
