"""`numerics.first_nonfinite`: returns the origin of non-finite results beside the results."""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from .._base import KeyPath, PyTree, Results, hide_frames, vary, vary_everywhere
from .._jaxpr import (
    ModulePaths,
    Modules,
    ObservedCall,
    RecordedOp,
    Register,
    call,
    check_function,
    find_direction,
    find_line,
    find_policy_keys,
    find_unrepeatable,
    name_results,
    observe,
    open_partials,
    prepare_replay,
    record_program,
    replace_variables,
    spell_arguments,
)
from ..loss_scale import all_finite
from ._chase import chase_origin
from ._extremes import Extremes, ExtremesRecorder, find_extremes, is_measurable
from ._nonfinite_graph import build_graph
from ._origin import NonfiniteOrigin
from ._remedies import A_CONSTANT, Words, describe_code, find_op_roles


def first_nonfinite(
    fun: Callable[..., Any], *, of: Callable[[Any], PyTree] | None = None
) -> Callable[..., tuple[Any, NonfiniteOrigin]]:
    """Finds the op that made a result of a function non-finite, with its line, module and loop iteration.

    If all results are finite, the outputs equal those of `fun` bit for bit, and the only cost is a check per output.
    Otherwise a `lax.cond` branch runs the program again, records every value, and goes back from the result to the op
    whose operands were finite. All of this stays on the device, and works in `jit`, `vmap` and `scan`.

    Wrap the gradient, not the whole step, so that a step can still update its parameters in place:

        grad_fn = first_nonfinite(jmp.value_and_grad(loss_fn, loss_scale=opt_state))
        (loss, grads), origin = grad_fn(params, batch)

    An infinity that does not reach a result, as in a mask, is not reported. Under `vmap` both branches run for each
    example. A Pallas kernel counts as one op, like a `while` loop whose trip count differs between examples.

    Args:
      fun: any function of trees of arrays, with or without linen or nnx modules. Its debug callbacks do not run the
        second time.
      of: selects the results to check from the output of `fun`, by default all. `lambda out: out[1]` selects gradients.

    Returns:
      A function of the same arguments that returns `(out, origin)`: the output of `fun`, and a `NonfiniteOrigin`.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: when called, `fun` cannot run twice because it has an `io_callback` or uses a mutable reference; or
        `autocast` is around it. Write `first_nonfinite(autocast(fun))`.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss(w, x):
    ...     with jax.named_scope("head"):
    ...         return jnp.mean(jnp.sqrt(x @ w))
    >>> find = jax.jit(jmp.numerics.first_nonfinite(jax.value_and_grad(loss)))
    >>> (value, grads), origin = find(jnp.ones(2), jnp.zeros((3, 2)))
    >>> origin.kind, origin.primitive, origin.path, origin.direction
    ('nan', 'dot_general', 'head', 'backward')
    >>> origin.cause.kind, origin.cause.primitive, origin.cause.operands
    ('inf', 'div', ((0.5, 0.5), (0.0, 0.0)))
    >>> find(jnp.ones(2), jnp.ones((3, 2)))[1].found
    False
    """
    return search_nonfinite(fun, of, checks=True)


def search_nonfinite(
    fun: Callable[..., Any], of: Callable[[Any], PyTree] | None, *, checks: bool
) -> Callable[..., tuple[Any, NonfiniteOrigin]]:
    """Is `first_nonfinite`. Without `checks` it always searches: a smaller program if the output is unused."""
    check_function(fun, "first_nonfinite")
    register = Register()

    @hide_frames
    @functools.wraps(fun)
    def run_and_find(*args: Any, **kwargs: Any) -> tuple[Any, NonfiniteOrigin]:
        results = _CheckedResults()
        opened, args, kwargs = open_partials(fun, args, kwargs)
        noted = opened if of is None else results.note(opened, of)
        run = lambda call: _run_and_search(call, results, checks=checks)
        return observe("first_nonfinite", register, run, noted, args, kwargs, results)

    return run_and_find


