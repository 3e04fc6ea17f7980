"""Policies with an accumulate dtype in linen: what layers sum is rounded once, and at a boundary as its policy says."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import export

import jmp_policy as jmp

WIDE = "p=f32,c=bf16,o=f32,a=f32"
BIAS = nn.initializers.normal(1.0)
X = jax.random.normal(jax.random.key(1), (4, 6, 64))
IMAGE = jax.random.normal(jax.random.key(2), (2, 8, 8, 16))

LAYERS = {
    "Dense": (nn.Dense(16, bias_init=BIAS), X),
    "no_bias": (nn.Dense(16, use_bias=False), X),
    "DenseGeneral": (nn.DenseGeneral((4, 8), axis=(-2, -1), batch_dims=(0,), bias_init=BIAS), X),
    "Einsum": (nn.Einsum((64, 2, 8), "btd,dhk->bthk", bias_init=BIAS), X),
    "Conv": (nn.Conv(8, (3, 3), bias_init=BIAS), IMAGE),
    "grouped": (nn.Conv(8, (3, 3), strides=2, feature_group_count=4, bias_init=BIAS), IMAGE),
    "attend": (nn.Embed(16, 64), X),
}
FORMATS = ["int8(min_size=0)", "int8(activations=false,min_size=0)", "int4/16(min_size=0)", "mxfp8/16(min_size=0)",
           "float8(recipe=current,min_size=0)", "int8"]  # fmt: skip


def method_of(name):
    return "attend" if name == "attend" else "__call__"


class Net(nn.Module):
    """A model whose own code would refuse a float32 result of a layer inside, under strict promotion."""

    features: int = 64

    @nn.compact
    def __call__(self, x):
        x = x + nn.Dense(64, name="first")(x)
        x = nn.relu(x) + nn.Einsum((64, 64), "btd,dk->btk", name="second")(x)
        return nn.Dense(self.features, name="head")(x)


class Tied(nn.Module):
    def setup(self):
        self.embed, self.dense = nn.Embed(16, 64), nn.Dense(64)

    def __call__(self, tokens):
        return self.embed.attend(self.dense(self.embed(tokens)))


def is_rounded(x, dtype=jnp.bfloat16):
    return bool((x == x.astype(dtype).astype(x.dtype)).all())


def half(tree):
    """The same numbers as bfloat16 has, in their own dtype."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), tree)


def exact(layer, name, variables, x, grad):
    """What the layer computes, and its gradients, in float64, of numbers rounded to bfloat16."""
    to64 = lambda tree: jax.tree.map(lambda v: jnp.asarray(np.asarray(v, np.float64)), tree)
    with jax.enable_x64(True):
        layer = layer.clone(dtype=jnp.float64) if hasattr(layer, "dtype") else layer
        out, vjp = jax.vjp(lambda v, x: layer.apply(v, x, method=method_of(name)), to64(variables), to64(x))
        return jax.tree.map(np.asarray, (out, *vjp(to64(grad))))


def error(found, true):
    found, true = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (found, true)
    )
    return np.linalg.norm(found - true) / np.linalg.norm(true)


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_return_and_hand_back_unrounded_sums(name, param_dtype):
    layer, x = LAYERS[name]
    model = jmp.with_policy(layer, f"p={param_dtype},c=bf16,o=f32,a=f32")
    x = half(x)
    variables = half(model.init(jax.random.key(0), x if name != "attend" else jnp.arange(3)))
    run = lambda v, x: model.apply(v, x, method=method_of(name))
    grad = half(jax.random.normal(jax.random.key(3), jax.eval_shape(run, variables, x).shape))
    out, vjp = jax.vjp(run, variables, x)
    grads, x_grad = vjp(grad)
    true = exact(layer, name, variables, x, grad)
    assert error(out, true[0]) < 1e-6
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {param_dtype}
    assert error(grads, true[1]) < (1e-6 if param_dtype == "float32" else 3e-3)
    assert error(x_grad, true[2]) < 3e-3
    plain = jmp.with_policy(layer, f"p={param_dtype},c=bf16,o=f32").apply(variables, x, method=method_of(name))
    assert error(plain, true[0]) > 1e-3  # which is what it is for


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_inside_of_a_model_layers_return_the_compute_dtype(name):
    layer, x = LAYERS[name]

    class Around(nn.Module):
        def setup(self):
            self.layer = layer.clone()

        def __call__(self, x):
            out = self.layer.attend(x) if name == "attend" else self.layer(x)
            assert out.dtype == jnp.bfloat16
            return out * 2

    model = jmp.with_policy(Around(), WIDE)
    variables = model.init(jax.random.key(0), x)
    out = model.apply(variables, x)
    rounded = jmp.with_policy(layer, "p=f32,c=bf16,o=bf16,a=f32")
    params = {"params": variables["params"]["layer"]}
    assert is_rounded(out)
    np.testing.assert_array_equal(out, 2 * np.float32(rounded.apply(params, x, method=method_of(name))))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "x"), [(Net(), X), (Tied(), jnp.arange(6))], ids=["net", "tied"])
