"""Suggested fixes for non-finite values, by the primitive that made them and its role."""

import linecache
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .._base import group_by_key
from .._jaxpr import Fact, Step, find_line, find_origin, having, split_line, walk

GUARDED = "where"
"""Role of an op used by a branch of `jnp.where`."""


class Words(NamedTuple):
    """Description of an equation or an argument, with the attributes of `NonfiniteOrigin`.

    `role` is the primitive whose derivative the equation computes, `GUARDED`, or empty.
    """

    primitive: str = ""
    source: str = ""
    function: str = ""
    code: str = ""
    path: str = ""
    direction: str = "forward"
    dtype: str = ""
    argument: str = ""
    role: str = ""
    key: str = ""  # of a `PolicyMap`


A_CONSTANT = "a constant"
"""`Words.argument` of a number or array that is in the program."""


def describe_code(eqn: JaxprEqn, around: Sequence[Any]) -> dict[str, str]:
    """Returns the fields of `Words` about the user's line of an equation."""
    source, function = split_line(find_line(find_origin(Step(eqn.primitive.name, (), (), eqn, "", tuple(around)))))
    file, _, number = source.rpartition(":")
    code = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return {"source": source, "function": function, "code": code}


_WIDTHS = (32, 130, 48, 88, 122, 12, 16, 72, 8, 74)
"""Maximum number of bytes of each field. Longer text keeps its end, and code its start. The total must not change,
because saved states contain the text."""

TEXT_LENGTH = sum(_WIDTHS) + len(_WIDTHS)


def write_words(words: Words) -> np.ndarray:
    """Encodes words as uint8 of shape `(TEXT_LENGTH,)`."""
    pieces = []
    for name, word, width in zip(Words._fields, words, _WIDTHS, strict=True):
        data = word.encode()
        if len(data) > width:
            mark = "…".encode()
            kept = width - len(mark)
            data = data[:kept] + mark if name == "code" else mark + data[-kept:]
        pieces.append(data)
    text = b"\0".join(pieces)
    return np.frombuffer(text.ljust(TEXT_LENGTH, b"\0"), np.uint8)


def read_words(text: np.ndarray) -> Words:
    pieces = text.tobytes().split(b"\0")[: len(_WIDTHS)]
    return Words(*(piece.decode(errors="ignore") for piece in pieces))


def find_op_roles(program: Jaxpr) -> dict[int, str]:
    """Finds `Words.role` of equations, by their ids.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.grad(jnp.sqrt))(1.0)
    >>> roles = find_op_roles(program.jaxpr)
    >>> [(eqn.primitive.name, roles[id(eqn)]) for eqn in program.eqns if id(eqn) in roles]
    [('div', 'sqrt')]
    """
    steps = list(walk(program))
    makers = group_by_key((id(var), step) for step in steps for var in step.results)
    roles = {id(eqn): GUARDED for eqn in _list_guarded(steps, makers)}
    logarithms = {id(step.operands[0]) for step in steps if step.name == "log"}
    divisors = {id(step.operands[1]) for step in steps if step.name == "div"}
    sines = {id(step.operands[0]) for step in steps if step.name in ("acos", "asin")}
    for step in steps:
        if "jvp(" not in step.scope:  # name stacks of the backward pass contain it too
            continue
        role = ""
        if step.name == "integer_pow":
            role = _find_role_of_power(step, makers, divisors)
        elif step.name == "div":
            role = _find_role_of_quotient(step, makers, logarithms)
        elif step.name == "rsqrt" and _is_cosine(step.operands[0], makers, sines):
            role = "acos"
        if role:
            roles[id(step.eqn)] = role
    return roles


def _find_role_of_power(step: Step, makers: dict[int, list[Step]], divisors: set[int]) -> str:
    (base,) = step.operands
    if _is_made_by("cbrt", base, makers):
        return "cbrt"
    return _find_decomposition(base, makers) or ("div" if step.eqn.params["y"] == -2 and id(base) in divisors else "")


def _find_role_of_quotient(step: Step, makers: dict[int, list[Step]], logarithms: set[int]) -> str:
    dividend, divisor = step.operands
    is_half = isinstance(dividend, Literal) and float(dividend.val) == 0.5
    if is_half and _is_made_by("sqrt", divisor, makers):
        return "sqrt"
    is_transposed = "transpose(" in step.scope
    if is_transposed and id(divisor) in logarithms:
        return "log"
    return _find_decomposition(divisor, makers, of_differences=not is_transposed)


