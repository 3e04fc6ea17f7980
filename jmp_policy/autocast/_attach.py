"""What `autocast` makes of a function."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._base import TRACING, Args, Kwargs, PyTree, describe, did_you_mean, meet_reduce_dtype, warn_user
from .._jaxpr import (
    AUTOCAST,
    Kind,
    Register,
    Rewriter,
    explain_tracing,
    float_dtype,
    note_casting,
    open_partials,
    run,
    run_lifted,
    trace,
)
from ..modules import (
    NO_TARGET,
    Adapter,
    PolicyDecorator,
    cast_result,
    find_adapter,
    is_flax_object,
    matmul_precision,
    parse_target,
    resolve_policy,
)
from ..policy import Policy, PolicyMap, PolicySpec
from ._rewrite import (
    COMPUTE_DTYPES,
    AutocastRules,
    Casting,
    CastingRule,
    Colour,
    EquationPlace,
    Mark,
    Scopes,
    check_policy,
    explain_unused_functions,
    has_scopes,
    root_policy,
)

CUSTOM_RULES = ("opaque", "inside")


def attach(fun: Any, policy: PolicySpec, rules: AutocastRules | None, custom_rules: str) -> Any:
    """Makes the function that stands for `fun`, or a decorator, as `autocast` says."""
    if custom_rules not in CUSTOM_RULES:
        raise ValueError(
            f"Unknown custom_rules {custom_rules!r}. {did_you_mean(custom_rules, CUSTOM_RULES)} "
            "For example: custom_rules='inside'."
        )
    moved = AutocastRules() if rules is None else rules
    if not isinstance(moved, AutocastRules):
        raise TypeError(
            f"rules must be AutocastRules, got {rules!r}. For example: AutocastRules(functions={{'softmax': 'full'}})."
        )
    target, captured = parse_target(fun, policy, "autocast")
    check_policy(captured)
    if target is NO_TARGET:
        attached: Any = PolicyDecorator(
            lambda target: _wrap_function(target, captured, moved, custom_rules), "autocast"
        )
    else:
        attached = _wrap_function(target, captured, moved, custom_rules)
    if policy is None and target is fun and rules is None:
        _warn_of_float32(captured)
    return attached


def _warn_of_float32(default: Policy | PolicyMap) -> None:
    """Warns where no policy was given and the default one, which is float32 until somebody sets it, casts nothing."""
    policies = [root_policy(default), *(rule.policy for rule in getattr(default, "rules", ()))]
    if all(policy.compute_dtype == np.float32 for policy in policies):
        warn_user(
            "autocast was given no policy, and computes in float32 as the default one says: nothing runs in half. "
            "For example: autocast(loss_fn, 'params=float32,compute=bfloat16,output=none'), or "
            "autocast(loss_fn, 'float32') if that is meant."
        )


def _wrap_function(fun: Any, policy: Policy | PolicyMap, rules: AutocastRules, custom_rules: str) -> Any:
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_wrap_function(fun.__func__, policy, rules, custom_rules))
    adapter = find_adapter(fun)
    if adapter is not None or isinstance(fun, type) or not callable(fun):
        raise TypeError(f"autocast takes a function, got {describe(fun)}. {_show_example(adapter)}")
    return _Autocast(fun, policy, rules, custom_rules).wrap()


def _show_example(adapter: Adapter | None) -> str:
    if adapter is None:
        return "For example: autocast(loss_fn, 'mixed_bfloat16')."
    return f"Give it one that calls the module. For example: {adapter.autocast_example}."


class _Autocast:
    """A function, and all that is the same in each of its calls."""

    def __init__(self, fun: Callable[..., Any], policy: Policy | PolicyMap, rules: AutocastRules, custom_rules: str):
        self._fun = fun
        self._policy = policy
        self._rules = rules
        self._custom_rules = custom_rules
        self._register = Register() if has_scopes(policy, rules) else None
        self._rewritten: Any = weakref.WeakKeyDictionary()

    def wrap(self) -> Callable[..., Any]:
        """Makes the function that stands for the one that was given."""

        @functools.wraps(self._fun)
        def call_autocast(*args: Any, **kwargs: Any) -> Any:
            for met in (root_policy(self._policy), *(rule.policy for rule in getattr(self._policy, "rules", ()))):
                meet_reduce_dtype(met.reduce_dtype)
            # What the function may write to has to be among its arguments.
            fun, args, kwargs = open_partials(self._fun, args, kwargs)
            policy = resolve_policy(root_policy(self._policy), (args, kwargs))
            trace_and_run = functools.partial(self._trace_and_run, policy)
            return run_lifted(trace_and_run, self._make_traceable(fun, policy), args, kwargs)

        return call_autocast

    def _make_traceable(self, fun: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
        """Makes the function that is traced: its result is checked and cast, and its modules are entered."""

        def call_and_check(*args: Any, **kwargs: Any) -> Any:
            with matmul_precision(policy), explain_tracing(), note_casting():
                out = cast_result(policy, fun(*args, **kwargs))
            _check_result(fun, out)
            return out

        return call_and_check if self._register is None else self._register.watch(call_and_check)

    def _trace_and_run(self, policy: Policy, fun: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Traces, rewrites and runs."""
        # The modules are entered while their methods are traced, so the rules by scope come after that.
        with TRACING(self._register and self._register.token):
            traced = trace(fun, args, kwargs)
        old = traced.program
        # What enters and what leaves keeps the dtypes that the function was traced with.
        kinds = [Kind(float_dtype(var), Mark(Colour.TRACED)) for var in old.jaxpr.invars]
        wanted = [float_dtype(var) for var in old.jaxpr.outvars]
        new = Rewriter(self._make_rule(policy, old)).rewrite(old, kinds, EquationPlace(), wanted).program
        with jax.named_scope(AUTOCAST):
            return run(traced, new)

    def _make_rule(self, policy: Policy, program: ClosedJaxpr) -> CastingRule:
        scopes = None
        unused = explain_unused_functions(self._rules.functions, program.jaxpr)
        if self._register is not None:
            scopes = Scopes(self._policy, self._rules.scopes, self._rules.backward, self._register.list_modules())
            unused += scopes.explain_unused(program.jaxpr)
        for message in unused:
            warn_user(message)
        compute_dtype: Any = policy.compute_dtype if policy.compute_dtype in COMPUTE_DTYPES else np.dtype(np.float32)
        rule = CastingRule(Casting(compute_dtype, self._rules, self._custom_rules, scopes, policy.accumulate_dtype))
        if scopes is not None:  # it knows the modules that the function called, which may be freed with that
            rule.rewritten = self._rewritten
        return rule

    def __reduce__(self) -> tuple:  # what it remembers is of this process
        return _Autocast, (self._fun, self._policy, self._rules, self._custom_rules)


def _check_result(fun: Callable[..., Any], out: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(out, is_leaf=is_flax_object)[0]:
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex) or is_flax_object(leaf)):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"{getattr(fun, '__qualname__', fun)} returned {leaf!r}, a {type(leaf).__name__}"
                f"{where and f', at {where} of its result'}; what autocast runs returns trees of arrays. "
                "For example: return loss, {'accuracy': accuracy}."
            )
