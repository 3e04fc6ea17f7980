"""Autocast among the transformations of JAX, and beside what an author wrote."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from programs import operations, program_text, trace, walk

from jmp_policy.autocast import autocast

BFLOAT16 = "params=float32,compute=bfloat16,output=none"
X, W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4), jnp.linspace(0.0, 1.0, 16).reshape(4, 4)


def layer(x, w):
    return jnp.tanh(x @ w)


def layer_by_hand(x, w):
    return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def total(fun):
    return lambda x, w: fun(x, w).sum()


def repeated(fun):
    return lambda x, w: lax.scan(lambda x, _: (fun(x, w), None), x, None, length=3)[0]


def on_devices(fun):
    mesh = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(total(f), argnums=(0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (w, x)),
    "hessian": lambda f: jax.hessian(total(f)),
    "jacfwd": jax.jacfwd,
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
    "vmap_with_an_axis_name": lambda f: jax.vmap(lambda x, w: lax.psum(f(x, w), "i"), (0, None), axis_name="i"),
    "remat": lambda f: jax.grad(total(jax.checkpoint(f))),
    "scan": repeated,
    "grad_of_scan": lambda f: jax.grad(total(repeated(f))),
    "scan_of_grad": lambda f: repeated(lambda x, w: x - jax.grad(total(f))(x, w)),
    "while": lambda f: lambda x, w: lax.while_loop(lambda x: x.sum() > 5, lambda x: f(x, w), x),
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w),
    "shard_map": on_devices,
}


@pytest.mark.parametrize("name", ["jit", *(pytest.param(name, marks=pytest.mark.slow) for name in [*TRANSFORMS][1:])])
def test_a_transformation_outside_gives_the_program_by_hand(name):
    transform = TRANSFORMS[name]
    text = lambda fun: program_text(jax.jit(transform(fun)).lower(X, W))
    # Inside `jit`, and before it is differentiated, the program is a jitted function.
    assert text(autocast(layer, BFLOAT16)) in (text(layer_by_hand), text(jax.jit(layer_by_hand)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformation_inside_runs_its_products_in_half(name):
    ours = jax.jit(autocast(TRANSFORMS[name](layer), BFLOAT16))
    assert set(matmul_dtypes(ours, X, W)) == {"bfloat16"}
    expected = jax.eval_shape(TRANSFORMS[name](layer), X, W)
    assert jax.tree.map(lambda a: a.dtype, jax.eval_shape(ours, X, W)) == jax.tree.map(lambda a: a.dtype, expected)


def matmul_dtypes(fun, *args):
    program = trace(fun)(*args).jaxpr
    return [str(step.eqn.outvars[0].aval.dtype) for step in walk(program) if step.name == "dot_general"]


def test_tracers_of_transformations_around_may_be_closed_over():
    def closing(fun):
        def step(x, row):
            return jax.grad(lambda y: fun(lambda: layer(x * y, row * W))().sum())(x), row

        return lambda x, w: lax.scan(step, x, jax.vmap(lambda row: fun(lambda: row * 2)())(w))

    ours = program_text(jax.jit(closing(lambda f: autocast(f, BFLOAT16))).lower(X, W))
    assert ours.count("xbf16>)") > ours.count("dot_general") > 0
    plain = closing(lambda f: f)
    wide = autocast(plain, "params=float32,compute=float32,output=none")
    assert operations(jax.jit(wide).lower(X, W)) == operations(jax.jit(plain).lower(X, W))


def test_an_export_for_another_platform_has_half_products():
    step = jax.jit(jax.value_and_grad(total(autocast(repeated(layer), BFLOAT16)), argnums=(0, 1)))
    text = jax.export.export(step, platforms=["tpu"])(X, W).mlir_module()
    products = re.findall(r"stablehlo\.dot_general.*-> tensor<\w+x(\w+)>", text)
    assert len(products) >= 3
    assert set(products) == {"bf16"}


@pytest.mark.slow
def test_trees_keywords_and_things_that_are_no_arrays_pass():
    def fun(tree, *, scale, name, flag=True):
        return {"out": tree["a"] @ tree["b"][0] * scale if flag else None, "none": None}, len(name)

    out, length = autocast(fun, BFLOAT16)({"a": X, "b": [W, None]}, scale=2.0, name="two")
    np.testing.assert_allclose(out["out"], X @ W * 2, atol=0.02)
    assert out["none"] is None
    assert length == 3


def multiply_in(half):
    return lambda x, w: x.astype(half) @ w.astype(half)


@pytest.mark.parametrize(
    ("fun", "compute"),
    [
        (multiply_in("float16"), "float32"),
        (multiply_in("float16"), "bfloat16"),
        (lambda x, w: multiply_in("bfloat16")(x, w) * 2, "bfloat16"),
    ],
)
def test_a_product_that_its_author_wrote_in_half_runs_as_written_and_what_follows_stays_half(fun, compute):
    ours = autocast(fun, f"params=float32,compute={compute},output=none")
    assert str(trace(ours)(X, W)) == str(trace(fun)(X, W))


# A derivative of a user survives, even a wrong one; those of JAX are rewritten with their functions.


@jax.custom_jvp
def wrong_jvp(x, w):
    return jnp.tanh(x @ w)


@wrong_jvp.defjvp
def _(primals, tangents):
    return jnp.tanh(primals[0] @ primals[1]), 7 * tangents[0]


@jax.custom_vjp
def wrong_vjp(x, w):
    return jnp.tanh(x @ w)


wrong_vjp.defvjp(lambda x, w: (jnp.tanh(x @ w), w), lambda w, ct: (7 * ct, 3 * w))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast casts no matmul to bfloat16")
@pytest.mark.parametrize("custom_rules", ["opaque", "inside"])
@pytest.mark.parametrize("wrong", [wrong_jvp, wrong_vjp])
def test_a_wrong_gradient_survives(wrong, custom_rules):
    cast = autocast(lambda x, w: wrong(x, w), BFLOAT16, custom_rules=custom_rules)
    for fun in cast, jax.jit(cast), lambda x, w: jax.vmap(cast, in_axes=(0, None))(x[None], w)[0]:
        np.testing.assert_array_equal(jax.grad(lambda x: fun(x, W).sum())(X), jnp.full((4, 4), 7.0))


@pytest.mark.parametrize("wrong", [wrong_jvp, wrong_vjp])
@pytest.mark.filterwarnings("ignore:autocast casts no matmul to bfloat16")
@pytest.mark.parametrize(("custom_rules", "dtype"), [("opaque", "float32"), ("inside", "bfloat16")])
def test_a_function_of_a_user_is_opaque_unless_it_is_asked_for(wrong, custom_rules, dtype):
    cast = autocast(lambda x, w: wrong(x, w), BFLOAT16, custom_rules=custom_rules)
    assert matmul_dtypes(cast, X, W) == [dtype]
    forward = lambda x, w: jax.grad(lambda x: cast(x, w).sum())(x)
    assert matmul_dtypes(forward, X, W) == [dtype]


def test_relu_stays_in_bfloat16_forward_and_backward():
    cast = autocast(lambda x, w: jax.nn.relu(x @ w), BFLOAT16)
    program = trace(jax.grad(lambda x: cast(x, W).sum()))(X)
    of_relu = [step.eqn for step in walk(program.jaxpr) if step.name in ("max", "select_n", "gt")]
    assert {str(eqn.invars[-1].aval.dtype) for eqn in of_relu} == {"bfloat16"}
    assert len(of_relu) >= 3
