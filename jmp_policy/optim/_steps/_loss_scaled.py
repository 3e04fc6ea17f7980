"""An optax transformation that carries a loss scale and skips the steps that overflowed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._base import AxisName, PyTree, describe, is_half, join_state, split_state, vary
from ...loss_scale import (
    LossScale,
    LossScaledState,
    NoOpLossScale,
    all_finite,
    has_scaled_state,
    register_with_flax,
    suggest_loss_scale,
)
from ...numerics._nonfinite import Provenance
from ._provenance import ProvenanceState, begin_provenance, carry_provenance, has_provenance, take_provenance
from ._skip import Operands, Result, make_skippable
from ._step import (
    MASKED,
    ParameterUpdate,
    Transformation,
    check_transformation,
    keep_dtypes,
    overwrite_state,
    restore_float0,
    step,
    with_extra_args,
    zero_float0,
)


class LossScaledUpdate(ParameterUpdate):
    """The `update` of `loss_scaled`; the updates are -0.0 on a skipped step."""

    overwrites = True

    def __init__(self, inner: Transformation, axis_name: AxisName | None, provenance: bool):
        self._inner = inner
        self._axis_name = axis_name
        self._provenance = provenance
        self._update = _update(inner, {})
        self._update_and_apply = _update_and_apply(inner, {})

    def __call__(self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        provenance, extra = self._open(state, extra)
        updates, gradient = split_state(updates, MASKED)
        if gradient is not None and params is None:
            raise ValueError(
                "There is float8 state among the gradients, which is overwritten and not added to: update needs the "
                "parameters. For example: tx.update(grads, opt_state, params)."
            )
        # A gradient without state may come with parameters that have some, which the inner optimizer then sees.
        params, old = (params, None) if gradient is None else split_state(params, MASKED)
        zeros = zero_float0(updates)
        arrays, others = _split(extra)
        take_or_skip = _update(self._inner, others) if others else self._update
        operands = Operands(zeros, NoOpLossScale(), state.inner_state, params, arrays)
        new_updates, after = self._unless_nonfinite(take_or_skip, operands, state, provenance)
        # What is added to float8 state is what makes it the next one, up to a rounding.
        difference = jax.tree.map(jnp.subtract, overwrite_state(old, gradient, state, after), old)
        return join_state(restore_float0(updates, new_updates, zeros), difference), after

    def step(
        self, grads: PyTree, state: LossScaledState, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, LossScaledState]:
        return self.step_scaled(grads, NoOpLossScale(), state, params, extra)

    def step_scaled(
        self, grads: PyTree, scale: LossScale, state: LossScaledState, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, LossScaledState]:
        """As `step`, from gradients that are multiplied by `scale` and may be narrower than their parameters."""
        provenance, extra = self._open(state, extra)
        (grads, gradient), (params, old) = split_state(grads, MASKED), split_state(params, MASKED)
        arrays, others = _split(extra)
        take_or_skip = _update_and_apply(self._inner, others) if others else self._update_and_apply
        operands = Operands(grads, scale, state.inner_state, params, arrays)
        new_params, after = self._unless_nonfinite(take_or_skip, operands, state, provenance)
        return join_state(new_params, overwrite_state(old, gradient, state, after)), after

    def _open(self, state: LossScaledState, extra: dict[str, Any]) -> tuple[Provenance | None, dict[str, Any]]:
        """Checks a state, and takes the provenance of the step out of its extra arguments."""
        _check_state(state)
        if self._provenance and not has_provenance(state):
            raise TypeError(_WITHOUT_PROVENANCE)
        return take_provenance(state, extra)

    def _unless_nonfinite(
        self,
        take_or_skip: Callable[[jax.Array, Operands], Result],
        operands: Operands,
        state: LossScaledState,
        provenance: Provenance | None,
    ) -> tuple[PyTree, LossScaledState]:
        finite = all_finite(operands.grads)
        if self._axis_name is not None:
            finite = lax.pmin(vary(finite, self._axis_name).astype(jnp.int32), self._axis_name) == 1
        out, inner_state = take_or_skip(finite, operands)
        skipped = (~finite).astype(jnp.int32)
        after = LossScaledState(
            inner_state,
            state.loss_scale.adjust(finite),
            finite,
            state.skipped_steps + skipped,
            (state.consecutive_skips + skipped) * skipped,
        )
        return out, carry_provenance(state, after, provenance, self._axis_name)


def _check_state(state: PyTree) -> None:
    if not isinstance(state, LossScaledState):
        raise TypeError(
            f"Expected the state of loss_scaled or skip_nonfinite, got {type(state).__name__}. It is made by "
            "opt_state = tx.init(params), and comes third: jmp_policy.optim.step(tx, grads, opt_state, params). A "
            "state that was saved without them goes inside: tx.init(params)._replace(inner_state=restored)."
        )


def _update(inner: Transformation, others: dict[str, Any]) -> Callable[[jax.Array, Operands], Result]:
    update = with_extra_args(inner).update

    @jax.jit  # skip asks for its shapes, too
    def take(operands: Operands) -> Result:
        extra = operands.extra | others
        updates, inner_state = update(operands.grads, operands.inner_state, operands.params, **extra)
        return updates, keep_dtypes(operands.inner_state, inner_state)

    def skip(operands: Operands) -> Result:
        updates, _ = jax.eval_shape(take, operands)
        return jax.tree.map(_negative_zeros, updates), operands.inner_state

    return make_skippable(take, skip, stores_half=isinstance(inner.update, ParameterUpdate))


def _update_and_apply(inner: Transformation, others: dict[str, Any]) -> Callable[[jax.Array, Operands], Result]:
    @jax.jit
    def take(operands: Operands) -> Result:
        extra = operands.extra | others
        grads = jax.tree.map(_as_wide, operands.scale.unscale(operands.grads), _differentiated(operands.params))
        params, inner_state = step(inner, grads, operands.inner_state, operands.params, **extra)
        return params, keep_dtypes(operands.inner_state, inner_state)

    def skip(operands: Operands) -> Result:
        return operands.params, operands.inner_state

    return make_skippable(take, skip, stores_half=isinstance(inner.update, ParameterUpdate))


def _differentiated(params: PyTree) -> PyTree:
    """The parameters that gradients are like: of the two trees that `optax.lookahead` trains, one."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _as_wide(grad: Any, param: Any) -> Any:
    """A half-precision gradient in the dtype of a parameter that is wider."""
    return lax.convert_element_type(grad, param.dtype) if is_half(grad) and not is_half(param) else grad


