"""What helps against an operation that made a number that is not finite."""

import math
from collections.abc import Sequence

import jax.numpy as jnp

Range = tuple[float, float] | None

LARGEST_HALF = 65504.0

_EPSILON = "Keep the {} away from zero, with an epsilon or `jnp.maximum`."
_TRAP = (
    "If a `jnp.where` guards this, guard what goes into the operation too, as in "
    "`jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)`: the gradient of the branch that is not taken is zero times this."
)
_ROOT = "Keep what is under the root positive, with an epsilon or `jnp.maximum`. " + _TRAP

REMEDIES = {
    "div": _EPSILON.format("divisor") + " " + _TRAP,
    "rem": _EPSILON.format("divisor"),
    "log": "Keep what goes into the logarithm positive, with an epsilon or `jnp.maximum`. " + _TRAP,
    "log1p": "Keep what goes into it above -1. " + _TRAP,
    "sqrt": _ROOT,
    "rsqrt": _ROOT,
    "pow": "Keep the base away from zero and positive, or take an integer power. " + _TRAP,
    "integer_pow": _EPSILON.format("base") + " " + _TRAP,
    "exp": "Subtract the largest number before, as `jax.nn.softmax` and `jax.nn.logsumexp` do.",
    "exp2": "Subtract the largest number before, as `jax.nn.softmax` and `jax.nn.logsumexp` do.",
    "expm1": "Bound what goes into it.",
    "sinh": "Bound what goes into it.",
    "cosh": "Bound what goes into it.",
    "acos": "Keep what goes into it within -1 and 1.",
    "asin": "Keep what goes into it within -1 and 1.",
    "atanh": "Keep what goes into it within -1 and 1, ends left out.",
    "acosh": "Keep what goes into it at 1 or above.",
    "erf_inv": "Keep what goes into it within -1 and 1, ends left out.",
    "cholesky": "The matrix has to be positive definite: add an epsilon to its diagonal.",
}
"""By primitive, where the numbers themselves are at fault and not their format."""


def find_remedy(
    primitive: str, kind: str, dtype: str, direction: str, path: str, argument: str, operands: Sequence[Range]
) -> str:
    """Says what helps; the empty string where nothing is known.

    Args:
      primitive: the name of the operation; the empty string for an argument.
      kind: `"nan"` or `"inf"`.
      dtype: of its result.
      direction: the pass.
      path: the module it is in.
      argument: the argument that came in with it; else the empty string.
      operands: the smallest and the largest number of each operand.

    >>> find_remedy("log", "inf", "float32", "forward", "head", "", [(0.0, 1.0)])[:55]
    'Keep what goes into the logarithm positive, with an eps'
    >>> find_remedy("dot_general", "inf", "float16", "forward", "head", "", [(-3.0, 4e4), (0.0, 2.0)])[:46]
    'float16 ends at 65504. Keep this in float32: `'
    """
    if argument:
        return (
            "It was there before the function ran: look at the batch, or at the step before, which a transformation "
            "such as `optim.skip_nonfinite` would have skipped."
        )
    if any(pair is not None and math.isinf(pair[0]) and pair[0] == pair[1] for pair in operands):
        return (
            "It is a constant of the program, such as a mask. Where everything is masked, a softmax of it is nan: mask "
            "with `jnp.finfo(x.dtype).min`, or give `jax.nn.softmax` the mask as `where=`."
        )
    if kind == "inf" and dtype == "float16" and not has_pole(primitive, operands, dtype):
        if direction == "backward":
            return (
                "float16 ends at 65504, and gradients are multiplied by the loss scale: start from a smaller one, such "
                "as `DynamicLossScale(2.0**10)`, which a dynamic one finds by itself after some skipped steps."
            )
        island = f"`PolicyMap({{{path!r}: 'float32'}}, policy)`" if path else "`jmp.force_full_precision`"
        return f"float16 ends at 65504. Keep this in float32: {island}."
    is_too_large = kind == "inf" and primitive in ("pow", "integer_pow") and not has_pole(primitive, operands, dtype)
    if primitive in REMEDIES and not is_too_large:
        return REMEDIES[primitive]
    if kind == "inf":
        return f"The numbers are too large for {dtype}: smaller steps, clipped gradients or a norm before this help."
    return ""


def has_pole(primitive: str, operands: Sequence[Range], dtype: str) -> bool:
    """Whether an operation is infinite in every format: at zero, which is among its operands.

    The exponent of an integer power is not known: it is taken for a square where a square of the largest number would
    overflow, as that is what most are.

    >>> has_pole("integer_pow", [(-600.0, 700.0)], "float16"), has_pole("integer_pow", [(0.0, 2.0)], "float16")
    (False, True)
    """
    poles = {"div": 1, "log": 0, "rsqrt": 0, "pow": 0, "integer_pow": 0}
    i = poles.get(primitive)
    if i is None or i >= len(operands):
        return False
    pair = operands[i]
    if pair is None or not pair[0] <= 0 <= pair[1]:
        return False
    if primitive == "pow" and len(operands) > 1 and operands[1] is not None:
        return operands[1][0] < 0
    largest = max(-pair[0], pair[1])
    return primitive != "integer_pow" or largest <= math.sqrt(float(jnp.finfo(dtype).max))
