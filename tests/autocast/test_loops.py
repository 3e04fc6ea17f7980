"""What a loop carries in float32 stays float32, in value and gradient; matmuls in loops stay half."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from programs import walk

import jmp_policy as jmp

TURNS = 1024
ROWS = jnp.asarray(np.random.default_rng(0).integers(48, 80, (TURNS, 4)) / 64, jnp.float32)  # exact in half
ZEROS, ONES = jnp.zeros(4), jnp.ones(4)


def _scan(turn, start):
    return lambda rows: lax.scan(turn, start, rows)


def _at(index, fun):
    return lambda rows: fun(rows)[index]


def _leapfrog(carry, row):
    place, speed = carry
    speed = speed - 0.01 * place * row
    return (place + 0.01 * speed, speed), place


def _nested(total, row):
    return lax.fori_loop(0, 2, lambda i, inner: inner + row[i], total), total


def _branching(total, row):
    return lax.cond(row[0] > 1, lambda total: total + row, lambda total: total, total), None


LOOPS = {
    "running sum": _at(0, _scan(lambda c, r: (c + r, None), ZEROS)),
    "running sum that is stacked": _scan(lambda c, r: (c + r, c), ZEROS),
    "sum in branches": _at(0, _scan(_branching, ZEROS)),
    "sum in a loop inside": _scan(_nested, ZEROS),
    "sum of entries": _at(0, _scan(lambda c, r: (c.at[1].add(r[0]).at[2].set(c[2] + r[1]), jnp.sum(c)), ZEROS)),
    "sum in a remat": _scan(lambda c, r: (jax.checkpoint(lambda c: c + r * jnp.where(c > 500, r, 1.0))(c), c), ZEROS),
    "running product": _at(0, _scan(lambda c, r: (c * jnp.where(r > 1, 1.01, 0.99) + 0 * r, c), ONES)),
    "average by steps": _scan(lambda c, r: (c + (r - c) / 1000, c), ZEROS),
    "leapfrog": _scan(_leapfrog, (ONES, ZEROS)),
    "phase": _at(0, _scan(lambda c, r: (jnp.mod(c + r / 4, 300.0), None), ZEROS)),
}
"""Each is a function of rows, and differentiable."""


HALVES = ["bfloat16", "float16"]
POLICY = "params=float32,compute=bfloat16,output=none"


def of_matmul(fun):
    return lambda rows: fun(rows @ jnp.eye(4))


def cast(fun, half="bfloat16"):
    return jmp.autocast(fun, jmp.Policy("float32", half, None))


def total(fun):
    return lambda rows: sum(leaf.mean() for leaf in jax.tree.leaves(fun(rows)))


def carried(fun, *args):
    """The dtypes of the floating values that the loops of a function carry, those of loops inside as well."""
    steps = walk(jax.make_jaxpr(fun)(*args).jaxpr)
    dtypes = [step.results[0].aval.dtype for step in steps if step.name == "carry"]
    return [dtype.name for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]


def distance(found, expected):
    """The largest difference, over the largest number."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


@pytest.mark.parametrize(("name", "half"), list(zip(LOOPS, itertools.cycle(HALVES))))
def test_what_accumulates_is_carried_in_float32(name, half):
    fun = of_matmul(LOOPS[name])
    assert set(carried(cast(fun, half), ROWS)) == {"float32"}


@pytest.mark.parametrize("name", LOOPS)
def test_so_are_its_gradients(name):
    assert set(carried(cast(jax.grad(total(of_matmul(LOOPS[name])))), ROWS)) == {"float32"}


AROUND = {
    "jit": jax.jit,
    "scan": lambda f: lambda rows: lax.scan(lambda x, _: (x, f(x)), rows, None, length=2)[1],
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda rows: jax.vmap(f, 1)(jnp.stack([rows, rows], 1)),
    "shard_map": lambda f: jax.shard_map(
        lambda rows: jax.tree.map(lambda x: x[None], f(rows)),
        mesh=make_mesh((2,), ("d",), axis_types=(AxisType.Auto,)),
        in_specs=P(None),
        out_specs=P("d"),
        check_vma=False,
    ),
}
"""What is put between a product and a loop that reads it, or around both."""


@pytest.mark.parametrize("around", AROUND)
def test_it_is_inside_of_transformations(around):
    loop, wrap = LOOPS["leapfrog"], AROUND[around]
    alone = carried(loop, ROWS).count("float32")
    for fun in (cast(of_matmul(wrap(loop))), cast(wrap(of_matmul(loop))), wrap(cast(of_matmul(loop)))):
        assert carried(fun, ROWS).count("float32") >= alone
        assert "bfloat16" not in carried(fun, ROWS)[-alone:]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "half"), list(zip(LOOPS, itertools.cycle(HALVES))))
