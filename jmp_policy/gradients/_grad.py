"""Gradients under a loss scale."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Required, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._base import (
    NO_VALUE,
    REDUCING,
    Args,
    Aux,
    DTypeLike,
    Kwargs,
    Loss,
    P,
    PyTree,
    Uncast,
    describe,
    explain_reuse,
    hide_frames,
    is_in_full_precision,
    is_wider,
    map_parts,
    meet_policy,
    note_for_observer,
    prepare_state,
    quote,
    warn_once,
    warn_user,
    zero_unused,
)
from ..loss_scale import LossScale, NoOpLossScale, get_loss_scale, spell_settings
from ..modules import find_lifting_adapter

T = TypeVar("T")


class _GradOptions(TypedDict, total=False):
    loss_scale: Required[PyTree]
    allow_int: bool
    reduce_dtype: DTypeLike | None
    on_opaque: Literal["error", "warn"]


@overload
def value_and_grad(
    fun: Callable[P, Loss],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[_GradOptions],
) -> Callable[P, tuple[Loss, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[Loss, Aux]],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[True] = ...,
    **options: Unpack[_GradOptions],
) -> Callable[P, tuple[tuple[Loss, Aux], Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, but scales the loss so that small float16 gradients do not underflow.

    The loss is multiplied by the scale, in float32, before the backward pass. The gradients are divided by the same
    scale afterwards, in float32. With a `NoOpLossScale` this is `jax.value_and_grad`. The gradient of float8 state (see
    `quant.float8_state`) is its next value: it does not depend on the scale, and several uses of a layer, including
    scan iterations, are combined by maximum.

    Args:
      fun: `(*args, **kwargs) -> loss`, a real scalar, or `-> (loss, aux)` with `has_aux`. Compute the loss in float32.
        A half-precision loss is rounded, and in float16 a loss scale above 65504 overflows in its gradient. A warning
        reports this.
      argnums: the positional arguments to differentiate, as in `jax.value_and_grad`.
      has_aux: whether `fun` returns auxiliary data, which is returned untouched.
      loss_scale: a `LossScale`, or any state that holds exactly one (an optax state, a TrainState). A policy that
        computes in float16 under a `NoOpLossScale` warns.
      allow_int: whether integer arguments may be differentiated, as in `jax.value_and_grad`.
      reduce_dtype: the dtype in which gradients are summed over the devices of a mesh. By default it is the widest
        reduce dtype of the policies that `fun` uses; without one, gradients are summed in the compute dtype. XLA
        reduces in the dtype of the partial sums, so matmuls, sums and scatter-adds that produce gradients get this
        output dtype. The forward pass and the dtypes of the gradients do not change. A dtype narrower than the dtype of
        the sum is an error.
      on_opaque: `"error"` or `"warn"`, if an unknown op (such as a custom kernel) stands between a gradient and its
        sum. With a `reduce_dtype` from a policy it is a warning.

    Returns:
      A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`. The loss is the
      loss that `fun` computed. Gradients have the dtypes of their parameters, except that half-precision gradients
      become float32 unless the scale is a `NoOpLossScale`. They are non-finite where the scaled backward pass
      overflowed.

    Raises:
      ValueError: `loss_scale` holds no loss scale or several; a float8 layer with state is used twice outside of
        `jax.jit`, or in a branch for each example of `jax.vmap`; float8 state is incomplete; or gradients cannot be
        reduced in `reduce_dtype`.
      TypeError: an nnx module with state, such as BatchNorm or Dropout, is differentiated: that is what
        `jmp_policy.nnx.value_and_grad` is for. Or quantized weights are.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> loss_fn = lambda w: jnp.sum(w.astype(jnp.float32) ** 2)
    >>> grad_fn = jmp.value_and_grad(loss_fn, loss_scale=jmp.StaticLossScale(2.0**10))
    >>> loss, grads = grad_fn(jnp.ones(2, jnp.float16))
    >>> float(loss), grads.dtype, grads.tolist()
    (2.0, dtype('float32'), [2.0, 2.0])
    """
    list_parameters = lambda args: jax.tree.leaves([args[i] for i in _list_positions(argnums, args)])

    def prepare(fun: Callable[..., Any], scale: LossScale) -> Callable[..., Any]:
        def call_prepared(*args: Any, **kwargs: Any) -> Any:
            chosen = _list_positions(argnums, args)
            args = tuple([prepare_state(x, scale.loss_scale) if i in chosen else x for i, x in enumerate(args)])
            return fun(*args, **kwargs)

        return call_prepared

    def differentiate(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            if not allow_int:
                check_differentiable([args[i] for i in _list_positions(argnums, args)], "value_and_grad")
            return jax.value_and_grad(fun, argnums, has_aux, allow_int=allow_int)(*args, **kwargs)

        return compute

    reduction = list_parameters, reduce_dtype, on_opaque
    return build_value_and_grad(differentiate, fun, has_aux, loss_scale, reduction, prepare)


@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    **options: Unpack[_GradOptions],
) -> Callable[P, Any]: ...
@overload
def grad(
    fun: Callable[P, tuple[Any, Aux]],
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[True] = ...,
    **options: Unpack[_GradOptions],
) -> Callable[P, tuple[Any, Aux]]: ...
def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: PyTree,
    allow_int: bool = False,
    reduce_dtype: DTypeLike | None = None,
    on_opaque: Literal["error", "warn"] = "error",
) -> Callable[..., Any]:
    """Like `value_and_grad`, but returns only the gradients, or `(grads, aux)` with `has_aux`, as `jax.grad` does.

    >>> import jmp_policy as jmp
    >>> jmp.grad(lambda w: w**2, loss_scale=jmp.StaticLossScale(8.0))(3.0)
    Array(6., dtype=float32)
    """
    options: dict[str, Any] = {"allow_int": allow_int, "reduce_dtype": reduce_dtype, "on_opaque": on_opaque}
    return drop_value(value_and_grad(fun, argnums, has_aux, loss_scale=loss_scale, **options), has_aux)


