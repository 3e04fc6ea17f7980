"""`numerics.collect`: returns statistics of tensors beside the outputs of a function."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

from .._base import hide_frames, vary_everywhere, warn_user
from .._jaxpr import (
    Atom,
    ModulePaths,
    ObservedCall,
    RecordedOp,
    Register,
    array_dtype,
    check_function,
    evaluate,
    find_direction,
    find_line,
    find_origin,
    find_real_shape,
    name_arguments,
    name_results,
    observe,
    record_program,
    split_line,
    walk,
)
from ._stats import Stats
from ._stats_choice import Place, Request, is_measured, make_recorder, make_request, remember_program, take_step
from ._stats_measure import StatsSpec
from ._stats_record import Record
from ._stats_row import Direction, StatsLayout, TensorInfo

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_MANY_ROWS, _SECONDS_PER_ROW = 500, 0.02  # of a CPU: see `benchmarks/numerics.py`


def collect(
    fun: Callable[..., Any],
    formats: Sequence[str] = FORMATS,
    where: str | Sequence[str] = "matmuls",
    of: str | Sequence[str] = ("forward", "backward", "arguments", "results"),
    histogram: bool = True,
    loops: Literal["auto", "split", "merge"] = "auto",
    every: int | None = None,
    sample: int | None = 4096,
) -> Callable[..., tuple[Any, Stats]]:
    """Measures the tensors of a function, and their losses in number formats.

    The returned function can be jitted, differentiated, mapped and sharded. Its statistics are a pytree of arrays, made
    without a callback. Compose it around the gradient, `collect(jax.value_and_grad(loss_fn))`, to measure the backward
    pass too.

    A row is one tensor. Outputs may differ in their last bits, since XLA fuses a measured operation differently. Pallas
    kernels and functions with a `jax.custom_vjp` are operations: their outputs have a row if the operation is chosen,
    and values inside have none. The devices of a `shard_map` share a row, and each counts its copy of a replicated
    value. The iterations of a `while` share a row too. A complex array has a row of its real and imaginary parts, with
    a last axis for them. Integers and booleans have none.

    Each measured step reads the tensors once more (`benchmarks/numerics.py`), or three times with `sample=None`, and
    `every=100` measures one step in a hundred. With two compiled functions, the other steps cost nothing:

        observed, plain = jax.jit(collect(train_step)), jax.jit(train_step)
        for step, batch in enumerate(batches):
            if step % 100:
                state = plain(state, batch)
            else:
                state, stats = observed(state, batch)
                logger.log(stats.scalars(), step)

    Args:
      fun: any function of trees of arrays, with modules of linen or nnx, or without.
      formats: names of dtypes; `"int8"` and `"int4"`; and `"mxfp8"`, `"mxfp8_e5m2"`, `"mxfp4"` and `"nvfp4"`. The block
        size along the last axis may follow the name of a block-scaled format, as in `"int4/32"`.
      where: `"matmuls"` (with convolutions), `"all"` operations, the names of primitives such as `"exp"`, and patterns
        of paths, which cover modules inside as keys of a `PolicyMap` do. A value is measured if one of the operations
        and one of the patterns match: `("matmuls", "blocks/.*")`.
      of: some of `"forward"`, `"recomputed"` (by a remat), `"backward"`, and the `"arguments"` and `"results"` of the
        whole function, which have the paths of its trees. `where` does not apply to the last two.
      histogram: whether to count the elements at each exponent.
      loops: `"split"` gives each iteration of a `scan` its own rows, and `"merge"` one row to all. `"auto"` splits
        loops of at most 64 iterations.
      every: measures every n-th step only. The returned function then takes the step number, an integer that may be
        traced, before its other arguments. Other steps run as without `collect`, and their rows are empty.
      sample: the number of elements of each tensor to look at for formats and the histogram: elements spread evenly
        over the tensor, or whole blocks for block-scaled formats. Smaller tensors are measured whole. A share `p` is
        off by at most about `3 * sqrt(p * (1 - p) / sample)`. Errors of formats are relative to the sample. They may be
        off by more, because a sample can miss a few large elements. The rest of a row is exact: the root mean square up
        to rounding in float32, if the largest element is between 1e-17 and 1e9. `None` looks at all elements. On a mesh
        no larger tensor moves: in a `shard_map` each device samples its shard, and elsewhere the devices add up the
        elements of the sample.

    Returns:
      A function of the same arguments that returns `(out, stats)`: the output of `fun`, and a `Stats`.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: a format, a pass or a value of `loops` is unknown, or `sample` is not positive. When called: `where`
        matches nothing, or `autocast` is around it and would change dtypes afterwards; write `collect(autocast(fun))`.

    Warns:
      UserWarning: there are more than 500 rows, which take long to compile.

    Source: the histograms follow Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.

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
    request, register = make_request(formats, where, of, histogram, loops, every, sample), Register()

    @hide_frames
    @functools.wraps(fun)
    def run_collect(*args: Any, **kwargs: Any) -> tuple[Any, Stats]:
        step, args = take_step(request.every, args)
        return observe("collect", register, functools.partial(_run_and_record, request, step), fun, args, kwargs)

    return run_collect


