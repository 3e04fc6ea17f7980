"""The state of a loss-scaled optimizer, and whether the elements of a tree are finite."""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import PyTree
from ._loss_scale import LossScale, register_with_flax

T = TypeVar("T")

_WORDS = {8: jnp.uint8, 16: jnp.uint16}
"""The integers of as many bits as a narrow float."""


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every number in a tree is finite, as a boolean scalar array.

    Integers, bools, keys and other leaves that cannot be infinite count as finite. Each array is read once. GPUs and
    TPUs write nothing of its size; on CPUs XLA writes one byte for each number before it reduces them. Of sharded
    arrays under `jit` all devices get one answer, and XLA exchanges it at once for all arrays that are split over the
    same axes; in `jax.shard_map` each device answers for its parts.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> bool(jmp.all_finite({"a": jnp.ones(3), "b": None})), bool(jmp.all_finite([jnp.array([1.0, jnp.nan])]))
    (True, False)
    """
    inexact = [x for x in jax.tree.leaves(tree) if _may_be_infinite(x)]
    return _are_finite(inexact) if inexact else jnp.array(True)


def select_tree(pred: jax.Array, a: T, b: T) -> T:
    """Selects the tree `a` where `pred` is true and `b` where it is false, leaf by leaf.

    Args:
      pred: a boolean scalar: a Python bool, or an array of shape `()`.
      a: a tree of arrays.
      b: a tree of the same structure, shapes and dtypes.

    Returns:
      A tree of that structure.

    Raises:
      AssertionError: `pred` is not a boolean scalar; an AssertionError because DeepMind's `jmp` raises one.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> jmp.select_tree(jnp.array(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})["w"].tolist()
    [0.0, 0.0]
    """
    is_array = isinstance(pred, bool | np.generic | np.ndarray | jax.Array)
    if not is_array or jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        got = jax.typeof(jnp.asarray(pred)) if is_array else repr(pred)
        raise AssertionError(f"expected boolean scalar, got {got}; for example: all_finite(grads)")
    pred = jnp.asarray(pred)
    return jax.tree.map(lambda x, y: _select(pred, jnp.asarray(x), jnp.asarray(y)), a, b)


def _select(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits in _WORDS
    return _select_bits(pred, x, y) if is_narrow and x.dtype == y.dtype else lax.select(pred, x, y)


@jax.custom_jvp
def _select_bits(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """A select of narrow floats: where XLA selects these as float32, a nan does not keep its payload."""
    word = _WORDS[jnp.finfo(x.dtype).bits]
    x_bits, y_bits = lax.bitcast_convert_type(x, word), lax.bitcast_convert_type(y, word)
    return lax.bitcast_convert_type(lax.select(pred, x_bits, y_bits), x.dtype)


@_select_bits.defjvp
def _select_tangents(primals: Any, tangents: Any) -> Any:
    return _select_bits(*primals), lax.select(primals[0], *tangents[1:])


def _may_be_infinite(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, float | complex)
    if not jnp.issubdtype(dtype, jnp.inexact) or np.size(leaf) == 0:
        return False
    # Below 8 bits a format has neither nan nor infinity, and XLA cannot compute in all of them.
    return jnp.issubdtype(dtype, jnp.complexfloating) or jnp.finfo(dtype).bits >= 8


@jax.jit  # one dispatch where it is called eagerly, and one function where a program asks about the same tree twice
def _are_finite(arrays: list[Any]) -> jax.Array:
    # A reduction of bools, because on CPUs XLA loses a nan in a float32 reduction of some thousand numbers: in `max`,
    # and in `sum(x - x)` where it fuses a maximum, such as a relu, into the sum. It also folds `sum(2 * x * 0)` to
    # `sum(x * 0)`, which hides that `2 * x` overflows. These read 1.0 times the bytes on a CPU, and this 1.5 times.
    return functools.reduce(lax.bitwise_and, [jnp.isfinite(x).all() for x in arrays])


# What goes on where a `loss_scaled` inside of it skips a step: transformations of optax by the type of their state,
# by name because this module does without optax, and how each goes inside of `loss_scaled` instead.
NEVER_OUTSIDE = {
    "optax.ApplyIfFiniteState": "optax.adamw(1e-3)",  # which does what loss_scaled does, and gives in
    "optax.LookaheadState": "optax.lookahead(optax.adamw(1e-3), 5, 0.5)",
    "optax.MechanicState": "optax.contrib.mechanize(optax.adamw(1e-3))",
    "optax.MultiStepsState": "optax.MultiSteps(optax.adamw(1e-3), 4)",
    "optax.SAMState": "optax.contrib.sam(optax.adamw(1e-3), adv_optimizer)",
    "optax.ScheduleFreeState": "optax.contrib.schedule_free(optax.adamw(1e-3), 1e-3)",
}
# What does so unless its other parts happen to have no memory. These states are also mere containers (a tuple of the
# states of two optimizers), so that only who applies a transformation can tell.
_NOT_OUTSIDE_IN_A_STEP = {
    "builtins.tuple": "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))",
    "collections.OrderedDict": "optax.named_chain(('clip', optax.clip(1.0)), ('adamw', optax.adamw(1e-3)))",
    "optax.ConditionallyMaskState": "optax.conditionally_mask(optax.adamw(1e-3), should_transform_fn)",
    "optax.ConditionallyTransformState": "optax.conditionally_transform(optax.adamw(1e-3), should_transform_fn)",
    "optax.InjectStatefulHyperparamsState": "optax.inject_hyperparams(optax.adamw)(schedule)",
    "optax.MaskedState": "optax.masked(optax.adamw(1e-3), mask)",
    "optax.PartitionState": "optax.partition({'matrix': optax.adamw(1e-3), 'vector': optax.sgd(1e-2)}, labels)",
}


class _Fields(NamedTuple):
    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


class LossScaledState(_Fields):
    """The state of `optim.loss_scaled`, a `NamedTuple`.

    Attributes:
      inner_state: the state of the wrapped transformation.
      loss_scale: the loss scale of the next step.
      grads_finite: whether the last step's gradients were finite, a boolean scalar; true before the first step.
      skipped_steps: how many steps were skipped, an int32 scalar.
      consecutive_skips: how many of them are the most recent ones in a row, an int32 scalar.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> state = jmp.optim.skip_nonfinite(optax.sgd(1.0)).init({"w": jnp.ones(2)})
    >>> bool(state.grads_finite), int(state.skipped_steps)
    (True, 0)
    """

    __slots__ = ()

    @property
    def loss_scale(self) -> LossScale:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The loss scale of the next step."""
        # Flax's serialization reads a state by its fields, and may have been loaded after the state was made, or the
        # state in another process than it was made in: here it learns of loss scales before it meets one.
        register_with_flax()
        return self[1]


