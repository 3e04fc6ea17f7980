"""`certify`, and its result: a proof that nothing overflows, or an input that breaks the function."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from ..._base import Check, PyTree, Results, cast_floating, describe, escape_controls, hide_frames, is_array
from ..._jaxpr import check_function, find_running_line, find_unrepeatable, split_line, trace, walk
from ...modules import with_policy
from ...policy import Policy, PolicySpec, get_policy
from ._analysis import Analysis
from ._faults import CANCELLATION, FAULTS, Fault
from ._interpreter import FaultSearch
from ._intervals import Interval, bound_dtype, find_tiny, is_real, round_inside


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """Proof that a function is safe in its dtypes for all inputs in some ranges, or an input that breaks it.

    Attributes:
      holds: True if it is proved that no operation has one of the four faults below, False if `counterexample` has
        one, None if the analysis cannot tell. `bool(certificate)` is True only if it is proved.
      fault: the first fault, or possible fault if `holds` is None. `"overflow"`: finite operands give infinity.
        `"division by zero"`: also the logarithm of zero, and a power or `rsqrt` of zero. `"invalid operation"`: other
        operations that return nan, such as the root of a negative number, and reading at an index out of bounds.
        `"cancellation"`: a difference that is never zero in exact arithmetic can be zero, as of `1 - sigmoid(x)`. Else
        the reason why the analysis gave up, such as `"it has no rule"`. Empty if `holds` is True.
      primitive: the name of the operation with this fault.
      dtype: the dtype of its result.
      source: the user's line of this operation, `"/home/me/loss.py:12"`.
      operands: the smallest and largest element of each of its operands: of the counterexample, or if `holds` is None
        the ranges that the analysis found, which may be larger than the real ones.
      counterexample: the arguments, as NumPy arrays in the ranges and in the dtypes in which the function gets them,
        for which the operation has the fault. None unless `holds` is False.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> x = jax.ShapeDtypeStruct((2,), jnp.float32)
    >>> certificate = jmp.contrib.certify(lambda x: jnp.exp(x) - x, [(0, 100)])(x)
    >>> certificate.holds, certificate.fault, certificate.primitive, certificate.operands
    (False, 'overflow', 'exp', ((100.0, 100.0),))
    >>> certificate.counterexample
    (array([100., 100.], dtype=float32),)
    """

    holds: bool | None
    fault: str = ""
    primitive: str = ""
    dtype: str = ""
    source: str = ""
    operands: tuple[tuple[float, float], ...] = ()
    counterexample: PyTree = None

    def __bool__(self) -> bool:
        return self.holds is True

    def __str__(self) -> str:
        """Returns one sentence: the fault, the operation and its operands."""
        if self.holds:
            return f"proved: no {', '.join(FAULTS[:-1])} or {FAULTS[-1]}"
        ranges = " and ".join(f"{low:.4g} to {high:.4g}" for low, high in self.operands)
        place = f"`{self.primitive}` ({self.dtype})" if self.primitive else "a constant nan that is returned"
        place += f", {os.path.basename(self.source)}" * bool(self.source) + f", of {ranges}" * bool(ranges)
        if self.holds is None:
            why = f"{self.fault} may occur in" if self.fault in FAULTS else f"{self.fault}:"
            return escape_controls(f"cannot tell: {why} {place}", keep="")
        return escape_controls(f"broken: {self.fault} in {place}", keep="")


_MOST_ELEMENTS = 2**22
"""Larger arrays are not tried."""

_TRIALS = 24


def certify(fun: Callable[..., Any], ranges: PyTree, policy: PolicySpec = None) -> Callable[..., Certificate]:
    """Proves that a small function cannot overflow or divide by zero for any inputs in given ranges.

    The function is traced. Interval arithmetic bounds each operation by its operands, with the rounding of its dtype.
    Some relations of values are known, too: `x - max(x)` is not positive, one term of the denominator of a softmax is
    1, and a mean of squares is not negative and bounds each of them. The certificate holds if no operation
    can overflow, divide by zero, be invalid, or lose all bits in a subtraction: see `Certificate.fault`. It does not
    promise small rounding errors. If the bounds prove nothing, the operations run one by one on numbers at the ends of
    the ranges, and on random ones. The certificate is broken if one of these fails. Otherwise it cannot tell.

    This is for losses, norms, activations and optimizer steps. Bounds of a whole network grow with each layer, so that
    the analysis rarely can tell. Operations without a rule, such as linear algebra, kernels and random numbers, and
    loops of more than 256 iterations whose bounds grow, cannot be certified either. An operation in a branch of
    `jnp.where` does not count for the elements that are not selected, if nothing else reads them and the operations
    from the compared array on are elementwise. Its gradient may be nan nevertheless: certify the gradient, too.

    Args:
      fun: any function of trees of arrays.
      ranges: `(low, high)` for each argument, in which its elements are. For an argument that is a tree, a pair for
        all its arrays or a tree of pairs. One pair alone is for all arguments.
      policy: a dtype or policy. Floating arguments are cast to its compute dtype, and outputs to its output dtype.
        Without one, they keep their dtypes. As with `with_policy`, the function itself sets the dtypes inside.

    Returns:
      A function of the same arguments that returns a `Certificate`. Arguments may be `jax.ShapeDtypeStruct`s: only
      shapes and dtypes of arrays are used. Other objects are constants. The function has no truth value.

    Raises:
      TypeError: `fun` is not a function, or an argument is a Python number, which has no range.
      ValueError: `ranges` does not fit the arguments, or a range has no numbers of the dtype.

    Source: Moore, Interval Analysis, 1966. Rump, Error Estimation of Floating-Point Summation, BIT 2012.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    >>> print(jmp.contrib.certify(jax.nn.log_softmax, [(-100, 100)])(x))
    proved: no overflow, division by zero, invalid operation or cancellation
    >>> certificate = jmp.contrib.certify(lambda x: 1 - jax.nn.sigmoid(x), [(-10, 10)], "float16")(x)
    >>> certificate.holds, certificate.fault, certificate.primitive
    (False, 'cancellation', 'sub')
    """
    check_function(fun, "certify", ", [(-1, 1), (0, 10)]")
    known = None if policy is None else get_policy(policy)
    policied = fun if known is None else with_policy(fun, known)

    @hide_frames
    @functools.wraps(fun)
    def run_certify(*args: Any) -> Certificate:
        if isinstance(known, Policy):
            args = cast_floating(args, known.compute_dtype)
        limits = _match_ranges(ranges, args)
        describe_shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf
        traced = trace(Results().take_arrays(policied), jax.tree.map(describe_shape, args), {})
        given = [(leaf, *limit) for leaf, limit in zip(traced.leaves, limits, strict=True)]
        analysis = Analysis()
        inputs = [analysis.bound(_flush(*one), one[0].shape) for one in given]
        faults = analysis.find_faults(traced.program.jaxpr, traced.program.consts, inputs)
        if not faults:
            return Certificate(True)
        found = _try_inputs(traced.program, given, analysis)
        return _report(faults[0], None) if found is None else _report(found[0], _put_back(args, found[1]))

    return Check(run_certify, f"certify({getattr(fun, '__name__', 'fun')}, ranges)")


Limits = tuple[float, float]
"""The smallest and largest number of a dtype in a range."""


def _is_pair(node: Any) -> bool:
    return isinstance(node, tuple | list) and len(node) == 2 and all(isinstance(bound, Real) for bound in node)


def _match_ranges(ranges: PyTree, args: tuple[Any, ...]) -> list[Limits]:
    """Returns the limits of each array among the arguments."""
    pairs: list[Any] = []
    given = tuple(ranges) if isinstance(ranges, list) and not _is_pair(ranges) else ranges
    try:
        jax.tree.map(lambda pair, arg: pairs.extend([pair] * len(jax.tree.leaves(arg))), given, args, is_leaf=_is_pair)
    except (ValueError, TypeError, KeyError) as error:
        shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), args)
        raise ValueError(
            f"The ranges {describe(ranges)} do not fit arguments of shapes {describe(shapes)}. Pass a pair (low, high) "
            "for each argument, or a tree of pairs. For example: certify(loss, [(-10, 10), (0, 1)])(logits, labels)."
        ) from error
    leaves = jax.tree.leaves(args)
    for leaf in leaves:
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            raise TypeError(
                f"The argument {leaf!r} is a Python number, which certify would take for a constant. Pass an array, "
                "or a shape and dtype. For example: jax.ShapeDtypeStruct((), 'float32')."
            )
    return [_find_limits(pair, leaf.dtype) for pair, leaf in zip(pairs, leaves, strict=True) if is_array(leaf)]


def _find_limits(pair: Any, dtype: Any) -> Limits:
    """Finds the smallest and largest number of a dtype in a range."""
    if not _is_pair(pair) or not pair[0] <= pair[1]:
        raise ValueError(
            f"{describe(pair)} is not a range. Pass (low, high) with low <= high. For example: (-10.0, 10.0)."
        )
    whole = bound_dtype(dtype)
    if not whole.low <= pair[0] <= pair[1] <= whole.high:
        raise ValueError(
            f"The range {pair} does not fit {dtype}, whose values are from {whole.low:.6g} to {whole.high:.6g}. "
            f"For example: (0, {whole.high:.6g})."
        )
    low, high = (round_inside(float(bound), dtype, side) for bound, side in zip(pair, (1, -1), strict=True))
    if low > high:
        raise ValueError(
            f"No number of {dtype} is in the range {pair}. Pass a range that has one. For example: (0, 1)."
        )
    return low, high


def _flush(leaf: Any, low: float, high: float) -> Interval:
    """Returns the interval of an argument, with zero if it may have subnormal numbers that are flushed."""
    tiny = find_tiny(leaf.dtype)
    return Interval(0.0 if 0 < low < tiny else low, 0.0 if -tiny < high < 0 else high)


def _try_inputs(
    program: ClosedJaxpr, given: Sequence[Any], analysis: Analysis
) -> tuple[Fault, list[np.ndarray]] | None:
    """Returns a fault with the inputs for which an operation has it, if some are found."""
    body = program.jaxpr
    names = {step.eqn.primitive.name for step in walk(body)}
    if not names.isdisjoint(("shard_map", "pallas_call")) or not all(is_real(leaf.dtype) for leaf, *_ in given):
        return None
    sizes = [math.prod(getattr(var.aval, "shape", ())) for step in walk(body) for var in step.results]
    if max(sizes) > _MOST_ELEMENTS or find_unrepeatable(body) is not None:
        return None
    lost = {fault.place for fault in analysis.faults if fault.kind == CANCELLATION}
    for inputs in list_inputs(given):
        trial = FaultSearch({place for place in lost if analysis.nonzero[place]})
        with jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"), jax.ensure_compile_time_eval():
            trial.run(body, program.consts, list(map(jnp.asarray, inputs)))
        if trial.fault:
            return trial.fault, inputs
    return None


def list_inputs(given: Sequence[Any]) -> Iterator[list[np.ndarray]]:
    """Yields arrays at the ends of the ranges, next to zero, and at random. `given`: triples of array, low and high."""
    rng = np.random.default_rng(0)
    for trial in range(_TRIALS):
        arrays = []
        for leaf, low, high in given:
            pattern = trial if trial < len(_PATTERNS) else int(rng.integers(len(_PATTERNS)))
            drawn = _PATTERNS[pattern](low, high, np.arange(math.prod(leaf.shape)), rng).reshape(leaf.shape)
            rounded = np.clip(drawn, low, high).astype(leaf.dtype).astype(np.float64)
            arrays.append(np.clip(rounded, low, high).astype(leaf.dtype))
        yield arrays


Pattern = Callable[[float, float, np.ndarray, np.random.Generator], np.ndarray]

_PATTERNS: list[Pattern] = [
    lambda low, high, i, rng: np.full(i.shape, high),
    lambda low, high, i, rng: np.full(i.shape, low),
    lambda low, high, i, rng: np.where(i == 0, low, high),
    lambda low, high, i, rng: np.where(i == 0, high, low),
    lambda low, high, i, rng: np.zeros(i.shape),
    lambda low, high, i, rng: np.where(i % 2 == 0, low, high),
    lambda low, high, i, rng: np.where(i == 0, 1.0, 0.0),
    lambda low, high, i, rng: rng.uniform(low, high, i.shape),
    lambda low, high, i, rng: rng.choice([low, 0.0, high], i.shape),
    lambda low, high, i, rng: rng.choice([-1, 1], i.shape) * 10.0 ** rng.uniform(-45, 5, i.shape),
    lambda low, high, i, rng: rng.choice([low, high], i.shape) * 2.0 ** -rng.uniform(0, 20, i.shape),
]  # fmt: skip


def _put_back(args: tuple[Any, ...], values: Sequence[np.ndarray]) -> PyTree:
    given = iter(values)
    return jax.tree.map(lambda leaf: next(given) if is_array(leaf) else leaf, args)


def _report(fault: Fault, counterexample: PyTree) -> Certificate:
    # A library's function that was passed itself has no line of the user.
    source = fault.source or split_line(find_running_line())[0]
    holds = None if counterexample is None else False
    return Certificate(holds, fault.kind, fault.primitive, fault.dtype, source, fault.operands, counterexample)