def build_value_and_grad(
    differentiate: Callable[..., Callable[..., Any]],
    fun: Callable[..., Any],
    has_aux: bool,
    state: PyTree,
    reduction: tuple[Callable[[Args], list[Any]], DTypeLike | None, Literal["error", "warn"]],
    prepare: Callable[[Callable[..., Any], LossScale], Callable[..., Any]],
    unscale: Callable[[PyTree, LossScale], PyTree] | None = None,
) -> Callable[..., Any]:
    """Builds `value_and_grad` over `differentiate(fun, has_aux=...)`, as `jax.value_and_grad` with its other options.

    `prepare` wraps `fun` to change its arguments, and `unscale` turns scaled gradients into true ones. `reduction`: a
    function that lists the differentiated arrays among the arguments, `reduce_dtype` and `on_opaque`.
    """
    if reduction[-1] not in ("error", "warn"):
        raise ValueError(f"on_opaque must be 'error' or 'warn', got {quote(reduction[-1])}.")
    if not callable(fun):
        raise TypeError(
            f"value_and_grad takes a function, got {describe(fun)}. For example: "
            "value_and_grad(lambda params: loss_fn(params, batch), loss_scale=opt_state)(params)."
        )
    get_loss_scale(state)  # raises at the line of the user

    @hide_frames
    @functools.wraps(fun)
    def value_and_true_grad(*args: Any, **kwargs: Any) -> Any:
        scale = get_loss_scale(state)  # an `nnx.Optimizer` may have another scale than before
        note_for_observer("loss scale", lambda: [(type(scale).__name__, spell_settings(scale))])
        prepared, is_plain = prepare(fun, scale), isinstance(scale, NoOpLossScale)

        @functools.wraps(fun)
        def call_scaled(*args: Any, **kwargs: Any) -> Any:
            out = prepared(*args, **kwargs)
            return out if is_plain else scale_loss(out, has_aux, scale)

        def compute(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
            with explain_reuse():
                out, grads = differentiate(call_scaled, has_aux=has_aux or not is_plain)(*args, **kwargs)
            if not is_plain:
                out = out[1] if has_aux else out[1][0]
            return out, (unscale or unscale_grads)(grads, scale)

        out, grads = _reduce_gradients(compute, *reduction, scale, args, kwargs)
        warn_of_half(out[0] if has_aux else out, scale)
        return out, grads

    return value_and_true_grad


def check_differentiable(params: PyTree, name: str) -> None:
    """Raises a `TypeError` for an nnx module with state, which the function `name` would lose, or quantized weights."""
    adapter = find_lifting_adapter(params)
    state = None if adapter is None else adapter.find_state(params)
    if state is not None:
        raise TypeError(
            f"{name} got an nnx module with {state}, which it would differentiate like a parameter; what the module "
            "writes to it would be lost. Use the functions for nnx. For example: optimizer = "
            "jmp_policy.nnx.Optimizer(model, tx, wrt=nnx.Param), and in the step loss, grads = "
            "jmp_policy.nnx.value_and_grad(loss_fn, loss_scale=optimizer)(model); optimizer.update(model, grads)."
        )
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, Uncast))
    for path, leaf in leaves:
        if hasattr(type(leaf), "dequantize"):
            raise TypeError(
                f"{name} got the quantized weight {leaf!r} at {jax.tree_util.keystr(path)}: integers have no gradient. "
                "Train the floating weights under the policy that quantized these, which rounds them in each step, and "
                "quantize the result; or differentiate others, such as those of LoRA. For example: "
                f"model = jmp_policy.with_policy(model, '{leaf.format}_from_mixed_bfloat16')."
            )


