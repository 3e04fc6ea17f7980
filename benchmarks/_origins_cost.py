"""Cost of `numerics.first_nonfinite` while results are finite: the example's GPT gradient, with and without it.

XLA counts both branches of a conditional, and a finite step runs one. So its bytes are measured on the same program
with another branch in place of the search, which returns constants. `compare_entries` tells whether that is the same
step: the instructions outside of the conditional must be the same.
"""

import collections
import functools
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

import jmp_policy as jmp
from benchmarks._compiled import figures
from benchmarks._programs import Program
from benchmarks._targets import Target
from benchmarks.architectures._programs import shapes
from benchmarks.autocast import gpt
from benchmarks.many_modules import seconds
from examples.gpt.model import GPTConfig
from jmp_policy.numerics import NonfiniteOrigin, first_nonfinite
from jmp_policy.numerics._first_nonfinite import search_nonfinite

POLICIES = {"float32": "float32", "float16, loss scale": "mixed_float16"}


class Cost(NamedTuple):
    """Costs of a step with a search over the same step without.

    Attributes:
      bytes: that it accesses while all is finite.
      temporaries: of all, the search included: memory is set aside before it is known whether it is needed.
      peak: the most memory in use at once, arguments and results included.
      compile_time: in process time.
      trace_time: likewise.
    """

    bytes: float
    temporaries: float
    peak: float
    compile_time: float
    trace_time: float


class Steps(NamedTuple):
    """Three programs of the same arguments, flat.

    Attributes:
      plain: loss and gradients.
      searching: the same with `first_nonfinite` around it.
      good: the same with another branch in place of the search.
    """

    plain: Program
    searching: Program
    good: Program


def gradient(config: GPTConfig, policy: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The loss and the gradients of the example's GPT under a policy, and its arguments, of parameters the shapes."""
    architecture = gpt(config)
    model = architecture.with_policy(jmp.get_policy(policy))

    def loss_and_grads(params: Any, variables: Any, batch: Any, scale: jmp.LossScale) -> Any:
        loss_fn = lambda params: model.loss(params, variables, batch)[0]
        return jmp.value_and_grad(loss_fn, loss_scale=scale)(params)

    batch = jax.tree.map(lambda tokens: jnp.asarray(tokens, jnp.int32), architecture.batch)
    return loss_and_grads, (*shapes(model), batch, jmp.get_policy(policy).loss_scale())


def make_steps(fun: Callable[..., Any], args: tuple[Any, ...]) -> Steps:
    """The three programs of a function."""
    leaves, structure = jax.tree.flatten(args)
    flat = lambda *leaves: fun(*jax.tree.unflatten(structure, leaves))
    searching = first_nonfinite(flat)
    good = jaxpr_as_fun(leave_out_search(jax.make_jaxpr(searching)(*leaves)))
    return Steps(*(Program(jax.jit(step), tuple(leaves)) for step in (flat, searching, good)))


def measure_search(fun: Callable[..., Any], args: tuple[Any, ...], target: Target) -> tuple[float, float]:
    """The compile time and the temporaries of the program of `optim.find_origin`, over those of a step without it."""
    leaves, structure = jax.tree.flatten(args)
    flat = lambda *leaves: fun(*jax.tree.unflatten(structure, leaves))
    search = lambda *leaves: search_nonfinite(flat, None, checks=False)(*leaves)[1]
    options = {"xla_backend_optimization_level": 0} if target.name == "CPU" else {}
    plain, searching = Program(jax.jit(flat), tuple(leaves)), Program(jax.jit(search), tuple(leaves))
    (one, taken), (other, its) = _compile(plain, target), _compile(searching, target, options)
    return its / taken, figures(other).temporaries / figures(one).temporaries


def leave_out_search(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, in which the branch that would search returns constants. It has no other branches."""
    equations = [_leave_out(eqn) if eqn.primitive.name == "cond" else eqn for eqn in program.eqns]
    assert sum(new is not old for new, old in zip(equations, program.eqns, strict=True)) == 1
    return ClosedJaxpr(program.jaxpr.replace(eqns=equations), program.consts)


def measure(steps: Steps, target: Target, repeats: int) -> Cost:
    """Returns the costs of the steps on a target, and asserts that the finite step is the same program."""
    compiled, taken = zip(*(_compile(step, target) for step in steps), strict=True)
    difference = compare_entries(*(each.as_text() for each in compiled[1:]))
    assert not difference, difference
    plain, searching, good = map(figures, compiled)
    over = searching.over(plain)
    traces = [functools.partial(_trace, step) for step in steps[:2]]
    plain_trace, trace = seconds(traces, repeats)
    return Cost(good.over(plain).bytes_accessed, over.temporaries, over.peak, taken[1] / taken[0], trace / plain_trace)


def compare_entries(one: str, other: str) -> dict[str, int]:
    """Compares the entries of two optimized HLO modules: instructions that one has more or fewer of, by their results.

    Compares floating and boolean arrays. Scalars and the integers of a `NonfiniteOrigin` may be fused with ops inside
    the conditional, or moved out of it, and tuples move nothing.
    """
    instructions = [_INSTRUCTION.findall(_ENTRY.findall(text)[0]) for text in (one, other)]
    counts = [collections.Counter(name for name in found if _DIMENSION.search(name)) for found in instructions]
    both = counts[0] | counts[1]
    return {name: counts[0][name] - counts[1][name] for name in both if counts[0][name] != counts[1][name]}


def check_bits(fun: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Runs a good step both ways, and returns how many bytes of its results differ."""
    (out, origin), plain = jax.jit(first_nonfinite(fun))(*args), jax.jit(fun)(*args)
    assert not origin.found, origin
    mine, its = (b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)) for tree in (out, plain))
    return sum(a != b for a, b in zip(mine, its, strict=True))


def _compile(step: Program, target: Target, options: dict[str, Any] | None = None) -> tuple[Any, float]:
    jax.clear_caches()
    lowered = step.step.lower(*target.put(step.args))
    start = time.process_time()
    compiled = lowered.compile(compiler_options=(options or {}) if target.name == "CPU" else target.options)
    return compiled, time.process_time() - start


def _trace(step: Program) -> None:
    jax.make_jaxpr(lambda *args: step.step.__wrapped__(*args))(*step.args)  # JAX would not trace one function twice


def _leave_out(cond: JaxprEqn) -> JaxprEqn:
    def return_constants(*_: Any) -> tuple[jax.Array, ...]:
        # Constants that differ from the other branch, or XLA removes the conditional.
        return tuple(NonfiniteOrigin.empty()._replace(status=jnp.int32(2)))

    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in cond.invars[1:]]  # pyright: ignore
    branches = (jax.make_jaxpr(return_constants)(*avals), *cond.params["branches"][1:])
    return cond.replace(params={**cond.params, "branches": branches})


_ENTRY = re.compile(r"^ENTRY [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(?(?:pred|b?f\d+)\[.*? (?!tuple\()[a-z][\w\-]*)\(", re.MULTILINE
)
_DIMENSION = re.compile(r"\[\d")
