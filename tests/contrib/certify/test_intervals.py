"""The bounds of each primitive contain its results, which are computed in three dtypes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

# A certificate of a program does not show the bounds of its operations.
from jmp_policy.contrib._certify._faults import find_invalid
from jmp_policy.contrib._certify._intervals import INF, RULES, Interval, round_interval

UNARY = {
    name: getattr(lax, name)
    for name in (
        "exp2", "exp",
        "expm1", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt", "cbrt", "erf", "erfc", "sinh", "cosh",
        "asinh", "asin", "acos", "atan", "acosh", "atanh", "sin", "cos", "neg", "abs", "sign", "floor", "ceil", "round",
        "square", "is_finite",
    )
} | {f"power {y}": lambda x, y=y: lax.integer_pow(x, y) for y in (2, 3, 13, -1, -2)}  # fmt: skip
BINARY = {
    name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "max", "min", "pow", "rem", "lt", "ge", "eq")
}
REDUCTIONS = {
    "sum": lambda x: lax.reduce(x, np.zeros((), x.dtype), lax.add, (1,)),
    "prod": lambda x: lax.reduce(x, np.ones((), x.dtype), lax.mul, (1,)),
    "cumsum": lambda x: lax.cumsum(x, axis=1),
    "max": lambda x: jnp.max(x, 1),
    "windows": lambda x: lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (1, 5), (1, 2), "SAME"),
    "largest of windows": lambda x: find_largest(x),
    "gradient of windows": lambda x: jax.vjp(find_largest, x)[1](x)[0],
    "dot": lambda x: lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,)))),
    "conv": lambda x: lax.conv(x[:1, None], x[1:2, None, :5], (1,), "SAME"),
}


def find_largest(x):
    return lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, (1, 5), (1, 1), "SAME")


DTYPES = ("float32", "bfloat16", "float16")


def draw_points(dtype, count):
    """Draws numbers of all magnitudes, around 0 and 1, and the largest one."""
    rng = np.random.default_rng(count)
    signs, largest = rng.choice([-1.0, 1.0], count), float(jnp.finfo(dtype).max)
    tiny = float(jnp.finfo(dtype).tiny)
    powers = signs * np.exp(rng.uniform(np.log(tiny), np.log(largest) - 0.1, count))
    drawn = np.concatenate(
        [powers, rng.uniform(-100, 100, count), rng.normal(size=count), 1 + 0.01 * signs, [0, largest]]
    )
    return np.asarray(jnp.asarray(drawn.astype(np.float32)).astype(dtype))


def trace_equation(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns[-1]


def bound(eqn, *operands):
    dtype = eqn.outvars[0].aval.dtype
    return round_interval(eqn, dtype, RULES[eqn.primitive.name](eqn, *operands), -INF)


@pytest.mark.parametrize(("name", "dtype"), list(zip(UNARY, itertools.cycle(DTYPES))))
def test_a_function_of_one_array_is_within_its_bounds(name, dtype):
    x = draw_points(dtype, 100)
    eqn = trace_equation(UNARY[name], x)
    for operand, result in zip(x.astype(np.float64), np.asarray(UNARY[name](jnp.asarray(x)), np.float64), strict=True):
        point = Interval(operand, operand)
        if find_invalid(eqn, [point]):
            continue
        (low, high, _), overflows = bound(eqn, point)
        assert low <= result <= high or (overflows and np.isinf(result)), (operand, result, low, high)
        assert overflows or np.isfinite(result)


@pytest.mark.parametrize(("name", "dtype"), list(zip(BINARY, itertools.cycle(DTYPES))))
def test_a_function_of_two_arrays_is_within_its_bounds(name, dtype):
    x = draw_points(dtype, 100)
    y = np.random.default_rng(0).permutation(x)
    eqn = trace_equation(BINARY[name], x, y)
    for a, b, result in zip(x.astype(float), y.astype(float), np.asarray(BINARY[name](x, y), float), strict=True):
        points = Interval(a, a), Interval(b, b)
        if find_invalid(eqn, points):
            continue
        (low, high, _), overflows = bound(eqn, *points)
        assert low <= result <= high or (overflows and np.isinf(result)), (a, b, result, low, high)
        wider = Interval(a - abs(a), a + 1), Interval(b - abs(b) / 2, b + abs(b) / 2)
        if not find_invalid(eqn, wider) and np.isfinite(result):
            assert bound(eqn, *wider)[0].low <= result <= bound(eqn, *wider)[0].high


@pytest.mark.parametrize(("name", "dtype"), list(zip(REDUCTIONS, itertools.cycle(DTYPES))))
def test_a_reduction_is_within_its_bounds(name, dtype):
    rng = np.random.default_rng(0)
    for low, high in [(0.0, 1.0), (-1.0, 1.0), (0.5, 1.5), (-2.0, -1.0), (1e-3, 0.5), (0.1, 0.1), (-0.3, -0.3)]:
        x = jnp.asarray(rng.uniform(low, high, (3, 700)).astype(np.float32)).astype(dtype)
        own = Interval(float(x.min()), float(x.max()))
        eqn = trace_equation(REDUCTIONS[name], x)
        assert eqn.primitive.name in RULES
        (least, most, _), _ = bound(eqn, *[own] * len(eqn.invars))
        result = np.asarray(REDUCTIONS[name](x), float)
        assert least <= result.min(), (low, high)
        assert result[np.isfinite(result)].max(initial=least) <= most
