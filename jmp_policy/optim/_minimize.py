"""A whole training step, from the loss function to new parameters."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, overload

import jax
import numpy as np
from jax.extend import core

from .._base import Aux, DTypeLike, Loss, P, PyTree, explain_reuse, hide_frames, is_half, prepare_state
from .._jaxpr import run, trace
from ..gradients import check_differentiable, scale_loss, search_reduce_dtype, value_and_grad, warn_of_half
from ..loss_scale import NoOpLossScale, ScaledState, get_loss_scale, has_scaled_state, list_skipping
from ._loss_scaled import LossScaledUpdate
from ._step import Params, explain_step_errors, step
from ._transformation import Transformation, check_loss_first


@overload
def minimize(
    fun: Callable[Concatenate[Params, P], Loss],
    tx: Transformation,
    has_aux: Literal[False] = False,
    *,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
) -> Callable[Concatenate[Params, Any, P], tuple[Params, Any, Loss]]: ...
@overload
def minimize(
    fun: Callable[Concatenate[Params, P], tuple[Loss, Aux]],
    tx: Transformation,
    has_aux: Literal[True],
    *,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
) -> Callable[Concatenate[Params, Any, P], tuple[Params, Any, Loss, Aux]]: ...
def minimize(
    fun: Callable[..., Any],
    tx: Transformation,
    has_aux: bool = False,
    *,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
) -> Callable[..., tuple[Any, ...]]:
    """Builds the training step of a loss function that moves the fewest bytes.

    It is `value_and_grad` followed by `optim.step`, but gradients are not visible between them: gradients of parameters
    that the model casts to half precision stay half-precision and scaled until the step, where they become float32
    without being written to memory. Code that reads true gradients, such as clipping, belongs in the optimizer;
    otherwise use the two functions. With a `reduce_dtype` gradients are true.

    Args:
      fun: `(params, *args, **kwargs) -> loss`, a real scalar, or `-> (loss, aux)` with `has_aux`. Compute the loss in
        float32.
      tx: an optax transformation. Only with `loss_scaled` and `skip_nonfinite` do gradients stay half-precision.
        Optimizers that need the loss, such as `optax.contrib.reduce_on_plateau` and `optax.lbfgs`, need `step`.
      has_aux: whether `fun` returns auxiliary data, which is returned untouched.
      reduce_dtype: the dtype in which gradients are summed over the devices of a mesh, as in `value_and_grad`. By
        default it is the reduce dtype of the policies that `fun` uses.
      on_opaque: `"error"` or `"warn"`, if an unknown op stands between a gradient and its sum, as in `value_and_grad`.

    Returns:
      A function `(params, opt_state, *args, **kwargs)` that returns `(params, opt_state, loss)`, and the auxiliary data
      as a fourth with `has_aux`. The loss is taken at the parameters before the step.

    Raises:
      ValueError: at the step, as `value_and_grad` and `optim.step`: `opt_state` holds no loss scale but `tx` is
        `loss_scaled`, or `loss_scaled` is inside a transformation that advances when it skips a step.
      TypeError: `tx` is not an optax transformation, or is first; or, at the step, `params` are an nnx module with
        state, such as BatchNorm or Dropout. Use `jmp_policy.nnx.Optimizer`.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.loss_scaled(optax.sgd(0.5), jmp.DynamicLossScale(2.0**8))
    >>> loss_fn = lambda w, x: jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32) ** 2)
    >>> params = jnp.ones(2)
    >>> train_step = jax.jit(jmp.optim.minimize(loss_fn, tx))
    >>> params, opt_state, loss = train_step(params, tx.init(params), jnp.float16([1.0, 0.5]))
    >>> params.tolist(), float(loss)
    ([0.0, 0.75], 1.25)
    """
    check_loss_first(fun, tx, "minimize")

    @functools.wraps(fun)
    def minimizing_step(params: PyTree, opt_state: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        def call_on_params(params: PyTree) -> Any:
            return fun(params, *args, **kwargs)

        def take_step(found_dtype: np.dtype | None) -> tuple[PyTree, PyTree, Any]:
            if found_dtype is None:
                return _scaled_step(call_on_params, tx, has_aux, params, opt_state)
            return _plain_step(call_on_params, tx, has_aux, params, opt_state, reduction)

        check_differentiable(params, "minimize")
        reduction = {"reduce_dtype": reduce_dtype, "on_opaque": on_opaque}
        if isinstance(tx.update, LossScaledUpdate) and reduce_dtype is None:
            new_params, new_state, out = search_reduce_dtype(take_step, get_loss_scale(opt_state))
        else:
            new_params, new_state, out = _plain_step(call_on_params, tx, has_aux, params, opt_state, reduction)
        return (new_params, new_state, *out) if has_aux else (new_params, new_state, out)

    _declare_signature(minimizing_step, fun)
    return hide_frames(minimizing_step)


def _declare_signature(minimizing_step: Any, fun: Callable[..., Any]) -> None:
    """Declares the signature of the step: `jit` needs it for static and donated arguments."""
    for name in ("__wrapped__", "__signature__"):  # of `fun`, in which each argument is one place earlier
        vars(minimizing_step).pop(name, None)
    step_signature = inspect.signature(minimizing_step)
    # `fun` may have no signature, or an argument named like one of ours: jit then sees `*args`.
    with contextlib.suppress(IndexError, TypeError, ValueError):
        given = list(inspect.signature(fun).parameters.values())
        ours = list(step_signature.parameters.values())[:2]
        theirs = given[1:] if given[0].kind in (given[0].POSITIONAL_ONLY, given[0].POSITIONAL_OR_KEYWORD) else given
        minimizing_step.__signature__ = step_signature.replace(parameters=[*ours, *theirs])


def _plain_step(
    fun: Callable[..., Any],
    tx: Transformation,
    has_aux: bool,
    params: PyTree,
    opt_state: PyTree,
    reduction: dict[str, Any],
) -> tuple[PyTree, PyTree, Any]:
    # `optax.inject_hyperparams` outside of `loss_scaled` makes it anew in each step, so only the state tells.
    scale = get_loss_scale(opt_state) if has_scaled_state(opt_state) else NoOpLossScale()
    differentiated = value_and_grad(fun, has_aux=has_aux, loss_scale=scale, **reduction)
    out, grads = differentiated(params)
    loss = out[0] if has_aux else out
    return *step(tx, grads, opt_state, params, **_list_extra(opt_state, loss)), out


def _list_extra(opt_state: PyTree, loss: Any) -> dict[str, Any]:
    """Returns the extra arguments of the step: `optim.skip_spikes` may need the loss."""
    return {"value": loss} if any(not isinstance(each, ScaledState) for each in list_skipping(opt_state)) else {}


def _scaled_step(
    fun: Callable[..., Any], tx: Any, has_aux: bool, params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree, Any]:
    scale = get_loss_scale(opt_state)

    def call_scaled(params: PyTree) -> Any:
        return scale_loss(fun(prepare_state(params, scale.loss_scale)), has_aux, scale)

    with explain_reuse():
        (_, out), grads = call_without_casts(jax.value_and_grad(call_scaled, has_aux=True), params)
    warn_of_half(out[0], scale)
    with explain_step_errors(grads, params, tx, opt_state):
        params, opt_state = tx.update.step_scaled(grads, scale, opt_state, params, _list_extra(opt_state, out[0]))
    return params, opt_state, out if has_aux else out[0]


def call_without_casts(differentiated: Callable[[PyTree], tuple[Any, PyTree]], params: PyTree) -> tuple[Any, PyTree]:
    """Calls a function that returns gradients, without their last casts from half precision to float32."""
    # To differentiate a traced function costs more than to trace the gradient: `jax.jit` keeps derivatives of jnp.
    traced = trace(differentiated, (params,), {})
    program = traced.program
    return run(traced, program.replace(jaxpr=_drop_casts(program.jaxpr, len(jax.tree.leaves(params)))))


def _drop_casts(jaxpr: core.Jaxpr, count: int) -> core.Jaxpr:
    """Returns the jaxpr without the casts to float32 that only make some of its last `count` outputs."""
    others, grads = jaxpr.outvars[: len(jaxpr.outvars) - count], jaxpr.outvars[len(jaxpr.outvars) - count :]
    used = {id(var) for variables in (others, *(eqn.invars for eqn in jaxpr.eqns)) for var in variables}
    unused = set(map(id, grads)) - used
    casts = {id(eqn.outvars[0]): eqn for eqn in jaxpr.eqns if _is_upcast(eqn) and id(eqn.outvars[0]) in unused}
    dropped = set(map(id, casts.values()))
    grads = [casts[id(var)].invars[0] if id(var) in casts else var for var in grads]
    return jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in dropped], outvars=[*others, *grads])


def _is_upcast(eqn: core.JaxprEqn) -> bool:
    """True for a cast from half precision to float32."""
    if eqn.primitive.name != "convert_element_type" or not is_half(eqn.invars[0].aval):
        return False
    aval: Any = eqn.outvars[0].aval
    return np.dtype(aval.dtype) == np.float32 and not aval.weak_type
