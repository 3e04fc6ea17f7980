"""The loss scale in any state, and checks for finite elements."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import PyTree, describe, is_floating
from ._loss_scale import DynamicLossScale, LossScale, register_loss_scales

T = TypeVar("T")

_WORDS = {8: jnp.uint8, 16: jnp.uint16}  # unsigned integers with the bits of a narrow float


def all_finite(tree: PyTree) -> jax.Array:
    """Returns True if every element in a tree is finite, as a boolean scalar array.

    Leaves that cannot be infinite, such as integers and keys, count as finite, as do those of dtypes that JAX does not
    know. For sharded arrays under `jit`, all devices get one answer. In `jax.shard_map` each device answers for its own
    shards.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> bool(jmp.all_finite({"a": jnp.ones(3), "b": None})), bool(jmp.all_finite([jnp.array([1.0, jnp.nan])]))
    (True, False)
    """
    inexact = [x for x in jax.tree.leaves(tree) if _may_be_infinite(x)]
    return _are_finite(inexact) if inexact else jnp.array(True)


def stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Returns True if no finite element of `old` is non-finite in `new`, a tree like it, as a boolean scalar array."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    inexact = [pair for pair in pairs if _may_be_infinite(pair[1])]
    if not inexact:
        return jnp.array(True)
    # An element may be infinite from the start, such as the best loss so far.
    return functools.reduce(lax.bitwise_and, [jnp.all(jnp.isfinite(x) | ~jnp.isfinite(y)) for y, x in inexact])


def select_tree(pred: jax.Array, a: T, b: T) -> T:
    """Selects the tree `a` if `pred` is true and `b` if it is false, leaf by leaf.

    Args:
      pred: a boolean scalar: a Python bool, or an array of shape `()`.
      a: a tree of arrays.
      b: a tree of the same structure, shapes and dtypes.

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
    return jax.tree.map(functools.partial(_select_leaf, pred), a, b)


def _select_leaf(pred: jax.Array, x: Any, y: Any) -> jax.Array:
    x, y = (leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in (x, y))
    return _select_bits(pred, x, y) if _is_narrow(x.dtype) and x.dtype == y.dtype else lax.select(pred, x, y)