def test_a_model_hands_over_what_its_last_layer_summed(model, x):
    variables = model.init(jax.random.key(0), x)
    outs = {policy: jmp.with_policy(model, policy).apply(variables, x) for policy in (WIDE, "p=f32,c=bf16,o=f32")}
    assert not is_rounded(outs[WIDE])
    assert is_rounded(outs["p=f32,c=bf16,o=f32"])
    assert jmp.with_policy(model, "p=f32,c=bf16,o=none,a=f32").apply(variables, x).dtype == jnp.bfloat16
    assert jmp.with_policy(model, "p=f32,c=bf16,o=f16,a=f32").apply(variables, x).dtype == jnp.float16


@pytest.mark.slow
def test_results_that_were_computed_with_are_rounded_ones():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            a, b = nn.Dense(8, name="a")(x), nn.Dense(8, name="b")(x)
            return {"sum": a + b, "a": a, "again": [a, jax.jit(lambda b: b)(b)]}

    model = jmp.with_policy(Two(), WIDE)
    out = model.apply(model.init(jax.random.key(0), X), X)
    assert [is_rounded(out["sum"]), is_rounded(out["again"][1])] == [True, True]
    assert not is_rounded(out["a"])
    np.testing.assert_array_equal(out["a"], out["again"][0])


@pytest.mark.exhaustive
def test_a_rule_gives_the_head_alone_unrounded_sums():
    policies = jmp.PolicyMap({"head": WIDE}, "p=f32,c=bf16,o=f32")
    variables = Net().init(jax.random.key(0), X)
    out = jmp.with_policy(Net(), policies).apply(variables, X)
    assert not is_rounded(out)
    grads = jax.grad(lambda v: jmp.with_policy(Net(), policies).apply(v, X).sum())(variables)["params"]
    assert is_rounded(grads["first"]["kernel"])  # as JAX hands it over
    assert not is_rounded(
        jax.grad(lambda v: jmp.with_policy(Net(), WIDE).apply(v, X).var())(variables)["params"]["first"]["kernel"]
    )


@pytest.mark.slow
def test_what_an_author_wrote_is_left_alone():
    def multiply(*args, **options):
        return jax.lax.dot_general(*args, **options)

    wide_einsum = functools.partial(nn.Einsum, (64, 8), "btd,dk->btk", use_bias=False)
    for layer in (
        nn.Dense(8, dot_general=multiply),
        wide_einsum(preferred_element_type=jnp.bfloat16),
        nn.Dense(8, dtype=jnp.float32),
    ):
        variables = layer.init(jax.random.key(0), X)
        programs = [
            str(jax.make_jaxpr(jmp.with_policy(layer, policy).apply)(variables, X))
            for policy in (WIDE, "p=f32,c=bf16,o=f32")
        ]
        assert programs[0] == programs[1]


@pytest.mark.slow
def test_methods_of_an_authors_subclass_find_the_compute_dtype():
    class Residual(nn.Dense):
        @nn.compact
        def __call__(self, x):
            out = super().__call__(x)
            assert out.dtype == jnp.bfloat16
            return x + out

    model = jmp.with_policy(Residual(64), WIDE)
    assert model.apply(model.init(jax.random.key(0), X), X).dtype == np.float32


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.relu(x + nn.Dense(64)(x)), None


