"""Each primitive under autocast: in the dtype of its class, and as close to float64 as that class can be."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from jax.lax import linalg
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from programs import trace
from test_composites import PRODUCTS

import jmp_policy as jmp
from jmp_policy.autocast import autocast

# Each row of the tables must have an example.
from jmp_policy.autocast import _tables  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

HALF = ["bfloat16", "float16"]


class Inputs(NamedTuple):
    """Square matrices that are the results of low operations, and have no rounding error of their own."""

    unit: Any  # in (0, 1)
    signed: Any  # in (-2, 2)
    above: Any  # in (1, 4)
    definite: Any  # symmetric, positive definite
    factor: Any  # upper triangular, with a heavy diagonal


def drawn(seed: int, dtype: Any) -> Inputs:
    rng = np.random.default_rng(seed)
    square, eye = (8, 8), np.eye(8)
    upper = np.triu(rng.uniform(0.1, 1, square))
    root = rng.normal(size=square)
    inputs = (
        rng.uniform(0.05, 0.95, square),
        rng.uniform(-2, 2, square),
        rng.uniform(1.1, 4, square),
        root @ root.T / 8 + 2 * eye,
        upper + 3 * eye,
    )
    return Inputs(*[np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for x in inputs])


def image(x: Any) -> Any:
    return x.reshape(1, 8, 8, 1)


def updates(scatter: Callable, x: Inputs) -> Any:
    """Four rows of updates to two rows of an operand."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return scatter(x.signed, jnp.array([[1], [3], [1], [3]]), x.above[:4], numbers)


def windows(x: Any, start: float, operation: Callable) -> Any:
    return lax.reduce_window(image(x), np.asarray(start, x.dtype)[()], operation, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


def on_devices(collective: Callable, x: Any) -> Any:
    mesh = make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(collective, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)(x)


def max_pool_backward(x: Inputs) -> Any:
    window = {"window_dimensions": (3, 3), "window_strides": (2, 2), "padding": ((0, 0), (0, 0))}
    return lax.select_and_scatter_add_p.bind(x.unit[:3, :3], x.signed, select_prim=lax.ge_p, **window)


def add_twice(a: Any, b: Any) -> Any:
    return a + b * 1.5


LOW: dict[str, Callable] = {
    "dot_general": lambda x: x.unit @ x.signed,
    "conv_general_dilated": lambda x: lax.conv_general_dilated(
        image(x.signed), x.unit[:3, :3].reshape(3, 3, 1, 1), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "ragged_dot_general": lambda x: lax.ragged_dot(x.unit, x.signed.reshape(2, 8, 4), jnp.array([3, 5])),
}

FULL: dict[str, Callable] = {
    "scatter-add": lambda x: updates(lax.scatter_add, x),
    "scatter-sub": lambda x: updates(lax.scatter_sub, x),
    "reduce_window_sum": lambda x: windows(x.signed, 0, lax.add),
    **{name: lambda x, name=name: getattr(lax, name)(x.signed) for name in (
        "exp", "exp2", "expm1", "cbrt", "sin", "cos", "tan", "sinh", "cosh", "asinh", "atan", "erfc",
        "bessel_i0e", "bessel_i1e")},
    **{name: lambda x, name=name: getattr(lax, name)(x.unit) for name in (
        "log", "log1p", "rsqrt", "asin", "acos", "atanh", "erf_inv")},
    **{name: lambda x, name=name: getattr(lax, name)(x.above) for name in ("acosh", "lgamma", "digamma")},
    "pow": lambda x: lax.pow(x.unit, x.signed),
    "atan2": lambda x: lax.atan2(x.signed, x.unit),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x.above), x.above),
    "igamma": lambda x: lax.igamma(x.above, x.unit),
    "igammac": lambda x: lax.igammac(x.above, x.unit),
    "igamma_grad_a": lambda x: lax.igamma_grad_a(x.above, x.unit),
    "regularized_incomplete_beta": lambda x: lax.betainc(x.above, x.above.T, x.unit),
    "zeta": lambda x: lax.zeta(x.above, x.above.T),
    "reduce_sum": lambda x: jnp.sum(x.signed, axis=0),
    "reduce_prod": lambda x: jnp.prod(x.above, axis=0),
    "reduce": lambda x: lax.reduce(x.signed, np.asarray(0, x.signed.dtype)[()], add_twice, (0,)),
    "cumsum": lambda x: lax.cumsum(x.signed),
    "cumprod": lambda x: lax.cumprod(x.above),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x.signed),
    "fft": lambda x: [part(lax.fft(x.signed, lax.FftType.RFFT, (8,))) for part in (lax.real, lax.imag)],
    "cholesky": lambda x: linalg.cholesky(x.definite),
    "cholesky_update": lambda x: jnp.abs(linalg.cholesky_update(x.factor, x.unit[0])),
    "eig": lambda x: jnp.sort(lax.real(linalg.eig(x.definite, compute_left_eigenvectors=False)[0])),
    "eigh": lambda x: linalg.eigh(x.definite)[1],
    "householder_product": lambda x: linalg.householder_product(x.unit, x.unit[0]),
    "hessenberg": lambda x: linalg.hessenberg(x.definite)[0],
    "lu": lambda x: linalg.lu(x.definite)[0],
    "ormqr": lambda x: linalg.ormqr(x.unit, x.unit[0], x.signed),
    "qr": lambda x: jnp.abs(linalg.qr(x.definite)[1]),
    "schur": lambda x: jnp.sort(jnp.diagonal(linalg.schur(x.definite)[0])),
    "svd": lambda x: linalg.svd(x.signed, compute_uv=False),
    "symmetric_product": lambda x: linalg.symmetric_product(x.signed, x.definite, symmetrize_output=True),
    "triangular_solve": lambda x: linalg.triangular_solve(x.factor, x.signed, left_side=True),
    "tridiagonal": lambda x: linalg.tridiagonal(x.definite)[1],
    "tridiagonal_solve": lambda x: linalg.tridiagonal_solve(x.unit[0], x.above[0] * 1.0, x.unit[1], x.signed),
}  # fmt: skip