@functools.cache
def _is_narrow(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in _WORDS


@jax.custom_jvp
def _select_bits(pred: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Selects between narrow floats by their bits: XLA may select them as float32, which loses the payload of a nan."""
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
    return _has_infinity(dtype) and np.size(leaf) > 0


@functools.cache  # `issubdtype` and `finfo` are slow
def _has_infinity(dtype: np.dtype) -> bool:
    # Formats below 8 bits have neither nan nor infinity, and XLA cannot compute in all of them.
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.issubdtype(dtype, jnp.inexact) and (is_complex or jnp.finfo(dtype).bits >= 8)


@jax.jit  # one dispatch in eager mode, and one function if a program checks the same tree twice
def _are_finite(arrays: list[Any]) -> jax.Array:
    # Reduces bools, because XLA:CPU can lose a nan in a float32 `max`, or in `sum(x - x)` if it fuses a relu into the
    # sum. It also folds `sum(2 * x * 0)` to `sum(x * 0)`, which hides an overflow of `2 * x`.
    return functools.reduce(lax.bitwise_and, map(_is_finite, arrays))


def _is_finite(x: Any) -> jax.Array:
    if not is_floating(x):
        return jnp.isfinite(x).all()
    return lax.reduce_and(lax.is_finite(x), axes=tuple(range(x.ndim)))  # a fifth of the Python calls of jnp


class SkippingState:
    """Base class of the states of optimizers that skip whole steps, named tuples."""

    __slots__ = ()
    inner_state: Any
    _replace: Any

    @property
    def step_taken(self) -> Any:
        """True if the last step was taken, as a boolean scalar array."""
        raise NotImplementedError

    @property
    def inner_taken(self) -> Any:
        """True if a skipping optimizer inside took the last step, as a boolean scalar array, or if there is none."""
        inner = look_inside(self.inner_state)
        if inner is None:
            return True
        # Between its steps, the decision inside of `optax.MultiSteps` is that of the last one.
        waiting = getattr(self.inner_state, "mini_step", 0) != 0
        return inner.step_taken if waiting is False else inner.step_taken | waiting


class ScaledState(SkippingState):
    """Base class of `optim.LossScaledState`: the loss scale and the skipped steps beside the state of an optimizer."""

    __slots__ = ()
    loss_scale: Any

    @staticmethod
    def _check_outermost(state: PyTree, *, in_step: bool) -> None:
        """Raises if a scaled state is inside of a transformation that advances on a skipped step."""
        raise NotImplementedError


def has_scaled_state(state: PyTree) -> bool:
    return bool(find_nodes(state, ScaledState))


def find_nodes(tree: PyTree, kind: type[T]) -> list[T]:
    """Lists the nodes of a type in a tree. Does not look into the inner state of a `LossScaledState`."""
    nodes: list[Any] = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, (kind, ScaledState)))
    if kind is LossScale:
        nodes = [node.loss_scale if isinstance(node, ScaledState) else node for node in nodes]
    return [node for node in nodes if isinstance(node, kind)]


def get_loss_scale(state: PyTree) -> LossScale:
    """Finds the loss scale in a state.

    Args:
      state: a `LossScale`, or any tree that holds exactly one: an optax state, a `TrainState`, an `nnx.Optimizer`.

    Raises:
      ValueError: it holds no loss scale or several; or the loss scale is inside another transformation, such as
        `optax.MultiSteps`, whose state would advance on a skipped step.

    >>> import jmp_policy as jmp
    >>> jmp.get_loss_scale({"step": 0, "scale": jmp.StaticLossScale(8.0)})
    StaticLossScale(loss_scale=8.0)
    """
    register_loss_scales()
    if isinstance(state, LossScale):
        return strip_variables(state)
    for node in find_nodes(state, ScaledState)[:1]:
        node._check_outermost(state, in_step=False)
    found = find_nodes(state, LossScale)
    if len(found) != 1:
        is_tree = state is not None and not jax.tree_util.all_leaves([state])
        got = f"{type(state).__name__} with {len(found)}" if is_tree else describe(state)
        raise ValueError(
            f"Expected a state that holds exactly one loss scale, got {got}. Pass the loss scale itself, such as "
            "policy.loss_scale(), or the state of jmp_policy.optim.loss_scaled(tx, policy.loss_scale())."
        )
    return strip_variables(found[0])


def was_step_taken(state: PyTree) -> Any:
    """Returns whether the last step of an optimizer was taken: a boolean scalar array, or True if it never skips."""
    for found in find_nodes(state, ScaledState) or [state]:
        return found.step_taken if isinstance(found, SkippingState) else True


def find_scaled_state(state: PyTree) -> Any:
    """Finds the one state of `optim.loss_scaled` in a tree, without its inner state."""
    found: list[Any] = find_nodes(state, ScaledState)
    if len(found) != 1:
        raise ValueError(
            f"Expected a state that holds exactly one LossScaledState, got {type(state).__name__} with {len(found)}. "
            "For example: jmp_policy.optim.loss_scaled(optax.adamw(1e-3), policy.loss_scale()).init(params)."
        )
    return strip_variables(found[0]._replace(inner_state=None))  # no caller reads it, and it may be large


def look_inside(state: Any) -> Any:
    """Returns the skipping state in the state of an optimizer, also of `optax.MultiSteps`, or None."""
    while state is not None and not isinstance(state, SkippingState):
        state = getattr(state, "inner_opt_state", getattr(state, "inner_state", None))
    return state


def list_skipping(state: PyTree) -> list[Any]:
    """Lists the states of all optimizers in a state that skip steps, outermost first, without their inner states.

    It looks only where one may be: the state of an optimizer may be large.
    """
    nodes = [state] if isinstance(state, SkippingState) else find_nodes(state, SkippingState)
    found: list[Any] = []
    while nodes:
        node: Any = nodes.pop(0)
        found.append(strip_variables(node._replace(inner_state=None)))
        inner = look_inside(node.inner_state)
        nodes += [] if inner is None else [inner]
    return found


def metrics(state: PyTree, params: PyTree = None) -> dict[str, Any]:
    """Returns the metrics of loss scaling as a flat dictionary of scalars, for any logger.

    The values are arrays, so a jitted step can return them, and nothing is read from the device. `x.item()` reads one
    as a Python number, and `jax.device_get` reads all of them at once, as NumPy arrays.

    Args:
      state: a tree that holds the state of `optim.loss_scaled` or `optim.skip_spikes`, or a loss scale alone.
      params: the parameters after the step, for `updates_finite`. To check them inside of the step costs less.

    Returns:
      `loss_scale` (float32) and `steps_since_growth` (int32). For the state of an optimizer also `grads_finite` (bool),
      `skipped_steps` and `consecutive_skips` (int32). With `check="updates"`, or with `params`, also `updates_finite`
      (bool): false in the step whose update lost the parameters, or would have. With `optim.skip_spikes` also
      `spike_steps` (int32), of all of them if there are several, and `last_spike` (float32), of the outermost.

    Raises:
      ValueError: the tree holds no loss scale and no `optim.skip_spikes`, or several loss scales.

    >>> import jax, json, jax.numpy as jnp, jmp_policy as jmp
    >>> loss, scale = jnp.float32(2.5), jmp.DynamicLossScale(2.0**10)
    >>> values = jax.device_get({"loss": loss} | jmp.metrics(scale))
    >>> json.dumps({name: x.item() for name, x in values.items()})
    '{"loss": 2.5, "loss_scale": 1024.0, "steps_since_growth": 0}'
    """
    scaled = find_nodes(state, ScaledState)
    spikes = [node for node in list_skipping(state) if not isinstance(node, ScaledState)]
    found: dict[str, Any] = {}
    if not spikes or scaled or find_nodes(state, LossScale):
        scale = get_loss_scale(state)
        dynamic = isinstance(scale, DynamicLossScale)
        found["loss_scale"] = scale.loss_scale if dynamic else np.float32(scale.loss_scale)
        found["steps_since_growth"] = scale.counter if dynamic else np.int32(0)
    if scaled:
        names = ("grads_finite", "skipped_steps", "consecutive_skips", "updates_finite")
        values = {name: getattr(find_scaled_state(state), name) for name in names}
        found |= {name: value for name, value in values.items() if value is not None}
    if params is not None and "updates_finite" not in found:
        found["updates_finite"] = all_finite(params)
    if spikes:
        found |= {"spike_steps": sum(each.spike_steps for each in spikes), "last_spike": spikes[0].last_spike}
    return found


def strip_variables(tree: T) -> T:
    """Replaces Variables, in which an nnx optimizer keeps its arrays, by their arrays."""
    is_variable = lambda node: hasattr(node, "get_value")
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_variable)
    if not any(map(is_variable, leaves)):
        return tree
    return structure.unflatten([leaf.get_value() if is_variable(leaf) else leaf for leaf in leaves])
