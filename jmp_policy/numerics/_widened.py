"""Runs a traced function, but with the ops of some scopes in float32."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn  # pyright: ignore[reportPrivateImportUsage]

from .._base import hide_frames
from .._jaxpr import (
    HALF,
    MATMULS,
    PRIMITIVES,
    AbstractValue,
    Fact,
    JaxprBuilder,
    ModulePaths,
    ObservedCall,
    Register,
    Rewriter,
    Rule,
    Value,
    body_of,
    call,
    check_function,
    find_policy_keys,
    float_dtype,
    having,
    observe,
    open_partials,
    walk,
)

_FLOAT32 = np.dtype(np.float32)
_COMBINING = having(Fact.COMBINES)
_AS_TRACED = having(Fact.KERNEL, Fact.OUTSIDE) | {"bitcast_convert_type", "nextafter"}  # of the bits of a dtype


def widen(fun: Callable[..., Any], scopes: frozenset[str] | None = None) -> Callable[..., Any]:
    """Returns `fun` with the half-precision ops of some scopes, or of all, in float32, forward and backward.

    As under a `PolicyMap`, matmuls of other scopes cast their operands back, and their other ops follow JAX's
    promotion. Outputs are not cast. Literals keep the value to which half precision rounded them.

    >>> import jax.numpy as jnp
    >>> square = lambda x: jnp.square(x.astype(jnp.float16))
    >>> float(square(jnp.float32(300.0))), float(widen(square)(jnp.float32(300.0)))
    (inf, 90000.0)
    """
    return _observed(fun, lambda observed: (_run_widened(observed, scopes), None))


class HalfScopes(NamedTuple):
    """Paths of ops with half-precision outputs, in the order of the jaxpr, each with the key of a rule for it."""

    keys: dict[str, str]
    has_rules: bool  # False if no rule can reach the program: then the keys are the paths


def find_half_scopes(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> HalfScopes:
    """Finds the paths of all ops of a function with half-precision outputs."""
    found = HalfScopes({}, has_rules=False)

    def note(observed: ObservedCall) -> tuple[Sequence[Any], None]:
        nonlocal found
        read = ModulePaths(observed.modules).read_stack
        steps = [*walk(observed.program.jaxpr, live_only=True)]
        paths = dict.fromkeys(read(step.scope) for step in steps if any(map(_is_half, step.results)))
        keys = find_policy_keys(paths, [step.scope for step in steps], observed.modules)
        found = HalfScopes(keys or {path: path for path in paths}, keys is not None)
        return call(observed.program, *observed.leaves), None

    jax.eval_shape(_observed(fun, note), *args, **kwargs)
    return found


def _observed(fun: Callable[..., Any], run: Callable[[ObservedCall], tuple[Sequence[Any], None]]) -> Callable[..., Any]:
    check_function(fun, "widen")
    register = Register()

    @hide_frames
    @functools.wraps(fun)
    def call_observed(*args: Any, **kwargs: Any) -> Any:
        opened, args, kwargs = open_partials(fun, args, kwargs)
        return observe("widen", register, run, opened, args, kwargs)[0]

    return call_observed


def _run_widened(observed: ObservedCall, scopes: frozenset[str] | None) -> Sequence[Any]:
    rule = _Widening(ModulePaths(observed.modules), scopes)
    program = observed.program
    kinds = [rule.argument(float_dtype(var)) for var in program.jaxpr.invars]
    return call(Rewriter(rule).rewrite(program, kinds, "").program, *observed.leaves)


def _is_half(atom: Any) -> bool:
    return float_dtype(atom) in HALF


class _Widening(Rule):
    """Writes the ops of some scopes in float32. The context of an equation is its path."""

    def __init__(self, paths: ModulePaths, scopes: frozenset[str] | None):
        self._paths, self._scopes = paths, scopes
        self.rewritten = weakref.WeakKeyDictionary()

    def contexts(self, outer: str, program: Jaxpr) -> Sequence[str]:
        return [self._paths.find(outer, eqn) for eqn in program.eqns]

    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: str) -> list[Value]:
        name = eqn.primitive.name
        is_wide = self._scopes is None or context in self._scopes
        if not is_wide and name not in MATMULS:  # follows JAX's promotion
            is_wide = any(
                _is_half(atom) and v.kind.dtype not in HALF for atom, v in zip(eqn.invars, values, strict=True)
            )
        is_wide = is_wide and name in PRIMITIVES and name not in _AS_TRACED
        dtype = lambda atom: _FLOAT32 if is_wide and _is_half(atom) else float_dtype(atom)
        kinds = [AbstractValue(dtype(var)) for var in eqn.outvars]
        wanted = [AbstractValue(dtype(atom)) for atom in eqn.invars]
        atoms = body.cast_values(values, wanted, eqn)
        if is_wide and name == "reduce_precision" and _is_half(eqn.outvars[0]):
            return [Value(atoms[0], kinds[0])]
        return body.append(eqn, atoms, kinds, self._widen_params(eqn, context) if is_wide else None)

    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        return next((kind for kind in kinds if kind.dtype not in HALF), kinds[0])

    def rewrites_custom_rule(self, eqn: JaxprEqn, context: str) -> bool:
        return True

    def rewrites_primal_only(self, eqn: JaxprEqn, context: str) -> bool:
        return True

    def _widen_params(self, eqn: JaxprEqn, context: str) -> dict[str, Any]:
        """Returns the parameters with float32 for half-precision dtypes, and in jaxprs that combine two elements."""
        params = dict(eqn.params)
        for name, value in eqn.params.items():
            if isinstance(value, np.dtype) and value in HALF:
                params[name] = _FLOAT32
            elif eqn.primitive.name in _COMBINING and isinstance(value, (Jaxpr, ClosedJaxpr)):
                combine = body_of(value)
                wide = lambda atom: _FLOAT32 if _is_half(atom) else float_dtype(atom)
                kinds = [AbstractValue(wide(var)) for var in combine.invars]
                outputs = [wide(atom) for atom in combine.outvars]
                params[name] = Rewriter(_Widening(self._paths, None)).rewrite(value, kinds, "", outputs).program
        return params
