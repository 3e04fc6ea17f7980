"""Finding the loss scale in whatever holds it, and its figures for a logger."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import DictKey

from .._base import PyTree, describe
from ._loss_scale import DynamicLossScale, LossScale, register_with_flax
from ._scale_settings import suggest_loss_scale
from ._scaled_state import NEVER_OUTSIDE, LossScaledState, check_not_inside, find_nodes, has_scaled_state

T = TypeVar("T")


def get_loss_scale(state: PyTree) -> LossScale:
    """Finds the loss scale in a state.

    Args:
      state: a `LossScale`, or any tree that holds exactly one: an optax state, a `TrainState`, an `nnx.Optimizer`.

    Raises:
      ValueError: it holds none, or several; or it is inside the state of a transformation that goes on where
        `optim.loss_scaled` skips a step, such as `optax.MultiSteps`.

    >>> import jmp_policy as jmp
    >>> jmp.get_loss_scale({"step": 0, "scale": jmp.StaticLossScale(8.0)})
    StaticLossScale(loss_scale=8.0)
    """
    register_with_flax()
    if isinstance(state, LossScale):
        return strip_variables(state)
    check_not_inside(NEVER_OUTSIDE, state)
    found = find_nodes(state, LossScale)
    suggestion = "" if found else suggest_loss_scale(state)
    if suggestion:
        raise ValueError(
            f"Expected a loss scale, or a state that holds one, got {describe(state)}. For example: {suggestion}; or, "
            "so that the steps carry it, the state of jmp_policy.optim.loss_scaled(tx, loss_scale)."
        )
    if len(found) != 1:
        raise ValueError(
            f"Expected a state that holds exactly one loss scale, got {type(state).__name__} with {len(found)}. "
            "Pass the loss scale itself, or the state of jmp_policy.optim.loss_scaled(tx, policy.loss_scale())."
        )
    return strip_variables(found[0])


def find_scaled_state(state: PyTree) -> LossScaledState:
    """Finds the state of `optim.loss_scaled` in a tree that holds exactly one.

    Raises:
      ValueError: it holds none, or several.
    """
    found = find_nodes(state, LossScaledState)
    if len(found) != 1:
        raise ValueError(
            f"Expected a state that holds exactly one LossScaledState, got {type(state).__name__} with {len(found)}. "
            "For example: jmp_policy.optim.loss_scaled(optax.adamw(1e-3), policy.loss_scale()).init(params)."
        )
    found = found[0]._replace(inner_state=None)  # which may be large, and nobody asks for
    return strip_variables(found)


def metrics(state: PyTree) -> dict[str, Any]:
    """The figures of loss scaling as a flat dictionary of scalars, for any logger.

    They are arrays, so that a jitted step can return them, and nothing is read back from the device. On the host
    `jax.device_get` reads all at once and makes Python numbers of them, which JSON and every logger know. What is
    joined to them by `|` becomes Python numbers too; a plain dictionary of them, `{**figures}`, stays as it is.

    Args:
      state: a tree that holds the state of `optim.loss_scaled`, or a loss scale alone.

    Returns:
      `loss_scale` (float32) and `steps_since_growth` (int32); of an optimizer's state also `grads_finite` (bool),
      `skipped_steps` and `consecutive_skips` (int32), and of one that carries provenance `nonfinite_step` (int32), of
      which `optim.last_skip` says why it was skipped. The dictionary is a pytree node of its own type.

    Raises:
      ValueError: the tree holds no loss scale, or several.

    >>> import jax, json
    >>> import jax.numpy as jnp
    >>> import jmp_policy as jmp
    >>> loss, scale = jnp.float32(2.5), jmp.DynamicLossScale(2.0**10)
    >>> json.dumps(jax.device_get({"loss": loss} | jmp.metrics(scale)))
    '{"loss": 2.5, "loss_scale": 1024.0, "steps_since_growth": 0}'
    """
    scale = get_loss_scale(state)
    dynamic = isinstance(scale, DynamicLossScale)
    figures = {
        "loss_scale": scale.loss_scale if dynamic else np.float32(scale.loss_scale),
        "steps_since_growth": scale.counter if dynamic else np.int32(0),
    }
    if has_scaled_state(state):
        of_optimizer = find_scaled_state(state)
        for name in ("grads_finite", "skipped_steps", "consecutive_skips"):
            figures[name] = getattr(of_optimizer, name)
        for name in {"nonfinite_step"} & set(of_optimizer._fields):  # of a subtype that stands on a higher floor
            figures[name] = getattr(of_optimizer, name)
    return Metrics(figures)


@jax.tree_util.register_pytree_with_keys_class
class Metrics(dict[str, Any]):
    """A dictionary whose arrays are Python numbers once `jax.device_get` has read them.

    That returns 0-dimensional arrays of numpy, which JSON and some loggers refuse. It rebuilds the dictionary from
    them, and here they become numbers. Arrays of JAX and tracers, as `jit` rebuilds it from, stay.
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """The figures with their names, and their names, in the order that JAX gives any dictionary."""
        return [(DictKey(name), self[name]) for name in sorted(self)], tuple(sorted(self))

    def tree_flatten(self) -> tuple[Sequence[Any], tuple[str, ...]]:
        """The figures, and their names."""
        return [self[name] for name in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], figures: Iterable[Any]) -> "Metrics":
        """The dictionary of these figures."""
        return cls(zip(names, map(_read_number, figures), strict=True))

    def __or__(self, other: Any) -> Any:
        return Metrics({**self, **other}) if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return Metrics({**other, **self}) if isinstance(other, dict) else NotImplemented


def _read_number(figure: Any) -> Any:
    is_on_host = isinstance(figure, np.ndarray | np.generic) and figure.ndim == 0
    return figure.item() if is_on_host else figure


def strip_variables(tree: T) -> T:
    """Takes arrays out of the Variables in which an nnx optimizer keeps each; those are known by their `get_value`."""
    is_variable = lambda node: hasattr(node, "get_value")
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_variable)
    if not any(map(is_variable, leaves)):
        return tree
    return structure.unflatten([leaf.get_value() if is_variable(leaf) else leaf for leaf in leaves])
