"""One step of an optimizer, from gradients to new parameters, and how gradients are combined."""

import abc
import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._base import AxisName, PyTree, at_least_float32, describe, join_state, list_axes, next_state, split_state, vary
from ...loss_scale import check_outermost, find_scaled_state, has_scaled_state
from ._provenance import take_provenance

HOLE = optax.MaskedNode()
"""What stands for state that no optimizer sees: transformations of optax pass over it."""


def fill_zeros(rest: PyTree, state: PyTree) -> PyTree:
    """Puts zeros where state was split from a tree: they make no update, and add nothing to the norm of a tree."""
    return join_state(rest, jax.tree.map(jnp.zeros_like, state))


def overwrite_state(state: PyTree, gradient: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Makes the state after a step of an optimizer: the next one, unless the step was skipped.

    Args:
      state: the state among parameters, as `split_state` gives it, or among the two of `optax.lookahead`, which share
        theirs; `None` if there is none.
      gradient: its gradient.
      before: the state of the optimizer. In the middle of `optax.MultiSteps`, the largest magnitudes of microbatches
        stand for one step.
      after: the next state of the optimizer.
    """
    if state is None:
        return None
    if isinstance(state, optax.LookaheadParams):
        return optax.LookaheadParams(*[overwrite_state(state.fast, gradient, before, after)] * 2)
    new = next_state(state, gradient, _is_first(before))
    if not has_scaled_state(after):
        return new
    finite = find_scaled_state(after).grads_finite
    return jax.tree.map(lambda new, old: lax.select(finite, new, old), new, state)


def _is_first(opt_state: PyTree) -> Any:
    """Whether no microbatch of the step was taken before; a step ends where all groups of parameters take theirs."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_multi_steps)
    found = [node.mini_step == 0 for node in nodes if _is_multi_steps(node)]
    return functools.reduce(jnp.logical_and, found) if found else True


def _is_multi_steps(node: object) -> bool:
    return isinstance(node, optax.MultiStepsState)


def has_float0(grads: PyTree) -> bool:
    """Whether some gradients are `float0`."""
    return any(map(_is_float0, jax.tree.leaves(grads)))


def zero_float0(grads: PyTree) -> PyTree:
    """The gradients with integer zeros for those that are `float0`."""
    return jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.int32) if _is_float0(g) else g, grads)


def restore_float0(grads: PyTree, tree: PyTree, otherwise: PyTree) -> PyTree:
    """The leaves of `tree`, and those of `otherwise` where the gradient is `float0`."""
    if not has_float0(grads):
        return tree
    return jax.tree.map(lambda g, x, y: y if _is_float0(g) else x, grads, tree, otherwise)


def _is_float0(grad: object) -> bool:
    return getattr(grad, "dtype", None) == jax.dtypes.float0


T = TypeVar("T")


def accumulate(total: T, grads: PyTree) -> T:
    """Adds the gradients of a microbatch to those before it.

    `jax.tree.map(jnp.add, total, grads)`, but for the state of float8 layers, of which it takes the maximum: the
    largest magnitude of all microbatches. Divide the loss by their number, or the gradients inside of the optimizer
    (`optax.scale`): state divided is state lost.

    Args:
      total: gradients, as `jmp_policy.value_and_grad` returns them, or zeros like them.
      grads: the gradients of another microbatch, taken at the same parameters.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> first = {"w": jnp.float32(1), "_overwrite_with_gradient": {"input_scale": jnp.float32([3.0])}}
    >>> second = {"w": jnp.float32(2), "_overwrite_with_gradient": {"input_scale": jnp.float32([2.0])}}
    >>> total = jmp.optim.accumulate(first, second)
    >>> float(total["w"]), total["_overwrite_with_gradient"]["input_scale"].tolist()
    (3.0, [3.0])
    """
    (total, state), (grads, new_state) = split_state(total), split_state(grads)
    return join_state(jax.tree.map(jnp.add, total, grads), jax.tree.map(jnp.maximum, state, new_state))


def pmean(grads: T, axis_name: Any) -> T:
    """Averages gradients over devices.

    `jax.lax.pmean`, but for the state of float8 layers, of which it takes the maximum. In `jax.shard_map` with its
    account of what varies, and with arrays that are sharded under `jax.jit`, JAX has done both already.

    Args:
      grads: gradients, as `jmp_policy.value_and_grad` returns them.
      axis_name: a mapped axis, or several.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> grads = {"w": jnp.float32([1, 3]), "_overwrite_with_gradient": {"input_scale": jnp.float32([[1], [3]])}}
    >>> mean = jax.vmap(lambda grads: jmp.optim.pmean(grads, "devices"), axis_name="devices")(grads)
    >>> mean["w"].tolist(), mean["_overwrite_with_gradient"]["input_scale"].tolist()
    ([2.0, 2.0], [[3.0], [3.0]])
    """
    rest, state = split_state(grads)
    mean = jax.tree.map(lambda x: lax.pmean(vary(x, axis_name), axis_name), rest)
    return join_state(mean, jax.tree.map(lambda x: lax.pmax(vary(x, axis_name), axis_name), state))


