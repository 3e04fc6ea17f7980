"""`autocast`."""

import functools
from collections.abc import Callable
from typing import Any

from .._get_policy import PolicySpec, get_policy
from ..interpreter import Kind, Rewriter, is_float, trace
from ..interpreter._trace import run
from ._casting import Casting, CastingRule, Colour, Mark
from ._place import Place
from ._rules import AutocastRules


def autocast(
    fun: Callable[..., Any],
    policy: PolicySpec = None,
    *,
    rules: AutocastRules | None = None,
    custom_rules: str = "opaque",
) -> Callable[..., Any]:
    """Runs each operation of a function in the dtype that suits it."""
    policy = get_policy(policy)
    rule = CastingRule(Casting(policy.compute_dtype, rules or AutocastRules(), custom_rules))
    rewriter = Rewriter(rule)

    @functools.wraps(fun)
    def autocasted(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fun, args, kwargs)
        program = traced.program
        kinds = [Kind(v.aval.dtype, Mark(Colour.TRACED)) if is_float(v) else Kind(None) for v in program.jaxpr.invars]
        out = [(policy.output_dtype or v.aval.dtype) if is_float(v) else None for v in program.jaxpr.outvars]
        new = rewriter.rewrite(program, kinds, Place(), out)
        return run(traced, new.program)

    return autocasted
