"""The little programs that reductions, windows and scatters apply to pairs of numbers: typed, as everything is."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from ..interpreter import Kind, Rewriter, Rule, float_dtype, is_float


def with_operators(params: dict[str, Any], kind: Kind, rule: Rule, context: Any) -> dict[str, Any] | None:
    """The parameters of an equation that runs as `kind`, its operators too; `None` if they are good as they are."""
    programs = {name: value for name, value in params.items() if isinstance(value, (Jaxpr, ClosedJaxpr))}
    if not any(_differs(program, kind) for program in programs.values()):
        return None
    return params | {name: _in_dtype(program, kind, rule, context) for name, program in programs.items()}


def _differs(program: Any, kind: Kind) -> bool:
    return any(float_dtype(var) not in (None, kind.dtype) for var in _body(program).invars)


def _in_dtype(program: Any, kind: Kind, rule: Rule, context: Any) -> Any:
    body = _body(program)
    kinds = [kind if is_float(var) else Kind(None) for var in body.invars]
    wanted = [kind.dtype if is_float(atom) else None for atom in body.outvars]
    return Rewriter(rule).rewrite(program, kinds, context, wanted).program


def _body(program: Any) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program
