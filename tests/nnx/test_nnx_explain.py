"""`explain` for nnx: what holds at each path, by which rule, and what was traced there; and that nothing is changed."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from explained_blocks import IN_BLOCKS
from flax import linen, nnx
from nnx_models import Net, rngs

import jmp_policy as jmp

X = jax.ShapeDtypeStruct((2, 4), "float32")
MIXED = "mixed_bfloat16"


@pytest.fixture(autouse=True)
def _promotion():
    """A leak is made by promotion; and Flax's norms need it, too."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(self.dense(x))


class Nested(nnx.Module):
    """A container, an author's dtype, a policy inside, and a module that is not called."""

    def __init__(self, *, rngs):
        self.blocks = nnx.List([Block(rngs=rngs)])
        self.exact = nnx.Linear(4, 4, dtype=jnp.float16, rngs=rngs)
        self.inner = jmp.with_policy(Block(rngs=rngs), "params=float32,compute=float16,output=float32")
        self.idle = nnx.Linear(4, 4, rngs=rngs)

    def encode(self, x):
        return self.blocks[0](x)

    def __call__(self, x, exact=True):
        x = self.inner(self.encode(x))
        return self.exact(x) if exact else x


def abstract(kind, policy=None):
    """An abstract model, with a policy if one is given."""
    model = nnx.eval_shape(lambda: kind(rngs=rngs()))
    with warnings.catch_warnings(action="ignore"):
        return model if policy is None else jmp.with_policy(model, policy)


def column(explanation, name):
    return {row.path: getattr(row, name) for row in explanation.rows}


@pytest.mark.slow
def test_each_module_has_its_rule_policy_and_type():
    rules = jmp.PolicyMap({".*norm": "float32", nnx.Linear: "mixed_float16"}, MIXED)
    found = jmp.explain(abstract(Nested, rules), X)
    assert column(found, "rule") == {
        "": "default", "blocks/0": "default", "blocks/0/dense": "Linear", "blocks/0/norm": ".*norm",
        "inner": "its own policy", "inner/dense": "inherited", "inner/norm": "inherited",
        "exact": "author's dtype", "idle": "Linear",
    }  # fmt: skip
    assert found["blocks/0/norm"].policy is jmp.get_policy("float32")
    assert column(found, "type")["blocks/0/norm"] == "LayerNorm"


def test_rule_for_a_type_of_container_holds_inside():
    found = jmp.explain(abstract(Nested, jmp.PolicyMap({nnx.List: "float32"}, MIXED)), X)
    rules = {path: rule for path, rule in column(found, "rule").items() if path.startswith("blocks")}
    assert rules == dict.fromkeys(["blocks/0", "blocks/0/dense", "blocks/0/norm"], "List")
    assert found.unused == ()


def test_dtypes_are_those_that_were_traced():
    found = jmp.explain(abstract(Nested, MIXED), X)
    assert column(found, "input_dtypes")[""] == ("float32",)
    assert column(found, "compute_dtypes")["blocks/0/dense"] == ("bfloat16",)
    assert column(found, "compute_dtypes")["blocks/0/norm"] == ("float32",)  # Flax reduces in float32
    assert column(found, "output_dtypes")["inner"] == ("float32",)
    assert (found["exact"].input_dtypes, found["exact"].output_dtypes) == (("float32",), ("float16",))
    assert column(found, "output_dtypes")[""] == ("bfloat16",)


def test_module_that_is_not_called_has_parameters_alone():
    idle = jmp.explain(abstract(Nested, MIXED), X)["idle"]
    assert (idle.param_bytes, idle.input_dtypes, idle.compute_dtypes, idle.output_dtypes) == (80, (), (), ())


def test_rows_stand_in_the_order_of_calls_each_below_the_module_around_it():
    paths = [row.path for row in jmp.explain(abstract(Nested, MIXED), X).rows]
    inside = ["blocks/0", "blocks/0/dense", "blocks/0/norm", "inner", "inner/dense", "inner/norm"]
    assert paths == ["", *inside, "exact", "idle"]


def test_own_parameters_are_read_in_compute_dtype_and_counted_once():
    class Tied(nnx.Module):
        def __init__(self, *, rngs):
            self.one = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.two = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.two.kernel = self.one.kernel
            self.scale = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            return self.two(self.one(x)) * self.scale

    found = jmp.explain(abstract(Tied, MIXED), X)
    assert column(found, "param_bytes") == {"": 16, "one": 64, "two": 0}
    assert found[""].compute_dtypes == ("bfloat16",)


