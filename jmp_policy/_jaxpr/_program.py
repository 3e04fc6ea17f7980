"""Jaxprs: variables, the sub-jaxprs that equations run, a walk over every equation, and a builder of new jaxprs."""

import contextlib
import functools
import math
import re
import typing
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AbstractMesh

from .._base import PRODUCT_SCOPE, P, R, is_floating_dtype
from ._primitives import PRIMITIVES, Fact, having

Atom = Var | Literal

Program = Jaxpr | ClosedJaxpr


def float_dtype(atom: Atom) -> Any:
    """Returns the dtype of a real floating array, or None for anything else."""
    return float_dtype_of(atom.aval)


@functools.lru_cache(maxsize=4096)  # a rewriter asks for the dtype of each atom several times
def float_dtype_of(aval: Any) -> Any:
    return aval.dtype if isinstance(aval, ShapedArray) and is_floating_dtype(aval.dtype) else None


def array_dtype(atom: Atom) -> Any:
    """Returns the dtype of an array, or None for anything else, such as a mutable reference to one."""
    aval: Any = atom.aval
    return aval.dtype if isinstance(aval, ShapedArray) else None


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Returns the shape of an array, or `()` for anything else."""
    return getattr(atom.aval, "shape", ())


def is_float(atom: Atom) -> bool:
    return float_dtype(atom) is not None


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Hides the current mesh while an equation is traced that is kept: its types would refer to that mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def replace_variables(
    program: Program,
    invars: Sequence[Atom],
    equations: Sequence[JaxprEqn],
    outvars: Sequence[Atom],
    debug_info: DebugInfo | None = None,
) -> Program:
    """Replaces inputs, equations and outputs. Without `debug_info`, the new jaxpr has no names of arguments."""
    old = body_of(program)
    info = debug_info or DebugInfo(old.debug_info.traced_for, old.debug_info.func_src_info, None, None)
    new = old.replace(invars=list(invars), eqns=list(equations), outvars=list(outvars), debug_info=info)
    return program.replace(jaxpr=new) if old is not program else new


def list_variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def body_of(program: Program) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def remember_by_jaxpr(fun: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Remembers the results of `fun(jaxpr, *args)` while the jaxpr lives. They must not refer to it."""
    results: weakref.WeakKeyDictionary[Any, dict[Any, R]] = weakref.WeakKeyDictionary()

    @functools.wraps(fun)
    def look_up(program: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        found = results.setdefault(program, {})
        if args not in found:
            found[args] = fun(program, *args, **kwargs)
        return found[args]

    return look_up


def multiplies_only(eqn: JaxprEqn) -> bool:
    """True if a `dot_general` sums nothing: an outer product, such as `einsum("i,j->ij")` or `x[:, None] @ y[None]`."""
    if eqn.primitive.name != "dot_general":
        return False
    ((contracted, _), _), shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    return all(shape[axis] == 1 for axis in contracted)


def name_stack(eqn: JaxprEqn, outer: str = "") -> str:
    """Returns the scopes in which an equation was traced, outermost first, in a sub-jaxpr that has the scopes `outer`.

    JAX repeats some of them in the backward pass; see `drop_repetition`.
    """
    stack = str(eqn.source_info.name_stack)
    if not (is_backward(stack) or is_backward(outer)):
        return stack
    return drop_repetition(stack, is_remat=eqn.primitive.name in ("checkpoint", "remat2"))


def drop_repetition(stack: str, *, is_remat: bool = False) -> str:
    """Drops scopes that JAX repeats in the backward pass of a remat, or of a function with a custom derivative.

    >>> drop_repetition("transpose(jvp(net))/dense/jvp(net)/dense/rule")
    'transpose(net/dense/rule)'
    """
    if not ("/jvp(" in stack or is_remat):
        return stack
    names = [name for name in strip_transformations(stack).split("/") if name]
    once = _list_once(names)
    if once == names:
        return stack
    return f"transpose({'/'.join(once)})" if is_backward(stack) else "/".join(once)


def _list_once(names: list[str]) -> list[str]:
    """Drops the first names while the same names follow them: `a/b/a/b/c` becomes `a/b/c`."""
    for count in range(len(names) // 2, 0, -1):
        if names[:count] == names[count : 2 * count]:
            return _list_once(names[count:])
    return names


def is_backward(stack: str) -> bool:
    return "transpose(" in stack


Pass = typing.Literal["forward", "recomputed", "backward"]


def find_direction(stack: str, outer: str = "forward") -> Pass:
    """Returns the pass of a name stack inside a sub-jaxpr that is part of the pass `outer`.

    >>> find_direction("jvp(net)/dense"), find_direction("transpose(jvp(net))/rematted_computation/dense")
    ('forward', 'recomputed')
    """
    if outer == "recomputed":
        return "recomputed"
    backward = outer == "backward" or is_backward(stack)
    if backward and "rematted_computation" in stack:
        return "recomputed"
    return "backward" if backward else "forward"


def strip_transformations(stack: str) -> str:
    """Removes transformations: `"transpose(jvp(net))/dense"` becomes `"net/dense"`."""
    return re.sub(r"\w+\(|\)", "", stack)


class SubJaxpr(NamedTuple):
    program: Jaxpr  # the jaxpr
    consts: Sequence[Any]  # the arrays that it closes over, in the order of `program.constvars`
    inputs: list[tuple[Atom, Atom]]  # operands of the equation, each with the argument that it becomes
    outputs: list[tuple[Atom, Atom]]  # outputs of the jaxpr, each with the output of the equation that it becomes
    carry: range = range(0)  # positions of the arguments that a loop carries
    # Number of runs per run of the equation: 1 if it is unknown, and 0 for a branch of a `lax.platform_dependent` for
    # another platform.
    trips: int = 1

    def choose(self, results: frozenset[int]) -> frozenset[int]:
        """Returns the outputs of the jaxpr that some outputs of the equation need: all, unless these correspond."""
        return results if self.outputs else frozenset(range(len(self.program.outvars)))

    def find_read(self, results: frozenset[int], all_results: bool) -> frozenset[int]:
        """Returns the positions of the inputs that some outputs need; a loop may run zero times."""
        if all_results:
            return frozenset(range(len(self.inputs)))
        first = frozenset(self.carry[i] for i in results if i < len(self.carry))
        return first | find_live(self.program, self.choose(results), False).arguments


def sub_jaxprs(eqn: JaxprEqn, platform: str | None = None) -> list[SubJaxpr]:
    """Lists the jaxprs that an equation runs, except the jaxprs of reductions, scatters and kernels.

    `platform`, such as `"cuda"`, chooses the branch of a `lax.platform_dependent`; the default is this process's.
    """
    params, name = eqn.params, eqn.primitive.name
    if name in WITHOUT_JAXPRS:
        return []
    if name == "scan":
        consts, carried = scan_parts(eqn)
        return [_make_sub_jaxpr(eqn, params["jaxpr"], eqn.invars, range(consts, consts + carried), params["length"])]
    if name == "while":
        return _list_while_jaxprs(eqn)
    if name == "cond":
        branches = zip(params["branches"], _list_running(eqn, platform), strict=True)
        return [_make_sub_jaxpr(eqn, branch, eqn.invars[1:], trips=int(runs)) for branch, runs in branches]
    if name == "custom_linear_solve":
        return [_make_call(eqn, params["jaxprs"].solve)]
    if name == "call_hi_primitive":  # a `jax.experimental.hijax.HiPrim`, such as a `jax.checkpoint` under `jax_remat3`
        params = getattr(params.get("_prim"), "params", {})
    items = [item for value in params.values() for item in (value if isinstance(value, tuple | list) else (value,))]
    programs = [item.jaxpr if isinstance(item, jax.stages.Traced) else item for item in items]
    programs = [item for item in programs if isinstance(item, ClosedJaxpr | Jaxpr)]
    # Those of a HiPrim may be of other operands.
    sizes = range(len(eqn.invars) if name == "call_hi_primitive" else 0, len(eqn.invars) + 1)
    return [_make_call(eqn, program) for program in programs if len(body_of(program).invars) in sizes]


WITHOUT_JAXPRS = frozenset(PRIMITIVES) - having(Fact.CALLS, Fact.OUTSIDE, Fact.MEMORY)
"""Primitives without a jaxpr, or with one that only combines two elements or is the body of a kernel."""


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the number of constants and of carried values of a scan."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _list_running(eqn: JaxprEqn, platform: str | None) -> list[bool]:
    """Finds the branches of a `cond` that may run: all of them, or one of a `lax.platform_dependent`."""
    branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms")
    if platforms is None:
        return [True] * len(branches)
    if PRODUCT_SCOPE in name_stack(eqn):  # reports show the accelerator's form, not the workaround for CPUs
        return [own is None for own in platforms]
    backend = platform or jax.default_backend()
    names = {"cuda", "rocm"} if backend == "gpu" else {backend}
    chosen = next((i for i, own in enumerate(platforms) if own is None or not names.isdisjoint(own)), None)
    return [i == chosen for i in range(len(branches))]


def _list_while_jaxprs(eqn: JaxprEqn) -> list[SubJaxpr]:
    params = eqn.params
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    values, count = eqn.invars, len(eqn.invars)
    test_carry = range(first, first + count - start)
    test = _make_sub_jaxpr(eqn, params["cond_jaxpr"], [*values[:first], *values[start:]], test_carry)
    iteration = _make_sub_jaxpr(eqn, params["body_jaxpr"], values[first:], range(start - first, count - first))
    return [test._replace(outputs=[]), iteration]


def _make_call(eqn: JaxprEqn, program: Program) -> SubJaxpr:
    """A jaxpr that runs once (per device) with the last operands of an equation, which are usually all of them."""
    trips = 1
    if eqn.primitive.name == "shard_map":
        trips = math.prod(eqn.params["mesh"].shape[axis] for axis in split_axes(eqn.params))
    return _make_sub_jaxpr(eqn, program, eqn.invars[len(eqn.invars) - len(body_of(program).invars) :], trips=trips)


def split_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Lists the axes of the mesh over which a `shard_map` splits its operands."""
    mesh = params["mesh"]
    newly = params.get("newly_manual_axes")
    if newly is None:  # JAX 0.10.1
        newly = params["manual_axes"] - set(getattr(mesh, "manual_axes", ()))
    return tuple(axis for axis in mesh.axis_names if axis in newly)


def _make_sub_jaxpr(
    eqn: JaxprEqn, program: Program, invars: Sequence[Atom], carry: range = range(0), trips: int = 1
) -> SubJaxpr:
    body = body_of(program)
    outputs = zip(body.outvars, eqn.outvars, strict=True) if len(body.outvars) == len(eqn.outvars) else ()
    consts = getattr(program, "consts", ())
    return SubJaxpr(body, consts, list(zip(invars, body.invars, strict=True)), list(outputs), carry, trips)


class Step(NamedTuple):
    """One step of `walk`."""

    # The name of the primitive; `"link"` for a value that enters or leaves a sub-jaxpr, `"carry"` for one that enters
    # the first iteration of a loop, `"constant"` for an array that a sub-jaxpr closes over.
    name: str
    operands: Sequence[Any]  # the values that are read
    results: Sequence[Any]  # the values that are computed
    eqn: JaxprEqn  # the equation; for a link and a constant, the one that runs the sub-jaxpr
    scope: str  # the name stacks of the enclosing equations and of this one, joined by `/`
    # The enclosing equations, outermost first, each with the sub-jaxpr that contains the step.
    around: tuple[tuple[JaxprEqn, Jaxpr], ...] = ()
    trips: int = 1  # how often it runs
    again: Any = None  # of a carry: the value that the next iteration reads


def walk(
    program: Jaxpr,
    scope: str = "",
    around: tuple = (),
    trips: int = 1,
    *,
    live_only: bool = False,
    all_results: bool = True,
    platform: str | None = None,
) -> Iterator[Step]:
    """Yields the steps of a jaxpr in order, also in sub-jaxprs, once for each equation that runs one.

    Links, each with one result, join values of a sub-jaxpr to those around it; a carry is not followed to the next
    iteration. Variables are compared by identity, so keep `program` alive. With `live_only`, only the steps that have
    effects or contribute to an output; with `all_results`, also those that contribute to any output of a sub-jaxpr that
    runs, such as the loss in `jax.grad(jax.jit(loss))`, which XLA drops.
    """
    every = frozenset(range(len(program.outvars)))
    return _walk(program, scope, around, trips, every if live_only else None, all_results, platform)


def walk_with_kernels(program: Jaxpr, **options: Any) -> Iterator[Step]:
    """Yields the steps of a jaxpr, and of one block of each Pallas kernel as often as there are blocks."""
    for step in walk(program, **options):
        yield step
        if step.name == "pallas_call":
            body, grid = body_of(step.eqn.params["jaxpr"]), step.eqn.params["grid_mapping"].grid
            trips = step.trips * math.prod(size for size in grid if isinstance(size, int))
            yield from walk(body, step.scope, (*step.around, (step.eqn, body)), trips, **options)


def _walk(
    program: Jaxpr,
    scope: str,
    around: tuple,
    trips: int,
    wanted: frozenset[int] | None,
    all_results: bool,
    platform: str | None,
) -> Iterator[Step]:
    """Yields the steps that the outputs in `wanted` need; None stands for all steps."""
    live = None if wanted is None else find_live(program, wanted, all_results)
    for number, eqn in enumerate(program.eqns):
        if live is not None and number not in live.results:
            continue
        stack = name_stack(eqn, scope)
        here = f"{scope}/{stack}" if scope and stack else scope or stack
        bodies = sub_jaxprs(eqn, platform)
        if not bodies:
            yield Step(eqn.primitive.name, eqn.invars, eqn.outvars, eqn, here, around, trips)
            continue
        results = None if live is None else live.results[number]
        for body in bodies:
            for constant, var in zip(body.consts, body.program.constvars, strict=False):
                yield Step("constant", [constant], [var], eqn, here, around, trips)
            inside = (*around, (eqn, body.program))
            again = dict(zip(body.carry, body.program.outvars if body.outputs else (), strict=False))
            for i in range(len(body.inputs)) if results is None else sorted(body.find_read(results, all_results)):
                name, (outer, inner) = "carry" if i in body.carry else "link", body.inputs[i]
                yield Step(name, [outer], [inner], eqn, here, inside, trips, again.get(i))
            inner_wanted = None if results is None else body.choose(results)
            yield from _walk(body.program, here, inside, trips * body.trips, inner_wanted, all_results, platform)
        # One link per output of the equation. It reads that output of each sub-jaxpr, such as the branches of a cond.
        outputs = [{id(outer): inner for inner, outer in body.outputs} for body in bodies]
        for i, var in enumerate(eqn.outvars):
            if results is None or i in results:
                sources = [made[id(var)] for made in outputs if id(var) in made]
                yield Step("link", sources, [var], eqn, here, around, trips)


class Live(NamedTuple):
    """The parts of a jaxpr that some of its outputs need."""

    results: dict[int, frozenset[int]]  # by the position of an equation that has effects or is needed: its outputs
    arguments: frozenset[int]  # positions of the arguments that are read


@remember_by_jaxpr  # else the time doubles with each level of nested calls
def find_live(program: Jaxpr, wanted: frozenset[int], all_results: bool) -> Live:
    """Finds the equations that have effects, or that the outputs in `wanted` need, as XLA runs them.

    With `all_results`, all outputs and operands of an equation are needed if one output is.
    """
    used = set(list_variables(program.outvars[i] for i in wanted))
    found = dict[int, frozenset[int]]()
    for number, eqn in reversed([*enumerate(program.eqns)]):
        results = frozenset(i for i, var in enumerate(eqn.outvars) if var in used)
        if results or eqn.effects:
            needed = frozenset(range(len(eqn.outvars))) if all_results else results
            found[number], operands = _find_live_operands(eqn, needed, all_results)
            used.update(list_variables(operands))
    return Live(found, frozenset(i for i, var in enumerate(program.invars) if var in used))


def _find_live_operands(
    eqn: JaxprEqn, results: frozenset[int], all_results: bool
) -> tuple[frozenset[int], Sequence[Atom]]:
    """Returns the outputs of an equation that are needed, those that a loop carries among them, and its operands."""
    bodies = sub_jaxprs(eqn)
    read = [(body, i) for body in bodies for i in body.find_read(results, all_results)]
    carried = frozenset(i - body.carry.start for body, i in read if i in body.carry)
    if not carried <= results:
        return _find_live_operands(eqn, results | carried, all_results)
    dead = {id(outer) for body in bodies for outer, _ in body.inputs} - {id(body.inputs[i][0]) for body, i in read}
    return results, [atom for atom in eqn.invars if id(atom) not in dead]


def list_live(program: Jaxpr, kept: Collection[str] = ()) -> list[JaxprEqn]:
    """Lists the equations that have effects, contribute to an output, or call a function with a name in `kept`."""
    used = set(list_variables(program.outvars))
    found = []
    for eqn in reversed(program.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars) or eqn.params.get("name") in kept:
            used.update(list_variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


class AbstractValue(NamedTuple):
    """A rule's knowledge of a value. A jaxpr is rewritten once per combination of these."""

    dtype: Any  # the dtype of the value in the new jaxpr; None unless it is a real floating dtype
    state: Any = None  # any hashable object of the rule


class Value(NamedTuple):
    """A variable or literal of the new jaxpr, and the rule's knowledge of it."""

    atom: Atom
    kind: AbstractValue


class JaxprBuilder:
    """Collects the equations of a new jaxpr, in order."""

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self._casts: dict[tuple[Atom, np.dtype], Atom] = {}
        self.uncast: dict[Atom, Atom] = {}  # by the output of a cast that a rule looks through: its operand
        self.sources: dict[Atom, Any] = {}  # by a value: a rule's note of its origin in this jaxpr

    def append(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], kinds: Sequence[AbstractValue], params: dict[str, Any] | None = None
    ) -> list[Value]:
        """Appends `eqn` with other operands, output dtypes and, optionally, parameters. Returns its outputs."""
        invars, results = list(atoms), [*map(change_dtype, eqn.outvars, kinds)]
        outvars: list[Any] = [var for var, _ in results]
        if params is not None or invars != eqn.invars or outvars != eqn.outvars:
            eqn = eqn.replace(invars=invars, outvars=outvars, params=params)
        self.equations.append(eqn)
        return results

    def cast(self, atom: Atom, dtype: np.dtype, eqn: JaxprEqn) -> Atom:
        """Casts a floating value for use in `eqn`. The cast has the source line of `eqn`."""
        aval: Any = atom.aval
        if aval.dtype == dtype:
            return atom
        if isinstance(atom, Literal):
            return Literal(np.asarray(atom.val).astype(dtype), _change_aval(aval, dtype))
        template = _trace_conversion(dtype)
        out = Var(_change_aval(aval, dtype))
        params = {**template.params, "weak_type": aval.weak_type}  # so that a Python scalar stays weak
        self.equations.append(
            new_jaxpr_eqn([atom], [out], template.primitive, params, template.effects, eqn.source_info, eqn.ctx)
        )
        return out

    def cast_once(self, atom: Atom, dtype: np.dtype, eqn: JaxprEqn) -> Atom:
        """Like `cast`, but returns the first cast again for the same value and dtype."""
        if isinstance(atom, Literal):
            return self.cast(atom, dtype, eqn)
        key = atom, dtype
        if key not in self._casts:
            self._casts[key] = self.cast(atom, dtype, eqn)
        return self._casts[key]

    def cast_values(self, values: Sequence[Value], kinds: Sequence[AbstractValue], eqn: JaxprEqn) -> list[Atom]:
        """Casts each value to the dtype of its new kind, if that has one."""
        return [
            value.atom if kind.dtype is None else self.cast(value.atom, kind.dtype, eqn)
            for value, kind in zip(values, kinds, strict=True)
        ]


@functools.cache
def _trace_conversion(dtype: np.dtype) -> JaxprEqn:
    source = np.float32 if dtype != np.float32 else np.float16
    return jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))(source(0)).eqns[0]


def change_dtype(var: Var, kind: AbstractValue) -> Value:
    """Returns a variable, or a new one if `kind` has another dtype."""
    aval: Any = var.aval
    is_same = kind.dtype is None or aval.dtype == kind.dtype
    return Value(var if is_same else type(var)(_change_aval(aval, kind.dtype)), kind)


# A jaxpr has few distinct avals, and `update` takes ten times as long as this look-up.
@functools.lru_cache
def _change_aval(aval: Any, dtype: np.dtype) -> Any:
    return aval.update(dtype=dtype)
