"""A few programs under each strict setting of JAX, which people switch on to look for a bug."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

SETTINGS = {
    "jax_enable_checks": functools.partial(jax.enable_checks, True),
    "jax_numpy_rank_promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
    "jax_numpy_dtype_promotion": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "jax_disable_jit": jax.disable_jit,
    "jax_enable_x64": functools.partial(jax.enable_x64, True),
    "jax_debug_nans": functools.partial(jax.debug_nans, True),
}

QUANTIZED = (
    "int8",
    "int4",
    "int4/32",
    "int4(activations=true)",
    "e4m3",
    "e4m3(activations=true)",
    "nf4",
    "float8",
    "mxfp8",
    "mxfp4",
    "nvfp4",
)
MIXED = "params=float32,compute=bfloat16,output=float32"
W, X = np.full((4, 4), 0.25, np.float32), np.full((8, 4), 0.5, np.float32)
PROGRAMS = {}


def program(fun):
    """Registers a function of parameters and a batch, both float32."""
    PROGRAMS[fun.__name__] = fun
    return fun


def loss(w, x):
    """A loss with a scan, a loop of integers, a branch, a custom derivative, a remat and a bias."""
    x = lax.scan(lambda c, _: (jax.nn.relu(c @ w), None), x, None, length=2)[0]
    count = lax.while_loop(lambda i: i < 5, lambda i: i + 2, jnp.int32(0))
    x = jax.checkpoint(lambda x: lax.cond(count > 3, jnp.tanh, jnp.exp, x @ w))(x)
    bias = jnp.broadcast_to(w[:1], x.shape)
    return jnp.mean(jnp.where(x > 0, x + bias, jnp.sqrt(jnp.square(x) + 1e-6)))


def sharded_loss(w, x):
    mesh = make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def mean(w, x):
        fixed = lax.stop_gradient((w, x))
        turn = lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ fixed[0]))
        start = lax.while_loop(lambda carry: carry[0] < 2, turn, (jnp.int32(0), fixed[1]))[1]
        return lax.pmean(jnp.mean(lax.cond(start[0, 0] > 0, jnp.tanh, jnp.exp, x @ w) + start), "data")

    return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)


@program
def autocast(w, x):
    return jmp.autocast(loss, MIXED)(w, x)


@program
def gradient_of_autocast(w, x):
    return jax.grad(jmp.autocast(loss, MIXED + ",accumulate=float32"))(w, x)


@program
def autocast_of_a_gradient_inside_custom_rules(w, x):
    return jmp.autocast(jax.grad(loss), MIXED, custom_rules="inside")(w, x)


@program
def function_with_a_policy(w, x):
    return jmp.with_policy(loss, MIXED)(w, x)


@program
def linen_with_a_policy(w, x):
    model = jmp.with_policy(nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(4)]), MIXED)
    return model.init_with_output(jax.random.key(0), x)


@program
def nnx_with_a_policy(w, x):
    model = jmp.with_policy(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), MIXED)
    return model(x)


@program
def scaled_gradient(w, x):
    return jmp.value_and_grad(loss, loss_scale=jmp.DynamicLossScale(2.0**10))(w, x)


@program
def gradient_in_a_reduce_dtype(w, x):
    scale = jmp.NoOpLossScale()
    return jmp.value_and_grad(jmp.with_policy(loss, MIXED), loss_scale=scale, reduce_dtype="float32")(w, x)


@program
def loss_scales_that_are_traced(w, x):
    scale = jmp.DynamicLossScale(jnp.max(w))
    return scale.adjust(jmp.all_finite({"w": w})), scale.scale(x), scale.unscale(x)


@program
def collect_all_operations(w, x):
    return jmp.numerics.collect(loss, formats=("float16",), where="all", of=("forward",), histogram=False)(w, x)


@program
def collect_gradients_on_some_steps(w, x):
    return jmp.numerics.collect(jax.grad(loss), formats=(), loops="merge", every=2)(jnp.int32(1), w, x)


@program
def collect_around_devices(w, x):
    return jmp.numerics.collect(jax.grad(sharded_loss))(w, x)


@program
def first_nonfinite_around_devices(w, x):
    return jmp.numerics.first_nonfinite(jax.grad(sharded_loss))(w, x)


@program
def autocast_and_reduce_around_devices(w, x):
    grad = jmp.grad(jmp.autocast(sharded_loss, MIXED), loss_scale=jmp.NoOpLossScale(), reduce_dtype="float32")
    return grad(w, x)


@program
def audit(w, x):
    jmp.numerics.audit(jmp.autocast(jax.grad(loss), MIXED))(w, x)
    return x


@program
def collectives(w, x):
    jmp.numerics.collectives(jax.grad(sharded_loss), compiled=False)(w, x)
    return x


@program
def explain(w, x):
    jmp.explain(jmp.with_policy(nn.Dense(4), MIXED), jax.ShapeDtypeStruct((8, 4), jnp.float32))
    return x


@program
def step(w, x):
    tx = jmp.optim.loss_scaled(optax.sgd(1e-3, momentum=0.9), jmp.DynamicLossScale(2.0**10))
    grads = jmp.grad(loss, loss_scale=(state := tx.init(w)))(w, x)
    return jmp.optim.step(tx, grads, state, w)


@program
def minimize(w, x):
    tx = jmp.optim.loss_scaled(optax.sgd(1e-3), jmp.DynamicLossScale(2.0**10))
    return jmp.optim.minimize(loss, tx)(w, tx.init(w), x)


def update(tx, params):
    return tx.update(params, tx.init(params), params)


@program
def half_parameters(w, x):
    half, inner = w.astype(jnp.bfloat16), optax.sgd(1e-3, momentum=0.9)
    wrapped = [
        jmp.optim.master_weights(inner),
        jmp.optim.master_weights(inner, mode="split"),
        jmp.optim.kahan(inner),
        jmp.optim.stochastic_rounding(inner, jax.random.key(0)),
    ]
    return [update(tx, half) for tx in wrapped]


@program
def small_optimizer_state(w, x):
    inner, params = optax.sgd(1e-3, momentum=0.9), jnp.zeros((64, 128), jnp.float32)
    wrapped = [jmp.optim.quantize_state(inner), jmp.optim.cast_state(inner, mu_dtype="bfloat16")]
    return [update(tx, params) for tx in wrapped]


@pytest.mark.parametrize(("name", "setting"), list(zip(PROGRAMS, itertools.cycle(SETTINGS))))
def test_programs_trace_under_strict_settings(setting, name):
    with SETTINGS[setting]():
        jax.make_jaxpr(PROGRAMS[name])(W, X)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format_name", "setting"), list(zip(QUANTIZED, itertools.cycle(["jax_enable_checks", "jax_enable_x64"])))
)
def test_quantized_layers_trace_under_strict_settings(setting, format_name):
    with SETTINGS[setting]():
        x = jnp.ones((16, 64), jnp.float32)
        kind, _, options = format_name.partition("(")
        format = f"{kind}({options.replace(')', ',')}min_size=0)"
        model = jmp.with_policy(nn.Dense(64), f"{format}_from_mixed_bfloat16")
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        grad = jax.grad(lambda variables: model.apply(variables, x).astype(jnp.float32).sum(), allow_int=True)
        jax.make_jaxpr(grad)(variables)


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["int8", "int4/2"])
def test_stored_weights_are_the_same_under_x64(format_name):
    stored = jmp.quant.quantize_array(W * np.arange(4, dtype=np.float32), format_name)
    with jax.enable_x64(True):
        wide = jmp.quant.quantize_array(W * np.arange(4, dtype=np.float32), format_name)
    for ours, theirs in zip(jax.tree.leaves(wide), jax.tree.leaves(stored), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


INSIDE = {
    "collect": lambda x: jmp.numerics.collect(jnp.tanh, where="all")(x),
    "collect on some steps": lambda x: jmp.numerics.collect(jnp.tanh, where="all", every=2)(jnp.int32(1), x),
    "first_nonfinite": lambda x: jmp.numerics.first_nonfinite(jnp.log)(x),
}


@pytest.mark.parametrize(("name", "checks"), list(zip(INSIDE, [True, False, True], strict=True)))
def test_instruments_trace_inside_a_shard_map(name, checks):
    mesh = make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def run(x):
        return jax.tree.map(lambda leaf: leaf[None], INSIDE[name](x))

    with jax.enable_checks(True):
        sharded = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=checks)
        jax.make_jaxpr(sharded)(X)
