"""`numerics.collect`: a program that returns, beside its results, what its tensors look like."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..._base import TRACING, Args, Kwargs, PyTree, vary_everywhere
from ..._jaxpr import (
    Atom,
    Line,
    ModulePaths,
    Order,
    Recorder,
    Register,
    evaluate,
    explain_tracing,
    find_direction,
    find_line,
    find_origin,
    float_dtype,
    is_float,
    open_partials,
    record_program,
    refuse_casting,
    run_lifted,
    split_line,
    trace,
    walk,
)
from .._ends import Results, check_function, find_signature, name_arguments, name_results
from ._choice import Choice, Place, Request, make_choice, make_request, remember_program, take_step
from ._measure import PartialStats, StatsSpec
from ._record import Record, fold, join, merge
from ._row import Direction, Layout, TensorInfo
from ._stats import Stats

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
MOST_TURNS = 64
"""Each turn of a loop of at most so many has rows of its own, unless the user says otherwise."""


def collect(
    fun: Callable[..., Any],
    formats: Sequence[str] = FORMATS,
    where: str | Sequence[str] = "matmuls",
    of: str | Sequence[str] = ("forward", "backward", "arguments", "results"),
    histogram: bool = True,
    loops: Literal["auto", "split", "merge"] = "auto",
    every: int | None = None,
) -> Callable[..., tuple[Any, Stats]]:
    """Measures what the tensors of a function look like, and what number formats would do to them.

    The function that it returns is a JAX function like any other: it can be jitted, differentiated, mapped and
    sharded, and what it measures leaves as a pytree of arrays, without a callback. Compose it around the gradient,
    `collect(jax.value_and_grad(loss_fn))`, to see the backward pass too.

    A row is one tensor. XLA fuses an operation that is looked at differently, so that results may differ in their last
    bits. Pallas kernels and functions with derivatives of their own (`jax.custom_vjp`) are operations: what they return
    has a row, if they do what is chosen, and what is inside has none. Devices of a `shard_map` are one row together, of
    which each counts its own copy of a replicated value, and so are the turns of a `while`.

    Statistics of each step cost two passes over what is measured (`benchmarks/numerics.py`). `every=100` pays that in
    one step of a hundred. Two compiled functions, of which the host chooses one, cost nothing on the other steps:

        observed, plain = jax.jit(collect(train_step)), jax.jit(train_step)
        for step, batch in enumerate(batches):
            if step % 100:
                state = plain(state, batch)
            else:
                state, stats = observed(state, batch)
                logger.log(stats.scalars(), step)

    Args:
      fun: any function of trees of arrays, with modules of linen or nnx, or without.
      formats: what to measure the tensors for: names of dtypes; `"int8"` and `"int4"`; and `"mxfp8"`, `"mxfp8_e5m2"`,
        `"mxfp4"` and `"nvfp4"`. The block size of the latter, along the last axis, may follow, as in `"int4/32"`.
      where: `"matmuls"` (with convolutions), `"all"` operations, the names of primitives such as `"exp"`, and patterns
        of paths, which cover what is inside of them as keys of a `PolicyMap` do. Of several, operations add up and
        so do paths, and a value is measured where both are chosen: `("matmuls", "blocks/.*")`.
      of: some of `"forward"`, `"recomputed"` (by a remat), `"backward"`, and the `"arguments"` and `"results"` of the
        whole function, by their paths in its trees: gradients are told apart by those. `where` does not choose among
        the last two.
      histogram: whether to count the numbers of each exponent.
      loops: of `scan`, `"split"` gives each turn its own rows, and `"merge"` gives all turns one. `"auto"` splits loops
        of at most 64 turns.
      every: measures each so many steps only; the returned function then takes the number of the step before its other
        arguments, an integer that may be traced. Another step runs as without `collect`, and its rows are empty.

    Returns:
      A function of the same arguments that returns `(out, stats)`: what `fun` returns, and a `Stats`.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: a format, a pass or a way with loops is unknown; when called, `where` matches nothing, or `autocast`
        is around it, which changes dtypes afterwards: put it inside, `collect(autocast(fun))`.

    Source: the histograms are those of Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss(weights, x):
    ...     with jax.named_scope("head"):
    ...         return jnp.mean(x @ weights["head"])
    >>> observed = jax.jit(jmp.numerics.collect(jax.value_and_grad(loss), of=("forward", "backward")))
    >>> (_, grads), stats = observed({"head": jnp.ones((3, 64))}, jnp.full((8, 3), 1e-6))
    >>> for row in stats:
    ...     print(row.direction, row.path, row.count, row.formats["float16"].underflow)
    forward head 512 0.0
    backward head 192 1.0
    """
    check_function(fun, "collect")
    request, register = make_request(formats, where, of, histogram, loops, every), Register()

    @functools.wraps(fun)
    def run_collect(*args: Any, **kwargs: Any) -> tuple[Any, Stats]:
        refuse_casting("collect")
        step, args = take_step(request.every, args)
        opened, args, kwargs = open_partials(fun, args, kwargs)
        watched = register.watch(opened)
        run = _Run(request, register, step, find_signature(opened))
        pure = lambda fun, *given: run.trace_and_run(fun, *given, is_lifted=fun is not watched)
        out = run_lifted(pure, watched, args, kwargs)
        assert run.stats is not None
        return out, run.stats

    return run_collect


@dataclasses.dataclass(frozen=True)
class _StatsRecorder(Recorder):
    """Measures chosen values with a spec."""

    spec: StatsSpec
    choice: Choice
    loops: str

    def enter(self, outer: Place, eqn: JaxprEqn) -> Place:
        return self.choice.find_place(outer, eqn)

    def choose(self, eqn: JaxprEqn, context: Place) -> Sequence[int]:
        return self.choice.list_measured(eqn, context)

    def splits(self, turns: int) -> bool:
        return self.loops == "split" or (self.loops == "auto" and turns <= MOST_TURNS)

    def measure(self, value: Any) -> PartialStats | Record:
        return self.spec.look(value)

    def gather(self, measured: Sequence[PartialStats | Record]) -> Record:
        return self.spec.gather(measured)

    def join(self, records: Sequence[Record]) -> Record:
        return join(records)

    def merge(self, one: Record, other: Record) -> Record:
        return merge(one, other)

    def fold(self, record: Record, order: Order) -> Record:
        return fold(record)

    def empty(self, rows: int) -> Record:
        return self.spec.empty(rows)


class _Run:
    """One call of a function that is observed.

    Attributes:
      stats: what was measured, after `trace_and_run`.
    """

    def __init__(self, request: Request, register: Register, step: Any, signature: inspect.Signature | None):
        self.stats: Stats | None = None
        self._request, self._register, self._step, self._signature = request, register, step, signature

    def trace_and_run(self, fun: Callable[..., Any], args: Args, kwargs: Kwargs, *, is_lifted: bool) -> PyTree:
        """Traces a function of trees of arrays, has its program return a record, and runs that."""
        request, ends = self._request, Results()
        with TRACING(self._register.token), explain_tracing("collect", ""):
            traced = trace(ends.take_arrays(fun), args, kwargs)
        program, modules = traced.program, self._register.list_modules()

        # Which values are measured, and by what.
        choice = make_choice(request.where, request.of, program.jaxpr, modules)
        recorder = _StatsRecorder(_widen(request.spec, program.jaxpr), choice, request.loops)
        names = name_arguments(self._signature, (args, kwargs), is_lifted=is_lifted)
        results = name_results(ends.list_paths(), is_lifted=is_lifted)
        measured = [
            _list_measured(of in request.of, given, atoms)
            for of, given, atoms in (
                ("arguments", names, program.jaxpr.invars),
                ("results", results, program.jaxpr.outvars),
            )
        ]
        new, lines = record_program(program, recorder, Place(), arguments=measured[0], results=measured[1])

        # What each row is of.
        paths = ModulePaths(modules)
        sites = [_describe_end(names[i], program.jaxpr.invars[i], "argument") for i in measured[0]]
        sites += [_describe_line(line, paths) for line in lines]
        sites += [_describe_end(str(results[i]), program.jaxpr.outvars[i], "result") for i in measured[1]]

        # The new program returns the record after its results.
        count = len(program.jaxpr.outvars)
        if self._step is None:
            made = evaluate(new, *traced.leaves)
        else:
            made = self._run_some(new, program, vary_everywhere(recorder.empty(len(sites))), traced.leaves)
        record = Record(*made[count:]) if sites else recorder.empty(0)
        layout = Layout(sites, recorder.spec)
        remember_program(layout, program, modules, measured[0], lines, len(measured[1]))
        self.stats = Stats(record, layout)
        return ends.put_back(made[:count])

    def _run_some(self, new: ClosedJaxpr, old: ClosedJaxpr, empty: Record, leaves: Sequence[Any]) -> list[Any]:
        """Runs the new program on some steps, and on the others the old one."""
        is_observed = jnp.asarray(self._step) % (self._request.every or 1) == 0
        return lax.cond(
            is_observed,
            lambda *leaves: evaluate(new, *leaves),
            lambda *leaves: [*evaluate(old, *leaves), *(empty if new is not old else ())],
            *leaves,
        )


def _list_measured(is_chosen: bool, names: Sequence[str | None], atoms: Sequence[Atom]) -> list[int]:
    pairs = enumerate(zip(names, atoms, strict=True))
    return [i for i, (name, atom) in pairs if is_chosen and name is not None and is_float(atom)]


def _widen(spec: StatsSpec, program: Jaxpr) -> StatsSpec:
    """Extremes and sums are float64 where a value of the program is."""
    atoms = (*program.invars, *(var for step in walk(program) for var in step.results))
    is_wide = any(float_dtype(atom) == np.float64 for atom in atoms)
    return dataclasses.replace(spec, dtype=np.dtype(np.float64)) if is_wide else spec


def _describe_line(line: Line, paths: ModulePaths) -> TensorInfo:
    """What a row of an operation is of."""
    step, turns = line.step, line.turns
    aval: Any = step.results[line.result].aval
    source, function = split_line(find_line(find_origin(step)))
    turn = None if not turns else turns[0] if len(turns) == 1 else turns
    where = paths.read_stack(step.scope), step.name, source, function, find_direction(step.scope), turn
    return TensorInfo(*where, str(aval.dtype), math.prod(aval.shape), aval.shape)


def _describe_end(name: str, atom: Atom, direction: Direction) -> TensorInfo:
    """What the row of an argument or a result is of."""
    aval: Any = atom.aval
    return TensorInfo(name, "", "", "", direction, None, str(aval.dtype), math.prod(aval.shape), aval.shape)