def test_values_and_gradients_are_those_of_float32(name, half):
    """Within four roundings: of factors, gradients and operands of matmuls. What stalls is wrong by tens of percent."""

    loop = LOOPS[name]

    def run(rows):
        expected = jax.vjp(total(of_matmul(loop)), rows)
        outside = jax.vjp(total(cast(of_matmul(loop), half)), rows)
        gradients = [backward(jnp.float32(TURNS))[0] for _, backward in (expected, outside)]  # for float16 to hold
        return (of_matmul(loop)(rows), gradients[0]), (cast(of_matmul(loop), half)(rows), gradients[1])

    expected, found = jax.jit(run)(ROWS)
    assert distance(found, expected) < 4 * float(jnp.finfo(half).eps)


ROOTS = {
    "square root": lambda c, y: 0.5 * (c + y / c),
    "of tanh": lambda c, y: c - (jnp.tanh(c) - y / 8) / (1 - jnp.tanh(c) ** 2),
}
"""Newton's method: the next value for a value and a product's result."""


@pytest.mark.parametrize("name", ["square root", *(pytest.param(n, marks=pytest.mark.slow) for n in [*ROOTS][1:])])
def test_newtons_method_takes_as_many_iterations_as_in_float32(name):
    x = jnp.arange(16.0).reshape(4, 4) / 4 + 2  # exact in half

    def solve(x):
        y = x @ jnp.eye(4)
        turn = lambda carry: (ROOTS[name](carry[0], y), carry[0], carry[2] + 1)
        is_moving = lambda carry: (jnp.abs(carry[0] - carry[1]).max() > 1e-5) & (carry[2] < 100)
        return lax.while_loop(is_moving, turn, (jnp.ones_like(y), jnp.zeros_like(y), 0))

    expected, _, turns = jax.jit(solve)(x)
    assert turns < 20
    for half in HALVES:
        found, _, count = jax.jit(cast(solve, half))(x)
        assert count == turns
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def residual_stream(w, x):
    return lax.scan(lambda c, w: (c + jax.nn.relu(c @ w), None), x, w)[0]


def recurrent(cell):
    def run(w, x):
        rnn = nn.RNN(cell(4))
        params = rnn.init(jax.random.key(0), x)
        return rnn.apply(params, x @ w[0])

    return run


LAYERS = {
    "residual stream": residual_stream,
    "LSTM": recurrent(nn.OptimizedLSTMCell),
    "GRU": recurrent(nn.GRUCell),
}


@pytest.mark.parametrize("name", LAYERS)
def test_matmuls_of_layers_in_loops_stay_half(name):
    layers = LAYERS[name]
    w, x = jnp.ones((3, 4, 4)), jnp.ones((2, 5, 4))
    for fun in (layers, jax.grad(lambda w, x: layers(w, x).sum())):
        with jax.numpy_dtype_promotion("standard"):
            assert jmp.numerics.audit(cast(fun))(w, x).matmul_shares["bfloat16"] == 1


STAYING = {
    "cache": lambda c, r: (lax.dynamic_update_slice(c, r @ jnp.eye(4), (0,)), c @ ONES),
    "shift register": lambda c, r: (jnp.concatenate([c[1:], r[:1]]), c),
    "simple cell": lambda c, r: (jnp.tanh(c @ jnp.eye(4) + r), c),
}
"""Carries that do not accumulate, or through a matmul only."""


@pytest.mark.parametrize("name", STAYING)
def test_what_does_not_accumulate_is_carried_in_float32_and_its_matmuls_are_half(name):
    fun = cast(lambda rows: lax.scan(STAYING[name], rows[0] @ jnp.eye(4), rows @ jnp.eye(4)))
    assert set(carried(fun, ROWS)) == {"float32"}
    assert jmp.numerics.audit(fun)(ROWS).matmul_shares["bfloat16"] == 1


def test_a_carry_that_its_author_made_half_stays_half():
    half = jnp.bfloat16
    turn = lambda c, r: (c - (c - r.astype(half)) / jnp.asarray(8, half), c)
    fun = lambda rows: lax.scan(turn, ZEROS.astype(half), rows @ jnp.eye(4))
    assert carried(cast(fun), ROWS) == ["bfloat16"]
