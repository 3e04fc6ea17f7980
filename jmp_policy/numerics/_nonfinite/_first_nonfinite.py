"""`numerics.first_nonfinite`: a program that returns, beside its results, what made them not finite."""

import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import PartitionSpec

from ..._base import TRACING, Args, Kwargs, PyTree, vary, vary_everywhere
from ..._jaxpr import (
    ModulePaths,
    RecordedOp,
    Register,
    call,
    explain_tracing,
    find_direction,
    find_line,
    find_origin,
    find_unrepeatable,
    open_partials,
    prepare_replay,
    record_program,
    refuse_casting,
    replace_variables,
    run_lifted,
    split_line,
    trace,
)
from ...loss_scale import all_finite
from .._ends import Results, check_function, find_signature, name_results, spell_arguments
from ._chase import find_origin as chase_origin
from ._extremes import Extremes, ExtremesRecorder, is_measurable
from ._graph import build_graph
from ._provenance import Provenance
from ._remedies import Words, find_roles


def first_nonfinite(
    fun: Callable[..., Any], *, of: Callable[[Any], PyTree] | None = None
) -> Callable[..., tuple[Any, Provenance]]:
    """Finds what made a result of a function not finite: the operation, its line and module, and the turn of the loop.

    The function that it returns is a JAX function like any other. Where all results are finite it does what `fun` does,
    to the bit, and looks once at each result. Where one is not, a branch runs the program again, looks at every value,
    and goes back from the result to the operation whose operands were finite. Nothing leaves the device for it.

    Put it around the gradient, not around the whole step, so that a step can still write its parameters in place:

        grad_fn = first_nonfinite(jmp.value_and_grad(loss_fn, loss_scale=opt_state))
        (loss, grads), origin = grad_fn(params, batch)

    An infinity that never got into a result, as in a mask, is not blamed. Under `vmap` both branches run for each
    example. Pallas kernels and a `while` whose examples end in different turns are single operations. Of a loop of more
    than 64 turns the ranges are those of all turns together.

    Args:
      fun: any function of trees of arrays, with modules of linen or nnx, or without. Its debug callbacks are silent
        when it runs again.
      of: takes from what `fun` returns what is to be finite, where that is not all of it. `lambda out: out[1]` takes
        the gradients, where auxiliary data may well be infinite.

    Returns:
      A function of the same arguments that returns `(out, provenance)`: what `fun` returns, and a `Provenance`.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: when called, `fun` cannot run twice: it has an `io_callback`, or reads or writes a reference. Or
        `autocast` is around it, which changes dtypes afterwards: put it inside, `first_nonfinite(autocast(fun))`.

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
    check_function(fun, "first_nonfinite")
    register = Register()

    @functools.wraps(fun)
    def run_and_find(*args: Any, **kwargs: Any) -> tuple[Any, Provenance]:
        refuse_casting("first_nonfinite")
        opened, args, kwargs = open_partials(fun, args, kwargs)
        run = _Run(register, find_signature(opened), (args, kwargs))
        watched = register.watch(opened if of is None else run.note_results(opened, of))
        pure = lambda fun, *given: run.trace_and_run(fun, *given, is_lifted=fun is not watched)
        out = run_lifted(pure, watched, args, kwargs)
        assert run.provenance is not None
        return out, run.provenance

    return run_and_find


class _Run:
    """One call of a function whose results are looked at.

    Attributes:
      provenance: what was found, after `trace_and_run`.
    """

    def __init__(self, register: Register, signature: inspect.Signature | None, given: tuple[Args, Kwargs]):
        self.provenance: Provenance | None = None
        self._register, self._signature, self._given = register, signature, given
        self._noted: list[Any] | None = None
        self._marks: list[bool] = []

    def note_results(self, fun: Callable[..., Any], of: Callable[[Any], PyTree]) -> Callable[..., Any]:
        """The same function, of whose results some are noted: no others are looked at."""

        @functools.wraps(fun)
        def call_and_note(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            self._noted = jax.tree.leaves(of(out))
            return out

        return call_and_note

    def trace_and_run(self, fun: Callable[..., Any], args: Args, kwargs: Kwargs, *, is_lifted: bool) -> PyTree:
        """Traces a function of trees of arrays, runs its program, and where that went wrong looks for the origin."""
        ends = Results()
        with TRACING(self._register.token), explain_tracing("first_nonfinite", ""):
            traced = trace(self._mark_noted(ends.take_arrays(fun)), args, kwargs)
        if is_lifted:
            self._unmark_unwritten(traced.program.jaxpr, name_results(ends.list_paths(), is_lifted=True))
        paths = ModulePaths(self._register.list_modules())
        names = spell_arguments(self._signature, (args, kwargs), self._given, is_lifted=is_lifted)
        program, constants = _detach_constants(traced.program)
        leaves, names = [*constants, *traced.leaves], ["a constant"] * len(constants) + names
        made = call(program, *leaves)
        looked_at = [_sum_parts(array) for array in itertools.compress(made, self._marks)]
        is_finite = _agree(all_finite(lax.stop_gradient(looked_at)))
        search = _make_search(program, self._marks, names, paths)
        if search is None:
            self.provenance = Provenance.empty()
        else:
            nothing = lambda *_: vary_everywhere(Provenance.empty())
            self.provenance = lax.cond(is_finite, nothing, search, *lax.stop_gradient(leaves))
        return ends.put_back(made)

    def _unmark_unwritten(self, body: Jaxpr, names: Sequence[str | None]) -> None:
        """Does not look at what comes back as it came in, with objects of nnx that a function did not write to.

        A mask in the batch may hold infinities, and the batch comes back where a function makes objects, as gradients.

        Args:
          body: the program.
          names: of its results, `None` for one that the function did not return.
        """
        entering = set(map(id, body.invars))
        is_looked_at = (
            name is not None or id(var) not in entering for name, var in zip(names, body.outvars, strict=True)
        )
        self._marks = [mark and looked_at for mark, looked_at in zip(self._marks, is_looked_at, strict=True)]

    def _mark_noted(self, take: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def take_and_mark(*args: Any, **kwargs: Any) -> list[Any]:
            arrays = take(*args, **kwargs)
            noted = arrays if self._noted is None else self._noted
            ids = set(map(id, noted))
            self._marks, self._noted = [id(array) in ids for array in arrays], None  # which were of this trace
            return arrays

        return take_and_mark


def _sum_parts(array: jax.Array) -> jax.Array:
    """Sums an array of which each device has a part, on an explicit mesh: JAX has no `isfinite` of parts."""
    spec = jax.typeof(array).sharding.spec
    if not spec.unreduced:
        return array
    whole = PartitionSpec(*getattr(spec, "partitions", spec))  # JAX 0.10.0 has no `partitions`
    return jax.sharding.reshard(array, whole)


def _agree(is_finite: jax.Array) -> jax.Array:
    """Inside of a shard_map, whether it is so on all devices: they search together, for the program may communicate."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return lax.pmin(vary(is_finite, axes).astype(jnp.int32), axes) == 1 if axes else is_finite


