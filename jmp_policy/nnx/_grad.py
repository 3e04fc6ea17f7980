"""Gradients of nnx modules under a loss scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

from flax import nnx

from .._base import Aux, DTypeLike, Loss, P, PyTree, zero_unused
from ..gradients import differentiate_scaled, drop_value, make_reducer, read_scale_at_call, unscale_grads
from ..loss_scale import LossScale, NoOpLossScale, all_finite, get_loss_scale, has_scaled_state, select_tree
from ._float8 import Float8State, check_state_types, find_states, prepare_states

ArgNum = int | nnx.DiffState


@overload
def value_and_grad(
    fun: Callable[P, Loss],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: Literal[False] = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[P, tuple[Loss, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[Loss, Aux]],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    *,
    has_aux: Literal[True],
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[P, tuple[tuple[Loss, Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[P, tuple[Any, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Like `flax.nnx.value_and_grad`, but scales the loss so that small float16 gradients do not underflow.

    As `jmp_policy.value_and_grad`, for nnx modules. On a step that will be skipped, because a gradient is not finite,
    batch statistics and other state that `fun` wrote into the differentiated modules are restored; RNG states and
    intermediates are not. With a `NoOpLossScale` on its own, and without float8 layers, this is
    `flax.nnx.value_and_grad`.

    Float8 layers with state are differentiated with respect to the state too: its gradient is the next state, which
    `jmp_policy.nnx.Optimizer` writes. A `DiffState` must name it, `nnx.DiffState(0, nnx.Any(nnx.Param, Float8State))`.

    Args:
      fun: `(*args, **kwargs) -> loss`, a real scalar, or `-> (loss, aux)` with `has_aux`. Compute the loss in float32.
      argnums: positional arguments to differentiate, or `nnx.DiffState`s, as in `flax.nnx.value_and_grad`.
      has_aux: whether `fun` returns auxiliary data, which is returned unchanged.
      loss_scale: a `LossScale`, or any state that holds exactly one, such as an `nnx.Optimizer`.
      reduce_dtype: the dtype of sums of gradients over the devices of a mesh, as in `jmp_policy.value_and_grad`. By
        default, the `reduce_dtype` of the policies in `fun`.
      strict: whether to raise if a gradient cannot be followed to its sum, as in `jmp_policy.value_and_grad`.
      **options: other options of `flax.nnx.value_and_grad`, such as `graph`.

    Returns:
      A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`, with the loss as
      `fun` computed it. Gradients are float32 or wider, and non-finite where the scaled backward pass overflowed.

    Raises:
      ValueError: `loss_scale` holds no loss scale, or more than one; a float8 layer with state is used twice outside of
        `jax.jit`, or in a branch per example of `jax.vmap`; float8 state is not a `Float8State`; or gradients cannot be
        reduced in `reduce_dtype`.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss_fn = lambda model: model(jnp.ones((1, 2))).sum()
    >>> loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=jmp.StaticLossScale(8.0))(model)
    >>> grads["kernel"][...].tolist()
    [[1.0], [1.0]]
    """
    differentiate = functools.partial(nnx.value_and_grad, **options)
    list_models = lambda args: [args[_position(argnum)] for argnum in _as_sequence(argnums)]
    find_parameters = lambda args: nnx.split(list_models(args), graph=True)[1]
    reduce = make_reducer(reduce_dtype, strict, find_parameters)
    differentiate_with = functools.partial(_differentiate_models, differentiate, fun, argnums, has_aux, reduce)
    differentiated = read_scale_at_call(differentiate_with, fun, loss_scale)
    if isinstance(get_loss_scale(loss_scale), NoOpLossScale) and not has_scaled_state(loss_scale):
        return differentiated

    @functools.wraps(fun)
    def with_state_kept(*args: Any, **kwargs: Any) -> Any:
        before = _carried(list_models(args))
        out, grads = differentiated(*args, **kwargs)
        _keep_if_nonfinite(before, grads)
        return out, grads

    return with_state_kept


