"""A whole training step, from the loss function to new parameters."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, overload

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.typing import ArrayLike

from ..._base import Aux, DTypeLike, Loss, P, PyTree, explain_reuse, is_half, prepare_state, search_reduce_dtype
from ...gradients import scale_loss, value_and_grad, warn_of_half
from ...loss_scale import NoOpLossScale, get_loss_scale, has_scaled_state
from ._loss_scaled import LossScaledUpdate
from ._provenance import has_provenance
from ._step import Params, Transformation, step


@overload
def minimize(
    fun: Callable[Concatenate[Params, P], Loss],
    tx: Transformation,
    has_aux: Literal[False] = False,
    *,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[Concatenate[Params, Any, P], tuple[Params, Any, Loss]]: ...
@overload
def minimize(
    fun: Callable[Concatenate[Params, P], tuple[Loss, Aux]],
    tx: Transformation,
    has_aux: Literal[True],
    *,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[Concatenate[Params, Any, P], tuple[Params, Any, Loss, Aux]]: ...
@overload
def minimize(
    fun: Callable[Concatenate[Params, P], Any],
    tx: Transformation,
    has_aux: bool = False,
    *,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[Concatenate[Params, Any, P], tuple[Any, ...]]: ...
def minimize(
    fun: Callable[..., Any],
    tx: Transformation,
    has_aux: bool = False,
    *,
    reduce_dtype: DTypeLike | None = None,
    strict: bool = True,
) -> Callable[..., tuple[Any, ...]]:
    """Makes the training step of a loss function, in the fewest bytes.

    It does what `value_and_grad` and `optim.step` do one after the other. But where nobody looks at the gradients,
    they need not be true before the optimizer gets them: gradients of parameters that the model casts to half precision
    stay half, and scaled, until the branch that takes the step, where they become float32 without being written to
    memory. What wants to see true gradients is part of the optimizer (`optax.chain(optax.clip_by_global_norm(1.0),
    optax.adamw(1e-3))`), or takes the two functions.

    Where `tx` carries provenance, the step finds it, and its gradients are true ones, as those of `value_and_grad`. So
    they are with a `reduce_dtype`: what was reduced in float32 is not rounded to half before the step.

    Args:
      fun: `(params, *args, **kwargs) -> loss`, a real scalar, or `-> (loss, aux)` with `has_aux`. Compute the loss in
        float32.
      tx: an optax transformation; what is said of half precision is true of `loss_scaled` and `skip_nonfinite`.
      has_aux: whether `fun` returns auxiliary data; it is returned untouched.
      reduce_dtype: the dtype in which gradients are summed over the devices of a mesh, as in `value_and_grad`: by
        default that of the policies that `fun` meets.
      strict: whether it is an error where a gradient cannot be followed to its sum, as in `value_and_grad`.

    Returns:
      A function `(params, opt_state, *args, **kwargs)` that returns `(params, opt_state, loss)`, and the auxiliary
      data as a fourth with `has_aux`. The loss is as `fun` computed it, at the parameters before the step.

    Raises:
      ValueError: at the step, as `value_and_grad` and `optim.step` do: `opt_state` holds no loss scale though `tx` is
        `loss_scaled`, or that is inside of a transformation that goes on where it skips a step.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx = jmp.optim.loss_scaled(optax.sgd(0.5), jmp.DynamicLossScale(2.0**8))
    >>> loss_fn = lambda w, x: jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32) ** 2)
    >>> params = jnp.ones(2)
    >>> train_step = jax.jit(jmp.optim.minimize(loss_fn, tx))
    >>> params, opt_state, loss = train_step(params, tx.init(params), jnp.float16([1.0, 0.5]))
    >>> params.tolist(), float(loss)
    ([0.0, 0.75], 1.25)
    """
    is_scaled = isinstance(tx.update, LossScaledUpdate)

    @functools.wraps(fun)
    def minimizing_step(params: PyTree, opt_state: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        def call_on_params(params: PyTree) -> Any:
            return fun(params, *args, **kwargs)

        def take_step(found_dtype: np.dtype | None) -> tuple[PyTree, PyTree, Any]:
            if found_dtype is None:
                return _scaled_step(call_on_params, tx, has_aux, params, opt_state)
            return _plain_step(call_on_params, tx, has_aux, params, opt_state, reduction)

        reduction = {"reduce_dtype": reduce_dtype, "strict": strict}
        # Provenance reads the paths of modules while it traces them, which taking casts out has done before.
        if is_scaled and reduce_dtype is None and not has_provenance(opt_state):
            new_params, new_state, out = search_reduce_dtype(take_step)
        else:
            new_params, new_state, out = _plain_step(call_on_params, tx, has_aux, params, opt_state, reduction)
        return (new_params, new_state, *out) if has_aux else (new_params, new_state, out)

    _declare_signature(minimizing_step, fun)
    return minimizing_step


def _declare_signature(minimizing_step: Any, fun: Callable[..., Any]) -> None:
    """Says where the arguments of `fun` are in the step: one place further, which jit asks for static and donated ones.

    `functools.wraps` says that they are where `fun` has them, by a link to it and by a copy of what it declares.
    """
    for name in ("__wrapped__", "__signature__"):
        vars(minimizing_step).pop(name, None)
    step_signature = inspect.signature(minimizing_step)
    # `fun` may not tell, or have an argument named like one of ours: jit then sees `*args`.
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
    # Not outermost it may stand in optax.inject_hyperparams, which makes it anew in each step.
    scale = get_loss_scale(opt_state) if has_scaled_state(opt_state) else NoOpLossScale()
    differentiated = value_and_grad(fun, has_aux=has_aux, loss_scale=scale, **reduction)
    (out, grads), extra = _find_provenance(differentiated, opt_state, params)
    return *step(tx, grads, opt_state, params, **extra), out


def _scaled_step(
    fun: Callable[..., Any], tx: Any, has_aux: bool, params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree, Any]:
    scale = get_loss_scale(opt_state)

    def call_scaled(params: PyTree) -> Any:
        return scale_loss(fun(prepare_state(params, scale.loss_scale)), has_aux, scale)

    copies, fun_of_copies = extract_half_casts(call_scaled, params)
    with explain_reuse():
        (_, out), grads = jax.value_and_grad(fun_of_copies, has_aux=True)(copies)
    warn_of_half(out[0], scale)
    params, opt_state = tx.update.step_scaled(grads, scale, opt_state, params, {})
    return params, opt_state, out if has_aux else out[0]


def _find_provenance(
    differentiated: Callable[[PyTree], tuple[Any, PyTree]], opt_state: PyTree, params: PyTree
) -> tuple[tuple[Any, PyTree], dict[str, Any]]:
    """The results of a differentiated function, and as an extra argument where its gradients went wrong, if asked for.

    It does not look at the loss and at auxiliary data: the gradients decide whether a step is skipped.
    """
    if not has_provenance(opt_state):
        return differentiated(params), {}
    from ...numerics import first_nonfinite  # which needs most of the library

    made, provenance = first_nonfinite(differentiated, of=lambda out: out[1])(params)
    return made, {"provenance": provenance}


class HalfCasts(NamedTuple):
    """A function of parameters as one of their copies, some of which are already in half precision.

    Attributes:
      copies: what to differentiate with respect to: the parameters, as their casts where there is one.
      fun: a function of the copies.
    """

    copies: PyTree
    fun: Callable[[PyTree], Any]


def extract_half_casts(fun: Callable[[PyTree], Any], params: PyTree) -> HalfCasts:
    """Takes the casts of parameters to half precision out of a function.

    Only a cast that is all that the function does with a parameter: where it is cast twice, or used uncast as well,
    the parts of its gradient must be summed in its own dtype.

    Args:
      fun: a function of parameters that JAX can trace.
      params: its argument, a tree of arrays.

    >>> import jax.numpy as jnp
    >>> loss_fn = lambda w: jnp.sum(w["a"].astype(jnp.float16)) * w["b"]
    >>> copies, fun = extract_half_casts(loss_fn, {"a": jnp.ones(2), "b": 3.0})
    >>> copies["a"].dtype, copies["b"], float(fun(copies))
    (dtype('float16'), 3.0, 6.0)
    """
    leaves, structure = jax.tree.flatten(params)
    trees = []

    def call_on_leaves(leaves: list[Any]) -> list[Any]:
        out, tree = jax.tree.flatten(fun(structure.unflatten(leaves)))
        trees.append(tree)
        return out

    traced = jax.make_jaxpr(call_on_leaves)(leaves)
    casts = [_only_use(traced.jaxpr, var) for var in traced.jaxpr.invars]
    evaluate = core.jaxpr_as_fun(_without(traced, casts))
    copies = [leaf if cast is None else _replay(cast, leaf) for leaf, cast in zip(leaves, casts, strict=True)]
    return HalfCasts(structure.unflatten(copies), lambda copies: trees[0].unflatten(evaluate(*jax.tree.leaves(copies))))


def _only_use(jaxpr: core.Jaxpr, var: core.Var) -> core.JaxprEqn | None:
    """The cast to half precision that is the only equation to read a variable, or `None`."""
    readers = [eqn for eqn in jaxpr.eqns for read in eqn.invars if read is var]
    if len(readers) != 1 or any(out is var for out in jaxpr.outvars):
        return None
    (eqn,) = readers
    aval: Any = var.aval
    is_float32 = np.dtype(aval.dtype) == np.float32 and not aval.weak_type
    is_cast = eqn.primitive.name == "convert_element_type" and is_half(eqn.outvars[0].aval)
    return eqn if is_cast and is_float32 else None


def _without(traced: core.ClosedJaxpr, casts: list[core.JaxprEqn | None]) -> core.ClosedJaxpr:
    """The traced function that takes the results of casts in place of the variables that they cast."""
    jaxpr = traced.jaxpr
    invars = [var if cast is None else cast.outvars[0] for var, cast in zip(jaxpr.invars, casts, strict=True)]
    taken = {id(cast) for cast in casts if cast is not None}
    eqns = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
    return traced.replace(jaxpr=jaxpr.replace(invars=invars, eqns=eqns))


def _replay(cast: core.JaxprEqn, leaf: ArrayLike) -> jax.Array:
    copy: Any = cast.outvars[0].aval
    return lax.convert_element_type(leaf, copy.dtype)
