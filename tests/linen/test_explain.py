"""`explain` for linen: what holds at each path, by which rule, and what was traced there."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from explained_blocks import IN_BLOCKS
from flax import linen as nn

import jmp_policy as jmp

X = jax.ShapeDtypeStruct((2, 4), "float32")
EXACT = "params=float32,compute=float32,output=bfloat16"


@pytest.fixture(autouse=True)
def _promotion():
    """A leak is made by promotion; and Flax's norms need it, too."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Block(nn.Module):
    post_norm: bool = False

    @nn.compact
    def __call__(self, x):
        if self.post_norm:
            return x + nn.LayerNorm(name="norm")(nn.Dense(4, name="dense")(x))
        return x + nn.Dense(4, name="dense")(nn.LayerNorm(name="norm")(x))


class Net(nn.Module):
    """Submodules in setup and compact, several methods, and an author's dtype."""

    post_norm: bool = False

    def setup(self):
        self.block = Block(self.post_norm)
        self.head = nn.Dense(3, dtype=jnp.float16)

    def encode(self, x):
        return self.block(x)

    def __call__(self, x, train=False):
        return self.head(self.encode(x)) if train else self.encode(x)


def explain(rules, *, model=None, **kwargs):
    return jmp.explain(jmp.with_policy(model or Net(), rules), X, **kwargs)


def column(explanation, name):
    return {row.path: getattr(row, name) for row in explanation.rows}


def test_each_module_has_its_rule_and_policy():
    rules = jmp.PolicyMap({".*norm": "float32", nn.Dense: "float16"}, "mixed_bfloat16")
    found = explain(rules, train=True)
    assert column(found, "rule") == {
        "": "default", "block": "default", "block/norm": ".*norm", "block/dense": "Dense", "head": "author's dtype",
    }  # fmt: skip
    assert found["block/norm"].policy is jmp.get_policy("float32")
    assert found.to_dict()["rows"][0]["policy"] == "mixed_bfloat16"
    assert column(found, "type")["block/norm"] == "LayerNorm"


def test_dtypes_are_those_that_were_traced():
    row = explain("mixed_bfloat16")["block/dense"]
    assert (row.param_dtypes, row.compute_dtypes, row.output_dtypes) == (("float32",), ("bfloat16",), ("bfloat16",))
    norm = explain("mixed_bfloat16")["block/norm"]
    assert norm.compute_dtypes == ("float32",)  # Flax reduces in float32, whatever the policy
    assert norm.output_dtypes == ("bfloat16",)


def test_inputs_are_those_before_the_cast_and_outputs_those_after():
    root = explain("params=float32,compute=float16,output=bfloat16", model=Block())[""]
    assert (root.input_dtypes, root.compute_dtypes, root.output_dtypes) == (("float32",), ("float16",), ("bfloat16",))


def test_boundary_of_a_submodule_with_its_own_policy_is_seen_from_outside():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jmp.with_policy(Block(name="inner"), "params=float32,compute=float16,output=float32")(x)

    found = explain("mixed_bfloat16", model=Outer())
    inner = found["inner"]
    assert (inner.rule, inner.input_dtypes, inner.output_dtypes) == ("its own policy", ("bfloat16",), ("float32",))
    assert found["inner/dense"].rule == "inherited"
    assert found["inner/dense"].compute_dtypes == ("float16",)


def test_parameter_bytes_are_those_of_the_module_itself():
    found = explain("bfloat16")
    assert column(found, "param_bytes") == {"": 0, "block": 0, "block/norm": 16, "block/dense": 40}
    assert (found.total_bytes, found.float32_bytes) == (56, 112)


def test_parameters_that_are_no_floats_take_the_same_bytes_in_float32():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.param("index", lambda key: jnp.arange(4, dtype=jnp.int8)).astype(x.dtype)

    found = explain("bfloat16", model=Table())
    assert (found[""].param_dtypes, found.total_bytes, found.float32_bytes) == (("int8",), 4, 4)


def test_module_that_is_set_up_and_not_called_has_no_row():
    class Constants(nn.Module):
        def setup(self):
            self.factor = 2

    class Outer(nn.Module):
        def setup(self):
            self.constants = Constants()

        def __call__(self, x):
            return x * self.constants.factor

    assert [row.path for row in jmp.explain(Outer(), X).rows] == [""]


def test_rules_that_decide_nothing_are_named_and_no_warning_is_raised():
    rules = jmp.PolicyMap({"block": "float32", "block/norm": "float16", "blokc/dense": "float16"}, "mixed_bfloat16")
    assert explain(rules).unused == (
        "policy rule 'block/norm' decides nothing: the earlier rule 'block' hides it",
        "policy rule 'blokc/dense' matches no module; the closest path is 'block/dense'",
    )


