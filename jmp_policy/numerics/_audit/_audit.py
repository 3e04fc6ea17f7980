"""`numerics.audit`: traces a function, counts its operations, and checks each step."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Var

from ..._base import TRACING, Results
from ..._jaxpr import (
    HALF,
    MATMULS,
    ModulePaths,
    Register,
    Step,
    count_bytes,
    count_flops,
    find_line,
    find_origin,
    find_running_line,
    float_dtype,
    is_backward,
    is_float,
    multiplies_only,
    trace,
    walk,
)
from .._ends import check_function
from ._checks import Suspicion, check, suspect_half_gradient
from ._facts import ARGUMENT, OWN, ValueFacts, derive_facts, describe_constant, find_fact
from ._report import FINDINGS, REMEDIES, AuditReport, AuditRow, Finding, Matmul


def audit(fun: Callable[..., Any]) -> Callable[..., AuditReport]:
    """Reports the dtype of each operation of a function, and where it is likely to lose precision or time.

    The function is traced and not run: `jax.ShapeDtypeStruct`s suffice as arguments, and nothing is allocated. The
    report is of the jaxpr, before XLA fuses and rewrites it, with the sub-jaxprs of jit, scan, cond, remat, shard_map
    and custom rules. The forward and the backward pass of a train step are separate rows. The audit does not see inside
    the user's kernels (Pallas, FFI, callbacks). A `while` loop counts as one iteration, each branch of a `cond` counts
    once, and a `lax.platform_dependent` counts the branch of this process's platform. `numerics.FINDINGS` describes all
    findings. The sums that a backward pass makes where the forward pass broadcast are in the table, and not among the
    findings.

    Args:
      fun: any function of trees of arrays. The audit ignores outputs other than arrays.

    Returns:
      A function of the same arguments that returns an `AuditReport`: a table when printed or shown in a notebook,
      `.rows`, `.findings` and `.to_dict()` for programs, `.assert_matmuls_in` and `.assert_no` for tests.

    Raises:
      TypeError: `fun` is not a function. Errors of the function itself propagate.

    Source: NVIDIA published a speed-up over a baseline that ran in float32 unnoticed (TransformerEngine issue 2976).

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss(w, x):
    ...     logits = x @ w.astype(jnp.bfloat16)
    ...     return -jnp.mean(jax.nn.log_softmax(logits).astype(jnp.float32))
    >>> report = jmp.numerics.audit(jax.grad(loss))(jnp.ones((3, 4)), jax.ShapeDtypeStruct((8, 3), jnp.bfloat16))
    >>> [(row.dtype, row.backward, row.flops) for row in report.rows if row.operation == "dot_general"]
    [('bfloat16', False, 192), ('bfloat16', True, 192)]
    >>> [finding.id for finding in report.findings]
    ['half-logits']
    >>> report.assert_matmuls_in("bfloat16")
    """
    check_function(fun, "audit")

    @functools.wraps(fun)
    def run_audit(*args: Any, **kwargs: Any) -> AuditReport:
        register, overflows = Register(), list[tuple[str, str]]()

        def notice(kind: str, flag: int) -> None:
            overflows.append((find_running_line(), str(source_info_util.current_name_stack())))

        traceable = register.watch(Results().take_arrays(fun))
        with TRACING(register.token), np.errstate(over="call", call=notice):  # of constants that become infinite
            program = trace(traceable, args, kwargs).program
        return _Inspector(ModulePaths(register.list_modules())).inspect(program, overflows)

    return run_audit


class _Inspector:
    """Visits the steps of a jaxpr in order."""

    def __init__(self, paths: ModulePaths):
        self._facts: dict[Var, ValueFacts] = {}
        self._has_half = False  # of any value so far
        self._rows: dict[tuple, list[int]] = {}
        self._matmuls: dict[tuple, list[int]] = {}
        self._findings: dict[tuple, list[Any]] = {}
        self._loops: dict[str, None] = {}
        self._find_place = functools.cache(lambda scope: (paths.read_stack(scope), is_backward(scope)))

    def inspect(self, program: ClosedJaxpr, overflows: Iterable[tuple[str, str]]) -> AuditReport:
        """Returns the report of a jaxpr. `overflows`: lines and name stacks where a constant became infinite."""
        body = program.jaxpr
        self._facts.update((var, ValueFacts(given=ARGUMENT if is_float(var) else OWN)) for var in body.invars)
        self._facts.update(zip(body.constvars, map(describe_constant, program.consts), strict=False))
        self._has_half = any(float_dtype(var) in HALF for var in (*body.invars, *body.constvars))
        for source, scope in overflows:
            key = "infinite-constant", source, *self._find_place(scope)
            self._findings.setdefault(key, ["when it was cast", (), 0])[2] += 1
        for step in walk(body, live_only=True):
            self._see(step)
        for atom in body.outvars:  # which may be gradients
            fact = find_fact(atom, self._facts)
            if fact.summed is not None:
                self._suspect(suspect_half_gradient(fact, atom), backward=True)
        rows = (AuditRow(*key, *counts) for key, counts in self._rows.items())
        matmuls = (Matmul(*key, *counts) for key, counts in self._matmuls.items())
        findings = (
            Finding(name, f"{FINDINGS[name]} ({detail}); {REMEDIES[name]}", source, path, dtypes, backward, count)
            for (name, source, path, backward), (detail, dtypes, count) in self._findings.items()
            if name != "float32-matmul" or self._has_half  # a program in float32 throughout is meant to be
        )
        return AuditReport(tuple(rows), tuple(findings), tuple(matmuls), tuple(self._loops))

    def _see(self, step: Step) -> None:
        if step.name == "constant":
            self._facts[step.results[0]] = describe_constant(step.operands[0])
            return
        # Facts of the operands decide the findings here, and the facts of the results.
        backward = self._find_place(step.scope)[1]
        facts = [find_fact(atom, self._facts) for atom in step.operands]
        for suspicion in check(step, facts, backward):
            self._suspect(suspicion, backward)
        self._facts.update(zip(step.results, derive_facts(step, facts, backward), strict=True))
        # A link has no costs: it is not an operation. A link of a `while` means an unknown trip count.
        if step.name in ("link", "carry"):
            if step.eqn.primitive.name == "while":
                self._loops.setdefault(find_line(find_origin(step)))
            return
        self._has_half = self._has_half or any(float_dtype(var) in HALF for var in step.results)
        if step.trips:
            self._count(step)

    def _suspect(self, suspicion: Suspicion, backward: bool) -> None:
        if suspicion.step.trips:
            path = self._find_place(suspicion.step.scope)[0]
            key = suspicion.id, find_line(find_origin(suspicion.step)), path, backward
            dtypes = tuple(map(str, dict.fromkeys(suspicion.dtypes)))
            self._findings.setdefault(key, [suspicion.detail, dtypes, 0])[2] += 1

    def _count(self, step: Step) -> None:
        path, backward = self._find_place(step.scope)
        work, dtype = step.trips * count_flops(step.eqn), _name_dtype(step)
        amounts = step.trips, work, step.trips * count_bytes(step.eqn)
        _add_amounts(self._rows, (path, step.name, dtype, backward), *amounts)
        if step.name in MATMULS and not multiplies_only(step.eqn):
            dtypes = tuple(dict.fromkeys(str(float_dtype(atom) or atom.aval.dtype) for atom in step.operands[:2]))
            matmul = step.name, dtypes, dtype, find_line(find_origin(step)), path, backward
            _add_amounts(self._matmuls, matmul, step.trips, work)


def _add_amounts(table: dict[tuple, list[int]], key: tuple, *amounts: int) -> None:
    counts = table.setdefault(key, [0] * len(amounts))
    for i, amount in enumerate(amounts):
        counts[i] += amount


def _name_dtype(step: Step) -> str:
    """Returns the widest floating dtype that a step reads, or else makes."""
    if step.name == "convert_element_type":
        return f"{step.operands[0].aval.dtype}->{step.results[0].aval.dtype}"
    for atoms in (step.operands, step.results):
        floats = [dtype for dtype in map(float_dtype, atoms) if dtype is not None]
        if floats:
            return str(max(floats, key=lambda dtype: dtype.itemsize))
    return next((str(dtype) for atom in step.results if (dtype := getattr(atom.aval, "dtype", None))), "")