def _is_cosine(atom: Any, makers: dict[int, list[Step]], sines: set[int]) -> bool:
    """True if an atom is one minus the square of an operand of `acos` or `asin`."""
    squares = [operand for step in makers.get(id(atom), ()) for operand in step.operands]
    bases = [operand for square in squares for step in makers.get(id(square), ()) for operand in step.operands]
    return any(id(base) in sines for base in (*squares, *bases))


def _find_decomposition(atom: Any, makers: dict[int, list[Step]], *, of_differences: bool = True) -> str:
    """Returns "eigh" or "svd" if a divisor is made from the eigenvalues or singular values, else an empty string.

    With `of_differences`, only their differences count: user code may divide by an eigenvalue.
    """
    queue, seen = [(atom, not of_differences)], set()
    while queue:
        atom, counts = queue.pop()
        if (id(atom), counts) in seen:
            continue
        seen.add((id(atom), counts))
        for step in makers.get(id(atom), ()):
            if step.name in ("eigh", "svd") and counts:
                return step.name
            if step.name in (*_FOLLOWED, "slice", "squeeze"):
                queue += [(operand, counts or step.name == "sub") for operand in step.operands]
    return ""


def _is_made_by(name: str, atom: Any, makers: dict[int, list[Step]]) -> bool:
    return any(step.name == name for step in makers.get(id(atom), ()))


def _list_guarded(steps: list[Step], makers: dict[int, list[Step]]) -> list[Any]:
    """Lists the equations that a branch of a `select_n` is computed from, through the ops in `_FOLLOWED`."""
    found, seen = [], set()
    # A `select_n` of the backward pass is the transpose of a `jnp.where`, or of the derivative of `jnp.abs`.
    selects = [step for step in steps if step.name == "select_n" and "transpose(" not in step.scope]
    queue = [atom for step in selects for atom in step.operands[1:]]
    while queue:
        atom = queue.pop()
        if id(atom) in seen:
            continue
        seen.add(id(atom))
        for step in makers.get(id(atom), ()):
            if step.name not in ("link", "carry"):
                found.append(step.eqn)
            if step.name in _FOLLOWED:
                queue += step.operands
    return found


_FOLLOWED = ("add", "broadcast_in_dim", "convert_element_type", "div", "link", "mul", "neg", "reshape", "sub")


Range = tuple[float, float] | None

_EPSILON = "Keep the {} away from zero, with an epsilon or `jnp.maximum`."
_TRAP = (
    "If a `jnp.where` guards this, guard what goes into the operation too, as in "
    "`jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)`: the gradient of the branch that is not taken is zero times this."
)
_BY_ZERO = (
    "Choose the result for this case by two `jnp.where`, as in "
    "`jnp.where(y != 0, x / jnp.where(y != 0, y, 1.0), 0.0)`: with the outer one alone the gradient stays nan. "
    "Of a norm, add an epsilon under the root instead."
)
_ROOT = "Keep the operand of the root positive, with an epsilon or `jnp.maximum`. " + _TRAP

_DERIVATIVE = "This is the derivative of {}, which is infinite at zero. "
_GUARD = (
    "A branch of a `jnp.where` uses it, and the gradient of a branch that is not taken is zero times infinity, a nan. "
    "Guard the input of the operation as well, as in `jnp.where(ok, f(jnp.where(ok, x, 0.0)), other)`."
)
_VECTORS = (
    "This is the derivative of {}, which does not exist where two {} (a degenerate matrix). The derivative of the "
    "values alone is finite: use {}. If you need the vectors, move the values apart first, as with "
    "`a + jnp.diag(1e-3 * jnp.arange(n))`."
)
_SINGULAR = (
    "The matrix is singular, or nearly so: add an epsilon to its diagonal, or use `jnp.linalg.pinv` or "
    "`jnp.linalg.lstsq`."
)
_EXPONENTIAL = (
    "If the results are divided by their sum, or a logarithm of the sum follows, use `jax.nn.softmax` or "
    "`jax.nn.logsumexp`, which subtract the largest value first. Otherwise bound its operand, with `jnp.minimum`."
)
_GAMMA = "It has poles at zero and at the negative integers: keep its operand positive, as with `jnp.maximum`."
_OPAQUE = "This counts as a single operation: {} made it from finite operands. Check there."

_CONSTANT = (
    "It is a constant of the program: a mask, or the value of a function outside of its domain, such as a log-density "
    "or the logarithm of a determinant. A softmax over only masked values is nan: mask with "
    "`jnp.finfo(x.dtype).min`, or give `jax.nn.softmax` the mask as `where=`."
)
_NAN_CONSTANT = (
    "It is a constant of the program: the function returns nan for these arguments, as `jnp.var(x, ddof=1)` does for a "
    "single element."
)