def test_the_models_own_warnings_are_raised():
    class Warning_(nn.Module):
        def __call__(self, x):
            warnings.warn("mine", stacklevel=1)
            return x

    with pytest.warns(UserWarning, match="^mine$"):
        jmp.explain(Warning_(), X)


class TestLeaks:
    def test_wide_output_in_a_residual_sum_is_a_leak(self):
        found = explain(jmp.PolicyMap({".*norm": "float32"}, "mixed_bfloat16"), model=Block(post_norm=True))
        assert column(found, "leaks_into") == {"": (), "dense": (), "norm": ("",)}

    def test_wide_output_that_a_layer_narrows_is_none(self):
        found = explain(jmp.PolicyMap({".*norm": "float32"}, "mixed_bfloat16"))
        assert set(column(found, "leaks_into").values()) == {()}

    def test_wide_compute_with_narrow_output_is_none(self):
        found = explain(jmp.PolicyMap({".*norm": EXACT}, "mixed_bfloat16"), model=Net(post_norm=True))
        assert set(column(found, "leaks_into").values()) == {()}

    def test_wide_output_that_is_only_moved_before_a_layer_narrows_it_is_none(self):
        class Moves(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4)(nn.LayerNorm(name="norm")(x).reshape(-1, 2, 2).transpose(0, 2, 1))

        found = explain(jmp.PolicyMap({"norm": "float32"}, "mixed_bfloat16"), model=Moves())
        assert found["norm"].leaks_into == ()

    def test_wide_arithmetic_inside_the_named_module_is_none(self):
        class Softmax(nn.Module):
            def __call__(self, x):
                return jnp.exp(x.astype(jnp.float32))

        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Softmax(name="softmax")(x)

        found = explain(jmp.PolicyMap({"softmax": "mixed_bfloat16"}, "mixed_bfloat16"), model=Outer())
        assert (found["softmax"].compute_dtypes, found["softmax"].leaks_into) == (("float32",), ())

    def test_authors_conversion_is_none(self):
        class Converts(nn.Module):
            @nn.compact
            def __call__(self, x):
                return jnp.exp(nn.LayerNorm(name="norm")(x).astype(jnp.bfloat16)) + jnp.exp(x.astype(jnp.float32))

        found = explain(jmp.PolicyMap({"norm": EXACT}, "mixed_bfloat16"), model=Converts())
        assert found["norm"].leaks_into == ()

    def test_leak_goes_on_through_layers_without_a_dtype_and_bodies(self):
        class Through(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dropout(0.5, deterministic=False)(nn.LayerNorm(name="norm")(x))
                return jax.jit(jnp.sin)(x.reshape(-1))

        found = explain(jmp.PolicyMap({"norm": "float32"}, "mixed_bfloat16"), model=Through())
        assert found["norm"].leaks_into == ("",)


class TestTransforms:
    def test_path_of_a_scanned_and_rematerialised_module_appears_once(self):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(4, name="dense")(x), None

        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
                return layers(name="layers")(x, None)[0]

        found = explain("mixed_bfloat16", model=Stack())
        assert [row.path for row in found.rows] == ["", "layers", "layers/dense"]
        assert found["layers/dense"].param_bytes == 3 * 20 * 4
        assert found["layers/dense"].compute_dtypes == ("bfloat16",)

    @pytest.mark.slow
    def test_module_under_nn_jit_is_seen_although_it_was_traced_before(self):
        class Jitted(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.jit(Block)(name="block")(x)

        model = jmp.with_policy(Jitted(), "mixed_bfloat16")
        jax.eval_shape(model.init, jax.random.key(0), X)
        for _ in range(2):
            assert jmp.explain(model, X)["block/dense"].input_dtypes == ("bfloat16",)


class TestMethods:
    @pytest.mark.parametrize("method", ["encode", Net.encode, lambda net, x: net.encode(x)])
    def test_only_what_the_method_calls_is_explained(self, method):
        found = jmp.explain(jmp.with_policy(Net(), "mixed_bfloat16"), X, method=method)
        assert [row.path for row in found.rows] == ["", "block", "block/norm", "block/dense"]

    @pytest.mark.parametrize("model", [Net(), jmp.with_policy(Net(), "mixed_bfloat16")])
    def test_function_that_calls_no_method_of_the_root_explains_it_all_the_same(self, model):
        found = jmp.explain(model, X, method=lambda net, x: 2 * net.head(x))
        assert [row.path for row in found.rows] == ["", "head"]
        assert found[""].policy is jmp.policy_of(model)

    def test_arguments_that_are_no_arrays_are_passed_as_they_are(self):
        assert "head" in column(explain("mixed_bfloat16", train=True), "rule")
        assert "head" not in column(explain("mixed_bfloat16", train=False), "rule")

    def test_rngs_are_handed_on(self):
        class Noise(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x * self.has_rng("noise") + jax.random.normal(self.make_rng("noise"), x.shape, x.dtype)

        for rngs in (None, jax.random.key(1), {"noise": jax.random.key(1)}):
            assert jmp.explain(Noise(), X, rngs=rngs)[""].output_dtypes == ("float32",)


def test_model_without_policy_shows_what_is_traced():
    found = jmp.explain(Net(), X, train=True)
    assert {(row.policy, row.rule) for row in found.rows} == {(None, "")}
    assert found["head"].output_dtypes == ("float16",)


def test_missing_input_is_the_models_own_error():
    with pytest.raises(TypeError, match=r"^Net.__call__\(\) missing 1 required positional argument: 'x'"):
        jmp.explain(Net())


def test_compute_dtype_that_is_inferred_is_shown():
    model = jmp.with_policy(Block(), "infer_float32_vars")
    row = jmp.explain(model, jax.ShapeDtypeStruct((2, 4), "float16"))["dense"]
    assert str(row.policy.compute_dtype) == "float16"
    assert row.compute_dtypes == ("float16",)


@pytest.mark.slow
def test_model_too_large_to_exist_is_explained():
    class Huge(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(2**17, 2**15, name="embed")(tokens)
            for index in range(8):
                x = nn.Dense(2**17, name=f"up_{index}")(x)
                x = nn.Dense(2**15, name=f"down_{index}")(x)
            return x

    model = jmp.with_policy(Huge(), "bfloat16")
    found = jmp.explain(model, jax.ShapeDtypeStruct((8, 8192), "int32"))
    assert found.float32_bytes == 2 * found.total_bytes > 4 * 70e9


@pytest.mark.slow
def test_quantization_is_the_format_of_a_weight_or_why_it_is_left():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(64, 128, name="embed")(tokens)
            x = nn.Dense(128, name="own", dot_general=lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs))(x)
            x = nn.LayerNorm(name="norm")(nn.Dense(128, name="mlp")(x))
            return nn.Dense(4, name="head")(nn.Conv(64, (3,), name="conv", mask=jnp.ones((3, 128, 64)))(x))

    rules = jmp.PolicyMap({"mlp": "int4/64_from_bfloat16", "embed": "bfloat16"}, "int8_from_mixed_bfloat16")
    found = jmp.explain(jmp.with_policy(Wide(), rules), jax.ShapeDtypeStruct((2, 4), "int32"))
    assert column(found, "quantization") == {
        "": "", "embed": "", "norm": "", "mlp": "int4/64",
        "own": "int8, computed with as numbers: its author wrote dot_general",
        "conv": "int8, computed with as numbers: its weight is rewritten before it is used",
        "head": "left: 256 elements are fewer than min_size=4096",
    }  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(("format", "dense", "conv"), IN_BLOCKS)
def test_quantization_tells_of_blocks_that_do_not_fit_and_of_those_that_no_hardware_multiplies(format, dense, conv):
    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Dense(64, name="dense")(nn.Embed(64, 64, name="embed")(tokens))
            return nn.Conv(64, (3,), name="conv")(x)

    model = jmp.with_policy(Blocks(), f"{format}_from_mixed_bfloat16")
    found = column(jmp.explain(model, jax.ShapeDtypeStruct((2, 4), "int32")), "quantization")
    assert (found["dense"], found["conv"].startswith(conv)) == (dense, True)
    assert found["embed"] == "left: the rows of a table are read, and its logits want all the bits"


def test_quantization_of_a_kernel_in_code_of_a_users_own():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.normal(), (4, 4)).astype(x.dtype)

    found = explain("int8(min_size=0)_from_mixed_bfloat16", model=Own())
    assert found[""].quantization == "int8(min_size=0), computed with as numbers: its code is no layer of Flax's"


AS_NUMBERS = "int8(min_size=0), computed with as numbers: no policy can replace the function that it multiplies by"


@pytest.mark.sample(1)
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
    model = jmp.with_policy(nn.ConvTranspose(4, (3, 3)), f"{format}_from_mixed_bfloat16")
    assert jmp.explain(model, jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"))[""].quantization == said