def test_rules_that_decide_nothing_are_named_and_no_warning_is_raised():
    rules = jmp.PolicyMap({"blocks": "float32", "blocks/0": "float16", "exakt": "float16"}, MIXED)
    assert jmp.explain(abstract(Nested, rules), X).unused == (
        "policy rule 'blocks/0' decides nothing: the earlier rule 'blocks' hides it",
        "policy rule 'exakt' matches no module; the closest path is 'exact'",
    )


def test_wide_output_in_a_residual_sum_is_a_leak_and_a_narrowed_one_is_none():
    wide = jmp.explain(abstract(Block, jmp.PolicyMap({"norm": "float32"}, MIXED)), X)
    assert column(wide, "leaks_into") == {"": (), "dense": (), "norm": ("",)}
    exact = jmp.PolicyMap({"norm": "params=float32,compute=float32,output=bfloat16"}, MIXED)
    assert set(column(jmp.explain(abstract(Block, exact), X), "leaks_into").values()) == {()}


def test_decorated_class_is_explained():
    @jmp.with_policy(jmp.PolicyMap({"norm": "float32"}, MIXED))
    class Decorated(Block):
        pass

    found = jmp.explain(Decorated(rngs=rngs()), X)
    assert column(found, "rule") == {"": "default", "dense": "default", "norm": "norm"}


class TestMethods:
    @pytest.mark.parametrize("method", ["encode", Nested.encode, lambda model, x: model.encode(x)])
    def test_only_what_the_method_calls_is_traced(self, method):
        found = jmp.explain(abstract(Nested, MIXED), X, method=method)
        called = [row.path for row in found.rows if row.output_dtypes]
        assert called == ["", "blocks/0", "blocks/0/dense", "blocks/0/norm"]

    def test_bound_method_is_called_on_the_copy(self):
        model = abstract(Nested, MIXED)
        assert jmp.explain(model, X, method=model.encode)["inner"].output_dtypes == ()

    def test_arguments_that_are_no_arrays_are_passed_as_they_are(self):
        model = abstract(Nested, MIXED)
        assert jmp.explain(model, X, exact=False)["exact"].output_dtypes == ()

    def test_rngs_are_handed_on_and_not_drawn_from(self):
        class Noise(nnx.Module):
            def __call__(self, x, rngs):
                return x + jax.random.normal(rngs.noise(), x.shape, x.dtype)

        streams = nnx.Rngs(noise=0)
        row = jmp.explain(Noise(), X, rngs=streams)[""]
        assert (row.input_dtypes, int(streams.noise.count[...])) == (("float32",), 0)

    def test_rngs_of_none_are_handed_on_where_the_method_requires_the_keyword(self):
        class Silent(nnx.Module):
            def __call__(self, x, *, rngs):
                return x if rngs is None else x + rngs.noise()

        assert jmp.explain(Silent(), X, rngs=None)[""].output_dtypes == ("float32",)


class TestTransforms:
    @pytest.mark.parametrize("transform", [nnx.jit, nnx.remat], ids=["jit", "remat"])
    def test_module_under_a_transform_is_seen_under_its_path(self, transform):
        class Transformed(nnx.Module):
            def __init__(self, *, rngs):
                self.block = Block(rngs=rngs)

            def __call__(self, x):
                return transform(lambda block, x: block(x))(self.block, x)

        found = jmp.explain(abstract(Transformed, MIXED), X)
        assert found["block/dense"].compute_dtypes == ("bfloat16",)
        assert found["block"].output_dtypes == ("bfloat16",)

    @pytest.mark.slow
    def test_path_of_scanned_layers_appears_once(self):
        class Scanned(nnx.Module):
            def __init__(self, *, rngs):
                self.layers = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(rngs.split(3))

            def __call__(self, x):
                call = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
                return call(x, self.layers)

        found = jmp.explain(jmp.with_policy(Scanned(rngs=rngs()), MIXED), X)
        assert [row.path for row in found.rows] == ["", "layers"]
        assert (found["layers"].param_bytes, found["layers"].compute_dtypes) == (3 * 80, ("bfloat16",))

    @pytest.mark.slow
    def test_linen_module_in_a_bridge_is_one_row(self):
        bridge = nnx.bridge.ToNNX(linen.Dense(3), rngs=rngs()).lazy_init(jnp.ones((2, 4)))
        row = jmp.explain(jmp.with_policy(bridge, MIXED), X)[""]
        assert (row.type, row.param_bytes, row.compute_dtypes) == ("ToNNX", 60, ("bfloat16",))


@pytest.mark.slow
def test_model_stays_as_it_is():
    model = jmp.with_policy(Net(rngs=rngs()), MIXED)
    before = {path: (type(module), set(vars(module))) for path, module in nnx.iter_modules(model)}
    jmp.explain(model, X)
    assert {path: (type(module), set(vars(module))) for path, module in nnx.iter_modules(model)} == before
    assert not hasattr(model, "entered")  # which a call sets


