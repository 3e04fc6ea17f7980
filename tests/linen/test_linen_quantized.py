"""Linen modules under quantized policies: in training, and with the weights that `quant.quantize` makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec
from meshes import make_mesh
from programs import products, program_text
from quantized_linen import CASES, TOKENS, Scanned, X, call, init, variables_of_all

import jmp_policy as jmp
from jmp_policy import quant

INT8, WEIGHTS = "int8(min_size=0)_from_mixed_bfloat16", "int8(activations=false,min_size=0)_from_float32"
INT4 = "int4/4(min_size=0)_from_mixed_bfloat16"
MXFP8 = "mxfp8/8(min_size=0)_from_mixed_bfloat16"
BLOCKS = {
    MXFP8: 0.1,
    "mxfp8/8(activations=false,min_size=0)_from_float32": 0.07,
    "nvfp4/8(min_size=0)_from_mixed_bfloat16": 0.4,
    "nvfp4/8(activations=false,min_size=0)_from_float32": 0.3,
    "mxfp4/8(activations=true,min_size=0)_from_mixed_bfloat16": 0.4,
    "mxfp4/8(min_size=0)_from_float32": 0.3,
}
"""The formats of blocks, and how far off they may be, after three layers the most."""
LEFT_BY_BLOCKS = (
    "Embed", "Embed of one", "Embed attended to", "subclass with its own attend", "subclass that reads twice",
    "subclass whose methods call each other", "the same inside", "Conv in groups around", "ConvLocal",
)  # fmt: skip
"""Tables, and weights whose inputs no blocks divide."""
IN_BLOCKS = tuple(name for name in CASES if name not in LEFT_BY_BLOCKS)

SOME = (
    "Dense", "DenseGeneral over two axes", "Einsum in another order", "Conv of a line", "Embed", "Embed attended to",
    "subclass that adds", "module with its own kernel", "scan of rematerialised layers", "scan of layers without bias",
)  # fmt: skip
"""One for each way to a product: a format that stores weights in another way needs no more."""
SOME_IN_BLOCKS = tuple(name for name in SOME if name in IN_BLOCKS)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # an LSTM cell promotes its own float32 carry
        yield


def outputs(variables, policy=None, names=tuple(CASES)):
    given = (lambda module: module) if policy is None else (lambda module: jmp.with_policy(module, policy))
    return {name: call(CASES[name], given(CASES[name].module), variables[name]) for name in names}


@functools.cache
def plain_outputs():
    return jax.jit(outputs)(variables_of_all())


def quantized(variables, policy, names=tuple(CASES)):
    return {name: quant.quantize(variables[name], policy, stacked=CASES[name].stacked) for name in names}


def assert_same_bits(one, other):
    expected = dict(jax.tree.leaves_with_path(other))
    for path, x in jax.tree.leaves_with_path(one):
        np.testing.assert_array_equal(x, expected[path], err_msg=jax.tree_util.keystr(path), strict=True)


def relative_error(tree, reference):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    return max(np.linalg.norm(np.float64(x) - np.float64(y)) / np.linalg.norm(np.float64(y)) for x, y in pairs)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "names", "bound"),
    [
        (INT8, tuple(CASES), 0.03),
        (WEIGHTS, SOME, 0.02),
        (INT4, SOME, 0.2),
        (MXFP8, IN_BLOCKS, BLOCKS[MXFP8]),
        *((policy, SOME_IN_BLOCKS, bound) for policy, bound in BLOCKS.items() if policy != MXFP8),
    ],
)
def test_training_computes_what_the_quantized_weights_compute(policy, names, bound):
    """One jitted function with both kinds of weights; each is a program of its own."""
    variables = {name: variables_of_all()[name] for name in names}
    run = jax.jit(lambda variables: outputs(variables, policy, names))
    in_training = run(variables)
    assert_same_bits(in_training, run(jax.jit(lambda variables: quantized(variables, policy, names))(variables)))
    errors = {name: relative_error(out, plain_outputs()[name]) for name, out in in_training.items()}
    assert {name: error for name, error in errors.items() if not 1e-4 < error < bound} == {}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [INT8, INT4, MXFP8])
def test_variables_are_those_of_the_module_without_a_policy(policy):
    names = ["Dense", "DenseGeneral over two axes", "Einsum", "Embed", "attention", "scan of rematerialised layers"]

    def make(policy):
        return {name: init(CASES[name], jmp.with_policy(CASES[name].module, policy)) for name in names}

    without = policy.partition("_from_")[2]
    assert jax.jit(lambda: make(policy)).lower().as_text() == jax.jit(lambda: make(without)).lower().as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_alone",
    [
        "int8(min_size=100000)_from_mixed_bfloat16",
        jmp.PolicyMap({"|.*": "mixed_bfloat16"}, INT8),
        "mxfp8/7(min_size=0)_from_mixed_bfloat16",
        jmp.PolicyMap({"|.*": "mixed_bfloat16"}, MXFP8),
    ],
    ids=["by size", "by a map", "by blocks that do not fit", "from blocks, by a map"],
)
def test_module_whose_weights_are_left_is_the_program_without_quantization(left_alone):
    names = ("Dense", "Einsum", "Conv of a line", "Embed attended to", "attention", "subclass with its own product")
    variables = {name: variables_of_all()[name] for name in names}
    by_hand = "mixed_bfloat16" if isinstance(left_alone, str) else jmp.PolicyMap({"|.*": "mixed_bfloat16"}, "float32")

    def text(policy):
        def loss(variables):
            outs = outputs(variables, policy, names)
            return sum(jnp.sum(out.astype(jnp.float32)) for out in jax.tree.leaves(outs))

        return program_text(jax.jit(jax.grad(loss)).lower(variables))

    assert text(left_alone) == text(by_hand)


def dense_by_hand(params, x, format):
    return quant.dot_general(x, params["kernel"], (((2,), (0,)), ((), ())), quantization=format) + params[
        "bias"
    ].astype(x.dtype)


def attend_by_hand(params, x, format):
    return quant.dot_general(x, params["embedding"], (((2,), (1,)), ((), ())), quantization=format.for_tables)


def einsum_by_hand(params, x, format):
    out = quant.einsum("abc,dce->adbe", x, params["kernel"], quantization=format)
    return out + params["bias"].astype(x.dtype)[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [INT8, INT4])
@pytest.mark.parametrize(
    ("name", "by_hand"),
    [("Dense", dense_by_hand), ("Embed attended to", attend_by_hand), ("Einsum in another order", einsum_by_hand)],
)
def test_layer_computes_what_is_written_by_hand(name, by_hand, policy):
    case, given = CASES[name], jmp.get_policy(policy)

    @jax.jit
    def both(variables):
        expected = by_hand(variables["params"], case.inputs[0].astype(given.compute_dtype), given.quantization)
        return call(case, jmp.with_policy(case.module, given), variables), expected

    np.testing.assert_array_equal(*both(variables_of_all()[name]), strict=True)


TRAINED = (
    "Dense", "Einsum in another order", "Embed attended to", "subclass that adds", "scan of rematerialised layers",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "bound"),
    [(INT8, 0.05), (INT4, 0.35), (MXFP8, 0.15), ("mxfp4/8(min_size=0)_from_float32", 0.6)],
)
def test_gradients_pass_straight_through_to_the_floating_weights(policy, bound):
    def grads(policy):
        def loss(variables):
            outs = outputs(variables, policy, TRAINED)
            return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in jax.tree.leaves(outs))

        return jax.jit(jax.grad(loss))({name: variables_of_all()[name] for name in TRAINED})

    found, expected = grads(policy), grads(None)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"float32"}
    assert {n: e for n in TRAINED if not (e := relative_error(found[n], expected[n])) < bound} == {}


@pytest.mark.slow
def test_gradients_of_shards_sum_to_that_of_the_whole_batch():
    model = jmp.with_policy(Scanned(), INT8)
    params = variables_of_all()["scan of rematerialised layers"]["params"]
    batch = jnp.tile(X, (2, 1, 1)) * jnp.arange(1.0, 5.0)[:, None, None]

    def loss(params, batch):
        return jnp.sum(model.apply({"params": params}, batch).astype(jnp.float32) ** 2)

    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("devices")), "out_specs": PartitionSpec()}
    sharded = jax.shard_map(jax.value_and_grad(lambda p, x: jax.lax.psum(loss(p, x), "devices")), mesh=mesh, **specs)
    both = jax.jit(lambda *args: (sharded(*args), jax.value_and_grad(loss)(*args)))
    (value, grads), (expected, by_all) = both(params, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert relative_error(grads, by_all) < 0.01  # the sums are rounded to bfloat16 on each device


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("subclass that adds", "int8"), ("subclass whose methods call each other", "int8"), ("the same inside", "int8"),
        ("nn.jit of a layer", "int8"), ("subclass with its own product", "bfloat16"),
        ("subclass with its own attend", "bfloat16"),
    ],
)  # fmt: skip
def test_code_of_flax_multiplies_integers_and_code_of_a_users_numbers(name, dtype):
    case, variables = CASES[name], variables_of_all()[name]
    for given in (variables, jax.eval_shape(lambda: quant.quantize(variables, INT8))):
        program = jax.make_jaxpr(functools.partial(call, case, jmp.with_policy(case.module, INT8)))(given)
        assert [read for _, read in products(program)] == [dtype]


class Block(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 32, name="embed")(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(x)
        x = x + nn.Dense(32, name="mlp")(x)
        return nn.Dense(8, name="head")(x)


@pytest.mark.slow
def test_map_gives_each_module_its_own_format():
    rules = jmp.PolicyMap({"attention": INT4, "head|embed": "mixed_bfloat16"}, INT8)
    variables = jax.jit(lambda: quant.quantize(Block().init(jax.random.key(0), TOKENS), rules))()
    found = jax.tree.leaves_with_path(variables["params"], is_leaf=is_quantized)
    formats = {jax.tree_util.keystr(path[:1]): type(leaf.format) for path, leaf in found if is_quantized(leaf)}
    assert formats == {"['attention']": quant.Int4, "['mlp']": quant.Int8}
    program = jax.make_jaxpr(jmp.with_policy(Block(), rules).apply)(variables, TOKENS)
    dtypes = {scope.split("/")[1]: dtype for scope, dtype in products(program)}
    assert dtypes == {"attention": "bfloat16", "mlp": "int8", "head": "bfloat16"}


def is_quantized(leaf):
    return isinstance(leaf, quant.QuantizedArray)
