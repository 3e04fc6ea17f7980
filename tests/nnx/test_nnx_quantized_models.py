"""Quantized nnx models: they run as they are, in whatever way nnx takes models apart and puts them together."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.nnx import QuantizedParam
from jmp_policy.quant import QuantizedArray, quantize

INT8 = "int8(min_size=0)_from_float32"
INT4 = "int4/4(min_size=0)_from_float32"
X = jnp.linspace(-1.0, 1.0, 3 * 8).reshape(3, 8)
call = nnx.jit(lambda model, x: model(x))


def waves(key, shape, dtype):
    """Numbers of both signs: to draw them would take a compilation."""
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), dtype)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(8, 8, kernel_init=waves, rngs=rngs)
        self.head = nnx.Linear(8, 8, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


@pytest.fixture(scope="module")
def net():
    return Net(nnx.Rngs(0))


@pytest.fixture(scope="module")
def quantized(net):
    return nnx.jit(lambda net: quantize(net, INT8))(net)  # to compile one function takes less than many operations


@pytest.fixture(scope="module")
def out(quantized):
    return call(quantized, X)


def test_quantizing_leaves_the_original_as_it_is_and_shares_no_variable(net, quantized):
    assert all(type(layer.kernel) is nnx.Param for layer in (net.body, net.head))
    assert not {id(v) for _, v in nnx.iter_graph(net)} & {
        id(v) for _, v in nnx.iter_graph(quantized) if isinstance(v, nnx.Variable | nnx.Module)
    }


def test_a_quantized_weight_is_no_param(quantized):
    assert not issubclass(QuantizedParam, nnx.Param)
    assert {path[-1] for path, _ in nnx.to_flat_state(nnx.state(quantized, nnx.Param))} == {"bias"}
    assert isinstance(quantized.head.kernel, QuantizedParam)
    assert quantized.head.kernel.shape == (8, 8)
    assert isinstance(quantized.head.kernel[...], QuantizedArray)
    assert "QuantizedArray(int8(min_size=0), shape=(8, 8), dtype=float32)" in repr(quantized)


def test_a_quantized_model_is_pickled():
    class_of = lambda model: [type(module) for _, module in nnx.iter_modules(model)]
    embed = nnx.Embed(8, 8, embedding_init=waves, rngs=nnx.Rngs(0))
    quantized = nnx.jit(lambda embed: quantize(embed, INT8))(embed)
    again = pickle.loads(pickle.dumps(quantized))
    assert class_of(again) == class_of(quantized)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(quantized))


def test_a_quantized_model_can_be_made_of_shapes(quantized):
    abstract = nnx.eval_shape(lambda: quantize(Net(nnx.Rngs(0)), INT8))
    assert nnx.graphdef(abstract) == nnx.graphdef(quantized)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.state(quantized))
    assert jax.tree.leaves(nnx.state(abstract)) == jax.tree.leaves(like)


def test_what_is_left_of_a_quantized_model_trains(quantized):
    model = nnx.clone(quantized)
    optimizer = jmp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(model)
        optimizer.update(model, grads)
        return loss, nnx.to_pure_dict(grads)

    losses = [step(model, optimizer) for _ in range(2)]
    assert losses[1][0] < losses[0][0]
    assert losses[0][1].keys() == {"body", "head"}
    assert all("kernel" not in grads for grads in losses[0][1].values())
    jax.tree.map(np.testing.assert_array_equal, model.body.kernel[...], quantized.body.kernel[...])


def test_a_quantized_model_takes_policies_of_other_dtypes_and_no_others(quantized):
    half = jmp.with_policy(quantized, "int8(min_size=0)_from_mixed_bfloat16")
    assert nnx.eval_shape(call, half, X).dtype == jnp.bfloat16
    assert nnx.eval_shape(call, jmp.with_policy(quantized, "int8(activations=false)_from_float32"), X).shape == (3, 8)
    with pytest.raises(ValueError, match=r"'body/kernel' is quantized, as 'int8.*', but the policy 'float32'"):
        jmp.with_policy(quantized, "float32")
    with pytest.raises(ValueError, match=r"The weight 'head/kernel' is quantized, .* but the policy 'mixed_bfloat16'"):
        jmp.with_policy(quantized, jmp.PolicyMap({"head": "mixed_bfloat16"}, INT8))
    with pytest.raises(ValueError, match=r"The weight 'body/kernel' is stored as 'int8.*and its policy says 'int4/4"):
        jmp.with_policy(quantized, INT4)


def test_quantizing_twice_names_the_weight(quantized):
    with pytest.raises(ValueError, match=r"The weight 'body/kernel' is quantized already"):
        quantize(quantized, INT8)


def test_nothing_to_quantize_says_why(net):
    with pytest.raises(ValueError, match="'body/kernel': 64 elements are fewer than min_size=4096; 'head/kernel': 64"):
        quantize(net, "int8_from_float32")
    with pytest.raises(ValueError, match="there is no 'kernel' or 'embedding'"):
        quantize(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), INT8)


@pytest.mark.slow
def test_a_rule_that_matches_nothing_is_named(net):
    given = jmp.PolicyMap({"haed": "float32"}, INT8)
    for attach in (jmp.with_policy, quantize):
        with pytest.warns(UserWarning, match="haed") as warned:
            attach(net, given)
        assert warned[0].filename == __file__


def test_a_tied_weight_is_quantized_once_and_stays_tied():
    net = Net(nnx.Rngs(0))
    net.tied = nnx.Linear(8, 8, kernel_init=waves, rngs=nnx.Rngs(1))
    net.tied.kernel = net.body.kernel
    quantized = quantize(net, INT8)
    assert quantized.tied.kernel is quantized.body.kernel
    apart = quantize(net, jmp.PolicyMap({"tied": "float32"}, INT8))  # each computes what its policy says
    assert type(apart.tied.kernel) is nnx.Param
    assert isinstance(apart.body.kernel, QuantizedParam)


def test_a_model_keeps_the_arguments_that_it_was_told_to_keep():
    seen = []

    class Shifted(Net):
        def __call__(self, x, shift):
            seen.extend([x.dtype, shift.dtype])
            return super().__call__(x)

    model = jmp.with_policy(Shifted(nnx.Rngs(0)), "mixed_bfloat16", no_cast=["shift"])
    nnx.eval_shape(lambda: quantize(model, "int8(min_size=0)_from_mixed_bfloat16")(X, jnp.ones(8)))
    assert seen == [jnp.bfloat16, jnp.float32]


def own_function(kind):
    return lambda *args, **options: kind(*args, **options)


promote = own_function(nnx.nn.dtypes.promote_dtype)
dot_general = own_function(jax.lax.dot_general)
WRITTEN = {
    "promote_dtype": lambda rngs: nnx.Linear(8, 4, promote_dtype=promote, rngs=rngs),
    "promote_dtype of an embedding": lambda rngs: nnx.Embed(8, 8, promote_dtype=promote, rngs=rngs),
    "dot_general_cls": lambda rngs: nnx.LinearGeneral(8, 4, dot_general_cls=lambda: dot_general, rngs=rngs),
    "einsum_op": lambda rngs: nnx.Einsum("...c,cd->...d", (8, 4), einsum_op=own_function(jnp.einsum), rngs=rngs),
    "conv_general_dilated": lambda rngs: nnx.Conv(
        8, 4, (3,), conv_general_dilated=own_function(jax.lax.conv_general_dilated), rngs=rngs
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_function_that_the_author_wrote_computes_as_written(name):
    model = nnx.eval_shape(lambda: WRITTEN[name](nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    x = jnp.arange(3) if "embedding" in name else X
    ours, plain = (
        str(jax.make_jaxpr(lambda state, p=policy: jmp.with_policy(nnx.merge(graphdef, state), p)(x))(state))
        for policy in ("int8(min_size=0)_from_mixed_bfloat16", "mixed_bfloat16")
    )
    assert ours == plain
    with pytest.raises(ValueError, match=r"'(kernel|embedding)': its author wrote the functions that it computes with"):
        quantize(model, "int8(min_size=0)_from_mixed_bfloat16")


@pytest.mark.parametrize("wrap", [nnx.WeightNorm, pytest.param(nnx.SpectralNorm, marks=pytest.mark.slow)])
def test_a_weight_that_a_wrapper_rewrites_stays_as_it_is(wrap):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.normed = wrap(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

    quantized = nnx.jit(lambda: quantize(Model(nnx.Rngs(0)), INT8))()
    assert type(quantized.normed.layer_instance.kernel) is nnx.Param
    assert isinstance(quantized.head.kernel[...], QuantizedArray)
    quantized.normed.layer_instance = nnx.Linear(8, 8, rngs=nnx.Rngs(1))  # is given the policy at the next call
    graphdef, state = nnx.split(quantized)
    program = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state).normed(X))(state)
    assert "round" not in str(program)


@pytest.mark.slow
def test_a_mask_is_in_the_integers():
    mask = np.tril(np.ones((3, 8, 4), np.float32))
    quantized = nnx.jit(lambda: quantize(nnx.Conv(8, 4, (3,), mask=mask, rngs=nnx.Rngs(0)), INT8))()
    assert quantized.mask is None
    values = np.asarray(quantized.kernel[...].values)
    assert values.any()
    assert not values[mask == 0].any()


@pytest.mark.parametrize("attach", [jmp.with_policy, quantize])
def test_an_embedding_is_sharded_as_it_is_told(attach):
    tokens, seen = jnp.arange(8), []

    def outputs(embed):
        embed = attach(embed, INT8)
        seen.extend(map(jax.typeof, (embed(tokens, out_sharding=rows), embed.attend(X, out_sharding=PartitionSpec()))))

    rows = PartitionSpec("d")
    with jax.set_mesh(make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))):
        nnx.eval_shape(outputs, nnx.Embed(8, 8, embedding_init=waves, rngs=nnx.Rngs(0)))
    assert [(out.shape, out.sharding.spec[0]) for out in seen] == [((8, 8), "d"), ((3, 8), None)]


class HoldsAWeight(nnx.Module):
    """Its own code reads the weight of a layer that it does not call, as Mamba of mamba2-jax."""

    def __init__(self, rngs):
        self.parts = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    def __call__(self, x):
        return (x[..., None] * self.parts[0].kernel[...]).sum(-2)


def test_a_layer_that_only_holds_a_weight_is_left_and_its_stored_weight_is_named():
    policy, x = "int8(min_size=0)_from_float32", jnp.ones((2, 8))
    model = HoldsAWeight(nnx.Rngs(0))
    said = jmp.explain(jmp.with_policy(model, policy), x)["parts/0"].quantization
    assert said == "left: the layer is not called, and other code gets its weight as it is"
    stored = quantize(model, policy)
    for run in (stored, nnx.jit(lambda x: stored(x))):
        with pytest.raises(TypeError, match=r"leave 'parts/0/kernel' out by a rule .* PolicyMap\({'parts/0': 'mixed_"):
            run(x)
    rule = jmp.PolicyMap({"parts/0": "float32"}, policy)
    np.testing.assert_array_equal(jmp.with_policy(model, rule)(x), model(x))


class ReadsATable(nnx.Module):
    """Its own code looks up rows of a table that it does not call, as Qwen3 of bonsai."""

    def __init__(self, rngs):
        self.embedder = nnx.Embed(8, 16, rngs=rngs)

    def __call__(self, tokens):
        return self.embedder.embedding[...][tokens]


@pytest.mark.parametrize("format", ["int8(min_size=0)", "int4/16(min_size=0)", "e4m3/16(activations=true,min_size=0)"])
def test_a_table_that_is_not_called_is_left_whatever_the_format_of_tables(format):
    model = jmp.with_policy(ReadsATable(nnx.Rngs(0)), f"{format}_from_float32")
    said = jmp.explain(model, jnp.arange(4))["embedder"].quantization
    assert said == "left: the layer is not called, and other code gets its weight as it is"
