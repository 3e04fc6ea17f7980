"""The rules of an audit: each finds one problem of a step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from ..._jaxpr import (
    AUTOCAST,
    DEVICE_SUMS,
    HALF,
    HALF_SUMS,
    MATMULS,
    MOVING,
    Atom,
    Step,
    count_products,
    find_half_sum,
    find_origin,
    float_dtype,
    is_backward,
    is_called_by_library,
    is_called_by_loss,
    is_traced_in_loss,
    list_functions,
)
from ._facts import FLOAT32, ValueFacts


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
    """Yields the suspicions of a step: in the backward pass, which JAX writes, only those that a user can act on."""
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
    """Finds a half operand that the same call upcast: strict dtype promotion would refuse it."""
    if step.name not in _PROMOTING or AUTOCAST in step.scope:
        return
    # Which float32 operand of the call could as well be half?
    given = [fact.given for atom, fact in zip(step.operands, facts, strict=True) if _is_needlessly_wide(atom, fact)]
    if not given:
        return
    # Which operand was half, until this very call widened it?
    for atom, fact in zip(step.operands, facts, strict=True):
        half = float_dtype(atom) if fact.widening is None else float_dtype(fact.widening.operands[0])
        if half in HALF and (fact.widening is None or _is_one_call(fact.widening, step)):
            if is_called_by_library(find_origin(step)):  # a library layer mixes dtypes on purpose
                return
            through = f"{half} becomes float32 through {given[0]}"
            yield Suspicion("accidental-promotion", step, through, (half, FLOAT32))
            return


def _is_needlessly_wide(atom: Atom, fact: ValueFacts) -> bool:
    """True if an operand was given or made as float32, and half precision could hold it."""
    if float_dtype(atom) != FLOAT32 or not fact.given or fact.widening is not None:
        return False
    return not isinstance(atom, Literal) or atom.val == 0 or _SMALLEST <= abs(atom.val) <= _LARGEST


def _is_one_call(first: Step, second: Step) -> bool:
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
    if source is None or target not in HALF or source == target:
        return
    first = None if backward else facts[0].widening
    is_trip = first is not None and float_dtype(first.operands[0]) == target and not is_backward(first.scope)
    # Two casts that somebody wrote. A function of jax.numpy has its reasons for both, as has a transposed cast.
    if first is not None and is_trip and not _is_one_call(first, step):
        yield Suspicion("round-trip-cast", step, f"from {target} to {source} and back", (target, source))
    for constant in facts[0].constants:
        wide = np.asarray(constant).astype(np.float64)
        with np.errstate(over="ignore"):
            rounded = wide.astype(np.float32).astype(target).astype(np.float32)
        infinite = wide[np.isfinite(wide) & np.isinf(rounded)]
        if infinite.size:
            largest = infinite[np.argmax(np.abs(infinite))]
            yield Suspicion("infinite-constant", step, f"{largest:.4g} in {target}", (source, target))
            return


def _check_exponential(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    if float_dtype(step.operands[0]) == FLOAT16 and not backward:
        name = "float16-softmax" if list_functions(step) & {"softmax", "_softmax"} else "float16-exp"
        yield Suspicion(name, step, step.name, (FLOAT16,))


def _check_logarithm(step: Step, facts: Sequence[ValueFacts], backward: bool) -> Iterator[Suspicion]:
    dtype, fact = float_dtype(step.operands[0]), facts[0]
    if backward or dtype is None:
        return
    narrowest: Any = dtype if fact.narrowest is None or dtype in HALF else fact.narrowest
    is_in_loss = bool(list_functions(step) & _LOSSES) or is_traced_in_loss(find_origin(step))
    if narrowest in HALF and fact.made in ("softmax", "sigmoid"):
        yield Suspicion(f"log-of-{fact.made}", step, f"rounded to {narrowest}", (narrowest, dtype))
    elif narrowest in HALF and (fact.made == "sum of exp" or is_in_loss):
        yield Suspicion("half-logits", step, f"in {narrowest}", (narrowest, dtype))
    elif dtype == FLOAT16:
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
        uses = sum(atom is other for eqn in fact.carried.eqns for other in eqn.invars)
        if uses == 1 and any(other is step.results[0] for other in fact.carried.outvars):
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
