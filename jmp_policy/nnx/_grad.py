"""Gradients of nnx modules under a loss scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
from flax import nnx

from .._base import Aux, DTypeLike, Loss, P, PyTree, hide_frames, zero_unused
from ..gradients import build_value_and_grad, drop_value, unscale_grads
from ..loss_scale import LossScale, NoOpLossScale, all_finite, get_loss_scale, has_scaled_state, select_tree
from ._layer_state import Float8State, check_state_types, find_states, prepare_states
from ._optimizer import Optimizer

ArgNum = int | nnx.DiffState


@overload
def value_and_grad(
    fun: Callable[P, Loss],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: Literal[False] = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
    **options: Any,
) -> Callable[P, tuple[Loss, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[Loss, Aux]],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: Literal[True] = ...,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
    **options: Any,
) -> Callable[P, tuple[tuple[Loss, Aux], Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
    **options: Any,
) -> Callable[..., Any]:
    """Like `flax.nnx.value_and_grad`, but scales the loss so that small float16 gradients do not underflow.

    If a gradient is not finite, so that the step will be skipped, batch statistics and other state that the function
    wrote into its arguments keep their old values; RNG states and intermediates keep the new ones. If
    `loss_scale` is a `NoOpLossScale` itself, not the state of `loss_scaled`, and the model has no float8 layers, this
    is `flax.nnx.value_and_grad`.

    Float8 layers with state are differentiated with respect to that state too. Its gradient is its next value, for
    `jmp_policy.nnx.Optimizer`. A `DiffState` has to name it: `nnx.DiffState(0, nnx.Any(nnx.Param, Float8State))`.

    Args:
      fun: `(*args, **kwargs) -> loss`, a real scalar, or `-> (loss, aux)` with `has_aux`. Compute the loss in float32.
      argnums: the positional arguments to differentiate, or `nnx.DiffState`s, as in `flax.nnx.value_and_grad`.
      has_aux: whether `fun` returns auxiliary data, which is returned untouched.
      loss_scale: a `LossScale`, or any state that holds exactly one, such as an `nnx.Optimizer`.
      reduce_dtype: the dtype of gradient sums over devices, as in `jmp_policy.value_and_grad`.
      on_opaque: as in `jmp_policy.value_and_grad`.
      **options: other options of `flax.nnx.value_and_grad`, such as `graph`.

    Returns:
      A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`. The loss is the
      loss that `fun` computed. Gradients have the dtypes of their parameters, except that half-precision gradients
      become float32 unless the scale is a `NoOpLossScale`. They are non-finite where the scaled backward pass
      overflowed.

    Raises:
      ValueError: `loss_scale` holds no loss scale or several; a float8 layer with state is used twice outside of
        `jax.jit`, or in a branch for each example of `jax.vmap`; float8 state is not a `Float8State`, is left out by a
        `DiffState`, or is not updated by the `flax.nnx.Optimizer` in `loss_scale`; or gradients cannot be reduced in
        `reduce_dtype`.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss_fn = lambda model: model(jnp.ones((1, 2))).sum()
    >>> loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=jmp.StaticLossScale(8.0))(model)
    >>> grads["kernel"][...].tolist()
    [[1.0], [1.0]]
    """
    listed: Sequence[ArgNum] = (argnums,) if isinstance(argnums, ArgNum) else argnums
    positions = [argnum.argnum if isinstance(argnum, nnx.DiffState) else argnum for argnum in listed]
    list_models = lambda args: [args[position] for position in positions]
    list_parameters = lambda args: jax.tree.leaves(nnx.split(list_models(args), graph=True)[1])

    def differentiate(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            models = list_models(args)
            for argnum, model in zip(listed, models, strict=True):
                check_state_types(model, argnum.filter if isinstance(argnum, nnx.DiffState) else nnx.Param)
            _check_writes_state(loss_scale, models)
            with_state = any(map(find_states, models)) and _takes_filters(options)
            wrt = _with_state(argnums) if with_state else argnums
            value_and_grad: Any = nnx.value_and_grad
            return value_and_grad(fun, argnums=wrt, has_aux=has_aux, **options)(*args, **kwargs)

        return compute

    prepare = lambda fun, scale: prepare_states(fun, positions, scale.loss_scale)
    reduction = list_parameters, reduce_dtype, on_opaque
    differentiated = build_value_and_grad(differentiate, fun, has_aux, loss_scale, reduction, prepare, _unscale_models)
    if isinstance(get_loss_scale(loss_scale), NoOpLossScale) and not has_scaled_state(loss_scale):
        return differentiated

    @hide_frames
    @functools.wraps(fun)
    def with_state_kept(*args: Any, **kwargs: Any) -> Any:
        # The variables that one step hands to the next, also of models that are only called: a GAN's other network.
        nodes = [node for _, node in nnx.iter_graph((args, kwargs), graph=True) if isinstance(node, nnx.Variable)]
        kept = [v for v in nodes if not isinstance(v, nnx.Param | nnx.RngState | nnx.Intermediate | Float8State)]
        before = [(variable, variable.get_raw_value()) for variable in kept]
        out, grads = differentiated(*args, **kwargs)
        written = [(variable, value) for variable, value in before if variable.get_raw_value() is not value]
        if written:
            finite = all_finite(grads)
            for variable, value in written:
                variable.set_value(select_tree(finite, variable.get_value(), value))
        return out, grads

    return with_state_kept


def grad(
    fun: Callable[P, Any],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
    **options: Any,
) -> Callable[P, Any]:
    """Like `value_and_grad`, but returns only the gradients, or `(grads, aux)` with `has_aux`, as `flax.nnx.grad` does.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss_fn = lambda model: model(jnp.ones((1, 2))).sum()
    >>> jmp.nnx.grad(loss_fn, loss_scale=jmp.StaticLossScale(8.0))(model)["bias"].shape
    (1,)
    """
    options |= {"reduce_dtype": reduce_dtype, "on_opaque": on_opaque}
    return drop_value(value_and_grad(fun, argnums, has_aux, loss_scale=loss_scale, **options), has_aux)


def _unscale_models(grads: PyTree, scale: LossScale) -> PyTree:
    """Returns true gradients. Finds float8 state by its type too, for linen modules in `nnx.bridge.ToNNX`."""
    state = {path: variable.get_value() for path, variable in find_states(grads).items()}
    true_grads = unscale_grads(grads, scale)
    for path, variable in find_states(true_grads).items():
        variable.set_value(zero_unused(state[path]))
    return true_grads


def _with_state(argnums: ArgNum | Sequence[ArgNum]) -> Any:
    """Adds float8 state to the parameters to differentiate, except where the user gave a filter."""
    if isinstance(argnums, nnx.DiffState):
        return argnums
    if isinstance(argnums, int):
        return nnx.DiffState(argnums, nnx.Any(nnx.Param, Float8State))
    return tuple(map(_with_state, argnums))


def _check_writes_state(loss_scale: PyTree, models: list[Any]) -> None:
    """Raises a `ValueError` if the optimizer that holds the scale will not update the float8 state of the models."""
    if not isinstance(loss_scale, nnx.Optimizer) or isinstance(loss_scale, Optimizer):
        return
    is_updated = nnx.filterlib.to_predicate(loss_scale.wrt)
    for path, state in ((path, state) for model in models for path, state in find_states(model).items()):
        if not is_updated(path, state):
            raise ValueError(
                f"The model has float8 state, {'/'.join(map(str, path))!r}, which a flax.nnx.Optimizer does not "
                "update: its scales would never change, and small gradients would become zero. "
                "For example: optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )


def _takes_filters(options: dict[str, Any]) -> bool:
    """True if Flax differentiates by filters. In its tree mode it differentiates all floating arrays instead."""
    defaults = {"graph": nnx.set_graph_mode, "graph_updates": nnx.set_graph_updates}
    given = {name: options.get(name) for name in defaults}
    return all(defaults[name].current_value() if value is None else value for name, value in given.items())
