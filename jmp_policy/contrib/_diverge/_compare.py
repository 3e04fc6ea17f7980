"""`contrib.diverge`: finds the scopes that make two functions of one model differ."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base import hide_frames
from ..._jaxpr import check_function, find_real_shape
from ._align import align
from ._divergence import Divergence
from ._measure import compare
from ._positions import Positions
from ._recording import Comparisons, Level, Recording, Run, match, name_values
from ._run import TableLayout, make_layout, make_plan, run_aligned
from ._scopes import has_floats, has_values
from ._trace import FlatFunction


def diverge(
    f: Callable[..., Any], g: Callable[..., Any] | Recording, names: Mapping[str, str] | None = None
) -> Callable[..., Divergence]:
    """Finds the modules and named scopes that make two functions of one model differ, and those that only pass it on.

    Both functions are traced, for example a model in float32 and under a policy, before and after quantization, or
    ported from other code. Their scopes are aligned by path, pass and call, and the values between scopes by their
    computation, readers and shape; casts between scopes are ignored. One compiled program then runs `f` and `g`, and
    another one each scope of `g` on the values of `f`, whose error is the one that this scope *introduces*. A scope
    that introduces no error only passes on the error of its inputs.

    Compose both functions with the gradient, `diverge(jax.grad(loss), jax.grad(low_loss))`, to compare the backward
    pass too. A scope in the backward pass uses the residuals of its own forward pass in `g`, as if it were replaced in
    `f`. Iterations of a `scan` are aligned one by one with those of the other function, or with the layers of a Python
    loop: scopes such as `layers_0`, `layers_1` in place of `layers`. Scopes inside a `shard_map` of both functions are
    compared on each device. Complex numbers are compared by their parts. The error of integers and booleans is the
    share that differs; a recording has none of them. A `while` and a `cond`, and a `scan` or `shard_map` without a
    counterpart, count as one operation. Scopes that are jitted again with `in_shardings` run without them.

    A recording in the place of `g` is the reference: values that left the scopes in another framework, version or
    process. Each error compares `f` with the recording. A scope *introduces* the error that `f` makes there on
    recorded values; it is nan if the scope reads values of other scopes that the recording does not have.

    Args:
      f: the reference: any function of trees of arrays, with modules of linen or nnx, or without.
      g: a function of the same arguments, which may return other dtypes, and values that `f` does not have. Or a
        recording: a mapping, or the path of an `.npz` file, from scopes and outputs of `f` to arrays of the same
        shapes, named as by `record`. Dots may stand for slashes. Of several values of a scope, a recording may
        have those with some numbers, such as `"cell:0"` and `"cell:2"`. One without a number stands for the last one
        of its shape, which `unaligned` says. It also lists values that `f` does not have.
      names: the name of `record` for names of the recording, such as `{"encoder.layer.0": "encoder/layer_0"}`.

    Returns:
      A function of the arguments of `f` and `g` that returns a `Divergence`, which prints as a table. It can be
      jitted. Writes to nnx objects are lost.

    Raises:
      TypeError: `f` is not a function, or `g` not a function or a recording.
      ValueError: there are `names` for a function. When called: a function cannot run in parts because it has an
        `io_callback` or uses a mutable reference, no value of the recording belongs to a scope of `f`, or `names` has
        one that does not exist.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss(weights, x, dtype=jnp.float32):
    ...     with jax.named_scope("body"):
    ...         x = jnp.tanh((x.astype(dtype) @ weights["body"].astype(dtype)).astype(jnp.float32))
    ...     with jax.named_scope("head"):
    ...         return jnp.mean((x @ weights["head"]) ** 2)
    >>> low_loss = lambda weights, x: loss(weights, x, jnp.bfloat16)
    >>> weights = {name: jax.random.normal(jax.random.key(0), (8, 8)) for name in ("body", "head")}
    >>> divergence = jmp.contrib.diverge(jax.grad(loss), jax.grad(low_loss))(weights, jnp.ones((4, 8)))
    >>> for row in divergence.rows():
    ...     print(row.path, row.direction, row.introduced > 1e-4, row.outgoing > 1e-4)
    body forward True True
    head backward False True
    body backward True True
    """
    if isinstance(g, Mapping | str | os.PathLike):
        check_function(f, "diverge", ", other")
        return _compare_recording(f, g, names or {})
    for fun in (f, g):
        check_function(fun, "diverge", ", other")
    if names is not None:
        raise ValueError(f"names={names!r} renames recorded values, and {g!r} is a function. Name its scopes as in f.")

    @hide_frames
    @functools.wraps(f)
    def compare_runs(*args: Any, **kwargs: Any) -> Divergence:
        mine, theirs = (FlatFunction(fun, args, kwargs) for fun in (f, g))
        results = _pair_results(mine, theirs)
        labels = [*range(len(mine.types))], [results.get(i, "unpaired") for i in range(len(theirs.types))]
        by_id = {id(leaf): value for leaf, value in zip(mine.leaves, mine.flat.inputs, strict=True)}
        given = zip(theirs.leaves, theirs.flat.inputs, strict=True)
        inputs = {value: by_id[id(leaf)] for leaf, value in given if id(leaf) in by_id}
        plan = make_plan(align(mine.flat, theirs.flat, inputs, labels, {}), theirs.flat.inputs)

        def measure(f_inputs: list[Any], g_inputs: list[Any]) -> Any:
            f_outputs, g_outputs, record = run_aligned(plan, f_inputs, g_inputs, is_mixed=False)
            compared = [compare(f_outputs[i], g_outputs[j]) for j, i in results.items()]
            return record, compared, [_measure_total(f_outputs[i]) for i in results.values()]

        passed, compared, totals = jax.jit(measure)(mine.leaves, theirs.leaves)
        introduced = jax.jit(lambda *inputs: run_aligned(plan, *inputs, is_mixed=True)[-1])(mine.leaves, theirs.leaves)
        with jax.numpy_dtype_promotion("standard"):
            record = jax.tree.map(jnp.add, passed, introduced)
        shapes = [(mine.names[i], find_real_shape(mine.types[i])) for i in results.values()]
        unpaired = [name for j, name in enumerate(theirs.names) if j not in results and theirs.types[j].size]
        unaligned = [f"{name} is not compared: only one function returns such numbers" for name in unpaired]
        layout = make_layout(plan, shapes, _name_functions(f, g), unaligned)
        keys = theirs.find_policy_keys({row.plan.scope.path for row in layout.rows})
        layout = dataclasses.replace(layout, keys=keys)
        return Divergence(record, compared, totals, layout)

    return compare_runs


def record(fun: Callable[..., Any]) -> Callable[..., dict[str, jax.Array]]:
    """Records the values that leave each module and named scope, for `diverge` in another version or process.

    Save them in one environment with `numpy.savez("recording.npz", **recording)`, and pass the file to `diverge` in
    another one. The returned function can be jitted.

    Args:
      fun: any function of trees of arrays, with modules of linen or nnx, or without.

    Returns:
      A function of the same arguments that returns floating arrays by name: the path of a scope, with `"@backward"` for
      its backward pass, with `":1"`, `":2"` for further values and calls, in order; and `"result"` with the path of an
      output. Values in a `scan` have an axis for its iterations. Those in bfloat16 and float8 are in float32, because
      files of NumPy do not have these dtypes.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: when called, the function has an `io_callback` or uses a mutable reference.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def model(x, scale=1.0):
    ...     with jax.named_scope("body"):
    ...         x = scale * jnp.tanh(x)
    ...     with jax.named_scope("head"):
    ...         return x + 1
    >>> recording = jmp.contrib.record(model)(jnp.ones(3))
    >>> sorted(recording)
    ['body', 'head', 'result']
    >>> divergence = jmp.contrib.diverge(lambda x: model(x, 1.5), recording)(jnp.ones(3))
    >>> for row in divergence.rows():
    ...     print(row.path, row.introduced > 0.1, row.outgoing > 0.1)
    body True True
    head False True
    """
    check_function(fun, "record")

    @hide_frames
    @functools.wraps(fun)
    def run_and_record(*args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        traced = FlatFunction(fun, args, kwargs)
        return record_traced(traced, Level(traced.flat, [True] * len(traced.types)))

    return run_and_record


def record_traced(traced: FlatFunction, top: Level) -> dict[str, jax.Array]:
    """Runs a traced function, and returns the values that leave its scopes, and its outputs."""

    def collect(leaves: list[Any]) -> Any:
        made = Run(top, [leaves])
        outputs = made.read_outputs()[0]
        return jax.tree.map(_make_storable, (made.find(), [outputs[i] for i in traced.list_floats()]))

    found, outputs = jax.jit(collect)(traced.leaves)
    names = [traced.names[i] for i in traced.list_floats()]
    return name_values(top, found) | dict(zip(names, outputs, strict=True))


def _make_storable(array: jax.Array) -> jax.Array:
    """Casts dtypes that files of NumPy do not have to float32."""
    return array if np.dtype(array.dtype).kind in "fc" else array.astype(np.float32)


def _compare_recording(f: Callable[..., Any], g: Recording, names: Mapping[str, str]) -> Callable[..., Divergence]:
    @hide_frames
    @functools.wraps(f)
    def compare_run(*args: Any, **kwargs: Any) -> Divergence:
        traced = FlatFunction(f, args, kwargs)
        top = Level(traced.flat, [True] * len(traced.types))
        return compare_recorded(traced, top, g, names, ("the recording", _name_function(f)))

    return compare_run


def compare_recorded(
    traced: FlatFunction,
    top: Level,
    recording: Recording,
    names: Mapping[str, str],
    titles: tuple[str, str],
    positions: Positions | None = None,
) -> Divergence:
    """Compares a traced function with recorded values; at each of the positions, if there are any."""
    places = {traced.names[i]: i for i in traced.list_floats()}
    results, problems = match(top, {name: traced.types[i].shape for name, i in places.items()}, recording, names)
    for name, array in results.items():
        top.attach_output(traced.flat.outputs[places[name]], array)
    comparisons = Comparisons(top, [frozenset()] * len(traced.leaves))

    def measure(leaves: list[Any], recorded: Any, results: dict[str, Any]) -> Any:
        made = Run(top, [leaves, leaves], comparisons, recorded, positions)
        outputs = made.read_outputs()[0]
        given = {name: positions.choose(x, outputs[places[name]]) if positions else x for name, x in results.items()}
        compared = [compare(array, outputs[places[name]]) for name, array in given.items()]
        return made.find(), compared, [_measure_total(array) for array in given.values()]

    record, compared, totals = jax.jit(measure)(traced.leaves, top.list_recorded(), results)
    shapes = [(name, find_real_shape(traced.types[places[name]])) for name in results]
    for name, aval in zip(traced.names, traced.types, strict=True):
        if has_values(aval) and not has_floats(aval):
            problems.append(f"{name} is not compared: a recording has no integers or booleans")
    unaligned = tuple(dict.fromkeys([*problems, *comparisons.problems]))
    rows = comparisons.rows
    if positions is not None:
        sizes = lambda row: tuple(map(positions.count_elements, row.shapes))
        rows = [row._replace(positions=positions.length, position_sizes=sizes(row)) for row in rows]
    return Divergence(record, compared, totals, TableLayout(tuple(rows), tuple(shapes), unaligned, titles))


def _pair_results(mine: FlatFunction, theirs: FlatFunction) -> dict[int, int]:
    """Pairs outputs of `g` with outputs of `f`: of the same position and shape, or else the next one of that shape."""
    pairs: dict[int, int] = {}
    for i, other in enumerate(theirs.types):
        candidates = [i, *range(len(mine.types))]
        free = [j for j in candidates if j < len(mine.types) and j not in pairs.values()]
        found = next((j for j in free if _is_comparable(mine.types[j], other)), None) if has_values(other) else None
        if found is not None:
            pairs[i] = found
    return pairs


def _is_comparable(mine: Any, other: Any) -> bool:
    return mine.shape == other.shape and has_values(mine) and has_floats(mine) == has_floats(other)


def _name_functions(f: Any, g: Any) -> tuple[str, str]:
    names = _name_function(f), _name_function(g)
    is_clear = names[0] != names[1] and "the function" not in names
    return names if is_clear else ("the first function", "the second function")


def _name_function(f: Any) -> str:
    name = getattr(inspect.unwrap(f), "__name__", "<lambda>")
    return "the function" if name == "<lambda>" else name


def _measure_total(output: Any) -> Any:
    """Returns how far the exponentials along the last axis are from adding up to 1."""
    if not output.ndim or not jnp.issubdtype(output.dtype, jnp.floating):
        return jnp.inf
    return jnp.max(jnp.abs(jnp.sum(jnp.exp(output.astype(jnp.float32)), -1) - 1))
