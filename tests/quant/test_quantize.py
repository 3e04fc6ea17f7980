import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from flax.core import FrozenDict, freeze, meta

import jmp_policy as jmp
from jmp_policy import quant
from jmp_policy.quant import match_format

INT8 = "int8_from_float32"
KERNEL = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)


def variables() -> dict:
    dense = {"kernel": KERNEL, "bias": jnp.ones(64)}
    params = {"embed": {"embedding": KERNEL}, "mlp": {"up": dense}, "small": {"kernel": KERNEL[:8, :8]}}
    return {"params": params, "batch_stats": {"norm": {"mean": jnp.zeros(64)}}}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, 64, rngs=rngs)
        self.up = nnx.Linear(64, 64, rngs=rngs)
        self.small = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.small(self.up(self.embed(tokens)))


def is_quantized(tree: object) -> list[str]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, quant.QuantizedArray))
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if isinstance(leaf, quant.QuantizedArray)
    ]


def test_kernels_and_tables_become_integers_and_everything_else_stays():
    before = variables()
    after = quant.quantize(before, INT8)
    assert is_quantized(after) == ["params/embed/embedding", "params/mlp/up/kernel"]
    assert after["params"]["mlp"]["up"]["bias"] is before["params"]["mlp"]["up"]["bias"]
    assert after["params"]["small"]["kernel"] is before["params"]["small"]["kernel"]
    assert after["batch_stats"] is before["batch_stats"]
    assert is_quantized(before) == []
    assert is_quantized(quant.quantize(before["params"], INT8)) == ["embed/embedding", "mlp/up/kernel"]
    frozen = quant.quantize(freeze(before), INT8)
    assert isinstance(frozen, FrozenDict)
    assert is_quantized(frozen) == is_quantized(after)


def test_the_box_around_a_weight_stays_around_its_integers():
    params = {"dense": {"kernel": nn.Partitioned(KERNEL, (None, "model"))}}
    boxed = quant.quantize(params, "int8_from_float32")["dense"]["kernel"]
    assert isinstance(boxed, nn.Partitioned)
    assert boxed.names == (None, "model")
    assert is_quantized(meta.unbox({"kernel": boxed})) == ["kernel"]


def test_a_map_chooses_by_path():
    rules = jmp.PolicyMap({"mlp": "int4/32_from_float32", "embed": "float32"}, "int8(min_size=0)_from_float32")
    params = quant.quantize(variables(), rules)["params"]
    assert str(params["mlp"]["up"]["kernel"].format) == "int4/32"
    assert str(params["small"]["kernel"].format) == "int8(min_size=0)"
    assert params["embed"]["embedding"] is KERNEL


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "mxfp4/16(activations=true)", "nvfp4"])
def test_the_same_is_stored_inside_of_jit_and_abstractly_and_tables_stay_under_blocks(format):
    before, policy = variables(), f"{format}_from_bfloat16"
    after = quant.quantize(before, policy)
    assert is_quantized(after) == ["params/embed/embedding"] * (format == "int8") + ["params/mlp/up/kernel"]
    assert (after["params"]["embed"]["embedding"] is before["params"]["embed"]["embedding"]) == (format != "int8")
    jitted = jax.jit(lambda v: quant.quantize(v, policy))(before)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), after, jitted))
    abstract = jax.eval_shape(lambda: quant.quantize(before, policy))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)


@pytest.mark.slow
def test_integers_of_a_map_are_clipped_before_its_blocks_are_quantized():
    with pytest.raises(ValueError, match=r"^clip='mse' is for integers, and 'mxfp4' .* weight 'mlp/up/kernel' by"):
        quant.quantize(variables(), jmp.PolicyMap({"mlp": "mxfp4_from_float32"}, INT8), clip="mse")
    first = quant.quantize(variables(), jmp.PolicyMap({"mlp": "float32"}, INT8), clip=99.0)
    both = quant.quantize(first, jmp.PolicyMap({"mlp": "mxfp4_from_float32"}, "float32"))
    assert is_quantized(both) == ["params/embed/embedding", "params/mlp/up/kernel"]


