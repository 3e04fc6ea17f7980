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
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from .._base import PyTree, is_array, split_state, warn_user
from ..gradients import value_and_grad
from ..loss_scale import DynamicLossScale, LossScale, NoOpLossScale, find_nodes, get_loss_scale, strip_variables
from ..modules import find_adapter
from ._skipping import SkippingUpdate
from ._step import list_trained
from ._transformation import LossScaledState, Transformation, check_transformation

if TYPE_CHECKING:
    from ..numerics import NonfiniteOrigin
else:
    NonfiniteOrigin = Any  # for `typing.get_type_hints`

Counts = Mapping[str, tuple[int, int]]  # elements that are not finite and all elements of arrays, by path
_MOST_LISTED = 8


@dataclasses.dataclass(frozen=True)
class BadGradient:
    """A parameter whose gradient is not finite.

    Attributes:
      path: the names of the parameter, joined by `/`.
      bad: the number of elements of its gradient that are not finite.
      size: the number of all elements.
      frozen: whether the optimizer does not train it, as `optax.set_to_zero` in `optax.partition`.

    >>> import jmp_policy as jmp
    >>> str(jmp.optim.BadGradient("head/kernel", 2, 8, frozen=True))
    'head/kernel (2 of 8, frozen)'
    """

    path: str
    bad: int
    size: int
    frozen: bool = False

    def __str__(self) -> str:
        return f"{self.path or 'the parameter'} ({self.bad} of {self.size}{', frozen' if self.frozen else ''})"


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
      parameters: those whose gradients are not finite, in the order of the backward pass.

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
    parameters: tuple[BadGradient, ...]

    def __str__(self) -> str:
        search = "; the loss scale was too high, which is normal at the start" if self.is_search else ""
        cause = "" if self.origin.cause is None else f"; made of {self.origin.cause}"
        return f"step{self._number} skipped: {self.origin}{cause}{search}"

    def describe(self) -> str:
        """Returns the number of the step and a paragraph: the op, its elements, parameters, and suggestions."""
        sentences = [f"Step{self._number} was skipped. {self.origin.describe()}"]
        if self.bad_params:
            sentences.append(describe_bad_params(self.bad_params))
        if self.parameters:
            listed = _join([str(each) for each in self.parameters], most=5)
            sentences.append(f"Parameters whose gradients are not finite, in the order of the backward pass: {listed}.")
        if any(each.frozen for each in self.parameters):
            sentences.append("A frozen one skips the step too: put jax.lax.stop_gradient around it in the loss.")
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
    return {_name(path): (int(bad), int(size)) for path, (bad, size) in keyed if int(bad)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _join(listed: list[str], most: int) -> str:
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if listed[most:] else "")


def describe_bad_params(counts: Counts) -> str:
    listed = [f"{name or 'the parameter'} ({bad} of {size})" for name, (bad, size) in counts.items()]
    return (
        f"Parameters that are not finite themselves: {_join(listed, _MOST_LISTED)}. No step repairs them: restore a "
        "checkpoint. A step with finite gradients can have made them so, if its update overflowed: loss_scaled(..., "
        "check='updates') skips it."
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

    def differentiate(params: PyTree, scale: LossScale) -> Callable[..., Any]:
        adapter = find_adapter(params)
        transform: Any = (adapter and adapter.value_and_grad) or value_and_grad
        return transform(loss_fn, has_aux=has_aux, loss_scale=scale)

    def search(params: PyTree, scale: LossScale, given: Any) -> tuple[NonfiniteOrigin, PyTree, PyTree]:
        args, kwargs = jax.tree.map(lambda x: x.value if is_static(x) else x, given, is_leaf=is_static)
        differentiated = differentiate(params, scale)
        # The loss comes first: a nan of the forward pass need not be among the values that the gradient reads.
        select = lambda out: (out[0][0] if has_aux else out[0], out[1])
        (_, grads), origin = search_nonfinite(differentiated, select, checks=False)(params, *args, **kwargs)
        return origin, count_nonfinite(params), count_nonfinite(grads)

    @functools.cache
    def compile_for(sharding: NamedSharding | None) -> Callable[..., tuple[NonfiniteOrigin, PyTree, PyTree]]:
        # XLA:CPU compiles the search in three quarters of the time without optimizations.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(search, out_shardings=sharding, compiler_options=options)

    described: dict[Any, list[tuple[str, bool]]] = {}  # the parameters, by the types of the arguments

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
        found, param_counts, grad_counts = compile_for(everywhere)(params, scale, given)
        origin = NonfiniteOrigin(*map(np.asarray, found))  # pyright: ignore[reportArgumentType]
        if not origin.found:
            _warn_of_other_scale(old_state, scale)
            return None
        search = _is_search(origin, scale.adjust(jnp.bool_(False)))
        bad_grads = read_counts(grad_counts)
        key = jax.tree.structure((params, given)), *map(jax.typeof, jax.tree.leaves((params, given)))
        if bad_grads and key not in described:
            # Unscaled, each gradient is the output of its own part of the backward pass.
            take_grads = lambda params: differentiate(params, NoOpLossScale())(params, *args, **kwargs)[1]
            described[key] = _describe_gradients(take_grads, params, tx)
        parameters = tuple(
            BadGradient(name, *bad_grads[name], frozen) for name, frozen in described.get(key, ()) if name in bad_grads
        )
        return SkippedStep(_count_steps(old_state), origin, search, read_counts(param_counts), parameters)

    return find


def _describe_gradients(
    take_grads: Callable[[PyTree], PyTree], params: PyTree, tx: Transformation
) -> list[tuple[str, bool]]:
    """Lists the parameters and whether they are frozen, in the order in which the backward pass makes gradients."""
    program, made = jax.make_jaxpr(take_grads, return_shape=True)(params)
    grads = split_state(strip_variables(made))[0]
    inner: Any = tx
    while isinstance(inner.update, SkippingUpdate):
        inner = inner.update.inner
    frozen = {
        name: not is_trained for name, is_trained in zip(_list_names(grads), list_trained(inner, grads), strict=True)
    }
    names = zip(_list_names(strip_variables(made)), _order_outputs(program.jaxpr), strict=True)
    return [(name, frozen[name]) for name, _ in sorted(names, key=lambda pair: pair[1]) if name in frozen]


def _list_names(tree: PyTree) -> list[str]:
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _order_outputs(program: Any) -> list[tuple[int, ...]]:
    """Returns the place of each output of a jaxpr among its equations, and inside of an equation that calls another."""
    from .._jaxpr import sub_jaxprs

    made = {out: (i, k) for i, eqn in enumerate(program.eqns) for k, out in enumerate(eqn.outvars)}

    @functools.cache
    def order_inside(i: int) -> list[tuple[int, ...]]:
        eqn = program.eqns[i]
        bodies = [body.program for body in sub_jaxprs(eqn) if len(body.program.outvars) == len(eqn.outvars)]
        return _order_outputs(bodies[0]) if bodies else [()] * len(eqn.outvars)

    found = [None if isinstance(atom, Literal) else made.get(atom) for atom in program.outvars]
    return [() if at is None else (at[0], *order_inside(at[0])[at[1]]) for at in found]


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
