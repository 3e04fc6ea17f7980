"""Wraps a function for `autocast`: traces it, rewrites its jaxpr and runs it."""

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
    LIST_WEIGHTS,
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
    PolicyDecorator,
    cast_result,
    find_adapter,
    find_lifting_adapter,
    is_flax_object,
    matmul_precision,
    parse_target,
    resolve_policy,
)
from ..modules.common import eval_shapes
from ..policy import Policy, PolicyMap, PolicySpec, list_policies
from ._rewrite import (
    AutocastRules,
    CastingRule,
    EquationPlace,
    check_policy,
    explain_unused_functions,
    make_casting_rule,
    root_policy,
)
from ._weight_arguments import WeightArguments, WeightArray, Weights, check_weights

CUSTOM_RULES = ("opaque", "inside")


def attach(
    fun: Any, policy: PolicySpec, rules: AutocastRules | None, custom_rules: str, weights: Weights | None
) -> Any:
    """Returns the wrapped `fun`, or a decorator."""
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
    check_weights(weights)
    check_policy(captured, has_weights=weights is not None)
    wrap = functools.partial(_wrap_function, policy=captured, rules=moved, custom_rules=custom_rules, weights=weights)
    attached: Any = PolicyDecorator(wrap, "autocast") if target is NO_TARGET else wrap(target)
    if policy is None and target is fun and rules is None:
        _warn_of_float32(captured)
    return attached


def _warn_of_float32(default: Policy | PolicyMap) -> None:
    """Warns if no policy was given and the default policy computes in float32 only."""
    if all(policy.compute_dtype == np.float32 for policy in list_policies(default)):
        warn_user(
            "autocast was given no policy, and computes in float32 as the default policy says: nothing runs in half "
            "precision. For example: autocast(loss_fn, 'params=float32,compute=bfloat16,output=none'), or "
            "autocast(loss_fn, 'float32') to keep float32."
        )


def _wrap_function(fun: Any, **options: Any) -> Any:
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_wrap_function(fun.__func__, **options))
    adapter = find_adapter(fun)
    if adapter is not None or isinstance(fun, type) or not callable(fun):
        example = "autocast(loss_fn, 'mixed_bfloat16')" if adapter is None else adapter.autocast_example
        hint = "" if adapter is None else "Pass a function that calls the module. "
        raise TypeError(f"autocast takes a function, got {describe(fun)}. {hint}For example: {example}.")
    return _Autocast(fun, **options).wrap()


class _Autocast:
    """A function with its policy and rules."""

    def __init__(
        self,
        fun: Callable[..., Any],
        policy: Policy | PolicyMap,
        rules: AutocastRules,
        custom_rules: str,
        weights: Weights | None,
    ):
        self._fun, self._policy, self._rules, self._custom_rules = fun, policy, rules, custom_rules
        # Policies without quantization have no use for weights.
        self._weights = weights if any(each.quantization is not None for each in list_policies(policy)) else None
        has_scopes = isinstance(policy, PolicyMap) or rules.scopes or rules.backward
        self._register = Register() if has_scopes else None
        self._rewritten: Any = weakref.WeakKeyDictionary()

    def wrap(self) -> Callable[..., Any]:
        @functools.wraps(self._fun)
        def call_autocast(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs, [])

        setattr(call_autocast, LIST_WEIGHTS, None if self._weights is None else self._list_weights)
        return call_autocast

    def _list_weights(self, args: Args, kwargs: Kwargs) -> tuple[Policy, list[WeightArray]]:
        """Describes the weights of a call, whose arguments may be abstract."""
        found: list[WeightArray] = []
        eval_shapes(lambda args, kwargs: self._call(args, kwargs, found), args, kwargs)
        return root_policy(self._policy), found

    def _call(self, args: Args, kwargs: Kwargs, found: list[WeightArray]) -> Any:
        for each in list_policies(self._policy):
            meet_reduce_dtype(each.reduce_dtype)
        given = len(args)
        # A partial or bound method may hold an nnx object, which the function can update only as an argument.
        fun, args, kwargs = open_partials(self._fun, args, kwargs)
        policy = resolve_policy(root_policy(self._policy), (args, kwargs))
        lifted = self._weights is not None and find_lifting_adapter((args, kwargs)) is not None
        read_weights = functools.partial(WeightArguments, self._weights, opened=len(args) - given, lifted=lifted)
        trace_and_run = functools.partial(self._trace_and_run, policy, read_weights, found)
        return run_lifted(trace_and_run, self._make_traceable(fun, policy), args, kwargs)

    def _make_traceable(self, fun: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
        """Checks and casts the output, and registers the modules that are called."""

        def call_and_check(*args: Any, **kwargs: Any) -> Any:
            with matmul_precision(policy), explain_tracing(), note_casting():
                out = cast_result(policy, fun(*args, **kwargs))
            _check_result(fun, out)
            return out

        return call_and_check if self._register is None else self._register.watch(call_and_check)

    def _trace_and_run(
        self,
        policy: Policy,
        read_weights: Callable[..., WeightArguments],
        found: list[WeightArray],
        fun: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        # The trace registers the modules that the rules by scope need.
        with TRACING(self._register and self._register.token):
            traced = trace(fun, args, kwargs)
        old, rule = traced.program, self._make_rule(policy, traced.program)
        # Inputs and outputs keep the dtypes that the function was traced with.
        kinds = [rule.argument(float_dtype(var)) for var in old.jaxpr.invars]
        if self._weights is not None:
            are_weights, rows = read_weights(args, kwargs).find(rule, old.jaxpr)
            found.extend(rows)
            kinds = [rule.as_weight(kind) if own else kind for kind, own in zip(kinds, are_weights, strict=True)]
        wanted = [float_dtype(var) for var in old.jaxpr.outvars]
        new = Rewriter(rule).rewrite(old, kinds, EquationPlace(), wanted).program
        with jax.named_scope(AUTOCAST):
            return run(traced, new)

    def _make_rule(self, policy: Policy, program: ClosedJaxpr) -> CastingRule:
        modules = None if self._register is None else self._register.list_modules()
        rule = make_casting_rule(self._policy, policy, self._rules, self._custom_rules, modules)
        unused = explain_unused_functions(self._rules.functions, program.jaxpr)
        if rule.scopes is not None:
            unused += rule.scopes.explain_unused(program.jaxpr)
            rule.rewritten = self._rewritten  # refers to modules, which may be freed with the function
        for message in unused:
            warn_user(message)
        return rule

    def __reduce__(self) -> tuple:  # without the caches
        return _Autocast, (self._fun, self._policy, self._rules, self._custom_rules, self._weights)


def _check_result(fun: Callable[..., Any], out: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(out, is_leaf=is_flax_object)[0]:
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex) or is_flax_object(leaf)):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"{getattr(fun, '__qualname__', fun)} returned {leaf!r}, a {type(leaf).__name__}"
                f"{where and f', at {where} of its result'}; autocast needs a tree of arrays. "
                "For example: return loss, {'accuracy': accuracy}."
            )