class _CheckedResults(Results):
    """The outputs of a function, with a mark for each array to check."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[bool] = []
        self.numbers: list[tuple[KeyPath, complex]] = []  # Python numbers among the results, not finite
        self._noted: list[Any] | None = None

    def note(self, fun: Callable[..., Any], of: Callable[[Any], PyTree]) -> Callable[..., Any]:
        """Wraps a function so that only the results selected by `of` are checked."""

        @functools.wraps(fun)
        def call_and_note(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            self._noted = jax.tree.leaves(of(out))
            return out

        return call_and_note

    def take_arrays(self, fun: Callable[..., Any]) -> Callable[..., list[Any]]:
        take = super().take_arrays(fun)

        def take_and_mark(*args: Any, **kwargs: Any) -> list[Any]:
            arrays, others = take(*args, **kwargs), self.list_others()
            noted = [*arrays, *others.values()] if self._noted is None else self._noted
            ids = set(map(id, noted))
            self.marks, self._noted = [id(array) in ids for array in arrays], None  # tracers of this trace
            numbers = [(path, leaf) for path, leaf in others.items() if isinstance(leaf, float | complex)]
            self.numbers = [(path, leaf) for path, leaf in numbers if id(leaf) in ids and not np.isfinite(leaf)]
            return arrays

        return take_and_mark


def _run_and_search(
    observed: ObservedCall, results: _CheckedResults, *, checks: bool
) -> tuple[list[Any], NonfiniteOrigin]:
    """Runs a traced call, and searches for the origin if a result is not finite."""
    marks, is_lifted = results.marks, observed.is_lifted
    if is_lifted:
        # Unchanged state, which nnx returns beside the results, is not checked: a mask in a batch may have infinities.
        entering, names = (
            set(map(id, observed.program.jaxpr.invars)),
            name_results(results.list_paths(), is_lifted=True),
        )
        kept = zip(marks, names, observed.program.jaxpr.outvars, strict=True)
        marks = [mark and (name is not None or id(var) not in entering) for mark, name, var in kept]
    names = spell_arguments(observed.signature, observed.taken, observed.given, is_lifted=is_lifted)
    program, constants = _detach_constants(observed.program)
    leaves, names = [*constants, *observed.leaves], [A_CONSTANT] * len(constants) + names
    made = call(program, *leaves)
    search, none = _make_search(program, marks, names, observed.modules), NonfiniteOrigin.empty()
    for path, number in results.numbers[:1]:
        none = NonfiniteOrigin.of_constant(number, name_results([path], is_lifted=is_lifted)[0] or "")
    if search is None:
        return made, none
    if not checks:
        return made, search(*lax.stop_gradient(leaves))
    looked_at = [_sum_parts(array) for array in itertools.compress(made, marks)]
    is_finite = all_finite(lax.stop_gradient(looked_at))
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        # The devices of a `shard_map` must search together, because the program may communicate.
        is_finite = lax.pmin(vary(is_finite, axes).astype(jnp.int32), axes) == 1
    return made, lax.cond(is_finite, lambda *_: vary_everywhere(none), search, *lax.stop_gradient(leaves))


def _sum_parts(array: jax.Array) -> jax.Array:
    """Sums an array with unreduced mesh axes; JAX can ask neither it nor one with reduced axes if all is finite."""
    spec = jax.typeof(array).sharding.spec
    if not (spec.unreduced or spec.reduced):
        return array
    whole = PartitionSpec(*getattr(spec, "partitions", spec))  # JAX 0.10.1 has no `partitions`
    return jax.sharding.reshard(array, whole)


def _make_search(
    program: ClosedJaxpr, marks: Sequence[bool], names: Sequence[str], modules: Modules
) -> Callable[..., NonfiniteOrigin] | None:
    """Makes the function that runs a program again and finds the origin, or None if the program has no floats."""
    body = program.jaxpr
    _refuse_acting_twice(body)
    kept: Any = replace_variables(body, body.invars, body.eqns, list(itertools.compress(body.outvars, marks)))
    replay: Any = prepare_replay(ClosedJaxpr(kept, program.consts))
    body = replay.jaxpr
    recorder = ExtremesRecorder()
    arguments = [i for i, var in enumerate(body.invars) if is_measurable(var)]
    recorded, lines, _ = record_program(replay, recorder, None, arguments=arguments)
    words = [Words(argument=names[i], dtype=str(body.invars[i].aval.dtype)) for i in arguments]
    words += _describe_lines(lines, modules, find_op_roles(body))
    graph = build_graph(body, arguments, lines, words, recorder)
    if not len(graph.text):
        return None

    def search(*leaves: Any) -> NonfiniteOrigin:
        made = call(recorded, *leaves)[len(body.outvars) :]
        record = Extremes(*made) if words else recorder.empty(0)
        if len(graph.numbers):
            literals = recorder.gather(jax.vmap(find_extremes)(jnp.asarray(graph.numbers)))
            record = recorder.join([record, literals])
        return chase_origin(graph, record)

    return search


def _describe_lines(lines: Sequence[RecordedOp], modules: Modules, roles: dict[int, str]) -> list[Words]:
    """Describes recorded rows. The iterations of a loop share one description."""
    known: dict[Any, Words] = {}
    read = ModulePaths(modules).read_stack
    scopes = {line.step.scope: read(line.step.scope) for line in lines}
    policy_keys = find_policy_keys(scopes.values(), scopes, modules) or {}
    keys = [(id(line.step.eqn), line.result, tuple(id(eqn) for eqn, _ in line.step.around)) for line in lines]
    for line, key in zip(lines, keys, strict=True):
        if key not in known:
            step = line.step
            dtype: Any = step.results[line.result].aval
            known[key] = Words(
                step.name,
                path=scopes[step.scope],
                direction=find_direction(step.scope),
                dtype=str(dtype.dtype),
                role=roles.get(id(step.eqn), ""),
                key=re.escape(policy_keys.get(scopes[step.scope], "")),
                **describe_code(step.eqn, step.around),
            )
    return [known[key] for key in keys]


def _detach_constants(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Turns constants, and results that are literals, into leading arguments."""
    body = program.jaxpr
    numbers: dict[int, Any] = {id(atom): atom for atom in body.outvars if isinstance(atom, Literal)}
    entering: dict[int, Any] = {name: Var(atom.aval) for name, atom in numbers.items()}
    outvars = [entering.get(id(atom), atom) for atom in body.outvars]
    invars = [*body.constvars, *entering.values(), *body.invars]
    detached: Any = replace_variables(body, invars, body.eqns, outvars)
    values = [jnp.asarray(atom.val, atom.aval.dtype) for atom in numbers.values()]
    return ClosedJaxpr(detached.replace(constvars=[]), ()), [*program.consts, *values]


def _refuse_acting_twice(program: Jaxpr) -> None:
    eqn = find_unrepeatable(program)
    if eqn is None:
        return
    line = find_line(eqn)
    place = f" of {line}" if line else ""
    raise ValueError(
        f"first_nonfinite runs a function a second time if its results are not finite, and {eqn.primitive.name}"
        f"{place} would then act twice. Wrap a part without it. For example: "
        "first_nonfinite(jax.value_and_grad(loss_fn))(params, batch), with the callback outside."
    )
