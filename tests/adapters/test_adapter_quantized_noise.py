"""Stochastic rounding in both APIs: keys come from a stream, each layer draws its own noise, and only in gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy.nnx import set_rounding_rngs

NOISY = "nvfp4(min_size=0,stochastic_rounding=true,hadamard=true)_from_mixed_bfloat16"
WITHOUT_NOISE = "nvfp4(min_size=0)_from_mixed_bfloat16"
X = jax.random.normal(jax.random.key(0), (16, 32))
ONES = nn.initializers.ones


class LinenBlock(nn.Module):
    """A layer inside a module."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="dense")(x)


class LinenTwo(nn.Module):
    """Two layers of the same weights, inputs and gradients: the noise alone differs. Beside them a convolution."""

    @nn.compact
    def __call__(self, x):
        conv = nn.Conv(32, (1,), kernel_init=ONES, name="conv")(x[None])[0]
        mix = nn.Einsum((32, 32), "bi,io->bo", kernel_init=ONES, name="mix")(x)
        return nn.Dense(32, kernel_init=ONES, name="a")(x) + nn.Dense(32, kernel_init=ONES, name="b")(x) + conv + mix


class NnxBlock(nnx.Module):
    """A layer inside a module."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


class NnxTwo(nnx.Module):
    """The same two layers, and the convolution."""

    def __init__(self, rngs):
        self.a, self.b = (nnx.Linear(32, 32, kernel_init=ONES, rngs=rngs) for _ in range(2))
        self.conv = nnx.Conv(32, 32, (1,), kernel_init=ONES, rngs=rngs)
        self.mix = nnx.Einsum("bi,io->bo", (32, 32), (32,), kernel_init=ONES, rngs=rngs)

    def __call__(self, x):
        return self.a(x) + self.b(x) + self.conv(x[None])[0] + self.mix(x)


class Model(nnx.Module):
    """A first layer, two blocks and a head."""

    def __init__(self, rngs):
        self.stem, self.head = nnx.Linear(32, 32, rngs=rngs), NnxBlock(rngs)
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(nnx.relu(self.stem(x)))


def loss_of(out):
    return jnp.sum(out.astype(X.dtype) * X)


def linen_kernels(policy, seed=0, stream="rounding"):
    """The gradients of the kernels, by the name of their layer."""
    model = jmp.with_policy(LinenTwo(), policy)
    rngs = None if stream is None else {stream: jax.random.key(seed), "params": jax.random.key(9)}

    @jax.jit
    def gradients():
        variables = model.init(jax.random.key(1), X)
        return jax.grad(lambda variables: loss_of(model.apply(variables, X, rngs=rngs)))(variables)

    return {name: layer["kernel"] for name, layer in gradients()["params"].items()}


def nnx_kernels(policy, seed=0, stream="rounding"):
    @nnx.jit
    def gradients():
        model = jmp.with_policy(NnxTwo(nnx.Rngs(0)), policy)
        if stream is not None:
            set_rounding_rngs(model, nnx.Rngs(**{stream: seed}))
        return nnx.grad(lambda model: loss_of(model(X)))(model)

    return {name: layer["kernel"][...] for name, layer in gradients().items()}


KERNELS = {"linen": linen_kernels, "nnx": nnx_kernels}


def differ(a, b):
    return bool(jnp.any(a != b))


@pytest.mark.slow
@pytest.mark.parametrize("api", KERNELS)
def test_each_layer_draws_noise_of_its_own_by_the_key_of_its_stream_and_a_convolution_none(api):
    one, same, other = (KERNELS[api](NOISY, seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert {name for name in one if differ(one[name], other[name])} == {"a", "b", "mix"}
    assert differ(one["a"], one["b"])


@pytest.mark.parametrize("api", KERNELS)
def test_a_missing_key_is_an_error_that_says_how_to_give_one(api):
    remedy = {
        "linen": r"rngs=\{'rounding': key\}\) in linen, in nn\.scan and nn\.vmap with split_rngs",
        "nnx": r"nnx\.set_rounding_rngs\(model, nnx\.Rngs\(rounding=0\)\) in nnx",
    }
    for stream in (None, "dropout") if api == "linen" else (None,):
        with pytest.raises(ValueError, match=f"is differentiated has no key.*{remedy[api]}"):
            KERNELS[api](NOISY, stream=stream)


@pytest.mark.slow
def test_what_is_not_differentiated_needs_no_key_in_linen():
    model = jmp.with_policy(nn.Conv(32, (1,)), NOISY)
    variables = jax.eval_shape(model.init, jax.random.key(0), X[None])
    jax.eval_shape(jax.grad(lambda v: jnp.sum(model.apply(v, X[None]).astype(jnp.float32))), variables)
    block = jmp.with_policy(LinenBlock(), NOISY)
    keyed = lambda variables: block.apply(variables, X, rngs={"rounding": jax.random.key(0)})
    variables = jax.eval_shape(block.init, jax.random.key(0), X)
    assert str(jax.make_jaxpr(lambda v: block.apply(v, X))(variables)).count("scaled_dot") == 1
    assert jax.eval_shape(keyed, variables) == jax.eval_shape(lambda v: block.apply(v, X), variables)


def make_noisy(seed=0, kind=Model):
    model = jmp.with_policy(kind(nnx.Rngs(0)), NOISY)
    set_rounding_rngs(model, nnx.Rngs(rounding=seed))
    return model


@nnx.jit
def gradients(model):
    return nnx.grad(lambda model: loss_of(model(X)))(model)


def count_of(model):
    return model.blocks[0].dense.rounding.count[...].item()


def test_kept_layers_have_no_stream():
    def make():
        rules = jmp.PolicyMap({"(.*/)?(stem|head)": "mixed_bfloat16"}, NOISY)
        model = jmp.with_policy(Model(nnx.Rngs(0)), rules)
        set_rounding_rngs(model, nnx.Rngs(rounding=0))
        return model

    model = nnx.eval_shape(make)
    paths = {path[:-2] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.RngCount))}
    assert paths == {("blocks", 0, "dense"), ("blocks", 1, "dense")}


@pytest.mark.slow
def test_after_eval_no_keys_are_drawn_and_a_stream_can_be_taken_away():
    model = make_noisy()
    noisy = model(X)
    model.eval()
    np.testing.assert_array_equal(jax.jit(lambda x: model(x))(X), noisy)
    assert count_of(model) == 1
    with pytest.raises(ValueError, match="is differentiated has no key"):
        nnx.eval_shape(gradients, model)
    model.train()
    gradients(model)
    assert count_of(model) == 2
    set_rounding_rngs(model, None)
    with pytest.raises(ValueError, match="is differentiated has no key"):
        nnx.eval_shape(gradients, model)


@pytest.mark.parametrize("policy", [WITHOUT_NOISE, "nvfp4(stochastic_rounding=true)_from_mixed_bfloat16"])
def test_a_model_that_draws_nothing_takes_no_stream(policy):
    model = nnx.eval_shape(lambda: jmp.with_policy(Model(nnx.Rngs(0)), policy))
    assert type(model.blocks[0].dense) is type(model.head.dense)  # equal specs share a class, whatever their place
    with pytest.raises(ValueError, match=r"No layer of the model rounds at random\. Give it such a policy first"):
        set_rounding_rngs(model, nnx.Rngs(0))
