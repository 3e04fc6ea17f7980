"""Linen modules that others run through `.apply`, as heads that are tied to a table do."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_policy as jmp

KEY = jax.random.key(0)
IDS = jnp.arange(6).reshape(2, 3)
MIXED = "params=float32,compute=bfloat16,output=float32"
FLOAT8 = "float8(min_size=0)_from_" + MIXED
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which nn.LayerNorm and the sum with a bias need
        yield


class Head(nn.Module):
    """The head of a masked language model, as Hugging Face writes it: its decoder has the table for a kernel."""

    vocab: int = 16

    def setup(self):
        self.transform = nn.Dense(16)
        self.norm = nn.LayerNorm()
        self.decoder = nn.Dense(self.vocab, use_bias=False)
        self.bias = self.param("bias", nn.initializers.zeros, (self.vocab,))

    def __call__(self, x, table):
        x = self.norm(nn.gelu(self.transform(x)))
        return self.decoder.apply({"params": {"kernel": table.T}}, x) + self.bias


class MaskedLM(nn.Module):
    """A model with such a head."""

    head: type[nn.Module] = Head

    def setup(self):
        self.embed = nn.Embed(16, 16)
        self.body = nn.Dense(16)
        self.cls = self.head()

    def __call__(self, ids):
        x = self.body(self.embed(ids))
        return self.cls(x, self.embed.variables["params"]["embedding"])


class Block(nn.Module):
    """What it runs through `.apply` is inside of it."""

    make: type[nn.Module] = nn.Dense
    held: bool = True

    @nn.compact
    def __call__(self, x):
        kernel = self.param("weight", nn.initializers.lecun_normal(), (16, 16))
        layer = self.make(16, use_bias=False, **({"name": "layer"} if self.held else {"parent": None}))
        return layer.apply({"params": {"kernel": kernel}}, x)


class Blocks(nn.Module):
    """Two that are equal but for where they stand."""

    block: type[nn.Module] = Block
    held: bool = True

    @nn.compact
    def __call__(self, x):
        x = self.block(held=self.held, name="first")(x)
        return self.block(held=self.held, name="second")(x)


def under(model, rules, default=MIXED):
    return jmp.with_policy(model, jmp.PolicyMap(rules, default))


def matmul_dtypes(model, *inputs):
    """The dtypes of the matmuls of a model, in order, wherever they are nested."""
    variables = jax.eval_shape(model.init, KEY, *inputs)
    program = jax.make_jaxpr(model.apply)(variables, *inputs)
    return list(_dtypes(program.jaxpr))


def _dtypes(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.invars[0].aval.dtype
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _dtypes(inner)


@jax.jit
def look_up(ids):
    """A jitted function of the whole program, which knows no module that calls it."""
    return nn.Embed(16, 4, parent=None).apply({"params": {"embedding": jnp.ones((16, 4))}}, ids)


class Reader(nn.Module):
    """It runs a module by a function that other modules call as well."""

    def __call__(self, ids):
        return look_up(ids)


class Readers(nn.Module):
    """Two that are equal but for where they stand."""

    @nn.compact
    def __call__(self, ids):
        return Reader(name="first")(ids), Reader(name="second")(ids)


@pytest.mark.parametrize("key", ["first", "second"])
def test_a_rule_for_one_caller_of_a_jitted_function_is_not_taken_for_that_of_another(key):
    model = under(Readers(), {key: "bfloat16"}, "p=f32,c=f32,o=none")
    first, second = jax.eval_shape(model.apply, {}, IDS)
    assert {"first": first.dtype, "second": second.dtype} == {"first": F32, "second": F32} | {key: BF16}


@jax.jit
def run_layer(x):
    return nn.Dense(16, use_bias=False, parent=None, name="layer").apply({"params": {"kernel": jnp.eye(16)}}, x)


class Holder(nn.Module):
    """It holds the layer that the jitted function runs."""

    @nn.compact
    def __call__(self, x):
        nn.Dense(16, use_bias=False, name="layer")
        return run_layer(x)


@pytest.mark.parametrize("inner", ["first/layer", "second/layer"])
def test_a_rule_inside_one_caller_of_a_jitted_function_is_not_taken_for_another_under_an_equal_policy(inner):
    rules = {inner: "float32", "first": MIXED, "second": MIXED}
    model = under(Blocks(lambda held, name: Holder(name=name)), rules)
    assert matmul_dtypes(model, jnp.ones((2, 16))) == ([F32, BF16] if inner == "first/layer" else [BF16, F32])


def test_a_jitted_function_is_traced_once_for_all_callers_under_one_policy():
    traces = []

    class Block(nn.Module):
        def __call__(self, x):
            return counted(x)

    @jax.jit
    def counted(x):
        traces.append(x)
        return x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("block_0", "block_1", "block_2", "head"):
                x = Block(name=name)(x)
            return x

    jax.eval_shape(under(Model(), {r"block_[01]": MIXED, "head": MIXED}, MIXED).apply, {}, IDS)
    assert len(traces) == 1
    jax.eval_shape(under(Model(), {r"block_\d": "float32", "head": "float32"}, MIXED).apply, {}, IDS)
    assert len(traces) == 2


@pytest.mark.parametrize("key", ["cls", Head, "cls/decoder"])
def test_rule_reaches_a_layer_that_runs_through_apply_inside_another_module(key):
    body, transform, decoder = matmul_dtypes(under(MaskedLM(), {key: "float32"}), IDS)
    assert (body, transform, decoder) == (BF16, BF16 if key == "cls/decoder" else F32, F32)


def test_rule_for_the_root_alone_is_not_taken_for_one_of_the_layer():
    assert matmul_dtypes(under(MaskedLM(), {"cls": "float32", "": MIXED}), IDS) == [BF16, F32, F32]


def test_explain_shows_the_layer_where_it_stands_and_unused_rules_inside_it():
    explanation = jmp.explain(under(MaskedLM(), {"cls/decoder": "float32"}), IDS)
    row = explanation["cls/decoder"]
    assert (row.rule, row.compute_dtypes, row.param_bytes) == ("cls/decoder", ("float32",), 0)
    assert not explanation.unused
    assert not explanation.unknown
    (message,) = jmp.explain(under(MaskedLM(), {"cls/decodre": "float32"}), IDS).unused
    assert message == "policy rule 'cls/decodre' matches no module; the closest path is 'cls/decoder'"


def test_layer_that_its_caller_does_not_hold_has_the_rules_of_its_caller():
    model = under(Blocks(held=False), {"second": "float32"})
    assert matmul_dtypes(model, jnp.ones((2, 16))) == [BF16, F32]
    explanation = jmp.explain(model, jnp.ones((2, 16)))
    assert explanation["second/<Dense>"].rule == "second"
    assert explanation.unknown[1] == (
        "'second/<Dense>' runs through .apply, and what runs it holds no such module, or several: rules by path cover "
        "it where they cover 'second'"
    )
    assert explanation.unknown[1] in " ".join(str(explanation).split())
    assert explanation.to_dict()["unknown"] == list(explanation.unknown)


def test_module_that_stands_elsewhere_has_the_rules_of_where_it_stands():
    class Caller(nn.Module):
        layer: nn.Module

        def __call__(self, x):
            return self.layer.apply(self.layer.variables, x)

    class Net(nn.Module):
        def setup(self):
            self.dense = nn.Dense(16)
            self.caller = Caller(self.dense)

        def __call__(self, x):
            return self.caller(self.dense(x))

    assert matmul_dtypes(under(Net(), {"caller": "float32"}), jnp.ones((2, 16))) == [BF16, BF16]
    assert matmul_dtypes(under(Net(), {"dense": "float32"}), jnp.ones((2, 16))) == [F32, F32]


VMAP = functools.partial(nn.vmap, variable_axes={"params": None}, split_rngs={"params": False})


@pytest.mark.parametrize(
    ("transform", "held"), [(nn.jit, True), (nn.remat, False), pytest.param(VMAP, True, marks=pytest.mark.slow)]
)
def test_place_is_known_inside_lifted_transforms(transform, held):
    x = jnp.ones((2, 3, 16))
    assert matmul_dtypes(under(Blocks(transform(Block), held), {"second": "float32"}), x) == [BF16, F32]
    assert matmul_dtypes(under(transform(Blocks)(held=held), {"second": "float32"}), x) == [BF16, F32]
    if held:
        assert matmul_dtypes(under(Blocks(transform(Block)), {"second/layer": "float32"}), x) == [BF16, F32]


def test_jitted_modules_that_are_equal_but_for_the_place_of_their_caller_do_not_share_a_program():
    model = under(Blocks(functools.partial(Block, make=nn.jit(nn.Dense))), {"second": "float32"})
    assert matmul_dtypes(model, jnp.ones((2, 16))) == [BF16, F32]


def test_delayed_float8_leaves_a_layer_that_keeps_no_state_wide():
    model = jmp.with_policy(MaskedLM(), FLOAT8)
    variables = jax.jit(model.init)(KEY, IDS)
    assert variables.keys() == {"params", "_overwrite_with_gradient"}
    assert variables["_overwrite_with_gradient"].keys() == {"body", "cls"}
    assert variables["_overwrite_with_gradient"]["cls"].keys() == {"transform"}
    out = jax.jit(model.apply)(variables, jnp.zeros((2, 8), jnp.int32))
    assert jnp.isfinite(out).all()
    row = jmp.explain(model, jax.ShapeDtypeStruct((2, 8), jnp.int32))["cls/decoder"]
    assert row.quantization == "left: it runs through .apply without state to scale by, and would lose what it made"


def test_error_of_a_quantized_layer_names_where_it_stands():
    policies = [f"{format}(min_size=0)_from_float32" for format in ("int8", "int4/4")]
    saved, other = (jmp.PolicyMap({"body|embed": "float32"}, policy) for policy in policies)
    variables = jax.eval_shape(lambda: jmp.quant.quantize(MaskedLM().init(KEY, IDS), saved))
    with pytest.raises(
        ValueError, match=re.escape("The weight 'cls/transform/kernel' is stored as 'int8(min_size=0)'")
    ):
        jax.eval_shape(jmp.with_policy(MaskedLM(), other).apply, variables, IDS)


def test_place_is_known_where_a_function_of_the_root_makes_the_call():
    class Net(nn.Module):
        def setup(self):
            self.decoder = nn.Dense(16, use_bias=False)

        def __call__(self, x):
            return self.decoder(x)

    def tied(net, x):
        return net.decoder.apply({"params": {"kernel": jnp.eye(16)}}, x)

    model, x = under(Net(), {"decoder": "float32", "": MIXED}), jnp.ones((2, 16))
    assert jmp.explain(model, x, method=tied)["decoder"].rule == "decoder"
    program = jax.make_jaxpr(lambda x: model.apply({}, x, method=tied))(x)
    assert list(_dtypes(program.jaxpr)) == [F32]