@overload
def grad(
    fun: Callable[P, Any],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: Literal[False] = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[P, Any]: ...
@overload
def grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    *,
    has_aux: Literal[True],
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[P, tuple[Any, Aux]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[P, Any]: ...
def grad(
    fun: Callable[..., Any],
    argnums: ArgNum | Sequence[ArgNum] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Like `value_and_grad`, but returns only the gradients, or `(grads, aux)` with `has_aux`, as `flax.nnx.grad` does.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss_fn = lambda model: model(jnp.ones((1, 2))).sum()
    >>> jmp.nnx.grad(loss_fn, loss_scale=jmp.StaticLossScale(8.0))(model)["bias"].shape
    (1,)
    """
    options |= {"reduce_dtype": reduce_dtype, "strict": strict}
    return drop_value(value_and_grad(fun, argnums, has_aux, loss_scale=loss_scale, **options), has_aux)


def _differentiate_models(
    differentiate: functools.partial[Any],
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    reduce: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    scale: LossScale,
) -> Callable[..., Any]:
    """Makes the function that differentiates models, and their float8 state if they have some."""
    plain = differentiate_scaled(differentiate, fun, argnums, has_aux, scale, reduce=reduce)

    @functools.wraps(fun)
    def value_and_true_grad(*args: Any, **kwargs: Any) -> Any:
        positions = [_position(argnum) for argnum in _as_sequence(argnums)]
        for argnum, position in zip(_as_sequence(argnums), positions, strict=True):
            check_state_types(args[position], argnum.filter if isinstance(argnum, nnx.DiffState) else nnx.Param)
        if not any(find_states(args[position]) for position in positions):
            return plain(*args, **kwargs)
        prepared = prepare_states(fun, positions, scale.loss_scale)
        wrt = _with_state(argnums) if _takes_filters(differentiate.keywords) else argnums
        options: dict[str, Any] = {"unscale": _unscale_models, "reduce": reduce}
        of_state = differentiate_scaled(differentiate, prepared, wrt, has_aux, scale, **options)
        return of_state(*args, **kwargs)

    return value_and_true_grad


def _unscale_models(grads: PyTree, scale: LossScale) -> PyTree:
    """Unscales gradients. The state of a linen module in `nnx.bridge.ToNNX` is known by its type alone."""
    state = {path: variable.get_value() for path, variable in find_states(grads).items()}
    true_grads = unscale_grads(grads, scale)
    for path, variable in find_states(true_grads).items():
        variable.set_value(zero_unused(state[path]))
    return true_grads


def _with_state(argnums: ArgNum | Sequence[ArgNum]) -> Any:
    """Adds float8 state to the arguments to differentiate. A `DiffState` of the user's stays as given."""
    if isinstance(argnums, nnx.DiffState):
        return argnums
    if isinstance(argnums, int):
        return nnx.DiffState(argnums, nnx.Any(nnx.Param, Float8State))
    return tuple(map(_with_state, argnums))


def _takes_filters(options: dict[str, Any]) -> bool:
    """True if Flax differentiates by filters; if it treats modules as trees, it differentiates all floating leaves."""
    defaults = {"graph": nnx.set_graph_mode, "graph_updates": nnx.set_graph_updates}
    given = {name: options.get(name) for name in defaults}
    return all(defaults[name].current_value() if value is None else value for name, value in given.items())


class _Carried(NamedTuple):
    """A variable that a step carries on, and its value before."""

    variable: nnx.Variable
    value: Any


def _carried(modules: list[Any]) -> list[_Carried]:
    nodes = [node for _, node in nnx.iter_graph(modules, graph=True) if isinstance(node, nnx.Variable)]
    carried = [v for v in nodes if not isinstance(v, nnx.Param | nnx.RngState | nnx.Intermediate | Float8State)]
    return [_Carried(v, v.get_raw_value()) for v in carried]


def _keep_if_nonfinite(before: list[_Carried], grads: PyTree) -> None:
    written = [c for c in before if c.variable.get_raw_value() is not c.value]
    if not written:
        return
    finite = all_finite(grads)
    for variable, value in written:
        variable.set_value(select_tree(finite, variable.get_value(), value))


def _as_sequence(argnums: ArgNum | Sequence[ArgNum]) -> Sequence[ArgNum]:
    return (argnums,) if isinstance(argnums, ArgNum) else argnums


def _position(argnum: ArgNum) -> int:
    return argnum.argnum if isinstance(argnum, nnx.DiffState) else argnum
