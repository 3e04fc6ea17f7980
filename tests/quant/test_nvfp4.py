"""What is NVFP4's own: the Hadamard transform and stochastic rounding of gradients, against NumPy, and the key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

from jmp_policy.quant import NVFP4, dot_general, einsum
from jmp_policy.quant._block_numbers import make_hadamard

DIMENSIONS = (((1,), (0,)), ((), ()))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NEAREST = NVFP4(min_size=0)
NOISY = NVFP4(min_size=0, stochastic_rounding=True)


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


X, W, G = draw(48, 32), draw(32, 64, seed=1), draw(48, 64, seed=2)


@functools.partial(jax.jit, static_argnums=0)
def gradients(format, x, w, g, key=None):
    """The gradients of input and weight, where that of the product is `g`."""
    product = lambda x, w: dot_general(x, w, DIMENSIONS, quantization=format, key=key)
    return jax.vjp(product, x, w)[1](g)


def round_columns(x, block=16):
    """E2M1 in blocks of rows with a scale in e4m3, and one of the tensor, in NumPy."""
    x = np.asarray(x, np.float64)
    scale_of_tensor = 2688 / np.abs(x).max()
    blocks = x.reshape(-1, block, x.shape[-1])
    scale = (np.abs(blocks).max(1, keepdims=True) * scale_of_tensor / 6).astype(jnp.float8_e4m3fn).astype(np.float64)
    values = np.clip(blocks * scale_of_tensor / scale, -6, 6).astype(jnp.float4_e2m1fn).astype(np.float64)
    return (values * scale / scale_of_tensor).reshape(x.shape)


def mix(x, block=16):
    """Sylvester's matrix and the signs, written another way."""
    matrix = np.ones((1, 1))
    for _ in range(int(np.log2(block))):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    bits = [f"{n:04b}" for n in range(block)]
    signs = [(-1) ** ((b[:2] == "11") + (b[2:] == "11")) for b in bits]
    blocks = x.reshape(-1, block, x.shape[-1])
    return np.einsum("ij,bjf->bif", matrix * signs / np.sqrt(block), blocks).reshape(x.shape)


def relative_error(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("size", [1, 2, 8, 16, 32])
def test_the_transform_is_orthonormal_and_spreads_what_is_equal(size):
    matrix = make_hadamard(size).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)
    if size in (16, 4):
        np.testing.assert_allclose(np.abs(matrix.sum(1)), 1, atol=1e-6)  # an odd number of bits leaves one unpaired


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_weight_is_of_rounded_operands_mixed_or_not(dtype):
    x, w, g = (array.astype(dtype) for array in (X, W, G))
    exact_x, exact_g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    plain = round_columns(exact_x).T @ round_columns(exact_g)
    mixed = round_columns(mix(exact_x)).T @ round_columns(mix(exact_g))
    # A number that float32 sums to the other side of a tie moves by a step: few of 1,536, each in a sum of 48 products.
    bound = 2e-3 if dtype == "float32" else 5e-3  # the result is rounded to bfloat16
    assert relative_error(gradients(NEAREST, x, w, g)[1], plain) < bound
    assert relative_error(gradients(NVFP4(min_size=0, hadamard=True), x, w, g)[1], mixed) < bound
    assert relative_error(plain, mixed) > 0.05


@pytest.mark.slow
def test_the_transform_changes_the_gradient_of_a_weight_alone():
    plain, mixed = gradients(NEAREST, X, W, G)[0], gradients(NVFP4(min_size=0, hadamard=True), X, W, G)[0]
    np.testing.assert_array_equal(plain, mixed)


@pytest.mark.slow
def test_the_transform_adds_nothing_where_rows_are_no_multiple_of_a_block():
    x, g = X[:41], G[:41]
    pad = lambda array: np.pad(np.asarray(array, np.float64), ((0, 7), (0, 0)))
    expected = round_columns(mix(pad(x))).T @ round_columns(mix(pad(g)))
    assert relative_error(gradients(NVFP4(min_size=0, hadamard=True), x, W, g)[1], expected) < 2e-3