def test_model_without_policy_shows_what_is_traced():
    found = jmp.explain(abstract(Net), X)
    assert {(row.policy, row.rule) for row in found.rows} == {(None, "")}
    assert found["head"].output_dtypes == ("float32",)


def test_missing_input_is_the_models_own_error():
    with pytest.raises(TypeError, match=r"^Net.__call__\(\) missing 1 required positional argument: 'x'"):
        jmp.explain(abstract(Net, MIXED))


@pytest.mark.slow
def test_model_too_large_to_exist_is_explained():
    class Huge(nnx.Module):
        def __init__(self, *, rngs):
            self.embed = nnx.Embed(2**17, 2**15, rngs=rngs)
            self.up = nnx.List([nnx.Linear(2**15, 2**17, rngs=rngs) for _ in range(8)])
            self.down = nnx.List([nnx.Linear(2**17, 2**15, rngs=rngs) for _ in range(8)])

        def __call__(self, tokens):
            x = self.embed(tokens)
            for up, down in zip(self.up, self.down, strict=True):
                x = down(up(x))
            return x

    found = jmp.explain(abstract(jmp.with_policy(Huge, "bfloat16")), jax.ShapeDtypeStruct((8, 8192), "int32"))
    assert found.float32_bytes == 2 * found.total_bytes > 4 * 70e9


class Wide(nnx.Module):
    def __init__(self, *, rngs):
        own = lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs)
        self.own = nnx.Linear(64, 64, dot_general=own, rngs=rngs)
        self.mlp = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.mlp(self.own(x)))


QUANTIZATION = {
    "": "", "own": "left: its author wrote the functions that it computes with", "mlp": "int8",
    "head": "left: 256 elements are fewer than min_size=4096",
}  # fmt: skip


def test_quantization_is_the_format_of_a_weight_or_why_it_is_left():
    found = jmp.explain(abstract(Wide, "int8_from_mixed_bfloat16"), jax.ShapeDtypeStruct((2, 64), "float32"))
    assert column(found, "quantization") == QUANTIZATION
    assert set(column(jmp.explain(abstract(Wide, MIXED), X.update(shape=(2, 64))), "quantization").values()) == {""}


@pytest.mark.slow
@pytest.mark.parametrize(("format", "dense", "conv"), IN_BLOCKS)
def test_quantization_tells_of_blocks_that_do_not_fit_and_of_those_that_no_hardware_multiplies(format, dense, conv):
    class Blocks(nnx.Module):
        def __init__(self, *, rngs):
            self.embed = nnx.Embed(64, 64, rngs=rngs)
            self.dense = nnx.Linear(64, 64, rngs=rngs)
            self.conv = nnx.Conv(64, 64, (3,), rngs=rngs)

        def __call__(self, tokens):
            return self.conv(self.dense(self.embed(tokens)))

    model = abstract(Blocks, f"{format}_from_mixed_bfloat16")
    found = column(jmp.explain(model, jax.ShapeDtypeStruct((2, 4), "int32")), "quantization")
    assert (found["dense"], found["conv"].startswith(conv)) == (dense, True)
    assert found["embed"] == "left: the rows of a table are read, and its logits want all the bits"


def test_bytes_of_a_quantized_weight_are_those_of_its_integers_and_scales():
    model = jmp.quant.quantize(abstract(Wide), "int8_from_mixed_bfloat16")
    found = jmp.explain(model, jax.ShapeDtypeStruct((2, 64), "float32"))
    assert column(found, "quantization") == QUANTIZATION
    mlp = found["mlp"]
    assert (mlp.param_bytes, mlp.float32_bytes) == (64 * 64 + 4 * 64 + 4 * 64, 4 * (64 * 64 + 64))
    assert set(mlp.param_dtypes) == {"int8", "float32"}


AS_NUMBERS = "int8(min_size=0), computed with as numbers: no policy can replace the function that it multiplies by"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("int8(min_size=0)", AS_NUMBERS),
        ("int8(activations=false,min_size=0)", "int8(activations=false,min_size=0)"),
        ("int4/4(min_size=0)", "int4/4(min_size=0)"),
        ("mxfp8/4(min_size=0)", AS_NUMBERS.replace("int8", "mxfp8/4")),
        ("mxfp4/4(min_size=0)", "mxfp4/4(min_size=0)"),
    ],
)
def test_a_transposed_convolution_is_a_layer_of_flax_whose_function_stays(format, said):
    model = jmp.with_policy(nnx.ConvTranspose(4, 4, (3, 3), rngs=rngs()), f"{format}_from_mixed_bfloat16")
    assert jmp.explain(model, jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"))[""].quantization == said
