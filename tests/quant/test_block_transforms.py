"""What JAX's transformations make of products in blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy._jaxpr import walk
from jmp_policy.quant import dot_general, einsum

ROWS = (((1,), (0,)), ((), ()))
IN_BLOCKS = ("mxfp8/8", "nvfp4/8", "mxfp4/8(activations=true)")
FORMATS = (*IN_BLOCKS, "mxfp4/8")


def arrays(*shapes):
    random = np.random.default_rng()
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def loss_and_gradients(x, w, t, format):
    out, backward = jax.vjp(lambda x, w: dot_general(x, w, ROWS, quantization=format), x, w)
    return out, *backward(t)


def assert_close(found, expected, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_jit_remat_and_eager_calls_give_the_same(format):
    x, w, t = arrays((5, 16), (16, 6), (5, 6))
    eager = loss_and_gradients(x, w, t, format)
    run = lambda x, w, t: loss_and_gradients(x, w, t, format)
    jitted, remat = jax.jit(lambda *args: (run(*args), jax.checkpoint(run)(*args)))(x, w, t)
    jax.tree.map(np.testing.assert_array_equal, jitted, remat)
    assert_close(jitted, eager)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_vmap_over_examples_and_over_ensembles_is_the_loop(format):
    x, w, t = arrays((3, 5, 16), (3, 16, 6), (3, 5, 6))
    run = functools.partial(loss_and_gradients, format=format)
    for axes, at in (((0, None, 0), (0, None)), ((0, 0, 0), (0, 0)), ((None, 0, 0), (None, 0)), ((1, 2, 1), (1, 2))):
        moved = [a[0] if axis is None else jnp.moveaxis(a, 0, axis) for a, axis in zip((x, w, t), axes, strict=True)]
        mapped = jax.jit(jax.vmap(run, axes))(*moved)
        for i in range(3):
            each = [x[i] if at[0] is not None else x[0], w[i] if at[1] is not None else w[0]]
            assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), jax.jit(run)(*each, t[i]))


def roundings(program, shape):
    """How often numbers of a shape become narrow ones in a traced program."""
    narrow = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
    made = [step.results[0].aval for step in walk(program.jaxpr) if step.name == "convert_element_type"]
    return sum(aval.size == np.prod(shape) and str(aval.dtype) in narrow for aval in made)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp8/8", "mxfp4/8(activations=true)", "nvfp4/8"])
def test_a_weight_that_examples_share_is_rounded_once_for_all_of_them(format):
    x, w, t = arrays((3, 5, 16), (16, 40), (3, 5, 40))
    run = functools.partial(loss_and_gradients, format=format)
    plain = jax.make_jaxpr(run)(x[0], w, t[0])
    mapped = jax.make_jaxpr(jax.vmap(run, (0, None, 0)))(x, w, t)
    assert roundings(plain, w.shape) == roundings(mapped, w.shape) == 2  # along its inputs, and along its outputs
    assert roundings(mapped, (3, *w.shape)) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", IN_BLOCKS)
def test_a_scan_over_a_stack_is_the_loop_over_its_layers(format):
    x, stack = arrays((5, 16), (3, 16, 16))
    layer = lambda x, w: jnp.tanh(dot_general(x, w / 4, ROWS, quantization=format))

    def scanned(x, stack):
        return jnp.sum(lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, stack)[0])

    def looped(x, stack):
        for i in range(3):
            x = layer(x, stack[i])
        return jnp.sum(x)

    found, expected = jax.jit(lambda *args: [jax.value_and_grad(run, (0, 1))(*args) for run in (scanned, looped)])(
        x, stack
    )
    assert_close(found, expected, rtol=1e-4)


@pytest.mark.exhaustive
def test_a_branch_and_a_loop_compute():
    x, w = arrays((5, 16), (16, 16))
    product = functools.partial(dot_general, dimension_numbers=ROWS, quantization="mxfp8/8")

    @jax.jit
    def run(x, w, is_taken):
        branch = lambda w: lax.cond(is_taken, lambda: jnp.sum(product(x, w)), lambda: 0.0)
        looped = lax.fori_loop(0, 2, lambda _, x: product(x, w), x)
        return jax.grad(branch)(w), looped

    taken, looped = run(x, w, True)
    assert_close(taken, jax.grad(lambda w: jnp.sum(product(x, w)))(w))
    assert_close(looped, product(product(x, w), w), rtol=1e-3)
    assert not run(x, w, False)[0].any()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_devices_compute_what_one_does(format, is_checked):
    """Each device has whole blocks of rows, and the amax of a tensor, which nvfp4 has, is the same on all."""
    x, w, t = arrays((32, 16), (16, 6), (32, 6))
    x, t = (jnp.concatenate([a, jnp.full((8, a.shape[1]), 0.0)])[:32].at[::8].set(8.0) for a in (x, t))
    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def of_device(x, w, t):
        out, of_x, of_w = loss_and_gradients(x, w, t, format)
        return out, of_x, of_w if is_checked else lax.psum(of_w, "data")

    specs = {"in_specs": (P("data"), P(), P("data")), "out_specs": (P("data"), P("data"), P())}
    sharded = jax.jit(jax.shard_map(of_device, mesh=mesh, check_vma=is_checked, **specs))(x, w, t)
    assert_close(sharded, jax.jit(lambda *args: loss_and_gradients(*args, format))(x, w, t))


@pytest.mark.slow
@pytest.mark.parametrize("format", IN_BLOCKS)
def test_gradients_that_are_accumulated_are_those_of_the_whole_batch(format):
    x, w, t = arrays((4, 8, 16), (16, 6), (4, 8, 6))
    x, t = x.at[:, 0].set(8.0), t.at[:, 0].set(8.0)  # one largest magnitude for all, which nvfp4 scales by
    loss = lambda w, x, t: jnp.sum(dot_general(x, w, ROWS, quantization=format) * t)

    @jax.jit
    def both(w):
        parts = lambda total, xt: (total + jax.grad(loss)(w, *xt), None)
        return lax.scan(parts, jnp.zeros_like(w), (x, t))[0], jax.grad(loss)(w, x.reshape(32, 16), t.reshape(32, 6))

    assert_close(*both(w))


@pytest.mark.slow
def test_a_loss_scale_of_a_power_of_two_changes_no_bit_of_a_gradient():
    """Scales of blocks are powers of two as well. In float16, unscaled gradients would be zero."""
    x, w = arrays((8, 16), (16, 6))
    x = x.astype(jnp.float16)

    def loss(w, size):
        out = dot_general(x, w, ROWS, quantization="mxfp8/8")
        return jnp.mean(out.astype(jnp.float32)) * size

    scaled = jax.jit(lambda w, size: jmp.grad(lambda w: loss(w, size), loss_scale=jmp.StaticLossScale(2.0**15))(w))
    unscaled = jax.jit(lambda w, size: jmp.grad(lambda w: loss(w, size), loss_scale=jmp.NoOpLossScale())(w))
    np.testing.assert_array_equal(scaled(w, 1.0), unscaled(w, 1.0))
    assert not unscaled(w, 2.0**-25).any()
    assert_close(scaled(w, 2.0**-25) * 2.0**25, scaled(w, 1.0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_step_with_a_number_that_is_not_finite_is_skipped(format, bad):
    x, w, t = arrays((8, 16), (16, 6), (8, 6))
    scale = jmp.DynamicLossScale(2.0**4)
    loss = lambda w, x: jnp.mean((dot_general(x, w, ROWS, quantization=format) - t) ** 2)

    @jax.jit
    def step(x):
        grads = jmp.grad(loss, loss_scale=scale)(w, x)
        is_finite = jmp.all_finite(grads)
        return jmp.select_tree(is_finite, w - 0.1 * grads, w), is_finite

    assert step(x)[1]
    after, is_finite = step(x.at[3, 4].set(bad))
    assert not is_finite
    np.testing.assert_array_equal(after, w)


@pytest.mark.slow
@pytest.mark.parametrize("format", IN_BLOCKS)
def test_forward_mode_is_refused_by_jax(format):
    x, w = arrays((5, 16), (16, 6))
    with pytest.raises(TypeError, match=r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function"):
        jax.jvp(lambda x: dot_general(x, w, ROWS, quantization=format), (x,), (x,))


@pytest.mark.parametrize("format", IN_BLOCKS)
@pytest.mark.parametrize("second", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
def test_second_derivatives_are_refused(second, format):
    x, w = arrays((5, 16), (16, 6))
    loss = lambda w: jnp.sum(dot_general(x, w, ROWS, quantization=format) ** 2)
    penalty = lambda w: jnp.sum(jax.grad(loss)(w) ** 2)
    with pytest.raises(TypeError, match=r"^Block-scaled matmuls \('.*'\) have no second derivative\. F"):
        jax.eval_shape(second(penalty), w)


@pytest.mark.slow
def test_rounded_weights_have_derivatives_of_any_order():
    """Without `activations` the rounding alone is special, and every derivative passes straight through it."""
    x, w = arrays((5, 16), (16, 6))
    rounded = jmp.quant.quantize_array(w, "mxfp4/8").dequantize()
    curved = lambda product: jax.jit(jax.hessian(lambda w: jnp.sum(jnp.sin(product(w)))))
    found = curved(lambda w: dot_general(x, w, ROWS, quantization="mxfp4/8"))(w)
    assert_close(found, curved(lambda w: x @ w)(rounded), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp8/8", "nvfp4/8"])
def test_experts_are_computed_each_by_itself(format):
    """A batch of weights is one product; nothing of one expert shows in another."""
    x, w, t = arrays((4, 5, 16), (4, 16, 6), (4, 5, 6))
    product = lambda x, w: einsum("ebd,edn->ebn", x, w, quantization=format)
    gradients = jax.jit(lambda x, w: (lambda out, backward: (out, *backward(t)))(*jax.vjp(product, x, w)))
    together = gradients(x, w)
    for i in range(4):
        assert_close([a[i] for a in together], jax.jit(loss_and_gradients, static_argnums=3)(x[i], w[i], t[i], format))
    spoilt = gradients(x.at[1].mul(1e6), w)
    np.testing.assert_array_equal(np.delete(spoilt[0], 1, axis=0), np.delete(together[0], 1, axis=0))