@pytest.mark.exhaustive
def test_noise_is_right_on_average_and_rounding_to_nearest_is_not():
    # Inputs that e2m1 has, so that gradients alone are rounded; these lie on one side of a tie.
    x = jnp.asarray(np.random.default_rng(0).choice(E2M1[1:], (16, 16)).astype(np.float32)).at[0].set(6)
    g = (0.1 * draw(16, 64, seed=5) + 1.1).at[0].set(6)
    exact, draws = np.asarray(x, np.float64).T @ np.asarray(g, np.float64), 256
    keys = jax.random.split(jax.random.key(0), draws)
    drawn = np.stack([gradients(NOISY, x, W[:16], g, key)[1] for key in keys]).astype(np.float64)
    # Of 1,024 numbers none is beyond 5 of the standard errors of its mean, more than noise in steps of 2**-17 is off.
    assert np.all(np.abs(drawn.mean(0) - exact) < 5 * drawn.std(0) / np.sqrt(draws) + 1e-6 * np.abs(exact))
    assert relative_error(drawn.mean(0), exact) < relative_error(drawn[0], exact) / 8  # 1 / 16 is expected
    nearest = gradients(NEAREST, x, W[:16], g)[1]
    assert relative_error(nearest, exact) > 3 * relative_error(drawn.mean(0), exact)


@pytest.mark.slow
def test_both_gradients_draw_noise_of_their_own():
    one, other = (gradients(NOISY, X, W, G, jax.random.key(seed)) for seed in range(2))
    again = gradients(NOISY, X, W, G, jax.random.key(0))
    for a, b, c in zip(one, other, again, strict=True):
        np.testing.assert_array_equal(a, c)
        assert 0.05 < relative_error(a, b) < 0.5


@pytest.mark.exhaustive
def test_inputs_and_weights_are_rounded_to_nearest():
    product = lambda key: dot_general(X, W, DIMENSIONS, quantization=NOISY, key=key)
    nearest = dot_general(X, W, DIMENSIONS, quantization=NEAREST)
    np.testing.assert_array_equal(product(jax.random.key(0)), nearest)
    np.testing.assert_array_equal(product(None), nearest)


@pytest.mark.exhaustive
def test_raw_keys_and_einsum_draw_as_keys_do():
    raw = jax.grad(lambda w: einsum("bi,io->bo", X, w, quantization=NOISY, key=jax.random.PRNGKey(0)).sum())(W)
    typed = jax.grad(lambda w: dot_general(X, w, DIMENSIONS, quantization=NOISY, key=jax.random.key(0)).sum())(W)
    np.testing.assert_array_equal(raw, typed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [2, 4])
def test_noise_is_the_same_bits_whatever_the_mesh(devices):
    mesh = make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    expected = gradients(NOISY, X, W, G, jax.random.key(3))
    sharded = gradients(NOISY, place(X, "data"), place(W), place(G, "data"), place(jax.random.key(3)))
    # Rows of the gradient of the input are sums on one device; those of the weight's are split, within rounding.
    np.testing.assert_array_equal(sharded[0], expected[0])
    assert relative_error(sharded[1], expected[1]) < 1e-6
    columns = gradients(NOISY, place(X), place(W, None, "data"), place(G, None, "data"), place(jax.random.key(3)))
    np.testing.assert_array_equal(columns[1], expected[1])


@pytest.mark.exhaustive
def test_each_device_of_shard_map_draws_by_the_key_that_it_has():
    mesh = make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x, g = jnp.concatenate([X, X]), jnp.concatenate([G, G])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data"))
    def grads(x, g, key):
        same = gradients(NOISY, x, W, g, key)[0]
        own = gradients(NOISY, x, W, g, jax.random.fold_in(key, jax.lax.axis_index("data")))[0]
        return jnp.stack([same, own], axis=1)

    first, second = jnp.split(jax.jit(grads)(x, g, jax.random.key(0)), 2)
    np.testing.assert_array_equal(first[:, 0], second[:, 0])
    assert relative_error(first[:, 1], second[:, 1]) > 0.05


def test_a_missing_key_shows_where_a_product_is_differentiated():
    with pytest.raises(ValueError, match=r"differentiated has no key\. Pass one: .*rngs=\{'rounding': key\}"):
        jax.grad(lambda x: dot_general(x, W, DIMENSIONS, quantization=NOISY).sum())(X)


@pytest.mark.parametrize("quantization", ["nvfp4", "mxfp8", "int8", None])
def test_a_key_for_a_format_without_noise_is_refused(quantization):
    with pytest.raises(
        ValueError, match=r"uses no stochastic rounding, but got a key\. For example: quantization='nvfp4"
    ):
        dot_general(X, W, DIMENSIONS, quantization=quantization, key=jax.random.key(0))


def test_the_transform_is_of_a_power_of_two():
    with pytest.raises(ValueError, match=r"Hadamard transform needs a block_size that is a power of two, got 24\."):
        NVFP4(block_size=24, hadamard=True)