@pytest.mark.slow
def test_a_model_too_large_for_memory_is_quantized_abstractly():
    kernel = jax.ShapeDtypeStruct((80, 8192, 28672), jnp.bfloat16)
    new = quant.quantize({"blocks": {"mlp": {"kernel": kernel}}}, "int4_from_bfloat16", stacked=["blocks"])
    weight = new["blocks"]["mlp"]["kernel"]
    assert weight.values == jax.ShapeDtypeStruct((80, 64, 64, 28672), jnp.uint8)
    assert weight.shape == kernel.shape
    new = quant.quantize({"blocks": {"mlp": {"kernel": kernel}}}, "nvfp4_from_bfloat16", stacked=["blocks"])
    weight = new["blocks"]["mlp"]["kernel"]
    assert weight.values == jax.ShapeDtypeStruct((80, 512, 8, 28672), jnp.uint8)
    assert weight.tensor_scale == jax.ShapeDtypeStruct((80,), jnp.float32)
    assert (weight.shape, weight.nbytes * 8) == (kernel.shape, 80 * (8192 * 28672 * 4.5 + 32))


def test_patterns_of_stacks_cover_what_is_inside_and_add_an_axis_each():
    params = {"blocks": {"dense": {"kernel": jax.ShapeDtypeStruct((2, 3, 64, 64), jnp.float32)}}}

    def scale(stacked: list[str]) -> tuple[int, ...]:
        new = quant.quantize(params, "int8(min_size=0)_from_float32", stacked=stacked)
        return new["blocks"]["dense"]["kernel"].scale.shape

    assert scale([]) == (1, 1, 1, 64)
    assert scale(["blocks"]) == scale(["blocks/.*"]) == (2, 1, 1, 64)
    assert scale(["blocks", "blocks/dense"]) == (2, 3, 1, 64)


@pytest.mark.slow
def test_the_clip_of_inputs_has_a_number_for_each_layer_of_a_stack_and_none_where_inputs_are_left_alone():
    params = {"blocks": {"kernel": jnp.ones((2, 64, 64))}, "head": {"kernel": KERNEL}}
    new = quant.quantize(params, INT8, stacked=["blocks"], input_clips={"blocks": 2.0, "head": 3})
    assert new["blocks"]["kernel"].input_clip.tolist() == [2.0, 2.0]
    assert new["head"]["kernel"].input_clip.tolist() == 3.0
    new = quant.quantize(variables(), "int8(activations=false)_from_float32", input_clips={"mlp/up": 2.0})
    assert new["params"]["mlp"]["up"]["kernel"].input_clip is None


def test_a_clip_of_inputs_below_their_peak_is_what_they_saturate_at():
    rows = jnp.array([[1.0, 0.5, 100.0, -0.25]])
    weight = quant.quantize_array(jnp.eye(4), "int8(min_size=0)", input_clip=1.0)
    out = quant.dot_general(rows, weight, (((1,), (0,)), ((), ())))
    assert jnp.allclose(out, jnp.array([[1.0, 0.5, 1.0, -0.25]]), atol=1 / 127)


@pytest.mark.slow
def test_an_nnx_model_is_quantized_as_a_copy_in_which_a_weight_of_two_layers_stays_one():
    model = Model(nnx.Rngs(0))
    model.up = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 64, rngs=nnx.Rngs(1)))
    model.up.layers[1].kernel = model.up.layers[0].kernel
    kernel = model.up.layers[0].kernel.get_raw_value()
    new = quant.quantize(model, INT8, input_clips={"up/layers/0": 4.0})
    assert model.up.layers[0].kernel.get_raw_value() is kernel
    assert new.up.layers[0].kernel.get_raw_value().input_clip == 4.0
    assert new.up.layers[1].kernel is new.up.layers[0].kernel
    assert isinstance(new.small.kernel, nnx.Param)
    assert new(jnp.arange(3)).shape == (3, 8)
    weight = quant.quantize(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), INT8).up.kernel.get_raw_value()
    assert isinstance(weight.values, jax.ShapeDtypeStruct)
    assert weight.values.dtype == jnp.int8


def test_a_layer_with_functions_of_its_author_is_left():
    model = Model(nnx.Rngs(0))
    model.up = nnx.Linear(64, 64, dot_general=lambda *args, **kwargs: jax.lax.dot_general(*args), rngs=nnx.Rngs(1))
    assert isinstance(quant.quantize(model, INT8).up.kernel, nnx.Param)