def _reduce_gradients(
    compute: Callable[..., tuple[Any, PyTree]],
    list_parameters: Callable[[Args], list[Any]],
    dtype: DTypeLike | None,
    on_opaque: Literal["error", "warn"] | None,
    scale: LossScale,
    args: Args,
    kwargs: Kwargs,
) -> tuple[Any, PyTree]:
    """Calls `compute` with its gradients reduced in `dtype`, or if it is None in the reduce dtype of a policy."""

    def compute_in(dtype: DTypeLike, on_opaque: Literal["error", "warn"] | None) -> tuple[Any, PyTree]:
        from ._reduce_in import reduce_gradients_in  # loads the jaxpr rewriter, which most users do not need

        return reduce_gradients_in(dtype, compute, list_parameters(args), on_opaque, args, kwargs)

    def compute_in_found(dtype: np.dtype | None) -> tuple[Any, PyTree]:
        try:
            return compute(*args, **kwargs) if dtype is None else compute_in(dtype, None)
        except NO_VALUE:
            if dtype is None:
                raise
            warn_once(
                _reduce_gradients,
                f"Gradients are not reduced in {dtype}, the reduce dtype of a policy: this needs a trace, and the loss "
                "function branches in Python on array values. Use jax.lax.cond or jnp.where in it.",
            )
            return compute(*args, **kwargs)

    if dtype is None:
        return search_reduce_dtype(compute_in_found, scale)
    search = REDUCING.value or _PolicySearch("given")  # an outer search goes on
    with REDUCING(search._replace(is_unscaled=isinstance(scale, NoOpLossScale))):
        return compute_in(dtype, on_opaque)


class _PolicySearch(NamedTuple):
    """The value of `REDUCING` in our gradient functions."""

    known: str = ""  # the name of the reduce dtype that was found, or "given" if the caller gave one
    is_unscaled: bool = False  # by a `NoOpLossScale`

    def meet(self, compute_dtype: np.dtype | None, reduce_dtype: np.dtype | None) -> None:
        """Ends the trace if a policy has a wider reduce dtype than those before. Warns of float16 without a scale."""
        if self.is_unscaled and compute_dtype == jnp.float16 and not is_in_full_precision():
            warn_once(
                _PolicySearch,
                "A policy computes in float16, and its gradients have no loss scale: those below 6e-8 become zero. "
                "Scale the loss; for example tx = loss_scaled(optax.adamw(1e-3), policy.loss_scale()).",
            )
        if reduce_dtype is None or self.known == "given":
            return
        if not self.known or is_wider(reduce_dtype, np.dtype(self.known)):
            raise _Met(reduce_dtype)


class _Met(BaseException):
    """Ends a trace. Not an `Exception`, so that handlers in user code do not catch it."""

    def __init__(self, dtype: np.dtype):
        super().__init__(dtype)
        self.dtype = dtype


def search_reduce_dtype(take_gradients: Callable[[np.dtype | None], T], scale: LossScale) -> T:
    """Calls `take_gradients(None)`, and again with the widest reduce dtype of the policies that it meets, if any.

    Policies are found only by tracing. So the first boundary with a reduce dtype ends the trace, and the gradients are
    computed again with that dtype.
    """
    dtype: np.dtype | None = None
    while True:
        try:
            with REDUCING(_PolicySearch("" if dtype is None else dtype.name, isinstance(scale, NoOpLossScale))):
                made = take_gradients(dtype)
            break
        except _Met as met:
            dtype = met.dtype
    meet_policy(None, dtype)  # for an outer search
    return made


def scale_loss(out: Any, has_aux: bool, scale: LossScale) -> Any:
    """Returns the scaled loss, and `(loss,)` or `(loss, aux)` as its auxiliary data."""
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):  # JAX takes both
        return out  # JAX reports the error
    loss, *aux = out if has_aux else (out,)
    return scale.scale(loss), (loss, *aux)


def unscale_grads(grads: PyTree, scale: LossScale) -> PyTree:
    """Divides gradients by the scale. Float8 state, which is its own next value, is not divided."""
    return map_parts(scale.unscale, zero_unused, grads)


def warn_of_half(loss: object, scale: LossScale) -> None:
    """Warns of a half-precision loss. Called outside of JAX, so that the user's line is found."""
    dtype = getattr(loss, "dtype", None)
    if dtype not in (jnp.float16, jnp.bfloat16):
        return
    bits = jnp.finfo(dtype).nmant + 1
    harm = f"each of {bits} significant bits" if isinstance(scale, NoOpLossScale) else "the loss scale"
    warn_user(
        f"The loss is {dtype}, and so is its cotangent, {harm}: compute the loss in float32, for example "
        "loss_fn = lambda logits: cross_entropy(logits.astype(jnp.float32), labels), or give the model a policy with "
        f"output dtype float32, for example 'params=float32,compute={dtype},output=float32'."
    )


def drop_value(value_and_grad_fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Builds the function that returns only the gradients, and the auxiliary data if there is any."""

    @hide_frames
    @functools.wraps(value_and_grad_fun)
    def compute_grad(*args: Any, **kwargs: Any) -> Any:
        out, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, out[1]) if has_aux else grads

    return compute_grad


def _list_positions(argnums: int | Sequence[int], args: Args) -> set[int]:
    positions = (argnums,) if isinstance(argnums, int) else argnums
    return {position % len(args) for position in positions} if args else set()
