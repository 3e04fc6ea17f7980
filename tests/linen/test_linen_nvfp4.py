"""NVFP4 in linen: layers that a rule keeps in the compute dtype, and the stream of keys for stochastic rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_policy as jmp
from jmp_policy.quant import QuantizedArray

POLICY = "nvfp4(min_size=0)_from_mixed_bfloat16"
NOISY = "nvfp4(min_size=0,stochastic_rounding=true,hadamard=true)_from_mixed_bfloat16"
KEPT = jmp.PolicyMap({"(.*/)?(stem_0|head)": "mixed_bfloat16"}, POLICY)
X = jax.random.normal(jax.random.key(0), (16, 32))


class Block(nn.Module):
    """A layer inside a module."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="dense")(x)


class Model(nn.Module):
    """A first layer, a block and a head."""

    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="stem_0")(x))
        x = nn.relu(self.block(name="inner")(x))
        return self.block(name="head")(x)


def loss_fn(model, variables, x=X, **options):
    return jnp.mean(model.apply(variables, x, **options).astype(jnp.float32) ** 2)


def make(policy, model=None):
    model = jmp.with_policy(model or Model(), policy)
    return model, model.init(jax.random.key(1), X)


def differ(a, b):
    return bool(jnp.any(a != b))


def reasons(policy, model=None):
    rows = jmp.explain(jmp.with_policy(model or Model(), policy), X).rows
    return {row.path: row.quantization for row in rows if row.quantization}


@pytest.mark.exhaustive
def test_every_layer_is_quantized_but_those_that_a_rule_keeps():
    plain = "nvfp4(min_size=0)"
    assert reasons(POLICY) == dict.fromkeys(["stem_0", "inner/dense", "head/dense"], plain)
    assert reasons(KEPT) == {"inner/dense": plain}


@pytest.mark.exhaustive
def test_a_jitted_module_is_kept_by_where_it_stands():
    jitted, variables = make(KEPT, Model(nn.jit(Block)))
    plain, _ = make(KEPT)
    np.testing.assert_array_equal(jitted.apply(variables, X), plain.apply(variables, X))
    np.testing.assert_array_equal(jax.jit(jitted.apply)(variables, X), jax.jit(plain.apply)(variables, X))


@pytest.mark.exhaustive
def test_quantize_stores_what_is_not_kept_and_computes_the_same():
    model, variables = make(KEPT)
    quantized = jmp.quant.quantize(variables, KEPT)
    kernels = {name: quantized["params"][name]["dense"]["kernel"] for name in ("inner", "head")}
    assert [isinstance(kernel, QuantizedArray) for kernel in kernels.values()] == [True, False]
    assert not isinstance(quantized["params"]["stem_0"]["kernel"], QuantizedArray)
    np.testing.assert_array_equal(model.apply(quantized, X), model.apply(variables, X))


@pytest.mark.exhaustive
def test_keys_are_read_from_their_stream_alone():
    model, variables = make(NOISY)
    grad = jax.jit(jax.grad(lambda v, rngs: loss_fn(model, v, rngs=rngs)))
    one, same, other = (
        grad(variables, {"rounding": jax.random.key(seed), "dropout": jax.random.key(n)})["params"]["inner"]["dense"]
        for n, seed in enumerate((0, 0, 1))
    )
    np.testing.assert_array_equal(one["kernel"], same["kernel"])
    assert differ(one["kernel"], other["kernel"])


@pytest.mark.exhaustive
def test_layers_draw_noise_of_their_own_also_in_scan():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": False, "rounding": True}, "length": 2}
            step = lambda block, x, _: (block(x), None)
            return nn.scan(nn.remat(step), **options)(Block(name="blocks"), x, None)[0]

    model, variables = make(NOISY, Stack())
    keys = jax.random.split(jax.random.key(0), 2)
    grads = jax.jit(jax.vmap(jax.grad(lambda v, k: loss_fn(model, v, rngs={"rounding": k})), (None, 0)))(
        variables, keys
    )
    kernel = grads["params"]["blocks"]["dense"]["kernel"]
    assert kernel.shape == (2, 2, 32, 32)
    assert all(differ(kernel[0, layer], kernel[1, layer]) for layer in range(2))


@pytest.mark.exhaustive
def test_two_like_layers_draw_different_noise():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            # The same weights, inputs and gradients: the noise alone differs.
            return nn.Dense(32, kernel_init=nn.initializers.ones, name="a")(x) + nn.Dense(
                32, kernel_init=nn.initializers.ones, name="b"
            )(x)

    model, variables = make(NOISY, Two())
    rngs = {"rounding": jax.random.key(0)}
    grads = jax.grad(lambda v: jnp.sum(model.apply(v, X, rngs=rngs).astype(X.dtype) * X))(variables)["params"]
    assert differ(grads["a"]["kernel"], grads["b"]["kernel"])


@pytest.mark.slow
def test_what_is_not_differentiated_needs_no_key():
    model, variables = make(NOISY)
    keyed = model.apply(variables, X, rngs={"rounding": jax.random.key(0)})
    np.testing.assert_array_equal(model.apply(variables, X), keyed)


@pytest.mark.slow
@pytest.mark.parametrize("rngs", [None, {"params": jax.random.key(0)}, {"dropout": jax.random.key(0)}])
def test_a_missing_key_is_an_error_that_names_the_stream(rngs):
    model, variables = make(NOISY)
    with pytest.raises(
        ValueError, match=r"rngs=\{'rounding': key\}\) in linen, in nn\.scan and nn\.vmap with split_rngs"
    ):
        jax.grad(lambda v: loss_fn(model, v, rngs=rngs))(variables)


@pytest.mark.exhaustive
def test_einsum_layers_draw_too_and_convolutions_need_no_key():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Einsum((32, 32), "bi,io->bo", name="mix")(x)
            return nn.Conv(32, (1,), name="conv")(x[None])[0]

    model, variables = make(NOISY, Layers())
    grads = [
        jax.grad(lambda v: loss_fn(model, v, rngs={"rounding": jax.random.key(seed)}))(variables)["params"]
        for seed in range(2)
    ]
    assert differ(grads[0]["mix"]["kernel"], grads[1]["mix"]["kernel"])
    np.testing.assert_array_equal(grads[0]["conv"]["kernel"], grads[1]["conv"]["kernel"])
    conv, weights = make(NOISY, nn.Conv(32, (1,)))
    jax.grad(lambda v: jnp.sum(conv.apply(v, X[None]).astype(jnp.float32)))(weights)