def global_norm(grads: PyTree) -> jax.Array:
    """The Euclidean norm of the gradients of parameters, to log it.

    As `optax.tree.norm`, but the state of float8 layers, which is not a gradient, does not count, and the squares of
    half-precision gradients are summed in float32. To clip by it, chain `clip_by_global_norm` before the optimizer.

    Args:
      grads: gradients, as `jmp_policy.value_and_grad` returns them, for nnx models too; `float0` counts as zero.

    Returns:
      A real scalar, float32 or wider; not finite where a gradient is not.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> grads = {"w": jnp.float16([300.0, 400.0]), "_overwrite_with_gradient": {"input_scale": jnp.float32([7.0])}}
    >>> float(jmp.optim.global_norm(grads))
    500.0
    """
    rest, _ = split_state(grads)
    return jnp.sqrt(_add_squares(map(_sum_of_squares, _list_inexact(rest))))


def clip_by_global_norm(max_norm: float, axis_name: AxisName | None = None) -> optax.GradientTransformationExtraArgs:
    """Clips gradients by their global norm, of which each device may have a part.

    `optax.clip_by_global_norm`, but squares are summed and gradients are scaled in float32, the state of float8 layers
    is left alone, and in `jax.shard_map` the norm is that of all devices: one `psum` of one number. There an array that
    is the same on all devices along an axis counts once. With `check_vma=False`, and in `jax.vmap`, JAX does not tell
    which arrays are: each counts as a part of its own.

    Args:
      max_norm: the largest norm that gradients keep.
      axis_name: the mapped axes along which devices have parts; `None` where each has all of the gradients.

    Raises:
      ValueError: `max_norm` is not positive.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> clip = jmp.optim.clip_by_global_norm(1.0, axis_name="fsdp")
    >>> parts = {"w": jnp.float32([3, 4])}  # one number of each of two devices
    >>> clipped = jax.vmap(lambda grads: clip.update(grads, clip.init(grads))[0], axis_name="fsdp")(parts)
    >>> [round(float(x), 3) for x in clipped["w"]]
    [0.6, 0.8]
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm!r}. For example: clip_by_global_norm(1.0).")

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, PyTree]:
        del params, extra
        rest, float8_state = split_state(updates)
        squares = [_share_square(_sum_of_squares(leaf), leaf, axis_name) for leaf in _list_inexact(rest)]
        total = _add_squares(squares)
        norm = jnp.sqrt(total if axis_name is None else lax.psum(vary(total, axis_name), axis_name))
        return join_state(jax.tree.map(lambda grad: _clip(grad, norm, max_norm), rest), float8_state), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _share_square(square: jax.Array, grad: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """What one device adds to a sum over devices: a part of the square of an array that several devices have."""
    axes = () if axis_name is None else list_axes(axis_name)
    known = [axis for axis in axes if axis in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying]
    shared = [axis for axis in known if axis not in jax.typeof(grad).manual_axis_type.varying]
    return square / math.prod(lax.axis_size(axis) for axis in shared)


def _clip(grad: jax.Array, norm: jax.Array, max_norm: float) -> jax.Array:
    if not jnp.issubdtype(grad.dtype, jnp.inexact):
        return grad
    wide = grad.astype(jnp.promote_types(grad.dtype, at_least_float32(grad.real.dtype)))
    scaled = wide * (max_norm / norm).astype(wide.real.dtype)
    return jnp.where(norm < max_norm, grad, scaled.astype(grad.dtype))


def _list_inexact(grads: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(grads) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _add_squares(squares: Iterable[jax.Array]) -> jax.Array:
    listed = list(squares)
    widest = max((square.dtype for square in listed), key=lambda dtype: dtype.itemsize, default=jnp.float32)
    return sum((square.astype(widest) for square in listed), start=jnp.zeros((), widest))


def _sum_of_squares(grad: jax.Array) -> jax.Array:
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        return _sum_of_squares(grad.real) + _sum_of_squares(grad.imag)
    return jnp.sum(jnp.square(grad.astype(at_least_float32(grad.dtype))))


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