def _negative_zeros(update: jax.ShapeDtypeStruct) -> jax.Array:
    """The number that changes no parameter it is added to; +0.0 would turn -0.0 into +0.0."""
    if jnp.issubdtype(update.dtype, jnp.complexfloating):
        zero = complex(-0.0, -0.0)
    else:
        zero = -0.0 if jnp.issubdtype(update.dtype, jnp.floating) else 0
    return lax.full_like(update, zero)  # which has the sharding of the update, as what is skipped must


def _split(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The extra arguments that are trees of arrays, and the others (functions, say), which `jax.jit` cannot receive."""
    arrays = {name: tree for name, tree in extra.items() if all(map(_is_array, jax.tree.leaves(tree)))}
    return arrays, {name: value for name, value in extra.items() if name not in arrays}


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype")


_WITHOUT_PROVENANCE = (
    "This optimizer carries the provenance of its steps, and the state that it got was made without. Convert it: "
    "opt_state = jmp_policy.convert_state(opt_state, tx.init(params))."
)


if TYPE_CHECKING:

    class LossScaling(optax.GradientTransformationExtraArgs):
        """A transformation of which a type checker knows the state."""

        init: Callable[[PyTree], LossScaledState]  # pyright: ignore[reportIncompatibleVariableOverride]

    class LossScalingWithProvenance(LossScaling):
        """One whose state carries provenance."""

        init: Callable[[PyTree], ProvenanceState]  # pyright: ignore[reportIncompatibleVariableOverride]
else:
    LossScaling = LossScalingWithProvenance = optax.GradientTransformationExtraArgs


@overload
def loss_scaled(
    inner: Transformation, loss_scale: LossScale, *, axis_name: AxisName | None = None, provenance: Literal[True]
) -> LossScalingWithProvenance: ...
@overload
def loss_scaled(
    inner: Transformation, loss_scale: LossScale, *, axis_name: AxisName | None = None, provenance: bool = False
) -> LossScaling: ...
def loss_scaled(
    inner: Transformation, loss_scale: LossScale, *, axis_name: AxisName | None = None, provenance: bool = False
) -> LossScaling:
    """Carries a loss scale beside an optimizer's state, and skips steps whose
    gradients are not finite.

    A step that overflowed changes no parameter, and halves the scale:

    >>> import jax.numpy as jnp, optax
    >>> import jmp_policy as jmp
    >>> tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0))
    >>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([jnp.inf, 1.0])}
    >>> opt_state = tx.init(params)
    >>> params, opt_state = jmp.optim.step(tx, grads, opt_state, params)
    >>> params["w"].tolist(), int(opt_state.skipped_steps)
    ([1.0, 1.0], 1)
    >>> float(opt_state.loss_scale.loss_scale)
    2.0

    What it does:

    1. A skipped step changes nothing but the loss scale and the skip counters.
       `optim.step` keeps every bit of the parameters and of the inner state.
       `update` followed by `optax.apply_updates` does as well (the updates are
       -0.0), subnormal parameters excepted where the backend flushes them.
    2. The decision is made on the device.
    3. It goes outermost, once, around everything else. Elsewhere something goes
       on where it skips a step, or hides from it that it should; `init`,
       `optim.step` and `value_and_grad` raise where they can tell.
    4. Around `MultiSteps` it drops a bad microbatch and keeps the rest; inside,
       the accumulator would be nan for ever. Its scale counts microbatches,
       where PyTorch's `GradScaler` counts steps of k: `period=2000 * k` grows
       as often.
    5. A clip outside of it hides an infinity; weight decay and schedules
       outside go on. `inject_hyperparams` of numbers may be outside.

    6. With `provenance` its state remembers the last step that was skipped, and
       which operation made the infinities: what `numerics.first_nonfinite`
       finds, and each step then hands over. `optim.last_skip` reads it.

    These work:

        loss_scaled(chain(clip, adamw, add_decayed_weights))
        loss_scaled(MultiSteps(adamw, k))
        loss_scaled(partition({"a": adamw, "b": sgd}, f))
        loss_scaled(inject_hyperparams(adamw)(schedule))
        loss_scaled(adamw)

    These do not:

        chain(clip, loss_scaled(adamw), add_decayed_weights)
        MultiSteps(loss_scaled(adamw), k)
        partition({"a": loss_scaled(adamw), "b": sgd}, f)
        inject_hyperparams(scaled_adamw)(schedule)
        apply_if_finite(loss_scaled(adamw), n)

    Restoring a saved state:

    1. `jmp_policy.convert_state` makes of it the state of a run under any
       policy: with another loss scale, or saved without `loss_scaled`.
    2. A running state goes on with another scale, a new policy's say, by
       `state._replace(loss_scale=policy.loss_scale())`; in nnx, which keeps
       each array in a Variable, by
       `jax.tree.map(nnx.OptArray, policy.loss_scale())`.

    Args:
      inner: the transformation to wrap. It receives true gradients, as
        `jmp_policy.value_and_grad` returns them.
      loss_scale: the loss scale to start from, for example
        `policy.loss_scale()`.
      axis_name: a mapped axis, or several, on which gradients differ from
        device to device; a step is then skipped on all of its devices if it
        overflowed on one. Not needed where gradients are averaged before.
      provenance: whether the state carries where the infinities of the last
        skipped step came from. `update` and `optim.step` then need an extra
        argument `provenance`, of each step; `optim.minimize` finds it itself.

    Returns:
      A transformation whose state is a `LossScaledState` (with `provenance` a
      `ProvenanceState`) and whose `update` passes extra arguments on.

    Raises:
      TypeError: `inner` is not an optax transformation, or `loss_scale` no loss
        scale.
      ValueError: `inner` is a `loss_scaled` itself, or holds one, which `init`
        finds.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018,
    section 3.2.
    """
    check_transformation(inner)
    if not isinstance(loss_scale, LossScale):
        example = suggest_loss_scale(loss_scale) or "policy.loss_scale()"
        raise TypeError(f"loss_scale must be a LossScale, got {describe(loss_scale)}. For example: {example}.")
    if isinstance(inner.update, LossScaledUpdate):
        raise ValueError(_WRAPPED_TWICE)

    def init(params: PyTree) -> Any:
        register_with_flax()
        inner_state = inner.init(split_state(params, MASKED)[0])
        if has_scaled_state(inner_state):
            raise ValueError(_WRAPPED_TWICE)
        # Arrays of their own, each: a fresh state may be donated, and the loss scale may begin another one.
        own_scale = jax.tree.map(jnp.array, loss_scale)
        skipped_steps, consecutive_skips = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        state = LossScaledState(inner_state, own_scale, jnp.array(True), skipped_steps, consecutive_skips)
        return begin_provenance(state) if provenance else state

    return LossScaling(init, LossScaledUpdate(inner, axis_name, provenance))


@overload
def skip_nonfinite(
    inner: Transformation, *, axis_name: AxisName | None = None, provenance: Literal[True]
) -> LossScalingWithProvenance: ...
@overload
def skip_nonfinite(
    inner: Transformation, *, axis_name: AxisName | None = None, provenance: bool = False
) -> LossScaling: ...
def skip_nonfinite(
    inner: Transformation, *, axis_name: AxisName | None = None, provenance: bool = False
) -> LossScaling:
    """`loss_scaled` without a scale: for bfloat16 and float32, where one infinity would poison the moments for good.

    Unlike `optax.apply_if_finite`, it never lets a non-finite step through; `optim.check` says when it skips only. Its
    arguments, its state and its errors are `loss_scaled`'s.

    It also serves a loop that keeps its loss scales itself. Several losses have a scale each, which only their own
    infinities lower, and share a step that is skipped where one of them overflows:

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx, losses = jmp.optim.skip_nonfinite(optax.sgd(0.5)), {"fit": lambda w: (w - 1.0) ** 2, "size": lambda w: w**2}
    >>> params, scales = jnp.float32(2.0), {"fit": jmp.DynamicLossScale(), "size": jmp.DynamicLossScale(2.0**8)}
    >>> grads = {name: jmp.grad(losses[name], loss_scale=scales[name])(params) for name in losses}
    >>> scales = {name: scale.adjust(jmp.all_finite(grads[name])) for name, scale in scales.items()}
    >>> params, opt_state = jmp.optim.step(tx, jax.tree.map(jnp.add, *grads.values()), tx.init(params), params)
    >>> float(params)
    -1.0

    Several optimizers (a GAN's) on one scale have a `skip_nonfinite` each, and skip each for itself; the scale
    is adjusted once, after all of them: `scale.adjust(state.grads_finite & other_state.grads_finite)`.
    """
    return loss_scaled(inner, NoOpLossScale(), axis_name=axis_name, provenance=provenance)


_WRAPPED_TWICE = (
    "This optimizer is wrapped in loss_scaled or skip_nonfinite twice: an overflow would lower two scales. Wrap it "
    "once, outermost, for example: loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), scale)."
)
