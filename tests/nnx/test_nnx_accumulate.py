"""Policies with an accumulate dtype in nnx: what layers sum is rounded once, and at a boundary as its policy says."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmp

WIDE = "p=f32,c=bf16,o=f32,a=f32"
BIAS = nnx.initializers.normal(1.0)
X = jax.random.normal(jax.random.key(1), (4, 6, 64))
IMAGE = jax.random.normal(jax.random.key(2), (2, 8, 8, 16))
SMALL = nnx.initializers.normal(0.2)

LAYERS = {
    "Linear": (lambda **d: nnx.Linear(64, 16, bias_init=BIAS, rngs=nnx.Rngs(0), **d), X),
    "no_bias": (lambda **d: nnx.Linear(64, 16, use_bias=False, rngs=nnx.Rngs(0), **d), X),
    "LinearGeneral": (lambda **d: nnx.LinearGeneral(64, (2, 8), bias_init=BIAS, rngs=nnx.Rngs(0), **d), X),
    "Einsum": (lambda **d: nnx.Einsum("btd,dhk->bthk", (64, 2, 8), (2, 8), bias_init=BIAS, rngs=nnx.Rngs(0), **d), X),
    "Conv": (lambda **d: nnx.Conv(16, 8, (3, 3), bias_init=BIAS, rngs=nnx.Rngs(0), **d), IMAGE),
    "attend": (lambda **d: nnx.Embed(16, 64, rngs=nnx.Rngs(0), **d), X),
}
FORMATS = ["int8(min_size=0)", "int4/16(min_size=0)", "mxfp8/16(min_size=0)", "float8(min_size=0)", "int8",
           "nvfp4(min_size=0,stochastic_rounding=true)"]  # fmt: skip


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(64, 64, rngs=rngs), nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs)
        self.head = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.first(x)
        return self.head(nnx.relu(x) + self.second(x))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.dense = nnx.Embed(16, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.dense(self.embed(tokens)))


def run(name):
    return lambda model, x: model.attend(x) if name == "attend" else model(x)


def is_rounded(x):
    return bool((x == x.astype(jnp.bfloat16).astype(x.dtype)).all())


def half(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), tree)


def error(found, true):
    join = lambda tree: np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
    found, true = join(found), join(true)
    return np.linalg.norm(found - true) / np.linalg.norm(true)


def gradients(name, model, x, grad):
    """The result of a model, and the gradients of its parameters and of its input, by the gradient of the result."""
    graph, state = nnx.split(model)
    out, vjp = jax.vjp(lambda state, x: run(name)(nnx.merge(graph, state), x), state, x)
    return out, *vjp(grad)


def exact(name, make, state, x, grad):
    with jax.enable_x64(True):
        model = make(dtype=jnp.float64, param_dtype=jnp.float64)
        nnx.update(model, jax.tree.map(lambda v: jnp.asarray(np.asarray(v, np.float64)), state))
        arrays = (jnp.asarray(np.asarray(a, np.float64)) for a in (x, grad))
        return jax.tree.map(np.asarray, gradients(name, model, *arrays))


@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_return_and_hand_back_unrounded_sums(name, param_dtype):
    make, x = LAYERS[name]
    layer, x = make(param_dtype=jnp.dtype(param_dtype)), half(x)
    nnx.update(layer, half(nnx.state(layer)))
    model = jmp.with_policy(layer, f"p={param_dtype},c=bf16,o=f32,a=f32")
    grad = half(jax.random.normal(jax.random.key(3), jax.eval_shape(lambda x: run(name)(model, x), x).shape))
    out, grads, x_grad = gradients(name, model, x, grad)
    true = exact(name, make, nnx.state(layer), x, grad)
    assert error(out, true[0]) < 1e-6
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {param_dtype}
    assert error(grads, true[1]) < (1e-6 if param_dtype == "float32" else 3e-3)
    assert error(x_grad, true[2]) < 3e-3
    assert error(run(name)(jmp.with_policy(layer, f"p={param_dtype},c=bf16,o=f32"), x), true[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("make", "x"), [(Net, X), (Tied, jnp.arange(6))], ids=["net", "tied"])
def test_a_model_hands_over_what_its_last_layer_summed(make, x):
    model = make(nnx.Rngs(0))
    assert not is_rounded(jmp.with_policy(model, WIDE)(x))
    assert is_rounded(jmp.with_policy(model, "p=f32,c=bf16,o=f32")(x))
    assert jmp.with_policy(model, "p=f32,c=bf16,o=none,a=f32")(x).dtype == jnp.bfloat16


@pytest.mark.slow
def test_lora_adds_what_both_layers_summed():
    layer = nnx.LoRALinear(64, 16, lora_rank=8, b_initializer=SMALL, bias_init=BIAS, rngs=nnx.Rngs(0))
    alone = nnx.LoRA(64, 8, 16, base_module=nnx.Linear(64, 16, rngs=nnx.Rngs(1)), b_initializer=SMALL, rngs=nnx.Rngs(0))
    for model in (layer, alone):
        nnx.update(model, half(nnx.state(model)))
        wide, x = jmp.with_policy(model, WIDE), half(X)
        assert not is_rounded(wide(x))
        assert error(wide(x), model(x)) < error(jmp.with_policy(model, "p=f32,c=bf16,o=f32")(x), model(x)) / 1.5
        grads = nnx.grad(lambda model: (model(x) ** 2).mean())(wide)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.slow
def test_a_rule_gives_the_head_alone_unrounded_sums():
    model = jmp.with_policy(Net(nnx.Rngs(0)), jmp.PolicyMap({"head": WIDE}, "p=f32,c=bf16,o=f32"))
    grads = nnx.grad(lambda model: model(X).sum())(model)
    assert not is_rounded(model(X))
    assert is_rounded(grads["first"]["kernel"][...])  # as JAX hands it over
    assert not is_rounded(
        nnx.grad(lambda m: m(X).var())(jmp.with_policy(Net(nnx.Rngs(0)), WIDE))["first"]["kernel"][...]
    )


def test_what_an_author_wrote_is_left_alone():
    def multiply(*args, **options):
        return jax.lax.dot_general(*args, **options)

    for options in ({"dot_general": multiply}, {"preferred_element_type": jnp.bfloat16}, {"dtype": jnp.bfloat16}):
        layer = nnx.Linear(64, 8, rngs=nnx.Rngs(0), **options)
        programs = [str(jax.make_jaxpr(jmp.with_policy(layer, p))(X)) for p in (WIDE, "p=f32,c=bf16,o=f32")]
        assert (programs[0] == programs[1]) == ("dtype" not in options)


@pytest.mark.slow
def test_methods_of_an_authors_subclass_find_the_compute_dtype():
    class Residual(nnx.Linear):
        def __call__(self, x):
            out = super().__call__(x)
            assert out.dtype == jnp.bfloat16
            return x + out

    model = jmp.with_policy(Residual(64, 64, rngs=nnx.Rngs(0)), WIDE)
    grads = nnx.grad(lambda model: (model(X) ** 2).mean())(model)
    assert not is_rounded(grads["kernel"][...])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Linear", "Einsum", "attend", "Conv"])
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_layers_hand_over_unrounded_sums(name, format):
    make, x = LAYERS[name]
    wide, narrow = (jmp.with_policy(make(), f"{format}_from_{policy}") for policy in (WIDE, "p=f32,c=bf16,o=f32"))
    if "stochastic" in format and name in ("Linear", "Einsum"):
        jmp.nnx.set_rounding_rngs(wide, nnx.Rngs(0))
    assert [is_rounded(run(name)(model, x)) for model in (wide, narrow)] == [False, True]
    assert error(run(name)(wide, x), run(name)(narrow, x)) < 4e-3
    grads = nnx.grad(lambda model: run(name)(model, x).var())(wide)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.slow
def test_policies_are_taken_back_and_pickled():
    model = jmp.with_policy(Net(nnx.Rngs(0)), WIDE)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again(X), model(X))
    back = jmp.with_policy(model, "float32")
    np.testing.assert_array_equal(back(X), jmp.with_policy(Net(nnx.Rngs(0)), "float32")(X))


@pytest.mark.exhaustive
def test_transforms_compute_the_same():
    model = jmp.with_policy(Net(nnx.Rngs(0)), WIDE)
    loss = lambda model, x: (model(x) ** 2).mean()
    value, grads = nnx.jit(nnx.value_and_grad(loss))(model, X)
    eager_value, eager = nnx.value_and_grad(nnx.remat(loss))(model, X)
    np.testing.assert_allclose(value, eager_value, rtol=1e-2)
    assert error(grads, eager) < 2e-2
    np.testing.assert_allclose(nnx.vmap(model, in_axes=0)(X), model(X), rtol=2e-2, atol=2e-2)


def test_an_open_compute_dtype_is_told_by_the_inputs():
    layer = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    model = jmp.with_policy(layer, "p=f32,c=none,o=f32,a=f32")
    assert not is_rounded(model(X.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match=r"^Products of 'float32' cannot be accumulated in 'bfloat16'"):
        jmp.with_policy(layer, "p=f32,c=none,o=f32,a=bf16")(X)


def test_explain_says_which_layers_hand_over_unrounded_sums():
    explanation = jmp.explain(jmp.with_policy(Net(nnx.Rngs(0)), WIDE), X)
    paths = ["", "first", "second", "second/lora", "head"]
    assert [explanation[path].accumulate_dtype for path in paths] == ["", *["float32"] * 4]
