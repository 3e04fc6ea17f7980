"""The public class `AutocastRules`: a user's changes to the tables of autocast."""

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from jax.extend.core import Primitive

from .._base import did_you_mean
from ..policy import Key, Policy, PolicyMap, PolicySpec
from . import _tables
from ._place import TREATMENTS, ScopeRow, find_target, parse_scope_rule
from ._tables import Precision

Residuals = Literal["promote", "half"]
_RESIDUALS = get_args(Residuals)


@dataclasses.dataclass(frozen=True, init=False)
class AutocastRules:
    """Changes the dtype in which autocast runs primitives, functions and scopes.

    Immutable and hashable. Functions with equal policies and rules share rewritten jaxprs. Float32 stands below for the
    full dtype, which is float64 of a policy with float64 parameters.

    Args:
      primitives: a primitive, or its name in `jax.lax`, and its class: `"low"` (compute dtype), `"full"` (float32, as
        the operations that follow), `"wide"` (float32 inside), `"infer"` (follows its inputs), `"clear"` (follows its
        inputs and only moves elements), `"compare"` or `"traced"` (unchanged).
      functions: the name of a function, and the treatment of the operations inside: `"full"` (float32 inside and out),
        `"wide"` (float32 inside, out what came in), `"narrow"` (float32 inside, compute dtype out), `"infer"`
        (operations of class full follow their inputs) or `"low"` (they run in the compute dtype). A dotted name stands
        for one function, as in `"jax.nn.softmax"`, or for all public functions of a module. A name without dots stands
        for any function of that name. The outermost function with a row wins.
      scopes: a pattern of `PolicyMap` for paths of modules or `jax.named_scope`s, or a module type, and a policy, a
        dtype, or a treatment. The first row that covers an operation wins. A `PolicyMap` comes after these rows.
      residuals: `"promote"`: as in JAX, half precision and a float32 array that the function was given make float32, so
        that a residual stream of given values stays float32. `"half"`: such arrays are rounded to half precision. The
        audit names each line where this happens.
      backward: the same for backward passes inside the function, where it wins over `scopes`; a policy, dtype or
        treatment alone is for all of them. The backward pass of `grad(autocast(f))` is outside: write
        `autocast(grad(f))`.

    Raises:
      ValueError: a name does not belong to a primitive, function, class or policy.

    >>> import jmp_policy as jmp
    >>> rules = jmp.AutocastRules(primitives={"exp": "low"}, functions={"softmax": "full"}, scopes={"head": "float32"})
    >>> rules.primitives, rules.functions, rules.residuals
    ((('exp', 'low'),), (('softmax', 'full'),), 'promote')
    """

    primitives: tuple[tuple[str, str], ...]
    functions: tuple[tuple[str, str], ...]
    scopes: tuple[ScopeRow, ...]
    backward: tuple[ScopeRow, ...]
    residuals: Residuals

    def __init__(
        self,
        *,
        primitives: Mapping[str | Primitive, str] | None = None,
        functions: Mapping[str, str] | None = None,
        scopes: Mapping[Key, PolicySpec] | None = None,
        backward: Mapping[Key, PolicySpec] | PolicySpec = None,
        residuals: Residuals = "promote",
    ):
        if residuals not in _RESIDUALS:
            raise ValueError(
                f"Unknown residuals {residuals!r} of AutocastRules. {did_you_mean(residuals, _RESIDUALS)} "
                "For example: residuals='half'."
            )
        object.__setattr__(self, "residuals", residuals)
        everywhere = backward if isinstance(backward, Mapping) or backward is None else {"": backward}
        rows = {
            "primitives": [_read_primitive_row(*row) for row in (primitives or {}).items()],
            "functions": [_read_function_row(*row) for row in (functions or {}).items()],
            "scopes": _read_scope_rows(scopes or {}, "scopes"),
            "backward": _read_scope_rows(everywhere or {}, "backward"),
        }
        for name, value in rows.items():
            object.__setattr__(self, name, tuple(value))


def list_rule_policies(rules: AutocastRules) -> list[Policy]:
    """Returns the policies of the rules by scope."""
    return [rule for _, rule in (*rules.scopes, *rules.backward) if isinstance(rule, Policy)]


def _read_primitive_row(primitive: Any, precision: Any) -> tuple[str, str]:
    known = {name for precision in Precision for name in getattr(_tables, precision.name)}
    name = primitive.name if isinstance(primitive, Primitive) else primitive
    if not isinstance(primitive, Primitive) and name not in known:
        raise ValueError(
            f"{name!r}, in primitives of AutocastRules, is not a primitive of the tables. "
            f"{_suggest(name, known)} For example: primitives={{'exp': 'low'}}."
        )
    classes = [precision.name.lower() for precision in Precision]
    if precision not in classes:
        raise ValueError(
            f"Unknown class {precision!r} for the primitive {name!r}. {did_you_mean(precision, classes)} "
            f"For example: primitives={{{name!r}: 'full'}}."
        )
    return name, precision


def _read_function_row(name: Any, treatment: Any) -> tuple[str, str]:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"{name!r}, in functions of AutocastRules, is not the name of a function. "
            "For example: functions={'jax.nn.softmax': 'full'}."
        )
    if "." in name and not _may_exist(name):
        raise ValueError(
            f"{name!r}, in functions of AutocastRules, names no function. {_suggest(name, _tables.FUNCTIONS)} "
            "For example: functions={'jax.nn.softmax': 'full'}."
        )
    if treatment not in TREATMENTS:
        raise ValueError(
            f"Unknown treatment {treatment!r} of the function {name!r}. {did_you_mean(treatment, TREATMENTS)} "
            f"For example: functions={{{name!r}: 'full'}}."
        )
    return name, treatment


def _read_scope_rows(rows: Mapping[Any, PolicySpec], field: str) -> list[ScopeRow]:
    PolicyMap([(key, "float32") for key in rows])  # raises for a bad key
    return [(key, parse_scope_rule(spec, f"for {key!r} in {field} of AutocastRules")) for key, spec in rows.items()]


def _may_exist(name: str) -> bool:
    """True if a dotted name is a function or module, or cannot be checked because its package is not loaded."""
    package = name.partition(".")[0]
    if package not in sys.modules:
        return importlib.util.find_spec(package) is not None
    target = find_target(name)
    return callable(target) or inspect.ismodule(target)


def _suggest(name: object, known: Iterable[str]) -> str:
    """Suggests the nearest of many names, without a list of all."""
    sentence = did_you_mean(name, known)
    return sentence if sentence.startswith("Did") else "None is like it."
