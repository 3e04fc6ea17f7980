"""Traces functions of trees or Flax objects to jaxprs, evaluates jaxprs, and prepares them to run a second time."""

import contextlib
import enum
import functools
import types
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from .._base import Args, Kwargs, is_array
from ..modules import find_lifting_adapter, is_flax_object
from ._program import Atom, Program, body_of, is_float, list_variables, replace_variables, walk


def open_partials(fun: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
    """Returns a function, and what a partial or a method of a Flax object holds among its arguments.

    The function may write to them, and so they have to come in as arguments.

    >>> open_partials(functools.partial(max, 1), (2,), {})
    (<built-in function max>, (1, 2), {})
    """
    if isinstance(fun, functools.partial):
        return open_partials(fun.func, (*fun.args, *args), {**fun.keywords, **kwargs})
    if isinstance(fun, types.MethodType) and is_flax_object(fun.__self__):
        return fun.__func__, (fun.__self__, *args), kwargs
    return fun, args, kwargs


def run_lifted(run: Callable[..., Any], fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls `run(fun, args, kwargs)`, where there are objects of nnx with a function and arguments that have none.

    What the function writes to them lands in the caller's objects when the trace is over.

    >>> run_lifted(lambda fun, args, kwargs: fun(*args, **kwargs), max, (1, 2), {})
    2
    """
    adapter = find_lifting_adapter((args, kwargs))
    if adapter is None:
        return run(fun, args, kwargs)
    return adapter.lift(lambda pure, state: run(pure, (state,), {}), fun, args, kwargs)


@contextlib.contextmanager
def explain_tracing(caller: str = "autocast", example: str = ", 'mixed_bfloat16'") -> Iterator[None]:
    """Adds what to do to errors that only tracing makes: they speak of trace levels and of a jit that nobody wrote.

    Args:
      caller: the name of the function that traces.
      example: its further arguments, for an example.
    """
    try:
        yield
    except _NO_VALUE as error:
        error.add_note(
            f"{caller} traces the function as jax.jit does: while it runs, arrays have no values that Python could "
            "decide on or convert. What Python needs can be a number of Python's among the arguments, which stays one."
        )
        raise
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                f"{caller} traces the function: pass an object that it writes to as an argument. "
                f"For example: {caller}(lambda model, x: model(x){example})(model, x)."
            )
        raise


_NO_VALUE = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError
)  # fmt: skip


class Traced(NamedTuple):
    """The program of a function for certain arguments.

    Attributes:
      program: it takes the array leaves of the arguments, in order.
      leaves: those leaves.
      out_tree: the structure of what the function returns.

    >>> traced = trace(lambda x, y: {"sum": x + y["a"]}, (1.0, {"a": 2.0}), {})
    >>> len(traced.leaves), traced.out_tree
    (0, PyTreeDef({'sum': *}))
    """

    program: ClosedJaxpr
    leaves: list[Any]
    out_tree: Any


def trace(fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Traced:
    """Traces a function for its arguments; leaves of them that are not arrays are constants.

    >>> trace(lambda x: jnp.sin(x) * 2, (jnp.ones(2),), {}).program.in_avals
    [ShapedArray(float32[2])]
    """
    flat, arrays, out_trees = flatten_function(fun, args, kwargs)
    program = jax.make_jaxpr(flat)(*arrays)
    return Traced(program, arrays, out_trees[-1])


def flatten_function(
    fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable[..., list[Any]], list[Any], list[Any]]:
    """The function of the array leaves of its arguments, those leaves, and a list of the structures it returned.

    >>> flat, leaves, out_trees = flatten_function(lambda x, y: {"sum": x + y}, (np.ones(2), 1), {})
    >>> flat(*leaves), out_trees
    ([array([2., 2.])], [PyTreeDef({'sum': *})])
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [is_array(leaf) for leaf in leaves]
    out_trees: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        merged = [next(given) if array else leaf for leaf, array in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        out, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        out_trees.append(out_tree)
        return out

    return flat, [leaf for leaf, array in zip(leaves, dynamic, strict=True) if array], out_trees


def run(traced: Traced, program: ClosedJaxpr) -> Any:
    """Runs a program in the place of the one that was traced.

    >>> traced = trace(lambda x: {"twice": 2 * x}, (jnp.float32(3),), {})
    >>> float(run(traced, traced.program)["twice"])
    6.0
    """
    return jax.tree.unflatten(traced.out_tree, evaluate(program, *traced.leaves))


def evaluate(program: ClosedJaxpr, *args: Any) -> list[Any]:
    """Runs a program on its arguments; the equations keep their names and source lines.

    Each goes in as a jitted function that is inlined, and equal equations as the same one, as the functions of
    jax.numpy do: what JAX derives of it, its derivative above all, is then found in JAX's caches. Bound one by one
    instead, differentiating the program takes two to three times as long as differentiating the original function.
    """
    body = program.jaxpr
    environment: dict[Var, Any] = dict(zip(body.constvars, program.consts, strict=True))
    environment.update(zip(body.invars, args, strict=True))

    def read_atom(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    last_uses = _find_last_uses(body)
    outer, mesh = source_info_util.current_name_stack(), _read_context_mesh()
    for i, eqn in enumerate(body.eqns):
        source = eqn.source_info
        with source_info_util.user_context(source.traceback, name_stack=outer + source.name_stack), eqn.ctx.manager:
            results = _bind(eqn, read_atom, mesh)
        environment.update(zip(eqn.outvars, results, strict=True))
        for var in last_uses.get(i, ()):  # eagerly, their memory can go
            del environment[var]
    return [_make_array(atom) if isinstance(atom, Literal) else environment[atom] for atom in body.outvars]


def call(program: ClosedJaxpr, *args: Any) -> list[Any]:
    """Runs a program as one jitted function: tracing that takes no time, and there is no derivative to be found.

    >>> program = jax.make_jaxpr(lambda x: 2 * x)(1.0)
    >>> float(call(program, jnp.float32(3))[0])
    6.0
    """
    params = _make_jit_params(program, program.jaxpr.debug_info.func_name)
    return _JIT.primitive.bind(*args, **params | _read_context_mesh())


def _make_array(literal: Literal) -> jax.Array:
    """A result that is a number in the program, as the array that `jit` would return: one of Python's stays weak."""
    aval: Any = literal.aval
    weak = jnp.asarray(np.asarray(literal.val).item()) if aval.weak_type else None
    return jnp.asarray(literal.val, aval.dtype) if weak is None or weak.dtype != aval.dtype else weak


def _find_last_uses(body: Jaxpr) -> dict[int, list[Var]]:
    """Which values nothing reads after which equation."""
    last: dict[Var, int] = {}
    for i, eqn in enumerate(body.eqns):
        last.update((var, i) for var in list_variables([*eqn.outvars, *eqn.invars]))
    for var in list_variables(body.outvars):
        last.pop(var, None)
    done: dict[int, list[Var]] = {}
    for var, i in last.items():
        done.setdefault(i, []).append(var)
    return done


def _bind(eqn: JaxprEqn, read_atom: Callable[[Atom], Any], mesh: dict[str, Any]) -> Sequence[Any]:
    positions: dict[Var, int] = {}  # of each variable that it reads among those: two operands may be the same one
    for atom in eqn.invars:
        if not isinstance(atom, Literal):
            positions.setdefault(atom, len(positions))
    shared = _share_call(eqn, positions)
    if shared is not None:
        return _JIT.primitive.bind(*map(read_atom, positions), **shared | mesh)
    results = eqn.primitive.bind(*map(read_atom, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


_CALLS: dict[Any, dict[str, Any]] = {}
"""The parameters of jitted functions, by all that tells equations apart: equal ones are to be the same function."""

_MOST_CALLS = 1 << 14


def _share_call(eqn: JaxprEqn, positions: dict[Var, int]) -> dict[str, Any] | None:
    """The parameters of a jitted function that is this equation; `None` for one that had better stand for itself."""
    if eqn.effects or jax.debug_nans.value or jax.debug_infs.value:  # these name the equation
        return None
    # The bits of a literal, for 0.0 equals -0.0.
    operands = [
        (atom.aval, np.asarray(atom.val).tobytes() if isinstance(atom, Literal) else positions[atom])
        for atom in eqn.invars
    ]
    results = [var.aval for var in eqn.outvars]
    key = eqn.primitive, tuple(operands), tuple(results), tuple(eqn.params.items()), eqn.ctx
    try:
        found = _CALLS.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return None
    if found is None and not _stands_for_itself(eqn):
        if len(_CALLS) >= _MOST_CALLS:
            _CALLS.clear()
        found = _CALLS[key] = _jit_equation(eqn, list(positions))
    return found


def _stands_for_itself(eqn: JaxprEqn) -> bool:
    """Whether an equation moves its arguments, for a jitted function runs where they are, or holds functions.

    A user's functions and programs may be new ones at each call, and would be kept.
    """
    name, params = eqn.primitive.name, eqn.params
    has_functions = any(callable(value) for value in params.values()) or any(jaxprs_in_params(params))
    return name == "device_put" or name.startswith("custom_") or has_functions


def _jit_equation(eqn: JaxprEqn, invars: list[Var]) -> dict[str, Any]:
    """The parameters of a jitted function of one equation, as if JAX had traced it.

    A function that JAX traces would do, but tracing leaves out what does nothing, such as a cast to the dtype that a
    value has, and calling one takes longer than binding what it makes.
    """
    own = eqn.replace(source_info=source_info_util.new_source_info())
    nameless = DebugInfo("jit", eqn.primitive.name, None, None)
    program = ClosedJaxpr(Jaxpr((), invars, eqn.outvars, [own], debug_info=nameless), ())
    inline = _JIT.params["inline"]
    early = type(inline)["JAX_EARLY"] if isinstance(inline, enum.Enum) else True
    return {**_make_jit_params(program, eqn.primitive.name), "inline": early}


def _make_jit_params(program: ClosedJaxpr, name: str) -> dict[str, Any]:
    """The parameters of a jitted function that is a program."""
    params = {**_JIT.params, "jaxpr": program, "name": name}
    for key in ("in_shardings", "in_layouts", "donated_invars"):
        params[key] = _JIT.params[key] * len(program.jaxpr.invars)
    for key in ("out_shardings", "out_layouts"):
        params[key] = _JIT.params[key] * len(program.jaxpr.outvars)
    return params


def _trace_jit() -> JaxprEqn:
    with jax.disable_jit(False):  # which a user may have set, to look for a bug
        return jax.make_jaxpr(jax.jit(lambda x: x + x))(1.0).eqns[0]


_JIT = _trace_jit()
"""An equation that jit makes, of one argument and one result: the pattern of all others."""


def _read_context_mesh() -> dict[str, Any]:
    """What a jitted function knows of the mesh that `jax.set_mesh` set: its devices are where it runs."""
    if jax.sharding.get_abstract_mesh().empty and _JIT.params["ctx_mesh"].empty:
        return {}  # `_JIT` has the mesh in use when this file was imported
    return {"ctx_mesh": _trace_jit().params["ctx_mesh"]}


_HEARD = frozenset(("debug_callback", "debug_print"))
_REFERENCES = ("get", "swap", "addupdate", "ref_get", "ref_swap", "ref_addupdate")

_READY: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


_CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_ENTERED = ("jit", "closed_call", "eval_jaxpr", "remat2", "scan", "while", "cond", "shard_map")


def find_unrepeatable(program: Jaxpr) -> JaxprEqn | None:
    """Finds an equation that may not run twice, because it talks to the host or writes to memory.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from jax.experimental import io_callback
    >>> def fun(x):
    ...     return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    >>> find_unrepeatable(jax.make_jaxpr(fun)(jnp.ones(2)).jaxpr).primitive.name
    'io_callback'
    """
    steps = (step.eqn for step in walk(program) if step.name == step.eqn.primitive.name)
    return next((eqn for eqn in steps if eqn.primitive.name in ("io_callback", *_REFERENCES)), None)


def prepare_replay(program: Program) -> Program:
    """Makes a program that can run beside the one that it is of: without debug callbacks.

    Functions with derivatives of their own become ordinary ones, so that a rule or a recorder enters them, and a choice
    among several values is made of each of them apart, so that what was not chosen does not count.

    >>> import jax, jax.numpy as jnp
    >>> def fun(x):
    ...     jax.debug.print("{}", x)
    ...     return jax.nn.relu(x)
    >>> program = prepare_replay(jax.make_jaxpr(fun)(1.0))
    >>> [eqn.primitive.name for eqn in program.eqns], program.effects
    (['remat2'], set())
    """
    if program not in _READY:
        _READY[program] = _prepare(program)
    return _READY[program]


def _prepare(program: Program) -> Program:
    old = body_of(program)
    equations, silenced = [], set[Any]()
    made_of_numbers = [eqn for eqn in old.eqns if all(isinstance(atom, Literal) for atom in eqn.invars)]
    constants = {var for eqn in made_of_numbers for var in eqn.outvars}
    for eqn in old.eqns:
        if eqn.primitive.name in _HEARD and not eqn.outvars:
            silenced |= eqn.effects
        elif _chooses(eqn, constants):
            equations.append(_call(eqn, _make_choice_apart(*[atom.aval for atom in (*eqn.outvars, *eqn.invars)])))
        else:
            equations.append(_prepare_equation(eqn))
            silenced |= eqn.effects - equations[-1].effects
    if all(new is eqn for new, eqn in zip(equations, old.eqns, strict=False)) and len(equations) == len(old.eqns):
        return program
    new = old.replace(eqns=equations, effects=old.effects - silenced, debug_info=old.debug_info)
    return program.replace(jaxpr=new) if old is not program else new


def _prepare_equation(eqn: JaxprEqn) -> JaxprEqn:
    name, params = eqn.primitive.name, eqn.params
    if name in _CUSTOM and not body_of(params["call_jaxpr"]).constvars:
        return _call(eqn, body_of(prepare_replay(params["call_jaxpr"])))
    if name not in _ENTERED:
        return eqn
    changed, silenced = {}, set[Any]()
    for key, value in params.items():
        old = value if isinstance(value, tuple) else (value,)
        new = tuple(prepare_replay(item) if isinstance(item, Jaxpr | ClosedJaxpr) else item for item in old)
        if any(one is not other for one, other in zip(old, new, strict=True)):
            changed[key] = new if isinstance(value, tuple) else new[0]
            for one, other in zip(old, new, strict=True):
                silenced |= getattr(one, "effects", set()) - getattr(other, "effects", set())
    return eqn.replace(params={**params, **changed}, effects=eqn.effects - silenced) if changed else eqn


def _call(eqn: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    """An equation that runs a body: a remat, which changes nothing; a jitted function would know of meshes."""
    return eqn.replace(primitive=_CALL.primitive, params={**_CALL.params, "jaxpr": body}, effects=body.effects)


def _chooses(eqn: JaxprEqn, constants: Container[Any]) -> bool:
    """Whether an equation chooses among floating values of which two or more are computed."""
    if eqn.primitive.name != "select_n" or not is_float(eqn.outvars[0]):
        return False
    return sum(not isinstance(case, Literal) and case not in constants for case in eqn.invars[1:]) > 1


@functools.lru_cache(maxsize=1024)
def _make_choice_apart(result: Any, *operands: Any) -> Jaxpr:
    """Makes the same choice in two steps: first each case, with zeros where it is not chosen.

    An infinity that is not chosen is gone after the first step, and cannot be mistaken for one that was.

    Args:
      result: the type of the result.
      operands: the types of the operands.
    """

    def select_apart(which: jax.Array, *cases: jax.Array) -> jax.Array:
        zeros = lax.convert_element_type(lax.lt(cases[0], cases[0]), cases[0].dtype)
        parts = [
            lax.select_n(which, *(case if j == i else zeros for j in range(len(cases)))) for i, case in enumerate(cases)
        ]
        return lax.select_n(which, *parts)

    # Traced without a mesh and then given types: all values but `which` have the shape and sharding of the result.
    traced = jax.make_jaxpr(select_apart)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]).jaxpr
    typed: dict[Any, Any] = dict(zip(traced.invars, map(Var, operands), strict=True))
    equations = []
    for eqn in traced.eqns:
        typed |= {var: Var(result.update(dtype=var.aval.dtype)) for var in eqn.outvars}  # type: ignore[attr-defined]
        invars, outvars = ([typed[var] for var in variables] for variables in (eqn.invars, eqn.outvars))
        equations.append(eqn.replace(invars=invars, outvars=outvars))
    invars, outvars = ([typed[var] for var in variables] for variables in (traced.invars, traced.outvars))
    return body_of(replace_variables(traced, invars, equations, outvars))


_CALL = jax.make_jaxpr(jax.checkpoint(lambda x: x + x, prevent_cse=False))(1.0).eqns[0]
