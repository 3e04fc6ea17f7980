"""A step that is taken or skipped, and functions that tell a host about skipped steps."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ..._base import PyTree, is_array, is_half, warn_user
from ...gradients import value_and_grad
from ...loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaledState,
    find_nodes,
    find_scaled_state,
    get_loss_scale,
    select_tree,
    strip_variables,
)
from ...modules import find_adapter
from ._skipped_step import SkippedStep, count_nonfinite, describe_bad_params, is_search, read_counts
from ._step import Transformation, check_transformation

if TYPE_CHECKING:
    from ...numerics import NonfiniteOrigin
else:
    NonfiniteOrigin = Any  # for `typing.get_type_hints`


class Operands(NamedTuple):
    """Inputs of a step."""

    grads: PyTree  # still multiplied by `scale`
    scale: LossScale
    inner_state: PyTree
    params: PyTree
    extra: dict[str, Any]  # arguments that are trees of arrays


Result = tuple[PyTree, PyTree]  # updates or parameters, and the next inner state


def make_skippable(
    take: Callable[[Operands], Result], skip: Callable[[Operands], Result], stores_half: bool
) -> Callable[[jax.Array, Operands], Result]:
    """Builds the function `(finite, operands)` that takes a step or skips it, as its platform does fastest."""

    # Built once: JAX compiles a function that it has not seen before at each eager call. `take` is jitted, so that both
    # forms trace it once. `stores_half` is true if the step stores half-precision parameters in their own way.
    def branch(finite: jax.Array, operands: Operands) -> Result:
        return lax.cond(finite, take, skip, operands)

    def select(finite: jax.Array, operands: Operands) -> Result:
        return select_tree(finite, take(operands), skip(operands))

    def take_or_skip(finite: jax.Array, operands: Operands) -> Result:
        sizes = (leaf.size if is_half(leaf) else -leaf.size for leaf in jax.tree.leaves(operands.grads))
        branching = ("cpu", "tpu") if stores_half or sum(sizes) > 0 else ("cpu",)  # if they are mostly half precision
        return lax.platform_dependent(finite, operands, **dict.fromkeys(branching, branch), default=select)

    # Without jit, an eager `platform_dependent` waits for the device to learn the platform. A trace needs no jit.
    eager = jax.jit(take_or_skip, inline=True)
    return lambda finite, operands: (take_or_skip if isinstance(finite, Tracer) else eager)(finite, operands)


def find_origin(
    loss_fn: Callable[..., Any], tx: Transformation, has_aux: bool = False
) -> Callable[..., SkippedStep | None]:
    """Finds the origin of a skipped step on the host, at no cost to the training step.

    A skipped step does not change the parameters, so its batch and the state before it are enough to repeat it. The
    search is a program of its own, compiled in the first call.

    Args:
      loss_fn: `(params, *args, **kwargs) -> loss`, or `-> (loss, aux)` with `has_aux`, as in `optim.minimize`.
      tx: the optimizer of the training step: `optim.loss_scaled` or `optim.skip_nonfinite`.
      has_aux: whether `loss_fn` returns auxiliary data.

    Returns:
      A function `find(params, old_state, *args, **kwargs)` for the host. `old_state` is the optimizer state before the
      step, or its loss scale alone: `jax.device_get(jmp_policy.get_loss_scale(opt_state))` outlives a step that donates
      its state. Arguments that are not arrays are static. It returns a `SkippedStep`; `None` if loss and gradients are
      finite.

    Raises:
      TypeError: `tx` is not an optax transformation; or `find` is called inside `jax.jit`.
      ValueError: `old_state` holds no loss scale, or several, or is of several models (`jax.vmap`); or arrays were
        donated.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx, loss_fn = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale(4.0)), lambda w, x: jnp.sum(w / x)
    >>> train_step, find = jax.jit(jmp.optim.minimize(loss_fn, tx)), jmp.optim.find_origin(loss_fn, tx)
    >>> params, old_state, x = jnp.ones(2), tx.init(jnp.ones(2)), jnp.float32([2.0, 0.0])
    >>> params, opt_state, loss = train_step(params, old_state, x)
    >>> if not opt_state.grads_finite:
    ...     skip = find(params, old_state, x)
    ...     print(skip.origin.primitive, skip.is_search)
    div False
    """
    from ...numerics._nonfinite import NonfiniteOrigin, search_nonfinite  # loads most of the library

    check_transformation(tx)
    is_static = lambda node: isinstance(node, _Static)

    def search(params: PyTree, scale: LossScale, given: Any) -> tuple[NonfiniteOrigin, PyTree, PyTree]:
        args, kwargs = jax.tree.map(lambda x: x.value if is_static(x) else x, given, is_leaf=is_static)
        adapter = find_adapter(params)
        differentiate: Any = (adapter and adapter.value_and_grad) or value_and_grad
        differentiated = differentiate(loss_fn, has_aux=has_aux, loss_scale=scale)
        # The loss comes first: a nan of the forward pass need not be among the values that the gradient reads.
        select = lambda out: (out[0][0] if has_aux else out[0], out[1])
        (_, grads), origin = search_nonfinite(differentiated, select, checks=False)(params, *args, **kwargs)
        return origin, count_nonfinite(params), count_nonfinite(grads)

    @functools.cache
    def compile_for(sharding: NamedSharding | None) -> Callable[..., tuple[NonfiniteOrigin, PyTree, PyTree]]:
        # XLA:CPU compiles the search in three quarters of the time without optimizations.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(search, out_shardings=sharding, compiler_options=options)

    def find(params: PyTree, old_state: PyTree, *args: Any, **kwargs: Any) -> SkippedStep | None:
        given = jax.tree.map(lambda leaf: leaf if is_array(leaf) else _Static(leaf), (args, kwargs))
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, old_state, given))):
            raise TypeError(
                "The function of find_origin runs on the host, and got tracers: call it after the jitted step. For "
                "example: if not opt_state.grads_finite: print(find(params, old_state, batch))."
            )
        leaves = jax.tree.leaves((params, old_state, given))
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise ValueError(
                "Arrays of the parameters, the state or the batch were donated to a step, which deleted them. The new "
                "parameters of a skipped step are the old ones. Of the state keep a copy of the scale: before = "
                "jax.device_get(jmp_policy.get_loss_scale(opt_state)), then the step, then find(params, before, batch)."
            )
        scale = get_loss_scale(old_state)
        _check_one_model((scale, [each.consecutive_skips for each in find_nodes(old_state, LossScaledState)]))
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((params, given))]
        mesh = next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        found, *counts = compile_for(everywhere)(params, scale, given)
        origin = NonfiniteOrigin(*map(np.asarray, found))  # pyright: ignore[reportArgumentType]
        if not origin.found:
            _warn_of_other_scale(old_state, scale)
            return None
        search = is_search(origin, scale.adjust(jnp.bool_(False)))
        return SkippedStep(_count_steps(old_state), origin, search, *map(read_counts, counts))

    return find


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """An argument that is not an array."""

    value: Any


def _warn_of_other_scale(old_state: PyTree, scale: LossScale) -> None:
    """Warns if the state skips steps, but this one has finite gradients at its scale."""
    states = find_nodes(old_state, LossScaledState)
    skips = int(strip_variables(states[0].consecutive_skips)) if states else 0
    if skips:
        warn_user(
            f"Loss and gradients are finite at the loss scale {float(scale.loss_scale)} of the state, whose last "
            f"{skips} steps were skipped. If this step was skipped too, its gradients were taken with another scale, "
            "or of another loss or batch. Pass the state: jmp_policy.value_and_grad(loss_fn, loss_scale=opt_state)."
        )


def _check_one_model(scalars: PyTree) -> None:
    """Raises a `ValueError` if a scalar of a state has an axis, as under `jax.vmap`."""
    for shape in filter(None, map(np.shape, jax.tree.leaves(scalars))):
        raise ValueError(
            f"The state is of several models: its scalars have the shape {shape}, as of jax.vmap. Pass one of them, "
            "for example: params, old_state = jax.tree.map(lambda x: x[0], (params, old_state)); find(params, "
            "old_state, batch)."
        )


def _count_steps(state: PyTree) -> int | None:
    """Returns the number of the step after a state, or None if the optimizer does not count its steps."""
    found = find_nodes(state, LossScaledState)
    if len(found) != 1:
        return None
    inner = found[0].inner_state
    counts = {int(count) for _, count in optax.tree_utils.tree_get_all_with_path(inner, "count") if np.ndim(count) == 0}
    if len(counts) != 1 or find_nodes(inner, optax.MultiStepsState):
        return None
    return counts.pop() + int(found[0].skipped_steps) + 1


def raise_if_stuck(state: PyTree, params: PyTree = None, *, patience: int = 10) -> None:
    """Raises an error if training is stuck: it only skips steps, and no smaller loss scale can help.

    Call it on the host, every few hundred steps: it reads three scalars, and so waits for the device.

    A dynamic scale is stuck if it is at its floor and the last two steps were skipped.

    Args:
      state: a tree that holds the state of `optim.loss_scaled` or `optim.skip_nonfinite`. In a state of several models,
        made by `jax.vmap`, each is looked at.
      params: parameters to look at if training is stuck: the error names those that are not finite themselves.
      patience: the number of skips in a row after which a scale that does not change is stuck. If the loop adjusts
        dynamic scales itself, beside `skip_nonfinite`, use more than their number of backoffs, 24 from the default
        ceiling.

    Raises:
      FloatingPointError: training is stuck.
      ValueError: `state` holds no such state, or several; or `patience` is not positive.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> jmp.optim.raise_if_stuck(jmp.optim.skip_nonfinite(optax.sgd(1.0)).init({"w": jnp.ones(2)}))
    """
    if patience < 1:
        raise ValueError(f"patience must be at least 1, got {patience!r}. For example: raise_if_stuck(opt_state).")
    found = find_scaled_state(state)
    shape = np.shape(found.consecutive_skips)
    take = lambda i: jax.tree.map(lambda x: x[i], found) if shape else found
    texts = {i: text for i in np.ndindex(shape) if (text := _explain_stuck(take(i), patience))}
    if not texts:
        return
    text = next(iter(texts.values()))
    if shape:
        listed = ", ".join(str(i[0] if len(i) == 1 else i) for i in texts)
        text = f"{len(texts)} of {math.prod(shape)} models are stuck: {listed}. Of the first: {text}"
    bad = read_counts(count_nonfinite(params))
    raise FloatingPointError(f"{text} {describe_bad_params(bad)}" if bad else text)


def _explain_stuck(found: LossScaledState, patience: int) -> str:
    """Returns the error about a state that is stuck, or an empty string."""
    scale, skips = found.loss_scale, int(found.consecutive_skips)
    value = float(scale.loss_scale)
    if not isinstance(scale, DynamicLossScale):
        stuck, where = skips >= patience, "does not change"
    else:
        at_floor = value <= np.float32(scale.min_loss_scale)  # the scale is float32
        stuck, where = at_floor and skips >= 2, f"is at its floor {scale.min_loss_scale}"
    if not stuck:
        return ""
    return (
        f"Training is stuck: the last {skips} steps were skipped ({int(found.skipped_steps)} in all) because their "
        f"gradients were not finite. The loss scale is {value} and {where}, so the model or its data makes the "
        "infinities, or another scale does. jmp_policy.optim.find_origin(loss_fn, tx)(params, opt_state, batch) finds "
        "the operation and the parameters; a policy that computes in bfloat16 has the range of float32. value_and_grad "
        "must scale by this state: jmp_policy.value_and_grad(loss_fn, loss_scale=opt_state), not by a constant such as "
        "policy.loss_scale()."
    )
