"""Random functions: random inputs, and the ends of the ranges, break no certificate that holds."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from certified import Case, draw, find_break, shape
from jax import lax

from jmp_policy.contrib import certify

UNARY = (
    "jnp.exp(@)", "jnp.log(@)", "jnp.sqrt(@)", "lax.rsqrt(@)", "jnp.tanh(@)", "jax.nn.sigmoid(@)", "jnp.abs(@)",
    "jnp.square(@)", "-@", "jnp.log1p(@)", "jnp.expm1(@)", "jnp.sin(@)", "lax.erf(@)", "jax.nn.relu(@)",
    "jax.nn.softplus(@)", "jnp.sign(@)", "@ ** 3", "1 / @", "@ ** -2", "jnp.cumsum(@, dtype=@.dtype)",
    "jax.nn.softmax(@)", "jax.nn.log_softmax(@)", "jax.nn.logsumexp(@)", "jnp.sort(@)", "@ - jnp.max(@)",
    "@ - jnp.max(@, -1, keepdims=True)", "@ - jnp.min(@, 0, keepdims=True)", "@ / (jnp.max(jnp.abs(@)) + 1e-3)",
    "@ * lax.rsqrt(jnp.mean(@ * @) + 1e-5)", "jnp.where(@ > 0.5, @, 1.0)", "jnp.where(@ < 0, -@, @ + 1)",
    "jnp.mean(@)", "jnp.prod(@)", "@.astype(jnp.float16)", "@.astype(jnp.float32)", "@.astype(jnp.bfloat16)",
    "jnp.max(@)", "jnp.min(@, -1)", "@[..., ::2]", "jnp.concatenate([jnp.ravel(@), 0 * jnp.ravel(@)])",
    "lax.scan(lambda c, _: (0.5 * c + 1, c), @, None, length=3)[0]",
    "lax.fori_loop(0, 3, lambda i, c: 0.7 * c + 1, @)", "lax.cond(jnp.sum(@) > 0, lambda y: 2 * y, jnp.negative, @)",
    "1 - @", "1 + @", "1 - jnp.exp(-jnp.abs(@))", "jnp.log(1 - jax.nn.sigmoid(@))",
    "jnp.dot(jnp.ravel(@), jnp.ravel(@))", "jnp.sum(@, -1)", "@ - jnp.mean(@)",
)  # fmt: skip
BINARY = ("a + b", "a - b", "a * b", "a / b", "jnp.maximum(a, b)", "jnp.minimum(a, b)", "jnp.power(a, b)",
    "jnp.logaddexp(a, b)", "jnp.hypot(a, b)", "jnp.where(a < b, a, b)", "a * jnp.exp(-jnp.abs(b))")  # fmt: skip
TESTS = ("@ > 0", "@ >= 0.5", "@ < 1", "@ != 0", "0 == @", "~(@ <= 0)", "(@ > -1) & (@ < 1)", "(@ < 0) | (@ > 2)",
    "jnp.abs(@) < 0.9", "@ > jnp.flip(@)", "jnp.max(@) > 1", "@ * @ < 4", "(@ != 0) & (@ != 1)")  # fmt: skip
CHAIN = ("jnp.log(@)", "jnp.sqrt(@)", "lax.rsqrt(@)", "1 / @", "@ ** -2", "jnp.exp(@)", "2 * @", "@ + 1", "@ - 1",
    "1 - @", "-@", "@ * @", "jnp.arctanh(@)", "jnp.log1p(@)", "jnp.arccos(@)", "jnp.abs(@)", "@ / (@ - 1)", "0 * @",
    "jnp.max(@)", "jnp.where(@ > 0.25, lax.rsqrt(@), @)")  # fmt: skip
"""A chain of these, in a case of `jnp.where`, may be invalid for the elements that are not selected."""

RANGES = (
    (-1.0, 1.0), (-10.0, 10.0), (0.0, 1.0), (0.125, 5.0), (-100.0, 100.0), (2.0**-20, 1.0), (-3.0, -0.5), (0.0, 0.0),
    (-256.0, 256.0), (-57344.0, 57344.0), (2.0**-100, 2.0**-10), (-1024.0, 2.0),
)  # fmt: skip
"""Their ends are numbers of all dtypes, except the one that float16 does not have."""


def match(a: Any, b: Any) -> tuple[Any, Any]:
    """Gives two arrays one dtype and shape."""
    b = b.astype(a.dtype)
    return (a, b) if a.shape == b.shape else (jnp.ravel(a)[:1], jnp.ravel(b)[:1])


def make_function(seed: int) -> tuple[Case, str]:
    """Makes a function of up to seven statements, and returns its text, too."""
    rng = random.Random(seed)
    values, lines = ["x", "y"], ["def fun(x, y):"]
    pick = lambda: rng.choice(values[-3:] if rng.random() < 0.7 else values)
    for i in range(rng.randint(1, 7)):
        if rng.random() < 0.25:
            value = chain = pick()
            for _ in range(rng.randint(1, 3)):
                chain = rng.choice(CHAIN).replace("@", f"({chain})")
            cases = rng.choice([f"{chain}, {value}", f"{chain}, 0", f"1, {chain}"])
            lines.append(f"    v{i} = jnp.atleast_1d(jnp.where({rng.choice(TESTS).replace('@', value)}, {cases}))")
        elif rng.random() < 0.65:
            lines.append(f"    v{i} = jnp.atleast_1d({rng.choice(UNARY).replace('@', pick())})")
        else:
            lines += [f"    a, b = match({pick()}, {pick()})", f"    v{i} = {rng.choice(BINARY)}"]
        values.append(f"v{i}")
    text = "\n".join([*lines, f"    return {values[-1]}"])
    names: dict[str, Any] = {"jnp": jnp, "jax": jax, "lax": lax, "match": match}
    exec(text, names)
    dtype = rng.choice(["float32", "float16", "bfloat16"])
    ranges = [rng.choice(RANGES[:-2] if dtype == "float16" else RANGES) for _ in range(2)]
    return Case(names["fun"], ranges, (shape(3, 4, dtype=dtype),) * 2), f"{text}\n# {dtype}, {ranges}"


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, *range(3, 23)))])
def test_a_certificate_of_a_random_function_is_true(seed):
    """Also for a batch of inputs, one operation at a time and compiled."""
    case, text = make_function(seed)
    certificate = certify(case.fun, case.ranges)(*case.args)
    if certificate.holds is False:
        fault = find_break(case.fun, *map(jnp.asarray, certificate.counterexample))
        assert certificate.fault == "cancellation" or (fault and fault.kind == certificate.fault), text
    if certificate.holds:
        ends = [
            np.stack([np.full(arg.shape, end, arg.dtype) for end in pair])
            for arg, pair in zip(case.args, case.ranges, strict=True)
        ]
        batch = [jnp.asarray(np.concatenate(both)) for both in zip(ends, draw(case, 1000), strict=True)]
        assert find_break(jax.vmap(case.fun), *batch) is None, text
        out = jax.jit(jax.vmap(case.fun))(*batch)
        assert np.isfinite(np.asarray(out, np.float64)).all(), text