REMEDIES = {
    "div": _EPSILON.format("divisor") + " " + _TRAP,
    "rem": _EPSILON.format("divisor"),
    "log": "Keep the operand of the logarithm positive, with an epsilon or `jnp.maximum`. " + _TRAP,
    "log1p": "Keep its operand above -1. " + _TRAP,
    "sqrt": _ROOT,
    "rsqrt": _ROOT,
    "pow": "Keep the base away from zero and positive, or take an integer power. " + _TRAP,
    "integer_pow": _EPSILON.format("base") + " " + _TRAP,
    **dict.fromkeys(("exp", "exp2"), _EXPONENTIAL),
    **dict.fromkeys(("expm1", "sinh", "cosh"), "Bound its operand."),
    **dict.fromkeys(("acos", "asin"), "Keep its operand between -1 and 1."),
    **dict.fromkeys(("atanh", "erf_inv"), "Keep its operand strictly between -1 and 1."),
    "acosh": "Keep its operand at 1 or above.",
    "cholesky": "The matrix has to be positive definite: add an epsilon to its diagonal.",
    **dict.fromkeys(("custom_linear_solve", "triangular_solve", "lu"), _SINGULAR),
    **dict.fromkeys(("lgamma", "digamma", "polygamma"), _GAMMA),
    **dict.fromkeys(("igamma", "igammac"), "Keep both operands positive."),
    "zeta": "It has a pole where its first operand is 1: keep that above 1.",
    "gather": "An index is out of bounds, where `jnp.take` and `x.at[i].get(mode='fill')` return nan: keep the indices "
    "within the axis, or pass `mode='clip'`.",
    "pure_callback": _OPAQUE.format("its function on the host"),
    "ffi_call": _OPAQUE.format("its native code"),
    "pallas_call": _OPAQUE.format("its kernel"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), _OPAQUE.format("its function")),
}
"""Fixes by primitive, for faults that any format has."""

_OVERFLOWING = having(Fact.OVERFLOWS)

_DERIVATIVES = {
    "sqrt": _DERIVATIVE.format("a square root") + "Add an epsilon under the root, as in `jnp.sqrt(x + 1e-6)`, and of a "
    "norm in `jnp.sqrt(jnp.sum(x * x) + 1e-6)`. " + _TRAP,
    "cbrt": _DERIVATIVE.format("a cube root") + _EPSILON.format("operand of the root") + " " + _TRAP,
    "acos": "This is the derivative of an arccosine or arcsine, which is infinite at -1 and 1. Keep the operand "
    "between them, as in `jnp.clip(x, -1 + 1e-6, 1 - 1e-6)`. " + _TRAP,
    "div": "This is the derivative of a division, which is infinite where it divides by zero. " + _BY_ZERO,
    "eigh": _VECTORS.format("eigenvectors", "eigenvalues are equal", "`jnp.linalg.eigvalsh(a)`"),
    "svd": _VECTORS.format(
        "singular vectors", "singular values are equal or one is zero", "`jnp.linalg.svd(a, compute_uv=False)`"
    ),
    "log": _DERIVATIVE.format("a logarithm") + _EPSILON.format("operand of the logarithm") + " " + _TRAP,
}
"""Fixes by the primitive whose derivative an op computes, for derivatives with a pole at zero."""