TRANSFORMS = {
    "scan": lambda: nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(),
    "remat_scan": lambda: nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
    )(),
    "remat": lambda: nn.remat(Block)(),
    "jit": lambda: nn.jit(Block)(),
    "vmap": lambda: nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False})(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_compute_the_same_eagerly_and_under_jit(name):
    model = jmp.with_policy(TRANSFORMS[name](), WIDE)
    variables = model.init(jax.random.key(0), X)
    loss = lambda v, x: (model.apply(v, x)[0] ** 2).mean()
    value, grads = jax.jit(jax.value_and_grad(loss))(variables, X)
    eager_value, eager_grads = jax.value_and_grad(loss)(variables, X)
    np.testing.assert_allclose(value, eager_value, rtol=1e-2)
    assert not is_rounded(jax.tree.leaves(grads)[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-2, atol=1e-4), grads, eager_grads)


@pytest.mark.slow
def test_a_jitted_layer_that_is_the_model_is_wide():
    model = jmp.with_policy(nn.jit(nn.Dense)(8), WIDE)
    variables = model.init(jax.random.key(0), X)
    assert model.apply(variables, X).dtype == np.float32


def exported_products(fun, platform, *args):
    text = export.export(jax.jit(fun), platforms=[platform])(*args).mlir_module()
    found = re.findall(r"stablehlo\.(?:dot_general|convolution)\W.* : \((.*), (.*)\) -> (.*?)(?: loc.*)?\n", text)
    return {tuple(re.sub(r".*x|>", "", kind) for kind in kinds) for kinds in found}


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x)).reshape(*x.shape[:-3], 16, 64)
        x = nn.MultiHeadDotProductAttention(4)(x, x)
        return Net()(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_products_of_a_step_have_half_operands_on_accelerators(platform):
    model = jmp.with_policy(Mixed(), WIDE)
    variables = jax.eval_shape(model.init, jax.random.key(0), IMAGE)
    with jax.numpy_dtype_promotion("standard"):
        found = exported_products(jax.grad(lambda v: model.apply(v, IMAGE).var()), platform, variables)
    assert {kinds[:2] for kinds in found} == {("bf16", "bf16")}
    assert ("bf16", "bf16", "f32") in found


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Dense", "Einsum", "attend", "Conv"])
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_layers_hand_over_unrounded_sums(name, format):
    layer, x = LAYERS[name]
    inputs = x if name != "attend" else jnp.arange(3)
    wide, narrow = (jmp.with_policy(layer, f"{format}_from_{policy}") for policy in (WIDE, "p=f32,c=bf16,o=f32"))
    variables = narrow.init(jax.random.key(0), inputs)
    outs = [model.apply(variables, x, method=method_of(name)) for model in (wide, narrow)]
    assert [is_rounded(out) for out in outs] == [False, True]
    assert error(*outs) < 4e-3  # the same numbers were multiplied
    grads = jax.grad(lambda v: wide.apply(v, x, method=method_of(name)).var())(variables)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.exhaustive
def test_scaled_losses_of_float16_keep_small_gradients_and_show_overflow():
    model = jmp.with_policy(Net(), "p=f32,c=f16,o=f32,a=f32")
    variables = model.init(jax.random.key(0), X)
    loss_fn = lambda v, x: model.apply(v, x).mean() * 1e-6
    loss, grads = jmp.value_and_grad(loss_fn, loss_scale=jmp.StaticLossScale(2.0**20))(variables, X)
    wide = jax.grad(lambda v, x: Net().apply(v, x).mean() * 1e-6)(variables, X)
    assert np.isfinite(loss)
    assert error(grads, wide) < 1e-2
    _, overflown = jmp.value_and_grad(loss_fn, loss_scale=jmp.StaticLossScale(2.0**60))(variables, X)
    assert not bool(jmp.all_finite(overflown))


@pytest.mark.slow
def test_an_open_compute_dtype_is_told_by_the_inputs():
    model = jmp.with_policy(nn.Dense(8, use_bias=False), "p=f32,c=none,o=f32,a=f32")
    variables = model.init(jax.random.key(0), X)
    assert is_rounded(jax.grad(lambda x: model.apply(variables, x).sum())(X.astype(jnp.bfloat16)))
    assert not is_rounded(model.apply(variables, X.astype(jnp.bfloat16)))
    narrow = jmp.with_policy(nn.Dense(8), "p=f32,c=none,o=f32,a=bf16")
    with pytest.raises(ValueError, match=r"^Products of 'float32' cannot be accumulated in 'bfloat16'"):
        narrow.init(jax.random.key(0), X)


@pytest.mark.slow
def test_an_accumulate_dtype_that_is_the_compute_dtype_changes_nothing():
    variables = Net().init(jax.random.key(0), X)
    programs = [
        jax.make_jaxpr(jmp.with_policy(Net(), f"p=f32,c=bf16,o=f32{a}").apply)(variables, X) for a in ("", ",a=bf16")
    ]
    assert str(programs[0]) == str(programs[1])


def test_explain_says_which_layers_hand_over_unrounded_sums():
    class Part(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(64, name="written", dtype=jnp.float32)(nn.Embed(16, 64, name="table")(x))
            x = nn.ConvTranspose(64, (3,), name="transposed")(x)
            return nn.Dense(8, name="open")(x)

    explanation = jmp.explain(jmp.with_policy(Part(), WIDE), jnp.zeros((2, 6), jnp.int32))
    paths = ["open", "written", "transposed", "table"]
    assert [explanation[path].accumulate_dtype for path in paths] == ["float32", "", "", ""]
    assert str(explanation).count("sums f32") == 1
    tied = jmp.explain(jmp.with_policy(Tied(), WIDE), jnp.arange(6))
    assert [row.accumulate_dtype for row in tied.rows] == ["", "float32", "float32"]
