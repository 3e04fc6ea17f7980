"""`SkippingUpdate`: takes or skips a whole step of an optimizer, as decided on the device."""

import abc
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from .._base import AxisName, PyTree, is_half, join_state, split_state
from ..loss_scale import LossScale, NoOpLossScale, SkippingState, select_tree
from ._step import (
    MASKED,
    explain_step_errors,
    fast_params,
    keep_dtypes,
    overwrite_state,
    restore_float0,
    step,
    zero_float0,
)
from ._transformation import ParameterUpdate, Transformation, with_extra_args


class _Operands(NamedTuple):
    """Inputs of a step."""

    grads: PyTree  # still multiplied by `scale`
    scale: LossScale
    inner_state: PyTree
    params: PyTree
    extra: dict[str, Any]  # arguments that are trees of arrays


class _Result(NamedTuple):
    """Outputs of a step."""

    out: PyTree  # updates or parameters
    inner_state: PyTree
    updates_finite: Any = None  # boolean scalar; None if updates are not checked


class Decision(NamedTuple):
    """Decision on a step, and the function from its result to the next state."""

    take: jax.Array
    finish: Callable[[PyTree, Any], Any]


Check = Callable[[PyTree, PyTree], jax.Array]
"""Decides, from the parameters and inner state before and after a step, whether it may be kept."""


class SkippingUpdate(ParameterUpdate):
    """`update` of a transformation that takes or skips whole steps. On a skipped step the updates are -0.0."""

    overwrites = True
    axis_name: AxisName | None = None

    def __init__(self, inner: Transformation, check: Check | None = None):
        self.inner = inner
        self._check = check
        # Built once, for steps without extra arguments that `jax.jit` cannot receive.
        self._built = {build: build(find_inner(inner), {}, check) for build in (_update, _update_and_apply)}

    @abc.abstractmethod
    def _decide(self, grads: PyTree, state: Any, extra: dict[str, Any]) -> Decision:
        """Decides on a step from its gradients, which may be scaled, and from extra arguments."""

    def decide(self, grads: PyTree, scale: LossScale, state: Any, extra: dict[str, Any]) -> Decision:
        """Decides on a step together with those inside that skip steps: one branch costs less than one inside another.

        `finish` of the decision takes the state inside of all of them.
        """
        own, update = self._decide(grads, state, extra), self.inner.update
        if not isinstance(update, SkippingUpdate):
            return own
        inner = update.decide(scale.unscale(grads), NoOpLossScale(), state.inner_state, extra)

        def finish(inner_state: PyTree, updates_finite: Any) -> Any:
            reached = own.take if updates_finite is None else own.take & updates_finite
            new = _select_skipping(reached, inner.finish(inner_state, None), state.inner_state)
            return own.finish(new, updates_finite)

        return Decision(own.take & inner.take, finish)

    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        updates, gradient = split_state(updates, MASKED)
        if gradient is not None and params is None:
            raise ValueError(
                "There is float8 state among the gradients, which replaces the old state: update needs the parameters. "
                "For example: tx.update(grads, opt_state, params)."
            )
        # Without state among the gradients, the inner optimizer sees the state among the parameters.
        params, old = (params, None) if gradient is None else split_state(params, MASKED)
        zeros = zero_float0(updates)
        with explain_step_errors(updates, updates if params is None else params):
            new_updates, after = self._take_or_skip(_update, zeros, NoOpLossScale(), state, params, extra)
        # Adding the difference to float8 state gives the next state, up to rounding.
        difference = jax.tree.map(jnp.subtract, overwrite_state(old, gradient, state, after), old)
        return join_state(restore_float0(updates, new_updates, zeros), difference), after

    def step(self, grads: PyTree, state: Any, params: PyTree, extra: dict[str, Any]) -> tuple[PyTree, Any]:
        return self.step_scaled(grads, NoOpLossScale(), state, params, extra)

    def step_scaled(
        self, grads: PyTree, scale: LossScale, state: Any, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, Any]:
        """Like `step`, for gradients that are multiplied by `scale` and may be narrower than their parameters."""
        (grads, gradient), (params, old) = split_state(fast_params(grads), MASKED), split_state(params, MASKED)
        new_params, after = self._take_or_skip(_update_and_apply, grads, scale, state, params, extra)
        return join_state(new_params, overwrite_state(old, gradient, state, after)), after

    def _take_or_skip(
        self,
        build: Callable[..., Callable[[jax.Array, _Operands], _Result]],
        grads: PyTree,
        scale: LossScale,
        state: Any,
        params: PyTree,
        extra: dict[str, Any],
    ) -> tuple[PyTree, Any]:
        """Returns the updates or parameters of a step, and the next state."""
        take, finish = self.decide(grads, scale, state, extra)
        is_array = lambda leaf: isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")
        arrays = {name: tree for name, tree in extra.items() if all(map(is_array, jax.tree.leaves(tree)))}
        others = {name: value for name, value in extra.items() if name not in arrays}  # such as functions
        if "value" in arrays and not _takes_loss(find_inner(self.inner)):
            del arrays["value"]  # it was for `skip_spikes`
        take_or_skip = build(find_inner(self.inner), others, self._check) if others else self._built[build]
        out, *rest = take_or_skip(take, _Operands(grads, scale, find_inner_state(state), params, arrays))
        return out, finish(*rest)


