"""Islands of float32: what enters, what leaves, and how precise it is in between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

MESH = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "inside", "outside"),
    [
        (["float16", "float16"], ["float32", "float32"], "float16"),
        (["float16", "bfloat16"], ["float32", "float32"], "float32"),
        (["float8_e4m3fn"], ["float32"], "float8_e4m3fn"),
        (["int32", "bfloat16"], ["int32", "float32"], "bfloat16"),
        (["int32"], ["int32"], "float32"),  # no floating input: the output is left as it is
    ],
)
def test_inside_is_float32_and_outside_the_result_type_of_the_inputs(inputs, inside, outside):
    seen = []

    @jmp.force_full_precision
    def fun(*args):
        seen.extend(str(x.dtype) for x in args)
        return jnp.ones(2), jnp.arange(2)

    floats, ints = fun(*(jnp.ones(2, dtype) for dtype in inputs))
    assert seen == inside
    assert str(floats.dtype) == outside
    assert ints.dtype == jnp.int32


def test_float64_stays_float64():
    with jax.enable_x64(True):
        assert jmp.force_full_precision(lambda x: x)(jnp.ones(2, jnp.float64)).dtype == jnp.float64


def test_weak_types_and_loss_scales_have_no_say_in_the_output_of_a_decorated_function():
    @jmp.force_full_precision
    def fun(x, *_):
        return x

    assert fun.__name__ == "fun"
    assert fun(jnp.bfloat16(1), jnp.asarray(2.0)).dtype == jnp.bfloat16
    assert fun(jnp.bfloat16(1), jmp.DynamicLossScale()).dtype == jnp.bfloat16


@pytest.mark.usefixtures("no_default_precision")
def test_matmuls_are_at_highest_precision_inside_only():
    x = jnp.ones((2, 2))
    dot = jmp.force_full_precision(jnp.dot)
    assert "HIGHEST" in str(jax.make_jaxpr(dot)(x, x))
    assert "HIGHEST" not in str(jax.make_jaxpr(lambda x: dot(x, x) @ x)(x)).rsplit("dot_general", 1)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.vmap,
        lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).astype(jnp.float32).sum()),
        lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0.0, x)[1],
        lambda f: jax.shard_map(f, mesh=MESH, in_specs=P("d"), out_specs=P("d")),
        lambda f: jmp.with_policy(f, "bfloat16"),
    ],
)
def test_it_holds_under_every_transformation(transform):
    x = jnp.linspace(-4, 4, 32, dtype=jnp.bfloat16).reshape(4, 8)

    def written(x):
        return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)

    ours = transform(jmp.force_full_precision(lambda x: jax.nn.softmax(x, axis=-1)))(x)
    expected = transform(written)(x)
    assert ours.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.mark.slow
def test_cumsum_is_within_one_rounding_of_float64():
    # 2^-8 is half an ulp of bfloat16, from the one rounding on the way out; 1e-5 covers 256 sums in float32.
    x = np.random.default_rng().uniform(0.5, 1.5, 256).astype(jnp.bfloat16)
    exact = np.cumsum(x.astype(np.float64))
    ours = np.asarray(jmp.force_full_precision(jnp.cumsum)(jnp.asarray(x))).astype(np.float64)
    assert np.max(np.abs(ours - exact) / exact) <= 2**-8 + 1e-5