def test_rules_that_decide_nothing_are_warned_of_where_quantize_is_called():
    rules = jmp.PolicyMap({"mpl": "int4_from_float32"}, "int8_from_float32")
    for target in (variables(), Model(nnx.Rngs(0))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quant.quantize(target, rules)
        assert [warning.filename for warning in caught] == [__file__]
        assert "policy rule 'mpl' matches no module" in str(caught[0].message)


VARIABLES, BY_TYPE = variables(), jmp.PolicyMap({nn.Dense: INT8}, "float32")
UNUSED = jmp.PolicyMap({"small": INT8, "mpl": INT8}, "float32")


@pytest.mark.parametrize(
    ("text", "target", "policy", "options"),
    [
        ("the policy 'mixed_float16' stores no quantized weights. For example: 'int8_from", None, "mixed_float16", {}),
        (r"the map PolicyMap\(\{'head'.* stores no quantized weights", None, jmp.PolicyMap({"head": "bfloat16"}), {}),
        ("'embed/embedding': 4096 elements are fewer than min_size=9999; ", None, "int8(min_size=9999)_from_f32", {}),
        ("'mlp/up/kernel': its policy 'float32' stores no .* The policy rule 'mpl'", None, UNUSED, {}),
        ("A rule of the map is for the type Dense, and variables do not know", None, BY_TYPE, {}),
        ("clip is 'absmax', 'mse' or a percentile in", None, INT8, {"clip": "max"}),
        ("'up', which is not a module with a weight. Known are 'emb", None, INT8, {"input_clips": {"up": 2.0}}),
        (r"input_clips\['up'\] is not a positive number, got 0", None, INT8, {"input_clips": {"up": 0}}),
        (r"input_clips\['up'\] is not a positive number, got 'a'", None, INT8, {"input_clips": {"up": "a"}}),
        ("'up' of stacked covers no module with a weight. Such modules are 'embed', ", None, INT8, {"stacked": ["up"]}),
        (r"stacked is a collection of patterns, got the string 'up'; write \['up'\]", None, INT8, {"stacked": "up"}),
        (r"'\(' of stacked is not a valid pattern: ", None, INT8, {"stacked": ["("]}),
        ("stacked is for linen variables", lambda: Model(nnx.Rngs(0)), INT8, {"stacked": ["up"]}),
        (r"'dense_4/kernel': 512 elements are fewer than .*; and 2 more\.$",
         lambda: {f"dense_{i}": {"kernel": KERNEL[:8]} for i in range(7)}, INT8, {}),
        ("there is no 'kernel' or 'embedding' of two", lambda: {"norm": {"scale": jnp.ones(64)}}, INT8, {}),
        ("'dense/kernel': it is not floating", lambda: {"dense": {"kernel": jnp.ones((64, 64), jnp.int32)}}, INT8, {}),
        ("'kernel': 512 elements are fewer than min_", lambda: nnx.Linear(64, 8, rngs=nnx.Rngs(0)), INT8, {}),
        ("'kernel': its author wrote the functions that it computes with",
         lambda: nnx.Linear(64, 64, promote_dtype=lambda arrays, **_: arrays, rngs=nnx.Rngs(0)), INT8, {}),
        ("The weight 'embed/embedding' is quantized already: Quan", lambda: quant.quantize(VARIABLES, INT8), INT8, {}),
        ("The weight 'embed/embedding' is quantized already: QuantizedArray",
         lambda: quant.quantize(Model(nnx.Rngs(0)), INT8), INT8, {}),
        *[
            (f"quantize takes linen variables or an nnx model, got {kind}", lambda target=target: target, INT8, {})
            for target, kind in ((nn.Dense(4), "a Dense"), (nnx.Linear, "the class Linear"), (KERNEL, "a ArrayImpl"),
                                 (nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "a State"))
        ],
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused(text, target, policy, options):
    with pytest.raises((ValueError, TypeError), match=text):
        quant.quantize(target() if target else VARIABLES, policy, **options)


TABLES_IN_4 = "int4/64(table_bits=4)_from_f32"


@pytest.mark.slow
def test_a_table_has_eight_bits_unless_told_otherwise_and_explain_says_so():
    array = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    formats = {"int4_from_f32": "int8(activations=false)", TABLES_IN_4: "int4/64(table_bits=4)", INT8: "int8"}
    for policy, format in formats.items():
        quantized = quant.quantize({"embed": {"embedding": array}, "up": {"kernel": array}}, policy)
        assert str(quantized["embed"]["embedding"].format) == format
        assert quantized["up"]["kernel"].format == jmp.get_policy(policy).quantization
        for embed in (nn.Embed(64, 64), nnx.Embed(64, 64, rngs=nnx.Rngs(0))):
            rows = jmp.explain(jmp.with_policy(embed, policy), jnp.zeros((2,), jnp.int32))
            assert rows[""].quantization == format
    # A table may be stored by a policy that differs for tables alone.
    stored = quant.quantize_array(array, "int4(table_bits=4)")
    assert match_format(stored, quant.Int4()).format == quant.Int4()
