"""Gradients under a loss scale: the true loss and true gradients, whatever the scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._base import (
    Args,
    Aux,
    DTypeLike,
    Loss,
    P,
    PyTree,
    describe,
    explain_reuse,
    hold_given,
    map_parts,
    prepare_state,
    search_reduce_dtype,
    warn_once,
    warn_user,
    zero_unused,
)
from ..loss_scale import LossScale, NoOpLossScale, get_loss_scale


@overload
def value_and_grad(
    fun: Callable[P, Loss],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[P, tuple[Loss, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[Loss, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[P, tuple[tuple[Loss, Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[P, tuple[Any, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[..., Any]:
    """Differentiates `fun` with its loss scaled, and hands back true values.

    The loss and the gradients are those of the function, whatever the scale:

    >>> import jax.numpy as jnp
    >>> import jmp_policy as jmp
    >>> loss_fn = lambda w: jnp.sum(w.astype(jnp.float32) ** 2)
    >>> scale = jmp.StaticLossScale(2.0**10)
    >>> grad_fn = jmp.value_and_grad(loss_fn, loss_scale=scale)
    >>> loss, grads = grad_fn(jnp.ones(2, jnp.float16))
    >>> float(loss), grads.dtype, grads.tolist()
    (2.0, dtype('float32'), [2.0, 2.0])

    What it does:

    1. It multiplies the loss by the scale, in float32, before the backward
       pass. Gradients too small for float16 survive it.
    2. It divides the gradients by the same scale afterwards, in float32.
    3. With a `NoOpLossScale` it is `jax.value_and_grad`.
    4. Where float8 layers have state among what is differentiated, the gradient
       of that state is the next state: as true gradients make it, whatever the
       scale, and the largest over all uses of a layer, in the steps of a scan
       too. State is known by its names, as `quant.float8_state` gives them.

    Args:
      fun: `(*args, **kwargs) -> loss`, a real scalar, or `-> (loss, aux)` with
        `has_aux`. Compute the loss in float32: a half-precision loss is rounded
        to 8 significant bits (bfloat16) or 11, and its cotangent is half
        itself, which overflows at 65504 in float16; a warning says so while
        tracing.
      argnums: which positional arguments to differentiate, as in
        `jax.value_and_grad`.
      has_aux: whether `fun` returns auxiliary data; it is returned untouched.
      loss_scale: a `LossScale`, or any state that holds exactly one (an optax
        state, a TrainState).
      allow_int: whether integer arguments may be differentiated, as in
        `jax.value_and_grad`.
      reduce_dtype: the dtype in which gradients are summed over the devices of
        a mesh. By default it is the reduce dtype of the policies that `fun`
        meets while it is traced, the widest of several; without one, the
        program sums them in compute dtype. XLA reduces in the dtype of
        the operation that makes the partial sums, whatever is cast afterwards:
        so the matmuls, sums and scattered sums that make gradients give this
        dtype, and what follows them works in it. Forward pass, activations and
        the dtypes of the gradients are those of the program without it. CPUs
        cast the operands of these matmuls first, so that XLA may gather them in
        this dtype there. A dtype narrower than the program's is refused.
      strict: whether it is an error, and not a warning, where an operation that
        nothing is known of, such as a kernel, stands between a gradient and the
        sum that makes it. A `reduce_dtype` that comes from a policy only warns.

    Returns:
      A function of the arguments of `fun` that returns `(loss, grads)`, or
      `((loss, aux), grads)`. The loss is as `fun` computed it. Gradients are
      float32 or wider, and non-finite where the scaled backward pass
      overflowed.

    Raises:
      ValueError: `loss_scale` holds no loss scale, or more than one; or a
        float8 layer with state is used twice outside of `jax.jit`, or in a
        branch for each example of `jax.vmap`; or part of such a state stands
        alone; or gradients cannot be reduced in `reduce_dtype`.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018,
    section 3.2.
    """
    differentiate = functools.partial(jax.value_and_grad, allow_int=allow_int)
    reduce = make_reducer(reduce_dtype, strict, lambda args: [args[i] for i in _list_positions(argnums, args)])

    def differentiate_with(scale: LossScale) -> Callable[..., Any]:
        prepare = functools.partial(_prepare_arguments, argnums, scale)
        return differentiate_scaled(differentiate, fun, argnums, has_aux, scale, prepare=prepare, reduce=reduce)

    return read_scale_at_call(differentiate_with, fun, loss_scale)


@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[P, Any]: ...
@overload
def grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[P, tuple[Any, Aux]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[P, Any]: ...
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[..., Any]:
    """As `value_and_grad`, and returns only the gradients, or `(grads, aux)` with `has_aux`, as `jax.grad` does.

    >>> import jmp_policy as jmp
    >>> jmp.grad(lambda w: w**2, loss_scale=jmp.StaticLossScale(8.0))(3.0)
    Array(6., dtype=float32)
    """
    options: dict[str, Any] = {"allow_int": allow_int, "reduce_dtype": reduce_dtype, "strict": strict}
    return drop_value(value_and_grad(fun, argnums, has_aux, loss_scale=loss_scale, **options), has_aux)


def make_reducer(
    dtype: DTypeLike | None, strict: bool, find_parameters: Callable[[Args], PyTree]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes what has a function that differentiates reduce its gradients in a dtype.

    Args:
      dtype: the dtype; `None` for that of the policies that the function meets while it is traced, if one has any.
      strict: whether it is an error where a gradient cannot be followed.
      find_parameters: the arrays that are differentiated, of the arguments.
    """
    list_parameters = lambda args: jax.tree.leaves(find_parameters(args))
    if dtype is None:
        return functools.partial(_reduce_as_policies_say, list_parameters)
    from ._reduce import reduce_gradients_in  # which rewrites programs: most users need none of that

    def reduce(differentiated: Callable[..., tuple[Any, PyTree]]) -> Callable[..., tuple[Any, PyTree]]:
        reduced = reduce_gradients_in(dtype, differentiated, list_parameters, strict=strict)

        def compute(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
            with hold_given():
                return reduced(*args, **kwargs)

        return compute

    return reduce


def _reduce_as_policies_say(
    list_parameters: Callable[[Args], list[Any]], differentiated: Callable[..., tuple[Any, PyTree]]
) -> Callable[..., tuple[Any, PyTree]]:
    """Has a function that differentiates reduce its gradients in the reduce dtype of a policy that it meets."""

    @functools.wraps(differentiated)
    def compute(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        def compute_in(dtype: np.dtype | None) -> tuple[Any, PyTree]:
            if dtype is None:
                return differentiated(*args, **kwargs)
            from ._reduce import reduce_gradients_in

            try:
                return reduce_gradients_in(dtype, differentiated, list_parameters, strict=None)(*args, **kwargs)
            except _NEEDS_VALUES:
                warn_once(
                    make_reducer,
                    f"Gradients are not reduced in {dtype}, the reduce dtype of a policy: that takes a trace, and the "
                    "loss function decides in Python on the values of arrays. Use jax.lax.cond or jnp.where in it.",
                )
                return differentiated(*args, **kwargs)

        return search_reduce_dtype(compute_in)

    return compute


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError
)  # fmt: skip


def read_scale_at_call(
    differentiate_with: Callable[[LossScale], Callable[..., Any]], fun: Callable[..., Any], state: PyTree
) -> Callable[..., Any]:
    """Makes a function that takes the scale out of a state when it is called: an `nnx.Optimizer` has a new one by then.

    Args:
      differentiate_with: makes of a scale the function to call.
      fun: what is differentiated.
      state: what holds the scale.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: `state` holds no scale, or several; now, at the line of the user.
    """
    if not callable(fun):
        raise TypeError(
            f"value_and_grad takes a function, got {describe(fun)}. For example: "
            "value_and_grad(lambda params: loss_fn(params, batch), loss_scale=opt_state)(params)."
        )
    get_loss_scale(state)

    @functools.wraps(fun)
    def value_and_true_grad(*args: Any, **kwargs: Any) -> Any:
        return differentiate_with(get_loss_scale(state))(*args, **kwargs)

    return value_and_true_grad


def differentiate_scaled(
    differentiate: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: object,
    has_aux: bool,
    scale: LossScale,
    *,
    prepare: Callable[[Args], Args] = tuple,
    unscale: Callable[[PyTree, LossScale], PyTree] | None = None,
    reduce: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Makes `value_and_grad` of any function of the form of `jax.value_and_grad`.

    Args:
      differentiate: that function.
      fun: what it differentiates.
      argnums: with respect to what, in the words of `differentiate`.
      has_aux: whether `fun` returns auxiliary data.
      scale: the loss scale.
      prepare: makes of the arguments what is to be differentiated; nothing else, if not given.
      unscale: makes true gradients; `unscale_grads`, if not given.
      reduce: makes of the function that returns values and true gradients one that reduces these in another dtype.
    """
    unscale = unscale_grads if unscale is None else unscale
    is_plain = isinstance(scale, NoOpLossScale)  # which is to be `differentiate` itself, to the last bit

    @functools.wraps(fun)
    def call_scaled(*args: Any, **kwargs: Any) -> Any:
        out = fun(*prepare(args), **kwargs)
        return out if is_plain else scale_loss(out, has_aux, scale)

    differentiated = differentiate(call_scaled, argnums=argnums, has_aux=has_aux or not is_plain)

    def compute(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        with explain_reuse():
            out, grads = differentiated(*args, **kwargs)
        if not is_plain:  # the auxiliary data have what the user's function returned
            out = out[1] if has_aux else out[1][0]
        return out, unscale(grads, scale)

    reduced = compute if reduce is None else reduce(compute)

    @functools.wraps(fun)
    def value_and_true_grad(*args: Any, **kwargs: Any) -> Any:
        out, grads = reduced(*args, **kwargs)
        warn_of_half(out[0] if has_aux else out, scale)
        return out, grads

    return value_and_true_grad


def scale_loss(out: Any, has_aux: bool, scale: LossScale) -> Any:
    """Makes of what a loss function returned the scaled loss, and as its auxiliary data the true loss and its own."""
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):  # JAX takes both
        return out  # and JAX says what is wrong
    loss, *aux = out if has_aux else (out,)
    return scale.scale(loss), (loss, *aux)


def unscale_grads(grads: PyTree, scale: LossScale) -> PyTree:
    """Makes true gradients of scaled ones; float8 state, which is its own next value, has no scale."""
    return map_parts(scale.unscale, zero_unused, grads)


def warn_of_half(loss: object, scale: LossScale) -> None:
    """Warns of a loss that is half precision; called past JAX, while the user's line is not far."""
    dtype = getattr(loss, "dtype", None)
    if dtype not in (jnp.float16, jnp.bfloat16):
        return
    bits = jnp.finfo(dtype).nmant + 1
    harm = f"each of {bits} significant bits" if isinstance(scale, NoOpLossScale) else "the loss scale"
    warn_user(
        f"The loss is {dtype}, and so is its cotangent, {harm}: compute the loss in float32, for example "
        "loss_fn = lambda logits: cross_entropy(logits.astype(jnp.float32), labels), or give the model a policy whose "
        f"output is float32, for example 'params=float32,compute={dtype},output=float32'."
    )


def drop_value(value_and_grad_fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Makes the function that returns only the gradients, and the auxiliary data if there is any."""

    @functools.wraps(value_and_grad_fun)
    def compute_grad(*args: Any, **kwargs: Any) -> Any:
        out, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return compute_grad


def _prepare_arguments(argnums: int | Sequence[int], scale: LossScale, args: Args) -> Args:
    """Prepares float8 state in the arguments that are differentiated, so that autodiff combines it by max."""
    differentiated = _list_positions(argnums, args)
    return tuple([prepare_state(x, scale.loss_scale) if i in differentiated else x for i, x in enumerate(args)])


def _list_positions(argnums: int | Sequence[int], args: Args) -> set[int]:
    positions = (argnums,) if isinstance(argnums, int) else argnums
    return {position % len(args) for position in positions} if args else set()
