"""What every transformation of ours does with the one inside it."""

from typing import Any

import jax
from jax import lax

from .._scaled_state import has_scaled_state
from .._trees import PyTree
from ._step import ParameterUpdate


def check_transformation(inner: Any) -> None:
    """Checks that a transformation can be wrapped.

    Raises:
      TypeError: it is no optax transformation.
    """
    if not callable(getattr(inner, "init", None)) or not callable(getattr(inner, "update", None)):
        raise TypeError(f"inner must be an optax transformation, got {inner!r}. For example: optax.adamw(1e-3).")


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


def check_not_outermost(inner: Any, name: str) -> None:
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


def with_dtypes_of(old: PyTree, new: PyTree) -> PyTree:
    """`new` in the dtypes of `old`: an optimizer under wider gradients than its state would widen its state.

    Python's numbers have no dtype to keep.
    """

    def like(old_leaf: Any, new_leaf: Any) -> Any:
        dtype = getattr(old_leaf, "dtype", None)
        if dtype is None or getattr(new_leaf, "dtype", None) == dtype:
            return new_leaf
        return lax.convert_element_type(new_leaf, dtype)

    return jax.tree.map(like, old, new)
