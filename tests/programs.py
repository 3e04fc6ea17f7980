"""What a compiled program costs, in counts that are the same on every run."""

import collections
import re
from typing import Any, NamedTuple

import jax

from benchmarks._compiled import figures
from benchmarks._targets import cpu

# `walk` reads a jaxpr with all that it calls: tests take it from here, so that one file imports it from inside.
from jmp_policy._jaxpr import walk as walk


class Cost(NamedTuple):
    operations: int  # StableHLO operations, before any optimization
    flops: float
    bytes: float
    temporaries: int  # bytes


def cost(fun: Any, *args: Any) -> Cost:
    """The cost on a CPU, whatever the tests compute on."""
    lowered = jax.jit(fun).lower(*cpu().put(args))
    found = figures(lowered.compile(compiler_options=cpu().options))
    return Cost(sum(operations(lowered).values()), found.flops, found.bytes_accessed, int(found.temporaries))


def operations(lowered: Any) -> collections.Counter:
    """How often each StableHLO operation stands in a lowered program."""
    return collections.Counter(re.findall(r"\bstablehlo\.(\w+)", lowered.as_text()))


def assert_costs_no_more(ours: Cost, by_hand: Cost) -> None:
    for name, mine, theirs in zip(Cost._fields, ours, by_hand, strict=True):
        assert mine <= theirs, f"{name}: {mine} against {theirs} by hand"


def program_text(lowered: Any) -> str:
    """The StableHLO of a lowered program, equal private functions being one.

    JAX shares the functions of `jnp.where` and its like among their callers within one context only: a policy's is
    another one than that in which the backward pass of a custom derivative is traced.
    """
    text = lowered.as_text()
    while (merged := _without_one_repeated_function(text)) != text:
        text = merged
    names = {name: f"@{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"@\w+", text)))}
    return re.sub(r"@\w+", lambda found: names[found.group()], text)


def _without_one_repeated_function(text: str) -> str:
    names: dict[str, str] = {}
    for function in re.finditer(r"  func\.func private (@\w+)(.*?\n  }\n)", text, re.DOTALL):
        name, body = function.groups()
        if (first := names.setdefault(body, name)) != name:
            return re.sub(rf"{name}\b", first, text.replace(function.group(), ""))
    return text


def trace(fun: Any) -> Any:
    """As `jax.make_jaxpr`, without the call that autocast makes of a program inside `jit`."""

    def make(*args: Any) -> Any:
        program = jax.make_jaxpr(fun)(*args)
        is_call = [eqn.primitive.name for eqn in program.eqns] == ["jit"]
        return program.eqns[0].params["jaxpr"] if is_call else program

    return make


def products(program: Any) -> list[tuple[str, str]]:
    """The name stack and the dtype of each matrix product of a traced program."""
    steps = [step for step in walk(program.jaxpr) if step.name == "dot_general"]
    return [(step.scope, str(step.operands[0].aval.dtype)) for step in steps]
