"""A skipped step as a host sees it: its cause, and the parameters that it concerns."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._base import PyTree, is_array, split_state, warn_user
from ..gradients import value_and_grad
from ..loss_scale import DynamicLossScale, LossScale, find_nodes, get_loss_scale, strip_variables
from ..modules import find_adapter
from ._transformation import LossScaledState, Transformation, check_transformation

if TYPE_CHECKING:
    from ..numerics import NonfiniteOrigin
else:
    NonfiniteOrigin = Any  # for `typing.get_type_hints`

Counts = Mapping[str, tuple[int, int]]  # elements that are not finite and all elements of arrays, by path
_MOST_LISTED = 8


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A skipped step and its cause; `str` of it is one line.

    Attributes:
      step: the number of the step, from 1. Skipped steps and the microbatches of `optax.MultiSteps` count. `None` if
        the optimizer does not count its steps.
      origin: the origin of its infinities.
      is_search: whether it is part of the search for a loss scale, which the next step may end: the backward pass
        overflowed, under a dynamic scale that can still fall.
      bad_params: the parameters that are not finite themselves, by path, with the number of elements that are not
        finite and of all elements.
      bad_grads: likewise the parameters whose gradients are not finite.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx, params = jmp.optim.skip_nonfinite(optax.adam(0.1)), jnp.ones(2)
    >>> find = jmp.optim.find_origin(lambda params, x: jnp.sum(params / x), tx)
    >>> skip = find(params, tx.init(params), jnp.zeros(2))
    >>> skip.step, skip.origin.primitive, skip.is_search
    (1, 'div', False)
    """

    step: int | None
    origin: "NonfiniteOrigin"
    is_search: bool
    bad_params: Counts
    bad_grads: Counts

    def __str__(self) -> str:
        search = "; the loss scale was too high, which is normal at the start" if self.is_search else ""
        cause = "" if self.origin.cause is None else f"; made of {self.origin.cause}"
        return f"step{self._number} skipped: {self.origin}{cause}{search}"

    def describe(self) -> str:
        """Returns the number of the step and a paragraph: the op, its elements, parameters, and suggestions."""
        sentences = [f"Step{self._number} was skipped. {self.origin.describe()}"]
        if self.bad_params:
            sentences.append(describe_bad_params(self.bad_params))
        if self.bad_grads:
            sentences.append(
                f"Parameters whose gradients are not finite: {_format_counts(self.bad_grads)}. Each of them skips the "
                "step, also one that the optimizer does not train: for that one, jax.lax.stop_gradient in the loss."
            )
        return " ".join(sentences)

    @property
    def _number(self) -> str:
        return "" if self.step is None else f" {self.step:,}"


def count_nonfinite(tree: PyTree) -> PyTree:
    """Counts the elements of each floating array that are not finite, and all its elements. Skips float8 state."""
    rest, _ = split_state(tree)
    inexact = lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)
    count = lambda x: (jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32), jnp.uint32(x.size)) if inexact(x) else None
    return jax.tree.map(count, strip_variables(rest))


def read_counts(counts: PyTree) -> Counts:
    is_count = lambda node: isinstance(node, tuple) and len(node) == 2 and all(map(is_array, node))
    keyed = jax.tree_util.tree_leaves_with_path(counts, is_leaf=is_count)
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in keyed)
    return {name: (int(bad), int(size)) for name, (_, (bad, size)) in zip(names, keyed, strict=True) if int(bad)}


def _format_counts(counts: Counts) -> str:
    listed = [f"{name or 'the parameter'} ({bad} of {size})" for name, (bad, size) in counts.items()]
    return ", ".join(listed[:_MOST_LISTED]) + (
        f" and {len(listed) - _MOST_LISTED} more" if listed[_MOST_LISTED:] else ""
    )


def describe_bad_params(counts: Counts) -> str:
    return (
        f"Parameters that are not finite themselves: {_format_counts(counts)}. No step repairs them: restore a "
        "checkpoint. A step with finite gradients can have made them so, if its update overflowed."
    )


def _is_search(origin: "NonfiniteOrigin", scale: LossScale) -> bool:
    """True if a skipped step is part of the search for a loss scale; see `SkippedStep`."""
    if not isinstance(scale, DynamicLossScale) or float(scale.loss_scale) <= np.float32(scale.min_loss_scale):
        return False
    from ..numerics import reaches_pole

    root = origin.cause or origin
    overflowed = root.kind == "inf" and not reaches_pole(root.primitive, root.operands, root.dtype)
    return overflowed and root.direction == "backward"


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
    from ..numerics import NonfiniteOrigin, search_nonfinite  # loads most of the library

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
        search = _is_search(origin, scale.adjust(jnp.bool_(False)))
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
