"""Wraps a function for `autocast`: traces it, rewrites its jaxpr and runs it. Finds the weights in its arguments."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr

from .._base import (
    TRACING,
    Args,
    Kwargs,
    PyTree,
    describe,
    did_you_mean,
    hide_frames,
    is_array,
    is_floating,
    meet_policy,
    note_for_observer,
    warn_once,
    warn_user,
)
from .._jaxpr import (
    AUTOCAST,
    CUSTOM,
    LIST_WEIGHTS,
    MATMULS,
    Register,
    Rewriter,
    Step,
    Traced,
    explain_tracing,
    find_line,
    find_origin,
    float_dtype,
    is_backward,
    is_batched,
    list_variables,
    multiplies_only,
    note_casting,
    open_partials,
    run,
    run_lifted,
    trace,
    walk,
    walk_with_kernels,
)
from ..modules import (
    NO_TARGET,
    PolicyDecorator,
    cast_result,
    eval_shapes,
    find_adapter,
    find_lifting_adapter,
    is_flax_object,
    matmul_precision,
    parse_target,
    resolve_policy,
)
from ..policy import Policy, PolicyMap, PolicySpec, check_policy_x64, list_policies, spell_rules
from ._casting import CastingRule, make_casting_rule
from ._place import FLOAT32, FLOAT64, EquationPlace, check_policy, explain_unused_functions, is_mixed, root_policy
from ._rules import AutocastRules, list_rule_policies
from ._weights import NO_WEIGHT, WHY_BACKWARD, WeightFinder, WeightUse

CUSTOM_RULES = ("opaque", "inside")

Weights = int | Sequence[int] | Callable[[str], bool]


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
    target, captured = parse_target(fun, policy)
    numbers = weights if isinstance(weights, list | tuple) else [weights]
    if weights is not None and not callable(weights) and not all(type(number) is int for number in numbers):
        raise TypeError(
            f"weights must be an argument number, several, or a function of paths, got {describe(weights)}. For "
            "example: weights=0, weights=(0, 2), or weights=lambda path: path.endswith('kernel')."
        )
    check_policy(captured, has_weights=weights is not None)
    wrap = PolicyDecorator(_autocast_function, policy=captured, rules=moved, custom_rules=custom_rules, weights=weights)
    attached: Any = wrap if target is NO_TARGET else wrap(target)
    is_plain = policy is None and target is fun and rules is None
    if is_plain and all(each.compute_dtype == np.float32 for each in list_policies(captured)):
        warn_user(
            "autocast was given no policy, and computes in float32 as the default policy says: nothing runs in half "
            "precision. For example: autocast(loss_fn, 'params=float32,compute=bfloat16,output=none'), or "
            "autocast(loss_fn, 'float32') to keep float32."
        )
    return attached


def _autocast_function(fun: Any, **options: Any) -> Any:
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_autocast_function(fun.__func__, **options))
    adapter = find_adapter(fun)
    if adapter is not None or isinstance(fun, type) or not callable(fun):
        example = "autocast(loss_fn, 'mixed_bfloat16')" if adapter is None else adapter.autocast_example
        hint = "" if adapter is None else "Pass a function that calls the module. "
        raise TypeError(f"autocast takes a function, got {describe(fun)}. {hint}For example: {example}.")
    return _Autocast(fun, **options).wrap()


class _Autocast:
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
        @hide_frames
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
            meet_policy(each.compute_dtype, each.reduce_dtype)
        for each in (*list_policies(self._policy), *list_rule_policies(self._rules)):
            check_policy_x64(each)
        note_for_observer("policy", lambda: spell_rules(self._policy))
        given = len(args)
        # A partial or bound method may hold an nnx object, which the function can update only as an argument.
        fun, args, kwargs = open_partials(self._fun, args, kwargs)
        policy = resolve_policy(root_policy(self._policy), (args, kwargs))
        lifted = self._weights is not None and find_lifting_adapter((args, kwargs)) is not None
        read_weights = functools.partial(WeightArguments, self._weights, opened=len(args) - given, lifted=lifted)
        trace_and_run = functools.partial(self._trace_and_run, policy, read_weights, found)

        @functools.wraps(fun)
        def call_and_check(*args: Any, **kwargs: Any) -> Any:
            with matmul_precision(policy), explain_tracing(), note_casting():
                out = cast_result(policy, fun(*args, **kwargs))
            _check_result(fun, out)
            return out

        traceable = call_and_check if self._register is None else self._register.watch(call_and_check)
        return run_lifted(trace_and_run, traceable, args, kwargs)

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
        with TRACING(self._register and self._register.take_token()):
            traced = trace(fun, args, kwargs)
        if self._register is not None:
            self._register.release_token(traced.program.jaxpr)
        old, modules = traced.program, None if self._register is None else self._register.list_modules()
        rule = make_casting_rule(self._policy, policy, self._rules, self._custom_rules, modules)
        unused = explain_unused_functions(self._rules.functions, old.jaxpr)
        if rule.scopes is not None:
            unused += rule.scopes.explain_unused(old.jaxpr)
            rule.rewritten = self._rewritten  # refers to modules, which may be freed with the function
        for message in unused:
            warn_user(message)
        # Inputs and outputs keep the dtypes that the function was traced with.
        kinds = [rule.argument(float_dtype(var)) for var in old.jaxpr.invars]
        if self._weights is not None:
            are_weights, rows = read_weights(args, kwargs).find(rule, old.jaxpr)
            found.extend(rows)
            kinds = [rule.as_weight(kind) if own else kind for kind, own in zip(kinds, are_weights, strict=True)]
        self._warn_of_uncast(rule, traced, policy)
        wanted = [float_dtype(var) for var in old.jaxpr.outvars]
        new = Rewriter(rule).rewrite(old, kinds, EquationPlace(), wanted).program
        with jax.named_scope(AUTOCAST):
            return run(traced, new)

    def _warn_of_uncast(self, rule: CastingRule, traced: Traced, policy: Policy) -> None:
        """Warns if no matmul is cast, or if a bias cannot be told from other arguments."""
        program = traced.program.jaxpr
        all_policies = (policy, *list_policies(self._policy))
        dtypes = [each.compute_dtype for each in all_policies if each.compute_dtype]
        low = min(dtypes, key=lambda dtype: dtype.itemsize, default=FLOAT32)
        found = _find_uncast(rule, program, policy, low, casts=is_mixed(*all_policies))
        if found is not None:
            step, why, example = found
            line = find_line(find_origin(step))
            first = f"{step.name} of {line}" if line else step.name
            warn_once(
                self,
                f"autocast casts no matmul to {low}: each one is {why}; the first is {first}. For example: {example}.",
            )
        inputs = {float_dtype(var) for var in program.invars} - {None}
        if found is None and inputs == {FLOAT64} and FLOAT64 not in rule.castable and policy.compute_dtype == FLOAT32:
            warn_once(
                self,
                f"autocast leaves float64 under {policy.name!r}, and all floating arguments are float64: nothing runs "
                "in float32. For example: autocast(fun, PolicyMap({'': 'float32'}, 'float64')).",
            )
        bias = _find_bias_of_one(program) if is_batched(traced) else None
        if bias is not None:
            warn_once(
                self,
                "autocast inside jax.vmap sees one example, where a bias looks like any other array, and adds it in "
                f"{policy.full_dtype}: {find_line(find_origin(bias))}. "
                f"For example: autocast(jax.vmap(fun), {policy.name!r}).",
            )

    def __reduce__(self) -> tuple:  # without the caches
        return _Autocast, (self._fun, self._policy, self._rules, self._custom_rules, self._weights)


def _find_uncast(
    rule: CastingRule, program: Jaxpr, policy: Policy, low: np.dtype, *, casts: bool
) -> tuple[Step, str, str] | None:
    """If no matmul is cast, returns the first one that could be, with a reason and an example."""
    found = None
    if not casts and policy.compute_dtype != FLOAT32:
        return None
    for step in walk_with_kernels(program):
        if step.name not in MATMULS or multiplies_only(step.eqn):
            continue
        dtypes = {float_dtype(atom) for atom in step.operands} - {None}
        closed = next((eqn.primitive.name for eqn, _ in step.around if not rule.enters(eqn, EquationPlace())), None)
        # No rule enters a kernel, also one inside a function with a custom derivative.
        closed = next((eqn.primitive.name for eqn, _ in step.around if eqn.primitive.name == "pallas_call"), closed)
        if FLOAT64 in dtypes and FLOAT64 not in rule.castable:
            why = "in float64, which a policy with float32 parameters leaves"
            example = f"autocast(fun, {policy.replace(param_dtype='float64').name!r})"
        elif dtypes and FLOAT64 in rule.castable and rule.wide.isdisjoint(dtypes):
            why, example = f"in {min(map(str, dtypes))} as it is", f"get_policy({policy.name!r}).cast_to_param(params)"
        elif not casts or rule.wide.isdisjoint(dtypes) or closed in (None, "custom_linear_solve"):
            return None
        elif closed in CUSTOM:
            why = "inside a jax.custom_vjp or jax.custom_jvp function, which runs as written"
            example = "autocast(fun, policy, custom_rules='inside')"
        elif closed == "pallas_call":
            why = "inside a pallas_call, which runs in the dtypes that it is given"
            example = f"pallas_call(kernel, ...)(x.astype('{low}'))"
        else:
            why = f"inside a {closed}, which runs as written"
            example = f"autocast(inner, {policy.name!r}) in place of the function inner that the {closed} runs"
        found = found or (step, why, example)
    return found


def _find_bias_of_one(program: Jaxpr) -> Step | None:
    """Finds the addition of an argument, or of an array that is closed over, to one vector that a matmul made."""
    arguments, vectors = {*program.invars, *program.constvars}, set[Any]()
    for step in walk(program):
        if step.name == "constant":  # of a jitted function
            arguments.update(step.results)
            continue
        read = set(list_variables(step.operands))
        if step.name == "dot_general" and step.results[0].aval.ndim == 1:
            vectors.update(step.results)
        elif step.name == "add" and read & arguments and read & vectors:
            return step
        elif step.name == "link":
            arguments.update(step.results if read & arguments else ())
            vectors.update(step.results if read & vectors else ())
    return None


def _check_result(fun: Callable[..., Any], out: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(out, is_leaf=is_flax_object)[0]:
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex) or is_flax_object(leaf)):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"{getattr(fun, '__qualname__', fun)} returned {leaf!r}, a {type(leaf).__name__}"
                f"{where and f', at {where} of its result'}; autocast needs a tree of arrays. "
                "For example: return loss, {'accuracy': accuracy}."
            )


class WeightArray(NamedTuple):
    path: str
    array: Any
    quantization: str  # its format, or why it is left


class WeightArguments:
    """The named weights among the array leaves of a call.

    Leaves come from `(args, kwargs)`, or from one argument that holds both if nnx objects were lifted. The first
    `opened` arguments come from a partial, and have no number.
    """

    def __init__(self, weights: Weights | None, args: Args, kwargs: Kwargs, *, opened: int, lifted: bool):
        leaves = [(keys, leaf) for keys, leaf in jax.tree.leaves_with_path((args, kwargs)) if is_array(leaf)]
        self._arrays = [leaf for _, leaf in leaves]
        # 0 or 1 for `args` or `kwargs`, then the number or name of the argument, then the path inside.
        spell = lambda key: jax.tree_util.keystr((key,), simple=True)
        parts = [[*map(spell, keys[2 if lifted else 0 :])] for keys, _ in leaves]
        owners = [int(names[0]) - opened if which == "0" else names[0] for which, *names in parts]
        paths = ["/".join([str(own), *names[2:]]) for own, names in zip(owners, parts, strict=True)]
        self._paths = [path.removesuffix("/value") if lifted else path for path in paths]
        if callable(weights):
            self._groups = {"weights": self._select(lambda i: bool(weights(self._paths[i])))}
            return
        numbers = [weights] if isinstance(weights, int) else weights or ()
        self._groups = {f"weights={n}": self._select(lambda i, n=n: owners[i] == n) for n in numbers}

    def _select(self, is_named: Callable[[int], bool]) -> list[int]:
        return [i for i, leaf in enumerate(self._arrays) if is_floating(leaf) and is_named(i)]

    def find(self, rule: CastingRule, program: Jaxpr) -> tuple[list[bool], list[WeightArray]]:
        """Returns which arguments of the jaxpr are quantized weights, and a description of each named weight."""
        named = {i for group in self._groups.values() for i in group}
        names = [frozenset([i]) if i in named else NO_WEIGHT for i in range(len(self._arrays))]
        uses, _ = WeightFinder(rule.find_weight_product, rule.contexts, rule.enters).find(
            program, names, EquationPlace()
        )
        by_name = {i: [use for use in uses if i in use.names] for i in sorted(named)}
        for label, group in self._groups.items():
            self._check_reached(label, group, by_name)
        if any(is_backward(step.scope) for step in walk(program)):
            warn_user(f"autocast quantizes the forward pass alone, because {WHY_BACKWARD}.")
        tables = {i for i, own in by_name.items() if any(use.is_lookup for use in own)}
        rows = [
            WeightArray(self._paths[i], self._arrays[i], _describe_uses(own))
            for i, own in by_name.items()
            if self._arrays[i].ndim > 1
        ]
        return [i in named - tables for i in range(len(self._arrays))], rows

    def _check_reached(self, label: str, group: list[int], uses: dict[int, list[WeightUse]]) -> None:
        if any(use.is_product for i in group for use in uses[i]):
            return
        reasons = [f"{self._paths[i]!r} ({_describe_uses(uses[i]).removeprefix('left: ')})" for i in group[:3]]
        others = ", ".join(map(repr, self._paths[:3]))
        found = ", ".join(reasons) if reasons else f"it names no floating array; the first paths are {others}"
        raise ValueError(
            f"{label} reaches no matmul or convolution as a weight: {found}. For example: "
            "autocast(lambda params, x: x @ params['kernel'], 'int8_from_mixed_bfloat16', weights=0)."
        )


def _describe_uses(uses: list[WeightUse]) -> str:
    """Describes the format of a weight, or why it is left."""
    lookups = [use for use in uses if use.is_lookup]
    products = lookups or [use for use in uses if use.is_product] or uses
    texts = {f"left: {own}" if isinstance(own, str) else str(own): None for own in (use.product for use in products)}
    return "; ".join(texts) or "left: nothing reads it"