def has_scaled_state(state: PyTree) -> bool:
    """Whether a tree holds the state of `optim.loss_scaled`."""
    return bool(find_nodes(state, LossScaledState))


def check_outermost(state: PyTree) -> None:
    """Checks that `loss_scaled` is not inside the transformation of optax whose state this is.

    `optax.inject_hyperparams` of numbers may be outside: it has no memory but a count that nobody reads. Of a type
    that is not optax's nothing is known.

    Raises:
      ValueError: it is inside.
    """
    check_not_inside(NEVER_OUTSIDE | _NOT_OUTSIDE_IN_A_STEP, state)


def check_not_inside(right_nestings: dict[str, str], state: PyTree) -> None:
    def is_outside(node: Any) -> bool:
        return _type_name(node) in right_nestings and getattr(node, "hyperparams_states", None) != {}

    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaledState) or is_outside(node))
    for node in nodes:
        if is_outside(node) and has_scaled_state(node):
            raise ValueError(
                f"loss_scaled and skip_nonfinite go outermost, but one is inside of a transformation whose state is "
                f"{type(node).__name__}, and which goes on where they skip a step. For example: "
                f"loss_scaled({right_nestings[_type_name(node)]}, policy.loss_scale())."
            )


def _type_name(node: Any) -> str:
    return f"{type(node).__module__.partition('.')[0]}.{type(node).__name__}"


def find_nodes(tree: PyTree, kind: type[T]) -> list[T]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
