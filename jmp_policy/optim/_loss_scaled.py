"""`loss_scaled`, an optax transformation that carries a loss scale and skips non-finite steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from .._base import AxisName, PyTree, describe, is_half, join_state, split_state, vary
from ..loss_scale import LossScale, NoOpLossScale, all_finite, has_scaled_state, register_loss_scales, select_tree
from ._step import (
    MASKED,
    explain_step_errors,
    keep_dtypes,
    overwrite_state,
    restore_float0,
    step,
    warn_of_half_params,
    zero_float0,
)
from ._transformation import LossScaledState, ParameterUpdate, Transformation, check_transformation, with_extra_args


class _Operands(NamedTuple):
    """Inputs of a step."""

    grads: PyTree  # still multiplied by `scale`
    scale: LossScale
    inner_state: PyTree
    params: PyTree
    extra: dict[str, Any]  # arguments that are trees of arrays


_Result = tuple[PyTree, PyTree]  # updates or parameters, and the next inner state


def _make_skippable(
    take: Callable[[_Operands], _Result], skip: Callable[[_Operands], _Result], stores_half: bool
) -> Callable[[jax.Array, _Operands], _Result]:
    """Builds the function `(finite, operands)` that takes a step or skips it, as its platform does fastest."""

    # Built once: JAX compiles a function that it has not seen before at each eager call. `take` is jitted, so that both
    # forms trace it once. `stores_half` is true if the step stores half-precision parameters in their own way.
    def branch(finite: jax.Array, operands: _Operands) -> _Result:
        return lax.cond(finite, take, skip, operands)

    def select(finite: jax.Array, operands: _Operands) -> _Result:
        return select_tree(finite, take(operands), skip(operands))

    def take_or_skip(finite: jax.Array, operands: _Operands) -> _Result:
        sizes = (leaf.size if is_half(leaf) else -leaf.size for leaf in jax.tree.leaves(operands.grads))
        branching = ("cpu", "tpu") if stores_half or sum(sizes) > 0 else ("cpu",)  # if they are mostly half precision
        return lax.platform_dependent(finite, operands, **dict.fromkeys(branching, branch), default=select)

    # Without jit, an eager `platform_dependent` waits for the device to learn the platform. A trace needs no jit.
    eager = jax.jit(take_or_skip, inline=True)
    return lambda finite, operands: (take_or_skip if isinstance(finite, Tracer) else eager)(finite, operands)


class LossScaledUpdate(ParameterUpdate):
    """`update` of `loss_scaled`. On a skipped step the updates are -0.0."""

    overwrites = True

    def __init__(self, inner: Transformation, axis_name: AxisName | None):
        self._inner = inner
        self._axis_name = axis_name
        # Built once, for steps without extra arguments that `jax.jit` cannot receive.
        self._built = {build: build(inner, {}) for build in (_update, _update_and_apply)}

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

    def step(
        self, grads: PyTree, state: LossScaledState, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, LossScaledState]:
        return self.step_scaled(grads, NoOpLossScale(), state, params, extra)

    def step_scaled(
        self, grads: PyTree, scale: LossScale, state: LossScaledState, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, LossScaledState]:
        """Like `step`, for gradients that are multiplied by `scale` and may be narrower than their parameters."""
        (grads, gradient), (params, old) = split_state(grads, MASKED), split_state(params, MASKED)
        new_params, after = self._take_or_skip(_update_and_apply, grads, scale, state, params, extra)
        return join_state(new_params, overwrite_state(old, gradient, state, after)), after

    def _take_or_skip(
        self,
        build: Callable[..., Callable[[jax.Array, _Operands], _Result]],
        grads: PyTree,
        scale: LossScale,
        state: LossScaledState,
        params: PyTree,
        extra: dict[str, Any],
    ) -> tuple[PyTree, LossScaledState]:
        """Returns the updates or parameters of a step that is skipped if a gradient is not finite, and the state."""
        if not isinstance(state, LossScaledState):
            raise TypeError(
                f"Expected the state of loss_scaled or skip_nonfinite, got {type(state).__name__}. It is made by "
                "opt_state = tx.init(params), and comes third: jmp_policy.optim.step(tx, grads, opt_state, params). A "
                "state that was saved without them goes inside: tx.init(params)._replace(inner_state=restored)."
            )
        is_array = lambda leaf: isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")
        arrays = {name: tree for name, tree in extra.items() if all(map(is_array, jax.tree.leaves(tree)))}
        others = {name: value for name, value in extra.items() if name not in arrays}  # such as functions
        take_or_skip = build(self._inner, others) if others else self._built[build]
        finite = all_finite(grads)
        if self._axis_name is not None:
            finite = lax.pmin(vary(finite, self._axis_name).astype(jnp.int32), self._axis_name) == 1
        out, inner_state = take_or_skip(finite, _Operands(grads, scale, state.inner_state, params, arrays))
        skipped = (~finite).astype(jnp.int32)
        return out, LossScaledState(
            inner_state,
            state.loss_scale.adjust(finite),
            finite,
            state.skipped_steps + skipped,
            (state.consecutive_skips + skipped) * skipped,
        )


def _update(inner: Transformation, others: dict[str, Any]) -> Callable[[jax.Array, _Operands], _Result]:
    update = with_extra_args(inner).update

    @jax.jit  # skip needs its shapes too
    def take(operands: _Operands) -> _Result:
        updates, inner_state = update(operands.grads, operands.inner_state, operands.params, **operands.extra | others)
        return updates, keep_dtypes(operands.inner_state, inner_state)

    def skip(operands: _Operands) -> _Result:
        updates, _ = jax.eval_shape(take, operands)
        return jax.tree.map(_negative_zeros, updates), operands.inner_state

    return _make_skippable(take, skip, stores_half=isinstance(inner.update, ParameterUpdate))


def _update_and_apply(inner: Transformation, others: dict[str, Any]) -> Callable[[jax.Array, _Operands], _Result]:
    @jax.jit
    def take(operands: _Operands) -> _Result:
        params = operands.params
        like = params.fast if isinstance(params, optax.LookaheadParams) else params  # the tree that gradients match
        grads = jax.tree.map(_as_wide, operands.scale.unscale(operands.grads), like)
        params, inner_state = step(inner, grads, operands.inner_state, params, **operands.extra | others)
        return params, keep_dtypes(operands.inner_state, inner_state)

    def skip(operands: _Operands) -> _Result:
        return operands.params, operands.inner_state

    return _make_skippable(take, skip, stores_half=isinstance(inner.update, ParameterUpdate))


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


if TYPE_CHECKING:

    class LossScaling(optax.GradientTransformationExtraArgs):
        """Transformation with a state type for type checkers."""

        init: Callable[[PyTree], LossScaledState]  # pyright: ignore[reportIncompatibleVariableOverride]
else:
    LossScaling = optax.GradientTransformationExtraArgs


def loss_scaled(inner: Transformation, loss_scale: LossScale, *, axis_name: AxisName | None = None) -> LossScaling:
    """Carries a loss scale beside an optimizer's state, and skips steps with non-finite gradients.

    A skipped step changes only the loss scale and the skip counters. `optim.step` keeps every bit of the parameters and
    of the inner state. So does `update` followed by `optax.apply_updates`, except for subnormal parameters on backends
    that flush them. The decision is made on the device.

    It goes outermost, once: `loss_scaled(chain(clip, adamw))`, `loss_scaled(MultiSteps(adamw, k))`,
    `loss_scaled(partition({"a": adamw, "b": sgd}, f))`. Only `inject_hyperparams` of numbers may be outside. In any
    other position, part of the optimizer still advances on a skipped step, or hides the non-finite gradient. `init`,
    `optim.step` and `value_and_grad` raise an error if they can tell. Around `MultiSteps` it skips a non-finite
    microbatch, and its scale counts microbatches: PyTorch's `GradScaler` counts steps of k, so use `period=2000 * k`.

    `jmp_policy.convert_state` restores a state that was saved with another loss scale, or without `loss_scaled`. To
    change the scale of a running state, use `state._replace(loss_scale=policy.loss_scale())`, or in nnx
    `state._replace(loss_scale=jax.tree.map(nnx.OptArray, policy.loss_scale()))`.

    Args:
      inner: the transformation to wrap. It receives true gradients, from `jmp_policy.value_and_grad`.
      loss_scale: the initial loss scale, for example `policy.loss_scale()`.
      axis_name: a mapped axis, or several, along which gradients differ between devices: a step that overflows on one
        of them is skipped on all. Not needed if gradients are averaged before.

    Returns:
      A transformation with a `LossScaledState` as its state. Its `update` passes extra arguments on.

    Raises:
      TypeError: `inner` is not an optax transformation, or `loss_scale` is not a loss scale.
      ValueError: `inner` is a `loss_scaled`, or holds one (`init` raises this).

    Warns:
      UserWarning: `init` gets half-precision parameters, and `inner` would lose small updates of them.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    >>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([jnp.inf, 1.0])}
    >>> params, opt_state = jmp.optim.step(tx, grads, tx.init(params), params)
    >>> params["w"].tolist(), int(opt_state.skipped_steps), float(opt_state.loss_scale.loss_scale)
    ([1.0, 1.0], 1, 2.0)
    """
    check_transformation(inner)
    if not isinstance(loss_scale, LossScale):
        given = describe(loss_scale)
        raise TypeError(f"loss_scale must be a LossScale, got {given}. For example: policy.loss_scale().")
    if isinstance(inner.update, LossScaledUpdate):
        raise ValueError(_WRAPPED_TWICE)

    def init(params: PyTree) -> Any:
        register_loss_scales()
        params = split_state(params, MASKED)[0]
        inner_state = inner.init(params)
        if has_scaled_state(inner_state):
            raise ValueError(_WRAPPED_TWICE)
        warn_of_half_params(inner, params, inner_state)
        # Copies: the state may be donated, and the loss scale may initialize another one.
        own_scale = jax.tree.map(jnp.array, loss_scale)
        skipped_steps, consecutive_skips = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return LossScaledState(inner_state, own_scale, jnp.array(True), skipped_steps, consecutive_skips)

    return LossScaling(init, LossScaledUpdate(inner, axis_name))


def skip_nonfinite(inner: Transformation, *, axis_name: AxisName | None = None) -> LossScaling:
    """Skips steps with non-finite gradients; `loss_scaled` without a scale, for bfloat16 and float32.

    Unlike `optax.apply_if_finite`, it never applies a non-finite step; `optim.raise_if_stuck` raises an error if it
    only skips. It has the arguments, state and errors of `loss_scaled`.

    It also serves a loop that keeps its own loss scales. Several losses can have a scale each and share a step, which
    is skipped if one of them overflows:

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx, losses = jmp.optim.skip_nonfinite(optax.sgd(0.5)), {"fit": lambda w: (w - 1.0) ** 2, "size": lambda w: w**2}
    >>> params, scales = jnp.float32(2.0), {"fit": jmp.DynamicLossScale(), "size": jmp.DynamicLossScale(2.0**8)}
    >>> grads = {name: jmp.grad(losses[name], loss_scale=scales[name])(params) for name in losses}
    >>> scales = {name: scale.adjust(jmp.all_finite(grads[name])) for name, scale in scales.items()}
    >>> params, opt_state = jmp.optim.step(tx, jax.tree.map(jnp.add, *grads.values()), tx.init(params), params)
    >>> float(params)
    -1.0

    Several optimizers (a GAN's) on one scale have a `skip_nonfinite` each, and skip independently. Adjust the scale
    once, after all of them: `scale.adjust(state.grads_finite & other_state.grads_finite)`.
    """
    return loss_scaled(inner, NoOpLossScale(), axis_name=axis_name)


_WRAPPED_TWICE = (
    "This optimizer is wrapped in loss_scaled or skip_nonfinite twice: an overflow would lower two scales. Wrap it "
    "once, outermost, for example: loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), scale)."
)
