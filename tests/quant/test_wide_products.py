"""`wide_product` against float64 and against what it replaces: for each operation, forward and backward."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jmp_policy as jmp
from jmp_policy.quant._operations import OPERATIONS
from jmp_policy.quant._wide_product import wide_product

IMAGES = ("NHWC", "HWIO", "NHWC")
PRODUCTS = {
    "dense": ("dot_general", (8, 64), (64, 16), [(((1,), (0,)), ((), ()))], {}),
    "transposed": ("dot_general", (2, 8, 64), (16, 64), [(((2,), (1,)), ((), ()))], {}),
    "batched": ("dot_general", (3, 8, 16), (3, 16, 8), [(((2,), (1,)), ((0,), (0,)))], {}),
    "general": ("dot_general", (4, 8, 4, 8), (8, 4, 3, 5), [(((1, 2), (0, 1)), ((), ()))], {}),
    "einsum": ("einsum", (2, 4, 32), (3, 8, 32), ["btd,hkd->bhtk"], {}),
    "ellipsis": ("einsum", (2, 3, 64), (64, 8), ["...d,dk->...k"], {}),
    "convolution": ("conv_general_dilated", (2, 8, 8, 16), (3, 3, 16, 8), [(1, 1), "SAME"], {}),
    "strided": ("conv_general_dilated", (2, 9, 8, 4), (3, 2, 4, 8), [(2, 1), ((1, 0), (0, 1))],
                {"rhs_dilation": (1, 2)}),
    "grouped": ("conv_general_dilated", (2, 8, 8, 8), (3, 3, 2, 8), [(1, 1), "SAME"], {"feature_group_count": 4}),
}  # fmt: skip


def describe(name, left, right):
    kind, _, _, args, options = PRODUCTS[name]
    if kind == "einsum":
        return OPERATIONS[kind].describe(*args, left, right, **options)
    if kind == "conv_general_dilated":
        options = {"dimension_numbers": IMAGES, **options}
    return OPERATIONS[kind].describe(left, right, *args, **options)


def operands(name, dtype, seed=0):
    """Two operands and a cotangent, which all are numbers of the compute dtype and of float32."""
    _, left, right, *_ = PRODUCTS[name]
    rng = np.random.default_rng([seed, len(name)])
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), dtype).astype(jnp.float32)
    left, right = draw(left), draw(right)
    return left, right, draw(jax.eval_shape(describe(name, left, right).operation.compute, left, right).shape)


def with_gradients(fun, left, right, grad):
    out, vjp = jax.vjp(fun, left, right)
    return out, *vjp(grad)


def product(name, left, right, accumulate=np.float32, compute="bfloat16"):
    return wide_product(describe(name, left, right).operation, left, right, accumulate, np.dtype(compute))


def exact(name, *arrays):
    """The product and both gradients in float64, as JAX derives them."""
    operation = describe(name, *arrays[:2]).operation.compute
    with jax.enable_x64(True):
        return with_gradients(operation, *(jnp.asarray(np.asarray(x, np.float64)) for x in arrays))


def error(found, true):
    true = np.asarray(true, np.float64)
    return np.linalg.norm(np.asarray(found, np.float64) - true) / np.linalg.norm(true)


def exported_products(fun, platform, *args):
    """The dtypes of the operands and of the result of every product of an exported program."""
    text = export.export(jax.jit(fun), platforms=[platform])(*args).mlir_module()
    found = re.findall(r"stablehlo\.(?:dot_general|convolution)\W.* : \((.*), (.*)\) -> (.*?)(?: loc.*)?\n", text)
    return [tuple(re.sub(r".*x|>", "", kind) for kind in kinds) for kinds in found]


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_gradients_are_sums_in_float32(name, compute):
    left, right, grad = operands(name, compute)
    fun = functools.partial(product, name, compute=np.dtype(compute))
    out, left_grad, right_grad = with_gradients(fun, left.astype(compute), right, grad)
    true = exact(name, left, right, grad)
    assert (out.dtype, left_grad.dtype, right_grad.dtype) == (np.float32, compute, np.float32)
    assert error(out, true[0]) < 1e-6
    assert error(left_grad, true[1]) < {"bfloat16": 3e-3, "float16": 4e-4}[compute]  # rounded once
    assert error(right_grad, true[2]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_half_weights_have_half_gradients_that_were_rounded_once(name):
    left, right, grad = (x.astype(jnp.bfloat16) for x in operands(name, "bfloat16"))
    out, left_grad, right_grad = with_gradients(functools.partial(product, name), left, right, grad.astype(jnp.float32))
    true = exact(name, left, right, grad)
    assert (left_grad.dtype, right_grad.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert error(out, true[0]) < 1e-6
    assert (
        right_grad.astype(jnp.float32).tolist()
        == jnp.asarray(true[2]).astype(jnp.float32).astype(jnp.bfloat16).astype(jnp.float32).tolist()
        or error(right_grad, true[2]) < 3e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_are_half_in_every_product_and_sums_are_not(name, platform):
    left, right, grad = operands(name, "bfloat16")
    backward = lambda left, right, grad: with_gradients(functools.partial(product, name), left, right, grad)
    found = exported_products(backward, platform, left.astype(jnp.bfloat16), right, grad)
    assert found == [("bf16", "bf16", "f32")] * 3


@pytest.mark.slow
def test_a_report_on_a_cpu_shows_the_products_of_accelerators():
    left, right, grad = operands("dense", "bfloat16")
    backward = lambda left, right, grad: with_gradients(functools.partial(product, "dense"), left, right, grad)
    matmuls = str(jmp.numerics.audit(backward)(left.astype(jnp.bfloat16), right, grad)).splitlines()[2]
    assert matmuls.split()[:3] == ["bfloat16", "1", "2"]


@pytest.mark.slow
def test_jax_itself_rounds_the_gradient_of_a_float32_weight():
    """What this replaces; when it fails, JAX has learnt to hand the sum over."""
    left, right, grad = operands("dense", "bfloat16")
    own = lambda left, right: lax.dot(left, right.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    right_grad = with_gradients(own, left.astype(jnp.bfloat16), right, grad)[2]
    assert error(right_grad, exact("dense", left, right, grad)[2]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["bfloat16", "float32", "float64"])
def test_the_result_has_the_accumulate_dtype_that_jax_has(accumulate):
    left, right, _ = operands("dense", "bfloat16")
    fun = functools.partial(product, "dense", left.astype(jnp.bfloat16), right)
    assert fun(np.dtype(accumulate)).dtype == ("bfloat16" if accumulate == "bfloat16" else "float32")
    with jax.enable_x64(True):
        assert fun(np.dtype(accumulate)).dtype == accumulate


@pytest.mark.slow
def test_an_einsum_that_repeats_an_operand_keeps_the_derivative_of_jax():
    left, right = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((1, 8, 3))
    operation = OPERATIONS["einsum"].describe("...d,...dk->...k", left, right).operation
    fun = lambda left, right: wide_product(operation, left, right, np.float32, np.dtype("bfloat16"))
    out, left_grad, right_grad = with_gradients(fun, left, right, jnp.ones((4, 3)))
    assert (out.dtype, left_grad.dtype, right_grad.dtype) == (np.float32, jnp.bfloat16, np.float32)
    assert (left_grad.tolist()[0][0], right_grad.tolist()[0][0][0]) == (3.0, 4.0)


@pytest.mark.parametrize("given", ["default", "operation"])
def test_gradients_have_the_precision_of_the_product(given, no_default_precision):
    left, right, grad = operands("dense", "float32")
    numbers = PRODUCTS["dense"][3][0]
    precision = "highest" if given == "operation" else None
    operation = OPERATIONS["dot_general"].describe(left, right, numbers, precision).operation

    def fun(left, right):
        with jax.default_matmul_precision("highest" if given == "default" else None):
            return wide_product(operation, left, right, np.float32, np.dtype("float32"))

    program = jax.make_jaxpr(lambda *arrays: with_gradients(fun, *arrays))(left, right, grad)
    found = [eqn.params["precision"] for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert found == [(lax.Precision.HIGHEST,) * 2] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_vmap_over_either_operand_is_a_loop(name):
    arrays = [
        jnp.stack(both) for both in zip(operands(name, "bfloat16"), operands(name, "bfloat16", seed=1), strict=True)
    ]
    left, right, grad = arrays[0].astype(jnp.bfloat16), *arrays[1:]
    fun = functools.partial(with_gradients, functools.partial(product, name))
    for axes in ((0, 0, 0), (0, None, 0), (None, 0, 0)):
        pick = lambda i, axes=axes: [x[0 if a is None else i] for x, a in zip((left, right, grad), axes, strict=True)]
        many = jax.vmap(fun, axes)(*(x[0] if a is None else x for x, a in zip((left, right, grad), axes, strict=True)))
        for i in range(2):
            for found, wanted in zip(many, fun(*pick(i)), strict=True):
                assert found.dtype == wanted.dtype
                np.testing.assert_allclose(np.float32(found[i]), np.float32(wanted), rtol=1e-2, atol=1e-4)