def _takes_loss(tx: Transformation) -> bool:
    """False for `optax.contrib.sam`, whose only extra argument is another one."""
    parameters = inspect.signature(tx.update).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or "value" in parameters or not isinstance(tx, optax.GradientTransformationExtraArgs)


def find_inner(tx: Transformation) -> Any:
    """Returns the transformation inside of all that skip steps."""
    inner: Any = tx
    while isinstance(inner.update, SkippingUpdate):
        inner = inner.update.inner
    return inner


def find_inner_state(state: Any) -> PyTree:
    """Returns the state inside of all that skip steps."""
    while isinstance(state, SkippingState):
        state = state.inner_state
    return state


def _select_skipping(reached: jax.Array, new: Any, old: Any) -> Any:
    """Selects between states of transformations that skip steps; keeps the innermost state of `new`."""
    if not isinstance(new, SkippingState):
        return new
    inner_state = _select_skipping(reached, new.inner_state, old.inner_state)
    fields = select_tree(reached, new._replace(inner_state=None), old._replace(inner_state=None))
    return fields._replace(inner_state=inner_state)


def _update(
    inner: Transformation, others: dict[str, Any], check: Check | None
) -> Callable[[jax.Array, _Operands], _Result]:
    update = with_extra_args(inner).update

    @jax.jit  # skip needs its shapes too
    def take(operands: _Operands) -> _Result:
        updates, inner_state = update(operands.grads, operands.inner_state, operands.params, **operands.extra | others)
        return _Result(updates, keep_dtypes(operands.inner_state, inner_state))

    def skip(operands: _Operands) -> _Result:
        updates = jax.eval_shape(take, operands).out
        return _Result(jax.tree.map(_negative_zeros, updates), _keep_state(take, operands))

    def compare(operands: _Operands, new: _Result) -> tuple[PyTree, PyTree]:
        if operands.params is None:
            return (skip(operands).out, operands.inner_state), (new.out, new.inner_state)
        return (operands.params, operands.inner_state), (optax.apply_updates(operands.params, new.out), new.inner_state)

    return _make_skippable(inner, take, skip, check and (lambda *args: check(*compare(*args))))