WIDE: dict[str, Callable] = {
    "scatter-mul": lambda x: updates(lax.scatter_mul, x),
    "reduce_window": lambda x: windows(x.unit, 0, add_twice),
    "select_and_scatter_add": lambda x: max_pool_backward(x),
    "select_and_gather_add": lambda x: jax.jvp(lambda y: windows(y, -np.inf, lax.max), (x.signed,), (x.unit,))[1],
}

INFER: dict[str, Callable] = {
    **{name: lambda x, name=name: getattr(lax, name)(x.signed, x.unit) for name in ("add", "sub", "mul", "div", "rem")},
    **{name: lambda x, name=name: getattr(lax, name)(x.signed) for name in ("tanh", "logistic", "erf", "square")},
    "sqrt": lambda x: lax.sqrt(x.unit),
    "integer_pow": lambda x: x.signed**3,
    "psum": lambda x: on_devices(lambda y: lax.psum(y, "i"), x.signed),
    "reduce_scatter": lambda x: on_devices(lambda y: lax.psum_scatter(y, "i", tiled=True), x.signed),
}

CLEAR: dict[str, Callable] = {
    **{name: lambda x, name=name: getattr(lax, name)(x.signed) for name in (
        "abs", "neg", "sign", "floor", "ceil", "round", "cummax", "cummin", "sort",
        "optimization_barrier")},
    "reduce_max": lambda x: jnp.max(x.signed, axis=0),
    "reduce_min": lambda x: jnp.min(x.signed, axis=0),
    "reshape": lambda x: x.signed.reshape(64),
    "squeeze": lambda x: lax.squeeze(x.signed[:1], (0,)),
    "transpose": lambda x: x.signed.T,
    "rev": lambda x: lax.rev(x.signed, (0,)),
    "slice": lambda x: lax.slice(x.signed, (1, 2), (5, 6)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x.signed, (jnp.argmax(x.unit[0]), 2), (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x.signed, x.unit[:2, :2], (1, 2)),
    "gather": lambda x: jnp.take(x.signed, jnp.array([3, 1]), axis=0),
    "pad": lambda x: jnp.pad(x.signed, 1),
    "concatenate": lambda x: lax.concatenate([x.signed, x.unit], 0),
    "split": lambda x: lax.split(x.signed, (3, 5)),
    "stack": lambda x: lax.stack([x.signed, x.unit]),
    "unstack": lambda x: list(lax.unstack(x.signed)),
    "broadcast_in_dim": lambda x: lax.broadcast(x.signed, (2,)),
    "tile": lambda x: lax.tile(x.signed, (2, 1)),
    "max": lambda x: lax.max(x.signed, x.unit),
    "min": lambda x: lax.min(x.signed, x.unit),
    "clamp": lambda x: lax.clamp(-1.0, x.signed, 1.0),
    "select_n": lambda x: jnp.where(x.signed > 0, x.signed, x.unit),
    "top_k": lambda x: lax.top_k(x.signed, 2)[0],
    "approx_top_k": lambda x: lax.approx_max_k(x.signed, 2)[0],
    "scatter": lambda x: x.signed.at[1].set(x.unit[0]),
    "scatter-max": lambda x: updates(lax.scatter_max, x),
    "scatter-min": lambda x: updates(lax.scatter_min, x),
    "reduce_window_max": lambda x: windows(x.signed, -np.inf, lax.max),
    "reduce_window_min": lambda x: windows(x.signed, np.inf, lax.min),
    "reduce_precision": lambda x: lax.reduce_precision(x.signed, 8, 23),
    "argmax": lambda x: lax.argmax(x.signed, 0, np.int32),
    "argmin": lambda x: lax.argmin(x.signed, 0, np.int32),
    "stop_gradient": lambda x: lax.stop_gradient(x.signed),
    "copy": lambda x: jnp.copy(x.signed),
    "name": lambda x: checkpoint_name(x.signed, "kept"),
    "device_put": lambda x: jax.device_put(x.signed, jax.memory.Space.Device),
    "all_gather": lambda x: on_devices(lambda y: lax.all_gather(y, "i", tiled=True), x.signed),
    "all_to_all": lambda x: on_devices(lambda y: lax.all_to_all(y, "i", 1, 0, tiled=True), x.signed),
    "ppermute": lambda x: on_devices(lambda y: lax.ppermute(y, "i", [(0, 1), (1, 0)]), x.signed),
    "pmax": lambda x: on_devices(lambda y: lax.pmax(y, "i"), x.signed),
    "pmin": lambda x: on_devices(lambda y: lax.pmin(y, "i"), x.signed),
}  # fmt: skip

COMPARE: dict[str, Callable] = {
    **{name: lambda x, name=name: getattr(lax, name)(x.signed, x.unit) for name in (
        "eq", "ne", "lt", "le", "gt", "ge")},
    "is_finite": lambda x: lax.is_finite(x.signed),
}  # fmt: skip

if hasattr(lax, "polynomial"):  # from JAX 0.12 on
    FULL["log2"] = lambda x: lax.log2(x.unit)
    FULL["polynomial"] = lambda x: lax.polynomial(x.signed, [1.0, 0.5, 0.25])
    INFER["one_minus_square"] = lambda x: lax.one_minus_square_p.bind(x.unit)

EXAMPLES = {"LOW": LOW, "FULL": FULL, "WIDE": WIDE, "INFER": INFER, "CLEAR": CLEAR, "COMPARE": COMPARE}
CASES = [(precision, name) for precision, examples in EXAMPLES.items() for name in examples]

WITHOUT_EXAMPLE = {
    "log2", "polynomial", "one_minus_square",  # before JAX 0.12
    "geqrf", "geqp3", "select_and_scatter", "relayout", "tie", "layout_constraint", "inspect_sharding",  # not public
    "eq_to", "le_to", "lt_to",  # of sorting, in lowering
    "add_any",  # of backward passes
    # of shard_map with its axes checked, and of meshes with explicit axes
    "psum_invariant", "unreduced_psum", "unreduced_reduce_scatter", "unreduced_pmax", "unreduced_pmin",
    "all_gather_invariant", "all_gather_reduced", "ragged_all_to_all", "pbroadcast", "pbroadcast_dynamic", "preduced",
    "pvary", "reduced_vary_cast", "reduced_vary_cast_p", "vary_unreduced_cast", "vary_unreduced_cast_p", "reshard",
    "sharding_constraint",
}  # fmt: skip

ONLY_DTYPES = {
    "igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta", "cholesky_update",  # seconds of compilation
    "psum", "reduce_scatter", "all_gather", "all_to_all", "ppermute", "pmax", "pmin",  # between devices
}  # fmt: skip
"""Those of which only the dtypes are tested, and not the numbers."""

MEASURED = [(precision, name) for precision, name in CASES if name not in ONLY_DTYPES]

LOOSER = dict.fromkeys(["lgamma", "digamma", "polygamma", "zeta"], 2e-5)
"""Series that float32 sums less well than one operation."""


def low(x: Inputs) -> Inputs:
    """The inputs as the results of low operations."""
    return Inputs(*[y @ jnp.eye(8, dtype=y.dtype) for y in x])


def results(function: Callable, x: Inputs) -> list[Any]:
    """What a primitive makes of low inputs; an operation that follows takes its colour."""
    outs = jax.tree.leaves(function(low(x)))
    return [out * 1.0 if jnp.issubdtype(out.dtype, jnp.floating) else out for out in outs]


def all_results(x: Inputs) -> dict[str, list[Any]]:
    return {name: results(EXAMPLES[precision][name], x) for precision, name in MEASURED}


def policy_of(dtype: str) -> jmp.Policy:
    return jmp.get_policy(f"params=float32,compute={dtype},output=none")


@functools.cache
def autocasted(dtype: str) -> dict[str, list[np.ndarray]]:
    found = jax.jit(autocast(all_results, policy_of(dtype)))(drawn(0, dtype))
    return jax.tree.map(np.asarray, found)


@functools.cache
def exact(dtype: str) -> dict[str, list[np.ndarray]]:
    with jax.enable_x64(True):
        found = jax.jit(all_results)(Inputs(*[x.astype(np.float64) for x in drawn(0, dtype)]))
        return jax.tree.map(np.asarray, found)


def class_of(precision: str, name: str, dtype: str) -> str:
    return "FULL" if dtype == "float16" and name in _tables.FULL_IN_FLOAT16 else precision


def tolerance(precision: str, name: str, eps: float, expected: np.ndarray) -> np.ndarray | float:
    """What a result of a class may differ from float64 of the same rounded inputs by."""
    largest = np.max(np.abs(expected))
    match precision:
        case "LOW":  # a sum of at most 9 products, added in float32 or half, and one rounding
            return 4 * eps * largest
        case "FULL":
            return LOOSER.get(name, 4e-6) * largest
        case "WIDE":  # one rounding of a float32 sum
            return 0.501 * eps * np.abs(expected) + 1e-6 * largest
        case "INFER":  # one unit in the last place
            return eps * np.abs(expected) + 1e-6 * largest
        case _:
            return 0.0


@pytest.mark.parametrize("dtype", HALF)
def test_errors_against_float64_are_those_of_the_classes(dtype):
    eps, wrong = float(jnp.finfo(dtype).eps), {}
    for precision, name in MEASURED:
        for got, expected in zip(autocasted(dtype)[name], exact(dtype)[name], strict=True):
            bound = tolerance(class_of(precision, name, dtype), name, eps, expected)
            errors = np.abs(got.astype(np.float64) - expected)
            if not np.all(errors <= bound):
                wrong[name] = np.max(errors)
    assert wrong == {}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("precision", EXAMPLES)
def test_primitives_run_and_are_followed_in_the_dtypes_of_their_class(precision, dtype):
    for name, example in EXAMPLES[precision].items():
        found = class_of(precision, name, dtype)
        traced = trace(autocast(functools.partial(results, example), policy_of(dtype)))(drawn(0, dtype))
        runs = "float32" if found in ("FULL", "WIDE") else dtype
        follows = "float32" if found == "FULL" else dtype
        assert (name, dtypes_of(traced.jaxpr, name)) == (name, {runs})
        assert dtypes_of_results(traced.jaxpr) <= {follows}, name


def dtypes_of(program: Any, name: str) -> set[str]:
    """The floating dtypes that equations of a primitive read and make."""
    found: set[str] = set()
    for eqn in program.eqns:
        if eqn.primitive.name == name:
            found |= {str(atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars)}
        for inner in jaxprs_in_params(eqn.params):
            found |= dtypes_of(inner, name)
    return {dtype for dtype in found if dtype in ("float32", *HALF)}


def dtypes_of_results(program: Any) -> set[str]:
    """The dtypes of floating results before they are cast to those that were traced."""
    made = {var: eqn for eqn in program.eqns for var in eqn.outvars}
    last = [made[var] for var in program.outvars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
    sources = [eqn.invars[0] if eqn.primitive.name == "convert_element_type" else eqn.outvars[0] for eqn in last]
    return {str(source.aval.dtype) for source in sources}


def test_every_row_that_computes_has_an_example():
    rows = {(precision, name) for precision in EXAMPLES for name in getattr(_tables, precision)}
    assert {name for _, name in rows - set(CASES)} == WITHOUT_EXAMPLE - {name for _, name in CASES}
    assert set(CASES) <= rows


def test_every_function_of_linear_algebra_is_in_float32_or_a_product():
    rows = {name for name in _tables.FUNCTIONS if "linalg." in name}
    assert {name.rpartition(".")[2] for name in rows} == set(PRODUCTS)
    assert {_tables.FUNCTIONS[name] for name in rows} == {"infer"}
