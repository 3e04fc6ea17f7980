"""`numerics.audit`: traces a function, counts its operations, and checks each step for problems."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._base import hide_frames, keeps_small_updates
from .._jaxpr import (
    AUTOCAST,
    DEVICE_SUMS,
    HALF,
    HALF_SUMS,
    MATMULS,
    MOVING,
    ROUNDED,
    Atom,
    ModulePaths,
    Register,
    Step,
    check_function,
    count_bytes,
    count_flops,
    count_products,
    find_half_sum,
    find_line,
    find_origin,
    find_running_line,
    float_dtype,
    is_backward,
    is_called_by_library,
    is_called_by_loss,
    is_float,
    is_traced_in_loss,
    keep_changes,
    list_callers,
    list_functions,
    multiplies_only,
    trace_call,
    walk,
)
from ._audit_facts import (
    ARGUMENT,
    CONSTANT,
    FLOAT32,
    FLOAT64,
    OWN,
    Sign,
    ValueFacts,
    count_uses,
    derive_facts,
    describe_constant,
    find_fact,
    is_lower,
)
from ._audit_report import FINDINGS, REMEDIES, AuditReport, AuditRow, Finding, Matmul


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
      fun: any function of trees of arrays. The audit ignores outputs other than arrays. Changes of nnx modules among
        the arguments count as outputs.

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

    @hide_frames
    @functools.wraps(fun)
    def run_audit(*args: Any, **kwargs: Any) -> AuditReport:
        register, overflows = Register(), list[tuple[str, str]]()

        def notice(kind: str, flag: int) -> None:
            overflows.append((find_running_line(), str(source_info_util.current_name_stack())))

        with np.errstate(over="call", call=notice):  # of constants that become infinite
            call = trace_call("audit", register, register.watch(keep_changes(fun)), args, kwargs)
        constants = map(describe_constant, call.program.consts)
        inspector = _Inspector(ModulePaths(call.modules).read_stack, keeps_small_updates((args, kwargs)))
        return inspector.inspect(call.program.jaxpr, constants, overflows)

    return run_audit


def find_in_program(program: Jaxpr, read_path: Callable[[str], str]) -> tuple[Finding, ...]:
    """Returns the findings of a jaxpr whose constants are not known. `read_path` reads a path from a name stack."""
    constants = (ValueFacts(given=CONSTANT) for _ in program.constvars)
    return _Inspector(read_path).inspect(program, constants, ()).findings


class _Inspector:
    """Visits the steps of a jaxpr in order."""

    def __init__(self, read_path: Callable[[str], str], keeps_updates: bool = False):
        self._keeps_updates = keeps_updates  # of half-precision parameters
        self._facts: dict[Var, ValueFacts] = {}
        self._has_half = False  # of any value so far
        self._rows: dict[tuple, list[int]] = {}
        self._matmuls: dict[tuple, list[int]] = {}
        self._findings: dict[tuple, list[Any]] = {}
        self._loops: dict[str, None] = {}
        self._find_place = functools.cache(lambda scope: (read_path(scope), is_backward(scope)))

    def inspect(
        self, body: Jaxpr, constants: Iterable[ValueFacts], overflows: Iterable[tuple[str, str]]
    ) -> AuditReport:
        """Returns the report of a jaxpr. `overflows`: lines and name stacks where a constant became infinite."""
        self._facts.update((var, ValueFacts(given=ARGUMENT if is_float(var) else OWN)) for var in body.invars)
        self._facts.update(zip(body.constvars, constants, strict=False))
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
            if fact.updated is not None and (dtype := float_dtype(atom)) in HALF and not self._keeps_updates:
                self._suspect(Suspicion("half-update", fact.updated, f"in {dtype}", (dtype,)), backward=False)
        rows = (AuditRow(*key, *counts) for key, counts in self._rows.items())
        matmuls = (Matmul(*key[:-1], *counts, precision=key[-1]) for key, counts in self._matmuls.items())
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

    def _suspect(self, suspicion: "Suspicion", backward: bool) -> None:
        if suspicion.step.trips:
            path = self._find_place(suspicion.step.scope)[0]
            key = suspicion.id, find_line(find_origin(suspicion.step)), path, backward
            dtypes = tuple(map(str, dict.fromkeys(suspicion.dtypes)))
            self._findings.setdefault(key, [suspicion.detail, dtypes, 0])[2] += 1

    def _count(self, step: Step) -> None:
        path, backward = self._find_place(step.scope)
        work, dtype = step.trips * count_flops(step.eqn), _name_dtypes(step)
        amounts = step.trips, work, step.trips * count_bytes(step.eqn)
        _add_amounts(self._rows, (path, step.name, dtype, backward), *amounts)
        if step.name in MATMULS and not multiplies_only(step.eqn):
            dtypes = tuple(dict.fromkeys(str(float_dtype(atom) or atom.aval.dtype) for atom in step.operands[:2]))
            matmul = step.name, dtypes, dtype, find_line(find_origin(step)), path, backward, read_precision(step.eqn)
            _add_amounts(self._matmuls, matmul, step.trips, work)


def _add_amounts(table: dict[tuple, list[int]], key: tuple, *amounts: int) -> None:
    counts = table.setdefault(key, [0] * len(amounts))
    for i, amount in enumerate(amounts):
        counts[i] += amount


def read_precision(eqn: JaxprEqn) -> str | None:
    """Returns the precision of a matmul as written; None for the default, which the platform decides."""
    given = eqn.params.get("precision")
    if isinstance(given, lax.DotAlgorithm):
        return _name_algorithm(given)
    names = dict.fromkeys(getattr(one, "name", str(one)) for one in (given if isinstance(given, tuple) else (given,)))
    return None if names.keys() <= {"None", "DEFAULT"} else ", ".join(names)


def _name_algorithm(algorithm: lax.DotAlgorithm) -> str:
    """Names an algorithm like a `DotAlgorithmPreset`, such as `"BF16_BF16_F32_X3"`."""
    read = (algorithm.lhs_precision_type, algorithm.rhs_precision_type, algorithm.accumulation_type)
    names = [str(dtype if dtype == "tf32" else np.dtype(dtype)) for dtype in read]
    passes = algorithm.num_primitive_operations
    short = "_".join(name.upper().replace("BFLOAT", "BF").replace("FLOAT", "F") for name in names)
    return short + (f"_X{passes}" if passes > 1 else "")


def _name_dtypes(step: Step) -> str:
    """Returns the widest floating dtype that a step reads, or else makes."""
    if step.name == "convert_element_type":
        return f"{step.operands[0].aval.dtype}->{step.results[0].aval.dtype}"
    for atoms in (step.operands, step.results):
        floats = [dtype for dtype in map(float_dtype, atoms) if dtype is not None]
        if floats:
            return str(max(floats, key=lambda dtype: dtype.itemsize))
    return next((str(dtype) for atom in step.results if (dtype := getattr(atom.aval, "dtype", None))), "")


class Suspicion(NamedTuple):
    """A finding before it is described: its name, the step, a detail, and the dtypes that take part."""

    id: str
    step: Step
    detail: str
    dtypes: tuple[Any, ...]


Check = Callable[[Step, Sequence[ValueFacts], bool], Iterator[Suspicion]]

FLOAT16 = np.dtype(np.float16)
_SMALLEST, _LARGEST = 2.0**-24, 65504.0  # of float16: a constant beyond is better off in float32


def check(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    """Yields the suspicions of a step. JAX writes the backward pass, so there only findings that the user can fix."""
    if not backward:
        # Gradients that were summed in half precision are found at their first use outside the backward pass.
        pairs = zip(step.operands, facts, strict=True)
        yield from (suspect_half_gradient(fact, atom) for atom, fact in pairs if fact.summed is not None)
        yield from _check_promotion(step, facts)
        yield from _check_loss(step)
    if step.name in CHECKS:
        yield from CHECKS[step.name](step, facts, backward)


def suspect_half_gradient(fact: ValueFacts, atom: Atom) -> Suspicion:
    """Suspects a gradient summed in half precision, at the cast of its weight if there is one."""
    summed: Any = fact.summed
    dtype = float_dtype(summed.results[0])
    uses = "the rows that were looked up" if summed.name.startswith("scatter") else "several uses"
    return Suspicion("half-gradient", fact.widening or summed, f"over {uses}, in {dtype}", (dtype, float_dtype(atom)))


def _check_promotion(step: Step, facts: Sequence[ValueFacts]) -> Iterator[Suspicion]:
    """Finds a narrow operand that the same call upcast: strict dtype promotion would refuse it."""
    if step.name not in _PROMOTING or AUTOCAST in step.scope:
        return
    pairs = [*zip(step.operands, facts, strict=True)]
    widened = [fact.widening for fact in facts if fact.widening is not None and _is_one_call(fact.widening, step)]
    halves = sorted({str(low) for first in widened if (low := float_dtype(first.operands[0])) in HALF})
    if len(halves) > 1 and not is_called_by_library(find_origin(step)):
        wide: Any = float_dtype(step.results[0])
        yield Suspicion("accidental-promotion", step, f"{' and '.join(halves)} become {wide}", (FLOAT16, wide))
        return
    # Which wide operand of the call could as well be narrow?
    given = [(float_dtype(atom), fact.given) for atom, fact in pairs if _is_needlessly_wide(atom, fact)]
    if not given:
        return
    # Which operand was narrow, until this very call widened it?
    wide, origin = given[0]
    for atom, fact in pairs:
        low = float_dtype(atom) if fact.widening is None else float_dtype(fact.widening.operands[0])
        if is_lower(low, wide) and (fact.widening is None or _is_one_call(fact.widening, step)):
            if is_called_by_library(find_origin(step)):  # a library layer mixes dtypes on purpose
                return
            yield Suspicion("accidental-promotion", step, f"{low} becomes {wide} through {origin}", (low, wide))
            return


def _is_needlessly_wide(atom: Atom, fact: ValueFacts) -> bool:
    """True if an operand was given or made as float32 or float64, and half precision could hold it."""
    if float_dtype(atom) not in {FLOAT32, FLOAT64} or not fact.given or fact.widening is not None:
        return False
    return not isinstance(atom, Literal) or atom.val == 0 or _SMALLEST <= abs(atom.val) <= _LARGEST


def _is_one_call(first: Step, second: Step) -> bool:
    if second.name in ("concatenate", "stack"):  # their functions of jax.numpy cast in another line of JAX
        return list_callers(find_origin(first)) == list_callers(find_origin(second))
    return find_origin(first).source_info.traceback == find_origin(second).source_info.traceback


def _check_loss(step: Step) -> Iterator[Suspicion]:
    """Anything that a loss of optax computes in half: errors, margins and squares as well as logarithms."""
    dtype = next((dtype for dtype in map(float_dtype, step.operands) if dtype in HALF), None)
    if dtype is None or step.name in MOVING or step.name == "convert_element_type":
        return
    # `smooth_labels` prepares the targets of a loss.
    if is_called_by_loss(find_origin(step)) and "smooth_labels" not in list_functions(step):
        yield Suspicion("half-logits", step, f"in {dtype}", (dtype,))


def _check_matmul(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    dtypes = tuple(dict.fromkeys(float_dtype(atom) for atom in step.operands[:2]))
    if FLOAT32 in dtypes and count_products(step.eqn) > 1 and "force_full_precision" not in step.scope:
        names = " and ".join(map(str, dtypes))
        yield Suspicion("float32-matmul", step, f"reads {names}", dtypes)


def _check_reduction(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    if (backward and step.name != _OF_MAX_POOLING) or (step.name == "reduce_sum" and facts[0].made == "truth"):
        return
    found = find_half_sum(step)
    if found is not None:
        name = "half-cumulative" if step.name.startswith("cum") else "half-reduction"
        yield Suspicion(name, step, str(found), (found.dtype,))


_OF_MAX_POOLING = "select_and_scatter_add"
"""A sum that only backward passes take. The forward operation that it belongs to sums nothing."""


def _check_conversion(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    source, target = float_dtype(step.operands[0]), float_dtype(step.results[0])
    if source in HALF and not backward:
        yield from _check_integer(step, facts[0])
    if source is None or not (target in HALF or is_lower(target, source)) or source == target:
        return
    if ROUNDED in step.scope and not backward:
        yield Suspicion("rounded-by-rule", step, f"from {source} to {target}", (source, target))
    first = None if backward else facts[0].widening
    is_trip = first is not None and float_dtype(first.operands[0]) == target and not is_backward(first.scope)
    # Two casts that somebody wrote. A function of jax.numpy has its reasons for both, as has a transposed cast.
    if first is not None and is_trip and not _is_one_call(first, step):
        yield Suspicion("round-trip-cast", step, f"from {target} to {source} and back", (target, source))
    for constant in facts[0].constants:
        wide = np.asarray(constant).astype(np.float64)
        with np.errstate(over="ignore"):
            rounded = wide.astype(np.float32).astype(target).astype(np.float64)
        infinite = wide[np.isfinite(wide) & np.isinf(rounded)]
        if infinite.size:
            largest = infinite[np.argmax(np.abs(infinite))]
            yield Suspicion("infinite-constant", step, f"{largest:.4g} in {target}", (source, target))
            return


def _check_integer(step: Step, fact: ValueFacts) -> Iterator[Suspicion]:
    """Finds half precision that becomes an integer: a token, an index or a count. Neither masks nor 8 bits round."""
    source, made = float_dtype(step.operands[0]), step.results[0].aval.dtype
    if jnp.issubdtype(made, jnp.integer) and made.itemsize > 1 and fact.made != "truth":
        last = 2 ** (jnp.finfo(source).nmant + 1)
        yield Suspicion("rounded-integer", step, f"{source} skips integers above {last}", (source,))


def _check_exponential(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    is_small = Sign.NOT_POSITIVE in facts[0].sign and step.name != "pow"  # at most 1, as in the derivative of gelu
    if float_dtype(step.operands[0]) == FLOAT16 and not backward and not is_small:
        functions = list_functions(step)
        if functions & _BOUNDED:
            return
        name = "float16-softmax" if functions & {"softmax", "_softmax"} else "float16-exp"
        yield Suspicion(name, step, step.name, (FLOAT16,))


_BOUNDED = frozenset(("elu", "log_softmax", "logaddexp", "logaddexp2", "logsumexp", "softplus"))
"""Functions of JAX that take exponentials of nothing positive: of a difference from the largest, or of one branch."""


def _check_logarithm(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    dtype, fact = float_dtype(step.operands[0]), facts[0]
    if backward or dtype is None:
        return
    narrowest: Any = dtype if fact.narrowest is None or dtype in HALF else fact.narrowest
    if dtype in HALF and list_functions(step) & {"gumbel", "_gumbel"}:  # the noise of `jax.random.categorical`
        yield Suspicion("half-sampling", step, f"Gumbel noise in {dtype}", (dtype,))
        return
    is_in_loss = bool(list_functions(step) & _LOSSES) or is_traced_in_loss(find_origin(step))
    if narrowest in HALF and fact.made in ("softmax", "sigmoid"):
        yield Suspicion(f"log-of-{fact.made}", step, f"rounded to {narrowest}", (narrowest, dtype))
    elif narrowest in HALF and (fact.made == "sum of exp" or is_in_loss):
        yield Suspicion("half-logits", step, f"in {narrowest}", (narrowest, dtype))
    elif dtype == FLOAT16 and not (step.name == "log1p" and Sign.NOT_NEGATIVE in fact.sign):  # as in softplus
        yield Suspicion("float16-log", step, step.name, (FLOAT16,))


_LOSSES = frozenset(("log_softmax", "logsumexp", "log_sigmoid"))


def _check_root(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    if facts[0].made == "sum of squares" and not backward:
        narrowest = facts[0].narrowest
        if FLOAT16 in (narrowest, float_dtype(step.operands[0])):
            yield Suspicion("float16-norm", step, f"{step.name} of a sum of squares", (FLOAT16,))


def _check_all_reduce(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    for atom, fact in zip(step.operands, facts, strict=True):
        dtype = float_dtype(atom)
        if dtype in HALF:
            what = "a gradient" if backward or fact.is_gradient else "a value"
            yield Suspicion("half-all-reduce", step, f"{step.name} of {what} in {dtype}", (dtype,))
            return


def _check_addition(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    """Finds a sum that a loop carries from one iteration to the next."""
    dtype = float_dtype(step.results[0])
    if dtype not in HALF or backward:
        return
    for atom, fact in zip(step.operands, facts, strict=True):
        if fact.carried is None:
            continue
        # The loop uses the carry only for a sum that it returns.
        if count_uses(atom, fact.carried) == 1 and any(other is step.results[0] for other in fact.carried.outvars):
            gradient = any(other.is_gradient for other in facts)
            name = "half-gradient" if gradient else "half-reduction"
            yield Suspicion(name, step, f"over the iterations of a loop, in {dtype}", (dtype,))


CHECKS: dict[str, Check] = (
    dict.fromkeys(MATMULS, _check_matmul)
    | dict.fromkeys(HALF_SUMS, _check_reduction)
    | dict.fromkeys(("exp", "exp2", "expm1", "pow"), _check_exponential)
    | dict.fromkeys(("log", "log2", "log1p"), _check_logarithm)
    | dict.fromkeys(("sqrt", "rsqrt"), _check_root)
    | dict.fromkeys(DEVICE_SUMS, _check_all_reduce)
    | {"add": _check_addition, "convert_element_type": _check_conversion}
)
"""By primitive: what to look for."""

_PROMOTING = MATMULS | {
    "add", "atan2", "clamp", "concatenate", "div", "dynamic_update_slice", "max", "min", "mul", "nextafter", "pow",
    "rem", "scatter", "scatter-add", "select_n", "stack", "sub",
}  # fmt: skip
"""Operations whose operands JAX promotes to one dtype. Comparisons are left out: their result is a bool."""