def _run_and_record(request: Request, step: Any, call: ObservedCall) -> tuple[list[Any], Stats]:
    """Runs a copy of a traced call that also returns a record."""
    program, modules = call.program, call.modules

    # Choose the values.
    recorder = make_recorder(request, _choose_sums_dtype(request.spec, program.jaxpr), program.jaxpr, modules)
    names = name_arguments(call.signature, call.taken, is_lifted=call.is_lifted)
    results = name_results(call.results.list_paths(), is_lifted=call.is_lifted)
    invars, outvars = program.jaxpr.invars, program.jaxpr.outvars
    arguments = _list_measured(names, invars) if "arguments" in request.of else []
    outputs = _list_measured(results, outvars) if "results" in request.of else []
    new, lines, _ = record_program(program, recorder, Place(), arguments=arguments, results=outputs)

    # Describe the rows.
    paths = ModulePaths(modules)
    sites = [_describe_end(names[i], invars[i], "argument") for i in arguments]
    sites += [_describe_line(line, paths) for line in lines]
    sites += [_describe_end(str(results[i]), outvars[i], "result") for i in outputs]
    if len(sites) > _MANY_ROWS:
        warn_user(
            f"collect measures {len(sites):,} tensors, which may add {_SECONDS_PER_ROW * len(sites):.0f} seconds "
            "to compile. Choose fewer, for example: where=('matmuls', 'blocks/0'), or loops='merge'."
        )

    # The new program returns the record after its results. Other steps run the old one.
    count = len(outvars)
    if step is None:
        made = evaluate(new, *call.leaves)
    else:
        empty = vary_everywhere(recorder.empty(len(sites)))
        made = lax.cond(
            jnp.asarray(step) % (request.every or 1) == 0,
            lambda *leaves: evaluate(new, *leaves),
            lambda *leaves: [*evaluate(program, *leaves), *(empty if new is not program else ())],
            *call.leaves,
        )
    record = Record(*made[count:]) if sites else recorder.empty(0)
    layout = StatsLayout(sites, recorder.spec)
    remember_program(layout, program, modules, arguments, lines, len(outputs))
    return made[:count], Stats(record, layout)


def _list_measured(names: Sequence[str | None], atoms: Sequence[Atom]) -> list[int]:
    pairs = enumerate(zip(names, atoms, strict=True))
    return [i for i, (name, atom) in pairs if name is not None and is_measured(atom)]


def _choose_sums_dtype(spec: StatsSpec, program: Jaxpr) -> StatsSpec:
    """Uses float64 for extremes and sums if a value of the jaxpr is float64."""
    atoms = (*program.invars, *(var for step in walk(program) for var in step.results))
    is_wide = any(array_dtype(atom) in (np.float64, np.complex128) for atom in atoms)
    return dataclasses.replace(spec, dtype=np.dtype(np.float64)) if is_wide else spec


def _describe_line(line: RecordedOp, paths: ModulePaths) -> TensorInfo:
    step, turns = line.step, line.turns
    aval: Any = step.results[line.result].aval
    source, function = split_line(find_line(find_origin(step)))
    turn = None if not turns else turns[0] if len(turns) == 1 else turns
    where = paths.read_stack(step.scope), step.name, source, function, find_direction(step.scope), turn
    shape = find_real_shape(aval)
    return TensorInfo(*where, str(aval.dtype), math.prod(shape), shape)


def _describe_end(name: str, atom: Atom, direction: Direction) -> TensorInfo:
    aval: Any = atom.aval
    shape = find_real_shape(aval)
    return TensorInfo(name, "", "", "", direction, None, str(aval.dtype), math.prod(shape), shape)
