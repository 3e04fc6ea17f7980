"""Functions of several operations that are one to a reader: linear algebra, and products that sum nothing."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax import lax
from programs import trace

import jmp_policy as jmp

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

HALVES = ["bfloat16", "float16"]


def under(half, function):
    return jmp.autocast(function, jmp.Policy("float32", half, None))


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


OUTER = {
    "einsum": lambda p, f: jnp.einsum("i,j->ij", p, f),
    "dot_general": lambda p, f: lax.dot_general(p, f, (((), ()), ((), ()))),
    "outer": jnp.outer,
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_the_angles_of_a_rotary_embedding_are_those_of_float32(outer, half):
    """Positions to 4095 are not numbers of half precision: a radian off is another angle altogether."""

    def tables(positions):
        angles = outer(positions, 10000 ** -jnp.linspace(0, 1, 32))
        return jnp.cos(angles), jnp.sin(angles)

    positions = np.arange(4096, dtype=np.float32)
    for ours, exact in zip(jax.jit(under(half, tables))(positions), jax.jit(tables)(positions), strict=True):
        np.testing.assert_allclose(ours, exact, atol=1e-3)  # the compiler may fuse an angle's last bit away


@pytest.mark.parametrize("half", HALVES)
def test_a_product_that_sums_nothing_follows_its_inputs(half):
    def fun(x):
        low = x @ x
        outer = jnp.einsum("i,j->ij", low[0], low[1])
        return outer, jnp.einsum("i,j->ij", jnp.exp(low[0]), low[1]), jnp.einsum("i,j->j", x[0], x[1])

    program = trace(under(half, fun))(normal(4, 4))
    made = {var: eqn for eqn in program.eqns for var in eqn.outvars}

    def before_cast(var):
        eqn = made[var]
        return str((eqn.invars[0] if eqn.primitive.name == "convert_element_type" else var).aval.dtype)

    assert [before_cast(var) for var in program.jaxpr.outvars[:2]] == [half, "float32"]


def test_the_gradient_of_a_weight_of_an_unbatched_layer_stays_half():
    """It is an outer product of a half cotangent: what it is by hand."""
    loss = lambda weight, x: jnp.sum(jnp.tanh(x @ weight) @ weight)
    program = trace(under("bfloat16", jax.grad(loss)))(normal(4, 4), normal(4))
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert {str(eqn.outvars[0].aval.dtype) for eqn in products} == {"bfloat16"}


def square():
    return normal(8, 8)


def definite():
    return square() @ square().T + 8 * np.eye(8, dtype=np.float32)


COMPOSITES = {
    "expm": lambda a: jax.scipy.linalg.expm(4 * a),
    "expm_frechet": lambda a: jax.scipy.linalg.expm_frechet(a, a.T)[1],
    "funm": lambda a: jax.scipy.linalg.funm(a, jnp.exp).real,
    "sqrtm": lambda a: jax.scipy.linalg.sqrtm(a).real,
    "solve_sylvester": lambda a: jax.scipy.linalg.solve_sylvester(a, a.T, jnp.ones((8, 8))),
    "cho_solve": lambda a: jax.scipy.linalg.cho_solve((a, False), jnp.ones((8, 8))),
    "pinv": jnp.linalg.pinv,
    "lstsq": lambda a: jnp.linalg.lstsq(a, jnp.ones(8))[0],
    "solve": lambda a: jnp.linalg.solve(a, jnp.ones(8)),
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "cov": jnp.cov,
    "polyfit": lambda a: jnp.polyfit(a[0], a[1], 3),
}  # fmt: skip

PRODUCTS = {
    "matmul": lambda a: jnp.linalg.matmul(a, a),
    "tensordot": lambda a: jnp.linalg.tensordot(a, a, axes=1),
    "vecdot": lambda a: jnp.linalg.vecdot(a, a),
    "multi_dot": lambda a: jnp.linalg.multi_dot([a, a, a]),
    "outer": lambda a: jnp.linalg.outer(a[0], a[1]),
    "cross": lambda a: jnp.linalg.cross(a[:, :3], a[:, 3:6]),
    "diagonal": jnp.linalg.diagonal,
    "matrix_transpose": jnp.linalg.matrix_transpose,
    "block_diag": lambda a: jax.scipy.linalg.block_diag(a, a),
}


@pytest.mark.parametrize(
    ("name", "half"), [*((name, "bfloat16") for name in COMPOSITES), ("expm", "float16"), ("pinv", "float16")]
)
def test_linear_algebra_is_that_of_float32(name, half):
    """Of what a matmul made, and so of half's numbers: the same function of them in float32, forward and backward."""
    argument = {"cho_solve": np.linalg.cholesky(definite()).T, "sqrtm": definite()}.get(name, square())
    fun = COMPOSITES[name]
    with jax.numpy_dtype_promotion("standard"):
        alone = jax.jit(under(half, fun))(argument)
        expected = jax.jit(fun)(argument)
        np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
        after = under(half, lambda a: fun(a @ jnp.eye(8)))
        rounded = np.asarray(jnp.asarray(argument, half), np.float32)
        expected = jax.jit(fun)(rounded)
        np.testing.assert_allclose(jax.jit(after)(rounded), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_linear_algebra_stay_half(name, half):
    with jax.numpy_dtype_promotion("standard"):
        program = trace(under(half, lambda a: PRODUCTS[name](a @ a)))(square())
    assert program.eqns[-1].invars[0].aval.dtype == half
