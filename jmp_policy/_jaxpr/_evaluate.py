"""Traces functions to jaxprs, evaluates jaxprs, and prepares them to run a second time."""

import contextlib
import contextvars
import enum
import functools
import itertools
import operator
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

from .._base import NO_VALUE, Args, Kwargs, describe, flatten_function
from ..modules import find_lifting_adapter, is_flax_object
from ._primitives import CUSTOM, ENTERED
from ._program import Program, body_of, is_float, list_variables, remember_by_jaxpr, replace_variables, walk
from ._source import RECORD


def open_partials(fun: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
    """Moves the arguments of a partial, and the object of a bound Flax method (to be written to), to the arguments."""
    if isinstance(fun, functools.partial):
        return open_partials(fun.func, (*fun.args, *args), {**fun.keywords, **kwargs})
    if isinstance(fun, types.MethodType) and is_flax_object(fun.__self__):
        return fun.__func__, (fun.__self__, *args), kwargs
    return fun, args, kwargs


def run_lifted(run: Callable[..., Any], fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Calls `run(fun, args, kwargs)`, and hands writes to nnx objects among the arguments to the caller's objects."""
    adapter = find_lifting_adapter((args, kwargs))
    if adapter is None:
        return run(fun, args, kwargs)
    return adapter.lift(lambda pure, state: run(pure, (state,), {}), fun, args, kwargs)


@contextlib.contextmanager
def explain_tracing(caller: str = "autocast", example: str = ", 'mixed_bfloat16'") -> Iterator[None]:
    """Adds a note to errors that only tracing raises. `example` has further arguments of the tracing function."""
    try:
        yield
    except NO_VALUE as error:
        error.add_note(
            f"{caller} traces the function as jax.jit does, so arrays have no values that Python can test or convert. "
            "Pass such a value as a Python number, which is not traced. For example: 2.0, not jnp.asarray(2.0)."
        )
        raise
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                f"{caller} traces the function: pass an object that it writes to as an argument. "
                f"For example: {caller}(lambda model, x: model(x){example})(model, x)."
            )
        raise


def refuse_lost_arrays(outputs: Iterable[Any]) -> None:
    """Raises a `TypeError` for an output, such as a function, that holds arrays of the trace that has ended."""
    for output in outputs:
        try:
            lax.optimization_barrier([leaf for leaf in _list_held(output) if isinstance(leaf, Tracer)])
        except jax.errors.UnexpectedTracerError:
            raise TypeError(
                f"A model under a quantized policy returned {describe(output)}, which holds arrays of the call. A "
                "model that multiplies by weights in its own code is traced, as under jax.jit: it returns arrays, or "
                "trees of them. For example: return jax.tree_util.Partial(function, hidden)."
            ) from None


def _list_held(output: Any) -> list[Any]:
    """Lists the leaves of a function's closure or arguments, or of an object's attributes."""
    inside = [getattr(output, name, None) for name in ("__closure__", "__self__", "args", "keywords")]
    try:
        cells = [cell.cell_contents for cell in inside[0] or ()]
        return jax.tree.leaves([cells, *inside[1:], *getattr(output, "__dict__", {}).values()])
    except (ValueError, TypeError):  # an empty cell, or keys that cannot be sorted
        return []


_CASTING: contextvars.ContextVar[bool] = contextvars.ContextVar("_CASTING", default=False)


@contextlib.contextmanager
def note_casting() -> Iterator[None]:
    """Makes `refuse_casting` raise inside."""
    token = _CASTING.set(True)
    try:
        yield
    finally:
        _CASTING.reset(token)


def refuse_casting(instrument: str) -> None:
    """Raises a `ValueError` inside `autocast`, which rewrites the program later."""
    if _CASTING.get():
        raise ValueError(
            f"{instrument} inside autocast would report the dtypes before autocast changes them. Call it outside. "
            f"For example: {instrument}(autocast(loss_fn, 'mixed_bfloat16'))."
        )


class Traced(NamedTuple):
    """A function's jaxpr, the array leaves of the arguments that it takes, and the structure of the outputs."""

    program: ClosedJaxpr
    leaves: list[Any]
    out_tree: Any


def trace(fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Traced:
    """Traces a function. Leaves of the arguments that are not arrays are constants."""
    flat, arrays, out_trees = flatten_function(fun, args, kwargs)
    # One argument: JAX handles each argument in Python, and the leaves of one in C++.
    program = jax.make_jaxpr(functools.wraps(flat)(lambda arrays: flat(*arrays)))(arrays)
    return Traced(program, arrays, out_trees[-1])


def run(traced: Traced, program: ClosedJaxpr) -> Any:
    """Runs `program`, a rewritten form of the traced jaxpr, on the traced arguments."""
    # Inside `jit` nothing is differentiated yet, and one call is quicker than to bind each equation.
    is_staged = _find_tracers(program, traced.leaves) == {_STAGED}
    return jax.tree.unflatten(traced.out_tree, (call if is_staged else evaluate)(program, *traced.leaves))


def is_batched(traced: Traced) -> bool:
    """True if an argument of a traced function belongs to a `vmap` around the function."""
    return _BATCHED in _find_tracers(traced.program, traced.leaves)


def _find_tracers(program: ClosedJaxpr, args: Sequence[Any]) -> set[type]:
    return {type(value) for value in (*args, *program.consts) if isinstance(value, Tracer)}


def evaluate(
    program: ClosedJaxpr,
    *args: Any,
    find_call: Callable[[JaxprEqn], Callable[..., list[Any]] | None] = lambda eqn: None,
) -> list[Any]:
    """Evaluates a jaxpr; its equations keep their names and source lines.

    Where `find_call(equation)` returns a function of its operands, this is called instead.
    """
    # Each equation becomes an inlined jitted function that equal equations share, so that JAX caches its derivative.
    # Differentiating equations that are bound one by one takes two to three times as long. Inside `jit` nothing is
    # differentiated yet, and binding one is quicker.
    body, is_staged = program.jaxpr, _find_tracers(program, args) == {_STAGED}
    environment: dict[Var, Any] = dict(zip(body.constvars, program.consts, strict=True))
    environment.update(zip(body.invars, args, strict=True))
    read = lambda atom: _make_array(atom) if isinstance(atom, Literal) else environment[atom]

    outer, mesh = source_info_util.current_name_stack(), _read_context_mesh()
    last_uses = itertools.repeat(()) if is_staged else iter(_find_last_uses(body))
    # Equations that follow each other usually have one context and one name stack.
    for (context, scopes), eqns in itertools.groupby(body.eqns, operator.attrgetter("ctx", "source_info.name_stack")):
        stack = outer + scopes
        with context.manager:
            for eqn, last_used in zip(eqns, last_uses, strict=False):
                call = find_call(eqn)
                with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
                    if call is not None:
                        results = call(*map(read, eqn.invars))
                    else:
                        results = _bind(eqn, environment) if is_staged else _bind_shared(eqn, environment, mesh)
                for var, result in zip(eqn.outvars, results, strict=True):
                    environment[var] = result
                for var in last_used:  # frees their memory when run eagerly
                    del environment[var]
    return [*map(read, body.outvars)]


def call(program: ClosedJaxpr, *args: Any) -> list[Any]:
    """Runs a jaxpr as one jitted function. It is quick to trace, but JAX does not cache its derivative."""
    if _is_debugging(args):
        return evaluate(program, *args)
    body = program.jaxpr
    info = DebugInfo("jit", body.debug_info.func_src_info, None, None)
    invars = [*body.constvars, *body.invars]  # constants may be tracers
    opened = Jaxpr((), invars, body.outvars, body.eqns, body.effects, debug_info=info, is_high=body.is_high)
    params = _make_jit_params(ClosedJaxpr(opened, ()), body.debug_info.func_name)
    return _JIT.primitive.bind(*program.consts, *args, **params | _read_context_mesh())


def _is_debugging(operands: Sequence[Any]) -> bool:
    """True if JAX checks results for nan: bound equation by equation, its error is public and names the equation."""
    is_on = jax.debug_nans.value or jax.debug_infs.value
    return is_on and not any(isinstance(operand, Tracer) for operand in operands)


def _make_array(literal: Literal) -> jax.Array:
    """Makes the array that `jit` returns for a literal output. A Python scalar stays weakly typed."""
    aval: Any = literal.aval
    weak = jnp.asarray(np.asarray(literal.val).item()) if aval.weak_type else None
    return jnp.asarray(literal.val, aval.dtype) if weak is None or weak.dtype != aval.dtype else weak


def _find_last_uses(body: Jaxpr) -> list[set[Var]]:
    """Finds, for each equation, the variables that nothing reads after it."""
    used, last_uses = set(list_variables(body.outvars)), []
    for eqn in reversed(body.eqns):
        last_uses.append(set(list_variables([*eqn.outvars, *eqn.invars])) - used)
        used |= last_uses[-1]
    return last_uses[::-1]


def _bind(eqn: JaxprEqn, environment: dict[Var, Any]) -> Sequence[Any]:
    operands = [atom.val if type(atom) is Literal else environment[atom] for atom in eqn.invars]
    # Measurements divide zeros by zeros inside, and return neither nan nor the quotients.
    is_entered = eqn.primitive is _JIT.primitive and not eqn.params["name"].startswith(RECORD)
    if is_entered and _is_debugging(operands):
        return evaluate(eqn.params["jaxpr"], *operands)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _bind_shared(eqn: JaxprEqn, environment: dict[Var, Any], mesh: dict[str, Any]) -> Sequence[Any]:
    positions: dict[Var, int] = {}  # numbers the distinct variables: two operands may be the same one
    for atom in eqn.invars:
        if type(atom) is not Literal and atom not in positions:
            positions[atom] = len(positions)
    shared = _share_call(eqn, positions)
    if shared is None:
        return _bind(eqn, environment)
    return _JIT.primitive.bind(*map(environment.__getitem__, positions), **shared | mesh)


_CALLS: dict[Any, dict[str, Any]] = {}
"""Parameters of `jit` by the equation that the jitted function runs. Equal equations share one function."""

_MOST_CALLS = 1 << 14


def _share_call(eqn: JaxprEqn, positions: dict[Var, int]) -> dict[str, Any] | None:
    """Returns the parameters of a jitted function that runs this equation, or None to bind the equation directly."""
    if eqn.effects or jax.debug_nans.value or jax.debug_infs.value:  # whose errors name the equation
        return None
    key: list[Any] = [eqn.primitive, eqn.ctx, *eqn.params.items()]
    for atom in eqn.invars:  # bits of literals, because 0.0 == -0.0
        key += atom.aval, np.asarray(atom.val).tobytes() if type(atom) is Literal else positions[atom]
    key += [var.aval for var in eqn.outvars]
    try:
        found = _CALLS.get(tuple(key))
    except TypeError:  # an unhashable parameter
        return None
    if found is None and _may_be_shared(eqn):
        if len(_CALLS) >= _MOST_CALLS:
            _CALLS.clear()
        found = _CALLS[tuple(key)] = _jit_equation(eqn, list(positions))
    return found


def _may_be_shared(eqn: JaxprEqn) -> bool:
    """False if the cache would keep functions or jaxprs of users alive, which may be new in each call."""
    name, params = eqn.primitive.name, eqn.params
    if name == "device_put":  # would run on the devices of its inputs
        return False
    has_functions = any(map(callable, params.values())) or any(jaxprs_in_params(params))
    return not (has_functions or name.startswith("custom_"))


def _jit_equation(eqn: JaxprEqn, invars: list[Var]) -> dict[str, Any]:
    """Makes the parameters of `jit` for one equation: quicker than tracing a function, which would lose no-op casts."""
    own = eqn.replace(source_info=source_info_util.new_source_info())
    nameless = DebugInfo("jit", eqn.primitive.name, None, None)
    program = ClosedJaxpr(Jaxpr((), invars, eqn.outvars, [own], debug_info=nameless), ())
    inline = _JIT.params["inline"]
    early = type(inline)["JAX_EARLY"] if isinstance(inline, enum.Enum) else True
    return {**_make_jit_params(program, eqn.primitive.name), "inline": early}


def _make_jit_params(program: ClosedJaxpr, name: str) -> dict[str, Any]:
    params = {**_JIT.params, "jaxpr": program, "name": name}
    for key in ("in_shardings", "in_layouts", "donated_invars"):
        params[key] = _JIT.params[key] * len(program.jaxpr.invars)
    for key in ("out_shardings", "out_layouts"):
        params[key] = _JIT.params[key] * len(program.jaxpr.outvars)
    return params


def trace_jit() -> JaxprEqn:
    with jax.disable_jit(False):  # which a user may have set while debugging
        return jax.make_jaxpr(jax.jit(lambda x: x + x))(1.0).eqns[0]


def _find_tracer(transform: Callable[..., Any]) -> type:
    kinds: list[type] = []
    transform(lambda x: kinds.append(type(x)))(np.ones(1))
    return kinds[0]


_STAGED, _BATCHED = _find_tracer(jax.make_jaxpr), _find_tracer(jax.vmap)
"""The classes of the tracers inside `jit` and `vmap`."""

_JIT = trace_jit()
"""A `jit` equation with one input and one output: the template of all others."""


def _read_context_mesh() -> dict[str, Any]:
    """Returns the `jit` parameter for the mesh of `jax.set_mesh`, whose devices run the function."""
    if jax.sharding.get_abstract_mesh().empty and _JIT.params["ctx_mesh"].empty:
        return {}  # `_JIT` was traced without a mesh, too
    return {"ctx_mesh": trace_jit().params["ctx_mesh"]}


_CALLBACKS = frozenset(("debug_callback", "debug_print"))
_REFERENCES = ("get", "swap", "addupdate", "ref_get", "ref_swap", "ref_addupdate")


def find_unrepeatable(program: Jaxpr) -> JaxprEqn | None:
    """Finds an equation that must not run twice: an `io_callback`, or an access to a reference."""
    steps = (step.eqn for step in walk(program) if step.name == step.eqn.primitive.name)
    return next((eqn for eqn in steps if eqn.primitive.name in ("io_callback", *_REFERENCES)), None)


def prepare_replay(program: Program) -> Program:
    """Prepares a jaxpr to run a second time, for a recorder: removes debug callbacks.

    Custom-derivative functions become ordinary ones, so that they are entered. `select_n` of several computed values
    is split, so that a value that is not selected does not count.

    >>> def fun(x):
    ...     jax.debug.print("{}", x)
    ...     return jax.nn.relu(x)
    >>> program = prepare_replay(jax.make_jaxpr(fun)(1.0))
    >>> [eqn.primitive.name for eqn in program.eqns], program.effects
    (['remat2'], set())
    """
    return _prepare(program) or program


@remember_by_jaxpr  # else equal sub-jaxprs would be copied one by one
def _prepare(program: Program) -> Program | None:
    """Returns the prepared jaxpr, or None if it is the same one, which the cache would keep alive."""
    old = body_of(program)
    equations, silenced = [], set[Any]()
    constants = {var for eqn in old.eqns if not list_variables(eqn.invars) for var in eqn.outvars}
    for eqn in old.eqns:
        if eqn.primitive.name in _CALLBACKS and not eqn.outvars:
            silenced |= eqn.effects
        elif _selects_computed(eqn, constants):
            equations.append(make_remat(eqn, _split_select(*[atom.aval for atom in (*eqn.outvars, *eqn.invars)])))
        else:
            equations.append(_prepare_equation(eqn))
            silenced |= eqn.effects - equations[-1].effects
    if all(new is eqn for new, eqn in zip(equations, old.eqns, strict=False)) and len(equations) == len(old.eqns):
        return None
    new = old.replace(eqns=equations, effects=old.effects - silenced, debug_info=old.debug_info)
    return program.replace(jaxpr=new) if old is not program else new


def _prepare_equation(eqn: JaxprEqn) -> JaxprEqn:
    name, params = eqn.primitive.name, eqn.params
    if name in CUSTOM and not body_of(params["call_jaxpr"]).constvars:
        return make_remat(eqn, body_of(prepare_replay(params["call_jaxpr"])))
    if name not in ENTERED:
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


def make_remat(eqn: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    """Makes an equation that runs `body`: a remat, because the parameters of `jit` depend on the mesh.

    It has the source line of `eqn`, and no scope, since the equations of `body` keep theirs.
    """
    source = eqn.source_info.replace(name_stack=_REMAT.source_info.name_stack)
    params = {**_REMAT.params, "jaxpr": body}
    return eqn.replace(primitive=_REMAT.primitive, params=params, effects=body.effects, source_info=source)


def _selects_computed(eqn: JaxprEqn, constants: Container[Any]) -> bool:
    """True for a `select_n` among two or more floating values that are not constants."""
    if eqn.primitive.name != "select_n" or not is_float(eqn.outvars[0]):
        return False
    return sum(not isinstance(case, Literal) and case not in constants for case in eqn.invars[1:]) > 1


@functools.lru_cache(maxsize=1024)  # equal selects are traced once
def _split_select(result: Any, *operands: Any) -> Jaxpr:
    """Makes a jaxpr that replaces elements that are not selected by zeros, and then selects."""

    def select_twice(which: jax.Array, *cases: jax.Array) -> jax.Array:
        zeros = lax.convert_element_type(lax.lt(cases[0], cases[0]), cases[0].dtype)
        parts = [
            lax.select_n(which, *(case if j == i else zeros for j in range(len(cases)))) for i, case in enumerate(cases)
        ]
        return lax.select_n(which, *parts)

    # Traced without a mesh, then given types. All values but `which` have the shape and sharding of the result.
    traced = jax.make_jaxpr(select_twice)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]).jaxpr
    typed: dict[Any, Any] = dict(zip(traced.invars, map(Var, operands), strict=True))
    equations = []
    for eqn in traced.eqns:
        typed |= {var: Var(result.update(dtype=var.aval.dtype)) for var in eqn.outvars}  # type: ignore[attr-defined]
        invars, outvars = ([typed[var] for var in variables] for variables in (eqn.invars, eqn.outvars))
        equations.append(eqn.replace(invars=invars, outvars=outvars))
    invars, outvars = ([typed[var] for var in variables] for variables in (traced.invars, traced.outvars))
    return body_of(replace_variables(traced, invars, equations, outvars))


_REMAT = jax.make_jaxpr(jax.checkpoint(lambda x: x + x, prevent_cse=False))(1.0).eqns[0]