def find_remedy(
    words: Words, kind: str, operands: Sequence[Range], made_nan_in: str = "", in_loop: bool = False
) -> str:
    """Returns a suggested fix, or an empty string. `made_nan_in`: the pass where an op made a nan of these infinities.

    >>> find_remedy(Words("log", path="head", dtype="float32"), "inf", [(0.0, 1.0)])[:55]
    'Keep the operand of the logarithm positive, with an eps'
    >>> find_remedy(Words("dot_general", key="head", dtype="float16"), "inf", [(-3.0, 4e4), (0.0, 2.0)])[:46]
    'float16 ends at 65504. Keep this in float32: `'
    """
    primitive, dtype = words.primitive, words.dtype
    if words.argument == A_CONSTANT and made_nan_in:
        return _CONSTANT
    if words.argument == A_CONSTANT:
        return (
            "If it is meant, choose the results to check. For example: "
            "numerics.first_nonfinite(fun, of=lambda out: out[0])."
        )
    if words.argument:
        return (
            "It was there before the function ran: check the batch and the previous step, which "
            "`optim.skip_nonfinite` would have skipped."
        )
    constants = [pair[0] for pair in operands if pair is not None and str(pair[0]) == str(pair[1])]
    if any(map(math.isinf, constants)):
        return _CONSTANT
    if any(map(math.isnan, constants)):
        return _NAN_CONSTANT
    if dtype.startswith("float8") and _find_largest_magnitude(operands) > (limit := float(jnp.finfo(dtype).max)):
        return f"{dtype} ends at {limit:g}: scale the values first, or clip them with `jnp.clip`."
    is_too_large = kind == "inf" and _overflows(primitive, operands, dtype)
    # A branch that is not taken makes a nan of its gradient alone.
    if words.role == GUARDED and made_nan_in and not (made_nan_in == "forward" and is_too_large):
        return _GUARD
    if words.role in _DERIVATIVES and reaches_pole(primitive, operands, dtype):
        return _DERIVATIVES[words.role]
    if primitive == "div" and kind == "nan":  # the operands are finite
        return "Dividend and divisor are both zero. " + _BY_ZERO
    if is_too_large and dtype == "float16":
        return _advise_float32(words.direction, words.key, in_loop)
    if primitive == "pow" and reaches_pole(primitive, operands, dtype):
        return _explain_power(operands)
    if primitive in REMEDIES and not (is_too_large and primitive in ("lgamma", "pow", "integer_pow")):
        return REMEDIES[primitive]
    if is_too_large:
        return f"The values are too large for {dtype}. Try smaller steps, gradient clipping or a norm before this op."
    if kind == "inf" and any(operands):
        return "None of its operands is large: check whether one is at a pole or at the edge of the domain."
    return ""


def _advise_float32(direction: str, key: str, in_loop: bool) -> str:
    is_whole = key and not key.startswith("…")
    island = f"`PolicyMap({{{key!r}: 'float32'}}, policy)`" if is_whole else "`jmp.force_full_precision`"
    if direction == "backward":
        return (
            "float16 ends at 65504. If a loss scale multiplies the gradients, start from a smaller one, such as "
            "`DynamicLossScale(2.0**10)`. A dynamic scale gets there by itself after some skipped steps. Without a "
            f"loss scale, or with one of 1, keep this in float32: {island}."
        )
    return f"float16 ends at 65504. Keep this in float32: {island}." + (CARRIED if is_whole and in_loop else "")


CARRIED = " If a scan carries the result, as `nn.scan` does, name the module around the scan: a carry keeps its dtype."
"""Follows a map with a rule for a module in a loop."""


def _explain_power(operands: Sequence[Range]) -> str:
    """Names the power that this is the derivative of, if all exponents are equal."""
    low, high = (operands[1] if len(operands) > 1 else None) or (math.nan, math.nan)
    if low != high or low <= -1:
        return REMEDIES["pow"]
    return (
        f"A power of {low:.4g} is infinite at zero, and it is the derivative of a power of {1 + low:.4g}. "
        "Keep the base away from zero, as in `(jnp.abs(x) + 1e-6) ** p`. " + _TRAP
    )


def _overflows(primitive: str, operands: Sequence[Range], dtype: str) -> bool:
    """True if an infinity is an overflow, not a pole or an unknown op.

    >>> _overflows("add", [(1.0, 2.0)], "float32"), _overflows("zeta", [(1.0, 1.0), (1.0, 1.0)], "float32")
    (True, False)
    """
    if primitive in _OVERFLOWING:
        return not reaches_pole(primitive, operands, dtype)
    return primitive not in REMEDIES and _find_largest_magnitude(operands) > float(jnp.finfo(dtype).max) ** 0.25


def _find_largest_magnitude(operands: Sequence[Range]) -> float:
    return max((max(-pair[0], pair[1]) for pair in operands if pair is not None), default=0.0)


def reaches_pole(primitive: str, operands: Sequence[Range], dtype: str) -> bool:
    """True if an op has a pole within the ranges of its operands, so that no format helps.

    The exponent of an `integer_pow` is not known. If the square of the operand overflows, this returns False.

    >>> reaches_pole("integer_pow", [(-600.0, 700.0)], "float16"), reaches_pole("integer_pow", [(0.0, 2.0)], "float16")
    (False, True)
    """
    poles = {"div": 1, "log": 0, "rsqrt": 0, "pow": 0, "integer_pow": 0, "lgamma": 0}
    i = poles.get(primitive)
    if i is None or i >= len(operands):
        return False
    pair = operands[i]
    if pair is None or pair[0] > 0:
        return False
    if primitive == "lgamma":  # has more poles below zero
        return True
    if pair[1] < 0:
        return False
    if primitive == "pow" and len(operands) > 1 and operands[1] is not None:
        return operands[1][0] < 0
    largest = max(-pair[0], pair[1])
    return primitive != "integer_pow" or largest <= math.sqrt(float(jnp.finfo(dtype).max))