def _make_search(
    program: ClosedJaxpr, marks: Sequence[bool], names: Sequence[str], paths: ModulePaths
) -> Callable[..., Provenance] | None:
    """Makes the function that runs a program again and finds the origin of a marked result.

    Returns:
      That function; `None` for a program in which nothing can be other than finite, as one of integers.
    """
    _check_repeatable(program.jaxpr)
    replay: Any = prepare_replay(_keep_results(program, marks))
    body = replay.jaxpr
    recorder = ExtremesRecorder()
    arguments = [i for i, var in enumerate(body.invars) if is_measurable(var)]
    recorded, lines = record_program(replay, recorder, None, arguments=arguments)
    words = [Words(argument=names[i], dtype=str(body.invars[i].aval.dtype)) for i in arguments]
    words += _Describer(paths, find_roles(body)).describe_all(lines)
    if not words:
        return None

    def search(*leaves: Any) -> Provenance:
        record = call(recorded, *leaves)[len(body.outvars) :]
        graph = build_graph(body, arguments, lines, words, recorder)
        return chase_origin(graph, Extremes(*record))

    return search


class _Describer:
    """Says what a row is of; the turns of a loop share what is said."""

    def __init__(self, paths: ModulePaths, roles: dict[int, str]):
        self._paths, self._roles = paths, roles
        self._said: dict[Any, Words] = {}

    def describe_all(self, lines: Sequence[RecordedOp]) -> list[Words]:
        return [self._describe(line) for line in lines]

    def _describe(self, line: RecordedOp) -> Words:
        step = line.step
        key = id(step.eqn), line.result, tuple(id(eqn) for eqn, _ in step.around)
        if key not in self._said:
            source, function = split_line(find_line(find_origin(step)))
            file, _, number = source.rpartition(":")
            code = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
            dtype: Any = step.results[line.result].aval
            where = self._paths.read_stack(step.scope), find_direction(step.scope), str(dtype.dtype)
            role = self._roles.get(id(step.eqn), "")
            self._said[key] = Words(step.name, source, function, code, *where, role=role)
        return self._said[key]


def _detach_constants(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The same program, whose constants come in as its first arguments, and the constants.

    A result that is a number in the program comes in, too.
    """
    body = program.jaxpr
    numbers: dict[int, Any] = {id(atom): atom for atom in body.outvars if isinstance(atom, Literal)}
    entering: dict[int, Any] = {name: Var(atom.aval) for name, atom in numbers.items()}
    outvars = [entering.get(id(atom), atom) for atom in body.outvars]
    invars = [*body.constvars, *entering.values(), *body.invars]
    detached: Any = replace_variables(body, invars, body.eqns, outvars)
    values = [jnp.asarray(atom.val, atom.aval.dtype) for atom in numbers.values()]
    return ClosedJaxpr(detached.replace(constvars=[]), ()), [*program.consts, *values]


def _keep_results(program: ClosedJaxpr, marks: Sequence[bool]) -> ClosedJaxpr:
    body = program.jaxpr
    kept: Any = replace_variables(body, body.invars, body.eqns, list(itertools.compress(body.outvars, marks)))
    return ClosedJaxpr(kept, program.consts)


def _check_repeatable(program: Jaxpr) -> None:
    eqn = find_unrepeatable(program)
    if eqn is None:
        return
    line = find_line(eqn)
    place = f" of {line}" if line else ""
    raise ValueError(
        f"first_nonfinite runs a function a second time where its results are not finite, and {eqn.primitive.name}"
        f"{place} would then act twice. Put it around a part that has none, for example: "
        "first_nonfinite(jax.value_and_grad(loss_fn))(params, batch), with the callback outside."
    )
