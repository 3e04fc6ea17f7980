"""`find_origin`: repeats a skipped step on the host, finds its origin, and judges it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

from .._base import PyTree, is_array, split_state, warn_user
from ..gradients import value_and_grad
from ..loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    find_nodes,
    get_loss_scale,
    list_skipping,
    strip_variables,
)
from ..modules import find_adapter, force_full_precision
from ._input_ranges import Range, join_range, name_leaves
from ._skipped_step import BadGradient, SkippedStep, count_nonfinite, list_names, read_counts
from ._skipping import find_inner
from ._step import list_trained
from ._transformation import LossScaledState, Transformation, check_loss_first

if TYPE_CHECKING:
    from ._verdict import Verdict
else:
    Verdict = Any  # for `typing.get_type_hints`


class Given(NamedTuple):
    """The arguments of a step that is repeated. Those that are not arrays are static."""

    params: PyTree
    scale: LossScale
    arguments: Any


class OriginFinder:
    """Repeats skipped steps on the host; made by `find_origin`.

    >>> import jax.numpy as jnp, optax, jmp_policy as jmp
    >>> find = jmp.optim.find_origin(lambda w, x: jnp.sum(w / x), tx := jmp.optim.skip_nonfinite(optax.sgd(0.1)))
    >>> params = jnp.ones(2)
    >>> str(find(params, tx.init(params), jnp.float32([2.0, jnp.nan])))
    'step skipped: nan in argument `x`'
    """

    def __init__(self, loss_fn: Callable[..., Any], tx: Transformation, has_aux: bool):
        self.loss_fn, self.tx, self.has_aux = loss_fn, tx, has_aux
        self.ranges: dict[str, Range | None] = {}  # of the arguments of `watch`
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._searches: dict[NamedSharding | None, Callable[..., Any]] = {}
        self._described: dict[Any, list[tuple[str, bool]]] = {}  # the parameters, by the types of the arguments

    def __call__(self, params: PyTree, old_state: PyTree, *args: Any, **kwargs: Any) -> SkippedStep | None:
        """Returns the origin of a skipped step, or `None` if its loss and gradients are finite."""
        return self.find(self.take(params, old_state, args, kwargs), old_state)

    def verdict(self, params: PyTree, old_state: PyTree, *args: Any, times: int = 2, **kwargs: Any) -> Verdict:
        """Replays a skipped step and finds the fault.

        The checks are in this order, and the first that finds something decides:

        1. *state*: a parameter is nan, or a moment is not finite that is finite in a new state of the optimizer.
        2. *not reproduced*: `times` runs of one program differ in bits, or no replay skips the step.
        3. *data*: elements of an input are not finite, or outside of the range that `watch` has seen, or in a row that
           is 100 times as large as the median row; and the step is taken with good rows in their place. If half the
           loss scale is enough for finite elements, it is the *scale*.
        4. *state* again: elements of a parameter are infinite, or 10,000 times as large as the median one, as after a
           flipped bit; and the step is taken without them.
        5. *scale*: the step is finite at a smaller loss scale.
        6. *format*: the step is finite in float32, and `tune`'s search finds the smallest map that makes it so; or a
           cast to float8 overflowed.
        7. *model*: it is not finite in float32 either.

        A step that `skip_spikes` skipped is a *spike*, unless the data explain it. If the gradients are finite and the
        update is not, the last two checks are of the optimizer.

        Args:
          params: the parameters before the step, or the nnx model.
          old_state: the optimizer state before the step. With the loss scale alone, the state cannot be checked.
          *args: the other arguments of the loss function.
          times: the number of replays to compare.
          **kwargs: the arguments by name.

        Returns:
          A `Verdict`; its `str` is a paragraph.

        Raises:
          ValueError: as `find`; or `times` is below 1.
        """
        from ._verdict import judge  # loads most of the library

        if not isinstance(times, int) or times < 1:
            raise ValueError(
                f"times must be an integer of at least 1, got {times!r}. For example: find.verdict(..., times=2)."
            )
        return judge(self, self.take(params, old_state, args, kwargs), old_state, times)

    def watch(self, *args: Any, **kwargs: Any) -> None:
        """Notes the range of each array of a batch that was good, for later verdicts. Does not wait for the device.

        Args:
          *args: the arguments of the loss function after the parameters.
          **kwargs: the arguments by name.
        """
        for name, leaf in name_leaves(self.loss_fn, args, kwargs):
            self.ranges[name] = join_range(leaf, self.ranges.get(name))

    def take(self, params: PyTree, old_state: PyTree, args: Any, kwargs: Any) -> Given:
        """Checks the arguments of a replay."""
        given = jax.tree.map(lambda leaf: leaf if is_array(leaf) else _Static(leaf), (args, kwargs))
        leaves = jax.tree.leaves((params, old_state, given))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise TypeError(
                "The function of find_origin runs on the host, and got tracers: call it after the jitted step. For "
                "example: if not opt_state.grads_finite: print(find(params, old_state, batch))."
            )
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise ValueError(
                "Arrays of the parameters, the state or the batch were donated to a step, which deleted them. The new "
                "parameters of a skipped step are the old ones. Of the state keep a copy of the scale: before = "
                "jax.device_get(jmp_policy.get_loss_scale(opt_state)), then the step, then find(params, before, batch)."
            )
        skipping = list_skipping(old_state)
        only_spikes = bool(skipping) and not find_nodes(old_state, LossScale)
        scale = NoOpLossScale() if only_spikes else get_loss_scale(old_state)
        _check_one_model((scale, [each.step_taken for each in skipping]))
        return Given(params, scale, given)

    def compile(self, fun: Callable[..., Any], key: Any = None) -> Callable[..., Any]:
        """Returns `fun(self, *args)` as a compiled function of `args`, once for each key, which is `fun` by default."""
        return self._compiled.setdefault(key or fun, jax.jit(functools.partial(fun, self)))

    def differentiate(self, params: PyTree, scale: LossScale, fun: Callable[..., Any] | None = None) -> Any:
        """Returns the function of params and batch that returns the loss and true gradients."""
        adapter = find_adapter(params)
        transform: Any = adapter and adapter.value_and_grad
        transform = transform or functools.partial(value_and_grad, allow_int=True)
        return transform(fun or self.loss_fn, has_aux=self.has_aux, loss_scale=scale)

    def find(self, given: Given, old_state: PyTree) -> SkippedStep | None:
        """Searches for the origin."""
        from ..numerics import NonfiniteOrigin

        leaves = jax.tree.leaves((given.params, given.arguments))
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        mesh = next((each.mesh for each in shardings if isinstance(each, NamedSharding)), None)
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        if everywhere not in self._searches:
            # XLA:CPU compiles the search in three quarters of the time without optimizations.
            options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
            self._searches[everywhere] = jax.jit(self._search, out_shardings=everywhere, compiler_options=options)
        search = self._searches[everywhere]
        found, param_counts, grad_counts = search(given)
        origin = NonfiniteOrigin(*map(np.asarray, found))  # pyright: ignore[reportArgumentType]
        if not origin.found:
            _warn_of_other_scale(old_state, given.scale)
            return None
        lowest = _find_lowest(given.scale)
        return SkippedStep(
            count_steps(old_state),
            origin,
            lowest is not None and not NonfiniteOrigin(*search(given._replace(scale=lowest))[0]).found,
            read_counts(param_counts),
            self._list_bad_gradients(given, read_counts(grad_counts)),
        )

    def _search(self, given: Given) -> tuple[Any, PyTree, PyTree]:
        from ..numerics import search_nonfinite  # loads most of the library

        args, kwargs = unwrap(given.arguments)
        # The loss comes first: a nan of the forward pass need not be among the values that the gradient reads.
        select = lambda out: (out[0][0] if self.has_aux else out[0], out[1])
        search = search_nonfinite(self.differentiate(given.params, given.scale), select, checks=False)
        (_, grads), origin = search(given.params, *args, **kwargs)
        return origin, count_nonfinite(given.params), count_nonfinite(grads)

    def _list_bad_gradients(self, given: Given, counts: Any) -> tuple[BadGradient, ...]:
        if not counts:
            return ()
        shapes = given.params, given.arguments
        key = jax.tree.structure(shapes), *map(jax.typeof, jax.tree.leaves(shapes))
        if key not in self._described:
            self._described[key] = self._describe_gradients(given)
        named = [(name, frozen) for name, frozen in self._described[key] if name in counts]
        return tuple(BadGradient(name, counts[name][0], counts[name][1], frozen) for name, frozen in named)

    def _describe_gradients(self, given: Given) -> list[tuple[str, bool]]:
        """Lists the parameters and whether they are frozen, in the order in which the backward pass makes gradients."""

        def take_grads(given: Given) -> PyTree:
            args, kwargs = unwrap(given.arguments)
            # Unscaled, each gradient is the output of its own part of the backward pass. In full precision, because
            # float16 without a scale would warn.
            differentiated = force_full_precision(self.differentiate(given.params, NoOpLossScale()))
            return strip_variables(differentiated(given.params, *args, **kwargs)[1])

        program, grads = jax.make_jaxpr(take_grads, return_shape=True)(given)
        rest = split_state(grads)[0]
        trained = zip(list_names(rest), list_trained(find_inner(self.tx), rest), strict=True)
        frozen = {name: not is_trained for name, is_trained in trained}
        names = zip(list_names(grads), _order_outputs(program.jaxpr), strict=True)
        return [(name, frozen[name]) for name, _ in sorted(names, key=lambda pair: pair[1]) if name in frozen]


def find_origin(loss_fn: Callable[..., Any], tx: Transformation, has_aux: bool = False) -> OriginFinder:
    """Finds the origin of a skipped step on the host, at no cost to the training step.

    A skipped step does not change the parameters, so its batch and the state before it are enough to repeat it. The
    search is a program of its own, compiled in the first call. `find` names the operation. `find.verdict` tells whether
    the data, the loss scale, the format, the model, the state or the machine is at fault.

    Args:
      loss_fn: `(params, *args, **kwargs) -> loss`, or `-> (loss, aux)` with `has_aux`, as in `optim.minimize`.
      tx: the optimizer of the training step: `optim.loss_scaled`, `optim.skip_nonfinite` or `optim.skip_spikes`.
      has_aux: whether `loss_fn` returns auxiliary data.

    Returns:
      An `OriginFinder`: a function `find(params, old_state, *args, **kwargs)` for the host. `old_state` is the state of
      the optimizer before the step, or its loss scale alone: `jax.device_get(jmp_policy.get_loss_scale(opt_state))`
      outlives a step that donates its state. Arguments that are not arrays are static. It returns a `SkippedStep`;
      `None` if loss and gradients are finite. `find.verdict` has the same arguments.

    Raises:
      TypeError: `tx` is not an optax transformation, or is first; or `find` is called inside `jax.jit`.
      ValueError: `old_state` holds no loss scale, or several, or is of several models (`jax.vmap`); or arrays were
        donated.

    >>> import jax, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> tx, loss_fn = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale(4.0)), lambda w, x: jnp.sum(w / x)
    >>> train_step, find = jax.jit(jmp.optim.minimize(loss_fn, tx)), jmp.optim.find_origin(loss_fn, tx)
    >>> params, old_state, x = jnp.ones(2), tx.init(jnp.ones(2)), jnp.float32([2.0, 0.0])
    >>> params, opt_state, loss = train_step(params, old_state, x)
    >>> if not opt_state.step_taken:
    ...     skip = find(params, old_state, x)
    ...     print(skip.origin.primitive, skip.is_search, find.verdict(params, old_state, x).kind)
    div False model
    """
    check_loss_first(loss_fn, tx, "find_origin")
    return OriginFinder(loss_fn, tx, has_aux)


def _find_lowest(scale: LossScale) -> LossScale | None:
    """Returns a dynamic scale at its floor, or None if the scale cannot fall."""
    if not isinstance(scale, DynamicLossScale) or float(scale.loss_scale) <= np.float32(scale.min_loss_scale):
        return None
    return replace_value(scale, jnp.minimum(scale.loss_scale, scale.min_loss_scale))


def replace_value(scale: LossScale, value: Any) -> LossScale:
    if not isinstance(scale, DynamicLossScale):
        return dataclasses.replace(scale, loss_scale=value)  # pyright: ignore[reportArgumentType]
    leaves, structure = jax.tree.flatten(scale)
    return structure.unflatten([jnp.float32(value), *leaves[1:]])


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


def unwrap(arguments: Any) -> Any:
    """Returns the arguments as the loss function takes them."""
    is_static = lambda node: isinstance(node, _Static)
    return jax.tree.map(lambda x: x.value if is_static(x) else x, arguments, is_leaf=is_static)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """An argument that is not an array."""

    value: Any
    kind: type = dataclasses.field(init=False)  # True is not 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", type(self.value))


def _warn_of_other_scale(old_state: PyTree, scale: LossScale) -> None:
    """Warns if the state skips steps, but this one has finite gradients at its scale."""
    states = find_nodes(old_state, LossScaledState)
    skips = int(strip_variables(states[0].consecutive_skips)) if states else 0
    if skips:
        checks_updates = states[0].updates_finite is not None
        update = "its update was not finite: ask find.verdict(params, old_state, batch). Or " if checks_updates else ""
        warn_user(
            f"Loss and gradients are finite at the loss scale {float(scale.loss_scale)} of the state, whose last "
            f"{skips} steps were skipped. If this step was skipped too, {update}its gradients were taken with another "
            "scale, or of another loss or batch. Pass the state: jmp_policy.value_and_grad(loss_fn, "
            "loss_scale=opt_state)."
        )


def _check_one_model(scalars: PyTree) -> None:
    """Raises a `ValueError` if a scalar of a state has an axis, as under `jax.vmap`."""
    for shape in filter(None, map(np.shape, jax.tree.leaves(scalars))):
        raise ValueError(
            f"The state is of several models: its scalars have the shape {shape}, as of jax.vmap. Pass one of them, "
            "for example: params, old_state = jax.tree.map(lambda x: x[0], (params, old_state)); find(params, "
            "old_state, batch)."
        )


def count_steps(state: PyTree) -> int | None:
    """Returns the number of the step after a state, or None if the optimizer does not count its steps."""
    found = find_nodes(state, LossScaledState)
    if len(found) != 1:
        return None
    inner = found[0].inner_state
    counts = {int(count) for _, count in optax.tree_utils.tree_get_all_with_path(inner, "count") if np.ndim(count) == 0}
    if len(counts) != 1 or find_nodes(inner, optax.MultiStepsState):
        return None
    spikes = sum(int(each.spike_steps) for each in list_skipping(inner))
    return counts.pop() + int(found[0].skipped_steps) + spikes + 1
