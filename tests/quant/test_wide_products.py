"""`wide_product` against float64 and against what it replaces: for each operation, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_policy as jmp
from jmp_policy.quant import describe_convolution, describe_dot_general, label_einsum, wide_product

IMAGES = ("NHWC", "HWIO", "NHWC")
PRODUCTS = {
    "dense": ("dot_general", (8, 64), (64, 16), [(((1,), (0,)), ((), ()))], {}),
    "transposed": ("dot_general", (2, 8, 64), (16, 64), [(((2,), (1,)), ((), ()))], {}),
    "batched": ("dot_general", (3, 8, 16), (3, 16, 8), [(((2,), (1,)), ((0,), (0,)))], {}),
    "einsum": ("einsum", (2, 4, 32), (3, 8, 32), ["btd,hkd->bhtk"], {}),
    "strided": ("convolution", (2, 9, 8, 4), (3, 2, 4, 8), [(2, 1), ((1, 0), (0, 1))], {"rhs_dilation": (1, 2)}),
    "grouped": ("convolution", (2, 8, 8, 8), (3, 3, 2, 8), [(1, 1), "SAME"], {"feature_group_count": 4}),
}


def describe(name, left, right):
    kind, _, _, args, options = PRODUCTS[name]
    if kind == "einsum":
        return label_einsum(left.ndim, right.ndim, *args)
    if kind == "convolution":
        return describe_convolution(left, right, *args, dimension_numbers=IMAGES, **options).operation
    return describe_dot_general(left, right, *args, **options).operation


def operands(name, dtype, seed=0):
    """Two operands and a cotangent, which all are numbers of the compute dtype and of float32."""
    _, left, right, *_ = PRODUCTS[name]
    rng = np.random.default_rng([seed, len(name)])
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), dtype).astype(jnp.float32)
    left, right = draw(left), draw(right)
    return left, right, draw(jax.eval_shape(describe(name, left, right).compute, left, right).shape)


def with_gradients(fun, left, right, grad):
    out, vjp = jax.vjp(fun, left, right)
    return out, *vjp(grad)


def product(name, left, right, accumulate=np.float32, compute="bfloat16"):
    return wide_product(describe(name, left, right), left, right, accumulate, np.dtype(compute))


def exact(name, *arrays):
    """The product and both gradients in float64, as JAX derives them."""
    operation = describe(name, *arrays[:2]).compute
    with jax.enable_x64(True):
        return with_gradients(operation, *(jnp.asarray(np.asarray(x, np.float64)) for x in arrays))


def error(found, true):
    true = np.asarray(true, np.float64)
    return np.linalg.norm(np.asarray(found, np.float64) - true) / np.linalg.norm(true)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compute", "weight"),
    [
        ("einsum", "bfloat16", "float32"),
        ("batched", "float16", "float32"),
        ("strided", "bfloat16", "float32"),
        ("grouped", "bfloat16", "bfloat16"),
    ],
)
def test_results_and_gradients_are_sums_in_float32_and_rounded_once(name, compute, weight):
    left, right, grad = operands(name, compute)
    fun = functools.partial(product, name, compute=np.dtype(compute))
    found, true = with_gradients(fun, left.astype(compute), right.astype(weight), grad), exact(name, left, right, grad)
    bounds = {"float32": 1e-6, "bfloat16": 3e-3, "float16": 4e-4}
    for result, wanted, dtype in zip(found, true, ("float32", compute, weight), strict=True):
        assert result.dtype == dtype
        assert error(result, wanted) < bounds[dtype]


@pytest.mark.slow
def test_a_report_on_a_cpu_shows_the_products_of_accelerators():
    left, right, grad = operands("dense", "bfloat16")
    backward = lambda left, right, grad: with_gradients(functools.partial(product, "dense"), left, right, grad)
    matmuls = str(jmp.numerics.audit(backward)(left.astype(jnp.bfloat16), right, grad)).splitlines()[2]
    assert matmuls.split()[:3] == ["bfloat16", "1", "2"]


@pytest.mark.parametrize("accumulate", ["bfloat16", "float64"])
def test_the_result_has_the_accumulate_dtype_that_jax_has(accumulate):
    left, right, _ = operands("dense", "bfloat16")
    fun = lambda dtype: jax.eval_shape(lambda: product("dense", left.astype(jnp.bfloat16), right, dtype))
    assert fun(np.dtype(accumulate)).dtype == ("bfloat16" if accumulate == "bfloat16" else "float32")
    with jax.enable_x64(True):
        assert fun(np.dtype(accumulate)).dtype == accumulate


@pytest.mark.parametrize("given", ["default", "operation"])
def test_gradients_have_the_precision_of_the_product(given, no_default_precision):
    left, right, grad = operands("dense", "float32")
    numbers = PRODUCTS["dense"][3][0]
    precision = "highest" if given == "operation" else None
    operation = describe_dot_general(left, right, numbers, precision).operation

    def fun(left, right):
        with jax.default_matmul_precision("highest" if given == "default" else None):
            return wide_product(operation, left, right, np.float32, np.dtype("float32"))

    program = jax.make_jaxpr(lambda *arrays: with_gradients(fun, *arrays))(left, right, grad)
    found = [eqn.params["precision"] for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert found == [(lax.Precision.HIGHEST,) * 2] * 3
