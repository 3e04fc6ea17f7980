"""Policies with an accumulate dtype in both APIs: sums are rounded once, and at a boundary as its policy says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import export
from quantized_apis import APIS, LAYERS, TOKENS, XS, Layer, X, filled, find, made, own_product, run

import jmp_policy as jmp

WIDE, NARROW = "p=f32,c=bf16,o=f32,a=f32", "p=f32,c=bf16,o=f32"
NAMES = [
    "Dense", "Dense without bias", "DenseGeneral over two axes", "Einsum to heads", "Conv of an image",
    "Conv in groups", "Embed attended to",
]  # fmt: skip
FORMATS = [
    "int8(min_size=0)",
    "int4/16(min_size=0)",
    "mxfp8/16(min_size=0)",
    "float8(recipe=current,min_size=0)",
    "int8",
]


class LinenNet(nn.Module):
    """A model whose own code would refuse a float32 result of a layer inside, under strict promotion."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.Dense(16, name="first")(x)
        return nn.Dense(16, name="head")(nn.relu(x))


class NnxNet(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.first, self.head = (nnx.Linear(16, 16, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.head(nnx.relu(x + self.first(x)))


class LinenTied(nn.Module):
    """A table that reads tokens and makes logits."""

    def setup(self):
        self.embed, self.dense = nn.Embed(16, 16), nn.Dense(16)

    def __call__(self, tokens):
        return self.embed.attend(self.dense(self.embed(tokens)))


class NnxTied(nnx.Module):
    """The same."""

    def __init__(self, rngs):
        self.embed, self.dense = nnx.Embed(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.dense(self.embed(tokens)))


class LinenResidual(nn.Dense):
    """A subclass that adds to what it inherits."""

    @nn.compact
    def __call__(self, x):
        out = super().__call__(x)
        assert out.dtype == jnp.bfloat16
        return x + out


class NnxResidual(nnx.Linear):
    """The same."""

    def __call__(self, x):
        out = super().__call__(x)
        assert out.dtype == jnp.bfloat16
        return x + out


NET, TIED = Layer(LinenNet(), NnxNet, XS), Layer(LinenTied(), NnxTied, TOKENS)
RESIDUAL = Layer(LinenResidual(16), lambda rngs: NnxResidual(16, 16, rngs=rngs), X)


def call_of(api, layer, policy, seed=0):
    """A model as a function of its variables, and these."""
    if str(policy).startswith("p=bfloat16"):
        make = layer.nnx
        layer = layer._replace(nnx=lambda rngs: jmp.nnx.cast_params(make(rngs), policy))
    model = APIS[api].make(layer, policy)
    variables = filled(APIS[api].shapes(APIS[api].make(layer), layer), seed)
    return (lambda v, *args: APIS[api].call(model, v, *(args or layer.args), method=layer.method)), variables


def is_rounded(x, dtype=jnp.bfloat16):
    return bool((x == x.astype(dtype).astype(x.dtype)).all())


def half(tree, dtype=None):
    """The same numbers as bfloat16 has, in their own dtype."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype or x.dtype), tree)


def error(found, true):
    found, true = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)]) for t in (found, true)
    )
    return np.linalg.norm(found - true) / np.linalg.norm(true)


def exact(api, name, variables, x, grad):
    """What the layer computes, and its gradients, in float64, of numbers rounded to bfloat16."""
    attend = lambda v, x: x @ APIS[api].params(v)["embedding"].T
    plain = lambda v, x: APIS[api].call(made(api, name)[0], v, x)
    with jax.enable_x64(True):
        variables, x, grad = jax.tree.map(lambda v: jnp.asarray(np.asarray(v, np.float64)), (variables, x, grad))
        out, vjp = jax.vjp(attend if name == "Embed attended to" else plain, variables, x)
        assert out.dtype == np.float64
        return jax.tree.map(np.asarray, (out, *vjp(grad)))


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("name", "param_dtype"), [(name, "bfloat16" if i % 3 == 2 else "float32") for i, name in enumerate(NAMES)]
)
def test_layers_return_and_hand_back_unrounded_sums(api, name, param_dtype):
    layer = find(api, name)
    outs = {}
    for accumulate in (",a=f32", ""):
        call, variables = call_of(api, layer, f"p={param_dtype},c=bf16,o=f32{accumulate}")
        variables, x = half(variables, param_dtype), half(layer.inputs)
        out, vjp = jax.vjp(call, variables, x)
        grad = half(jnp.asarray(np.random.default_rng(3).normal(size=out.shape), jnp.float32))
        outs[accumulate] = (out, *vjp(grad))
    true = exact(api, name, variables, x, grad)
    out, grads, x_grad = outs[",a=f32"]
    assert error(out, true[0]) < 1e-6
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {param_dtype}
    assert error(grads, true[1]) < (1e-6 if param_dtype == "float32" else 3e-3)
    assert error(x_grad, true[2]) < 3e-3
    assert error(outs[""][0], true[0]) > 1e-3  # which is what it is for


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("layer", [NET, TIED], ids=["net", "tied"])
def test_a_model_hands_over_what_its_last_layer_summed(api, layer):
    outs = {}
    for policy in (WIDE, NARROW, jmp.PolicyMap({"head|embed": WIDE}, NARROW)):
        call, variables = call_of(api, layer, policy)
        outs[policy] = call(variables)
    assert [is_rounded(out) for out in outs.values()] == [False, True, False]
    for policy, dtype in {"p=f32,c=bf16,o=none,a=f32": jnp.bfloat16, "p=f32,c=bf16,o=f16,a=f32": jnp.float16}.items():
        call, variables = call_of(api, layer, policy)
        assert jax.eval_shape(call, variables).dtype == dtype


@pytest.mark.parametrize("api", APIS)
def test_methods_of_an_authors_subclass_find_the_compute_dtype(api):
    model = APIS[api].make(RESIDUAL, WIDE)
    call = lambda v: APIS[api].call(model, v, X)
    assert jax.eval_shape(call, APIS[api].shapes(model, RESIDUAL)).dtype == np.float32


@pytest.mark.parametrize("api", APIS)
def test_what_an_author_wrote_is_left_alone_and_so_is_an_accumulate_dtype_that_is_the_compute_dtype(api):
    def text(options, policy):
        layer = Layer(nn.Dense(16, **options), lambda rngs: nnx.Linear(16, 16, rngs=rngs, **options), X)
        call, variables = call_of(api, layer, policy)
        return str(jax.make_jaxpr(call)(variables))

    assert text({"dot_general": own_product}, WIDE) == text({"dot_general": own_product}, NARROW)
    assert text({}, NARROW + ",a=bf16") == text({}, NARROW) != text({}, WIDE)


@pytest.mark.parametrize("api", APIS)
def test_an_open_compute_dtype_is_told_by_the_inputs(api):
    call, variables = call_of(api, LAYERS["Dense"], "p=f32,c=none,o=f32,a=f32")
    assert not is_rounded(call(variables, X.astype(jnp.bfloat16)))
    call, variables = call_of(api, LAYERS["Dense"], "p=f32,c=none,o=f32,a=f32")
    assert is_rounded(jax.grad(lambda x: call(variables, x).sum())(X.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match=r"^Products of 'float32' cannot be accumulated in 'bfloat16'"):
        call_of(api, LAYERS["Dense"], "p=f32,c=none,o=f32,a=bf16")[0](variables)


CASES = [
    (api, name, FORMATS[(i + j) % len(FORMATS)])
    for i, name in enumerate(["Dense", "Einsum to heads", "Embed attended to", "Conv of an image"])
    for j, api in enumerate(APIS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("api", "name", "format"), CASES)
def test_quantized_layers_hand_over_unrounded_sums(api, name, format):
    runs = [run(api, name, f"{format}_from_{policy}") for policy in (WIDE, NARROW)]
    variables = filled(made(api, name)[1])
    outs = [call(variables) for call in runs]
    assert [is_rounded(out) for out in outs] == [False, True]
    assert error(*outs) < 4e-3  # the same numbers were multiplied
    grads = jax.grad(lambda v: runs[0](v).var())(variables)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


def exported_products(fun, platform, *args):
    text = export.export(jax.jit(fun), platforms=[platform])(*args).mlir_module()
    found = re.findall(r"stablehlo\.(?:dot_general|convolution)\W.* : \((.*), (.*)\) -> (.*?)(?: loc.*)?\n", text)
    return {tuple(re.sub(r".*x|>", "", kind) for kind in kinds) for kinds in found}


@pytest.mark.parametrize(("api", "platform"), [("linen", "tpu"), ("nnx", "cuda")])
def test_products_of_a_step_have_half_operands_on_accelerators(api, platform):
    found = set()
    # The attention function of nnx is JAX's, whose backward pass multiplies float32 logits.
    for layer in (LAYERS["attention" if api == "linen" else "Dense"], LAYERS["Conv of an image"], NET):
        call, variables = call_of(api, layer, WIDE)
        with jax.numpy_dtype_promotion("standard"):
            found |= exported_products(jax.grad(lambda v, call=call: call(v).var()), platform, variables)
    assert {kinds[:2] for kinds in found} == {("bf16", "bf16")}
    assert ("bf16", "bf16", "f32") in found


@pytest.mark.parametrize("api", APIS)
def test_explain_says_which_layers_hand_over_unrounded_sums(api):
    explanation = jmp.explain(APIS[api].make(TIED, WIDE), TOKENS)
    assert {row.path: row.accumulate_dtype for row in explanation.rows} == {
        "": "",
        "embed": "float32",
        "dense": "float32",
    }
    assert "sums f32" in str(explanation)
    transposed = jmp.explain(APIS[api].make(LAYERS["ConvTranspose"], WIDE), LAYERS["ConvTranspose"].inputs)
    assert transposed.rows[0].accumulate_dtype == ""
    if api == "nnx":
        lora = nnx.eval_shape(lambda: jmp.with_policy(nnx.LoRALinear(16, 16, lora_rank=4, rngs=nnx.Rngs(0)), WIDE))
        assert {row.accumulate_dtype for row in jmp.explain(lora, X).rows} == {"float32"}


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


@pytest.mark.slow
def test_lora_of_nnx_adds_what_both_layers_summed():
    small = nnx.initializers.normal(0.2)
    base = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
    for layer in (
        nnx.LoRALinear(16, 16, lora_rank=8, b_initializer=small, rngs=nnx.Rngs(0)),
        nnx.LoRA(16, 8, 16, base_module=base, b_initializer=small, rngs=nnx.Rngs(0)),
    ):
        nnx.update(layer, half(nnx.state(layer)))
        wide, x = jmp.with_policy(layer, WIDE), half(X)
        assert not is_rounded(wide(x))
        np.testing.assert_array_equal(jmp.with_policy(layer, WIDE, no_cast=("x",))(X), wide(x))
        assert error(wide(x), layer(x)) < error(jmp.with_policy(layer, NARROW)(x), layer(x)) / 1.5
        grads = nnx.grad(lambda model, x=x: (model(x) ** 2).mean())(wide)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