def _update_and_apply(
    inner: Transformation, others: dict[str, Any], check: Check | None
) -> Callable[[jax.Array, _Operands], _Result]:
    @jax.jit
    def take(operands: _Operands) -> _Result:
        params = operands.params
        grads = jax.tree.map(_as_wide, operands.scale.unscale(operands.grads), fast_params(params))
        params, inner_state = step(inner, grads, operands.inner_state, params, **operands.extra | others)
        return _Result(params, keep_dtypes(operands.inner_state, inner_state))

    def skip(operands: _Operands) -> _Result:
        return _Result(operands.params, _keep_state(take, operands))

    return _make_skippable(inner, take, skip, check and (lambda operands, new: check(skip(operands)[:2], new[:2])))


def _make_skippable(
    inner: Transformation,
    take: Callable[[_Operands], _Result],
    skip: Callable[[_Operands], _Result],
    check: Callable[[_Operands, _Result], jax.Array] | None,
) -> Callable[[jax.Array, _Operands], _Result]:
    """Builds the function `(decision, operands)` that takes a step or skips it, as its platform does fastest."""

    # Built once: JAX compiles a function that it has not seen before at each eager call. `take` is jitted, so that both
    # forms trace it once.
    stores_half = isinstance(inner.update, ParameterUpdate)  # the step stores half-precision parameters in its own way

    def branch(decision: jax.Array, operands: _Operands) -> _Result:
        if check is None:
            return lax.cond(decision, take, skip, operands)
        # XLA makes one pass of the step and the check, which writes nothing, and computes the step again in the branch.
        # To keep its results until they are checked would need three more copies of the parameters in memory.
        finite = check(operands, take(operands))
        return lax.cond(decision & finite, take, skip, operands)._replace(updates_finite=finite | ~decision)

    def select(decision: jax.Array, operands: _Operands) -> _Result:
        new = take(operands)
        if check is None:
            return select_tree(decision, new, skip(operands))
        finite = check(operands, new)
        return select_tree(decision & finite, new, skip(operands))._replace(updates_finite=finite | ~decision)

    def take_or_skip(decision: jax.Array, operands: _Operands) -> _Result:
        sizes = (leaf.size if is_half(leaf) else -leaf.size for leaf in jax.tree.leaves(operands.grads))
        branching = ("cpu", "tpu") if stores_half or sum(sizes) > 0 else ("cpu",)  # if they are mostly half precision
        return lax.platform_dependent(decision, operands, **dict.fromkeys(branching, branch), default=select)

    # Without jit, an eager `platform_dependent` waits for the device to learn the platform. A trace needs no jit.
    eager = jax.jit(take_or_skip, inline=True)
    return lambda decision, operands: (take_or_skip if isinstance(decision, Tracer) else eager)(decision, operands)


def _keep_state(take: Callable[[_Operands], _Result], operands: _Operands) -> PyTree:
    """Returns the old state, with the sharding that a step gives it.

    `jax.jit(optax.contrib.madgrad(1e-3).init)` makes a state that is not sharded, and its updates are.
    """
    old = operands.inner_state
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(operands.grads)]
    if not any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
        return old
    new = jax.eval_shape(take, operands).inner_state
    return jax.tree.map(_reshard_like, old, new)


def _reshard_like(old: Any, new: jax.ShapeDtypeStruct) -> Any:
    sharding = jax.typeof(old).sharding
    return old if new.sharding in (None, sharding) else jax.sharding.reshard(old, new.sharding)


def _as_wide(grad: Any, param: Any) -> Any:
    """Upcasts a half-precision gradient to the dtype of a wider parameter."""
    return lax.convert_element_type(grad, param.dtype) if is_half(grad) and not is_half(param) else grad


def _negative_zeros(update: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an update that changes no parameter; +0.0 would change -0.0 to +0.0."""
    if jnp.issubdtype(update.dtype, jnp.complexfloating):
        zero = complex(-0.0, -0.0)
    else:
        zero = -0.0 if jnp.issubdtype(update.dtype, jnp.floating) else 0
    return lax.full_like(update, zero)  # keeps the sharding; both branches of the cond must have the same one
