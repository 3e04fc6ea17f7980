"""Gradients under a loss scale: the true loss and true gradients, whatever the scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._find_scale import get_loss_scale
from ._float8_state import explain_reuse, join_state, prepare_state, split_state, zero_unused
from ._loss_scale import LossScale, NoOpLossScale
from ._messages import warn_user
from ._trees import PyTree


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiates `fun` with its loss scaled, and hands back true values.

    The loss is multiplied by the scale, in float32, before the backward pass, so that gradients too small for
    float16 survive it; the gradients are divided by the same scale afterwards, in float32. With a `NoOpLossScale`
    this is `jax.value_and_grad`.

    Where float8 layers have state among what is differentiated, its gradient is the next state: that of true gradients,
    whatever the scale, and the largest of all uses of a layer, in the steps of a scan too. It is known by its names, as
    `quant.float8_state` gives them.

    Args:
      fun: `(*args, **kwargs) -> loss`, a real scalar, or `-> (loss, aux)` with `has_aux`. Compute the loss in
        float32: a half-precision loss is rounded to 8 significant bits (bfloat16) or 11, and its cotangent is half
        itself, which overflows at 65504 in float16; a warning says so while tracing.
      argnums: which positional arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: whether `fun` returns auxiliary data; it is returned untouched.
      loss_scale: a `LossScale`, or any state that holds exactly one (an optax state, a TrainState).
      allow_int: whether integer arguments may be differentiated, as in `jax.value_and_grad`.

    Returns:
      A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`. The loss is as
      `fun` computed it. Gradients are float32 or wider, and non-finite where the scaled backward pass overflowed.

    Raises:
      ValueError: `loss_scale` holds no loss scale, or more than one; or a float8 layer with state is used twice outside
        of `jax.jit`, or in a branch for each example of `jax.vmap`; or part of such a state stands alone.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    >>> scale = jmp.StaticLossScale(2.0**10)
    >>> loss_fn = lambda w: jnp.sum(w.astype(jnp.float32) ** 2)
    >>> loss, grads = value_and_grad(loss_fn, loss_scale=scale)(jnp.ones(2, jnp.float16))
    >>> float(loss), grads.dtype, grads.tolist()
    (2.0, dtype('float32'), [2.0, 2.0])
    """
    differentiate = functools.partial(jax.value_and_grad, allow_int=allow_int)
    fun = with_state_by_max(fun, argnums, get_loss_scale(loss_scale))
    return scaled_value_and_grad(differentiate, fun, argnums, has_aux, loss_scale)


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """As `value_and_grad`, and returns only the gradients, or `(grads, aux)` with `has_aux`, as `jax.grad` does.

    >>> grad(lambda w: w**2, loss_scale=jmp.StaticLossScale(8.0))(3.0)
    Array(6., dtype=float32)
    """
    return without_value(value_and_grad(fun, argnums, has_aux, loss_scale=loss_scale, allow_int=allow_int), has_aux)


def scaled_value_and_grad(
    differentiate: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    loss_scale: PyTree,
) -> Callable[..., Any]:
    """`value_and_grad` on top of any function of the form of `jax.value_and_grad`."""
    scale = get_loss_scale(loss_scale)
    if isinstance(scale, NoOpLossScale):
        plain = differentiate(fun, argnums=argnums, has_aux=has_aux)

        @functools.wraps(fun)
        def plain_value_and_grad(*args: Any, **kwargs: Any) -> Any:
            with explain_reuse():
                out, grads = plain(*args, **kwargs)
            warn_of_half(out[0] if has_aux else out, scale)
            return out, _true(grads, scale)

        return plain_value_and_grad

    scaled_grad = differentiate(with_scaled_loss(fun, has_aux, scale), argnums=argnums, has_aux=True)

    @functools.wraps(fun)
    def true_value_and_grad(*args: Any, **kwargs: Any) -> Any:
        with explain_reuse():
            (_, (loss, *aux)), grads = scaled_grad(*args, **kwargs)
        warn_of_half(loss, scale)
        return (loss, *aux) if has_aux else loss, _true(grads, scale)

    return true_value_and_grad


def with_state_by_max(fun: Callable[..., Any], argnums: int | Sequence[int], scale: LossScale) -> Callable[..., Any]:
    """The function of arguments whose float8 state autodiff combines by max, and is that of true gradients."""

    @functools.wraps(fun)
    def of_state(*args: Any, **kwargs: Any) -> Any:
        positions = (argnums,) if isinstance(argnums, int) else argnums
        differentiated = {position % len(args) for position in positions} if args else set()
        prepared = [prepare_state(x, scale.loss_scale) if i in differentiated else x for i, x in enumerate(args)]
        return fun(*prepared, **kwargs)

    return of_state


def with_scaled_loss(fun: Callable[..., Any], has_aux: bool, scale: LossScale) -> Callable[..., Any]:
    """The function that returns the scaled loss, and as its auxiliary data the true loss and that of `fun`."""

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):  # of which JAX takes both
            return out  # and JAX says what is wrong
        loss, *aux = out if has_aux else (out,)
        return scale.scale(loss), (loss, *aux)

    return scaled


def warn_of_half(loss: Any, scale: LossScale) -> None:
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


def without_value(value_and_grad_fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The function that returns only the gradients, and the auxiliary data if there is any."""

    @functools.wraps(value_and_grad_fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        out, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return gradient


def _true(grads: PyTree, scale: LossScale) -> PyTree:
    """Gradients without their scale; float8 state, which is its own next value, has none."""
    rest, state = split_state(grads)
    return join_state(scale.unscale(rest), zero_unused(state))
