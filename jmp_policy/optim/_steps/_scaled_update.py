"""The update of `loss_scaled`: one decision for a whole step, and what a skipped one leaves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._base import PyTree, is_half, join_state, split_state
from ..._base.mesh import AxisName, vary
from ...loss_scale import LossScale, LossScaledState, NoOpLossScale, all_finite
from ...numerics._nonfinite import Provenance
from ._provenance import carry_provenance, has_provenance, take_provenance
from ._skip import Operands, Result, make_skippable
from ._step import ParameterUpdate, Transformation, keep_dtypes, step, with_extra_args
from ._unseen import HOLE, overwrite_state, restore_float0, zero_float0


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
        updates, gradient = split_state(updates, HOLE)
        if gradient is not None and params is None:
            raise ValueError(
                "There is float8 state among the gradients, which is overwritten and not added to: update needs the "
                "parameters. For example: tx.update(grads, opt_state, params)."
            )
        # A gradient without state may come with parameters that have some, which the inner optimizer then sees.
        params, old = (params, None) if gradient is None else split_state(params, HOLE)
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
        (grads, gradient), (params, old) = split_state(grads, HOLE), split_state(params, HOLE)
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
