"""`explain` of Flax models: what holds at each path, by which rule, and what was traced there."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax_apis import LINEN, NNX

import jmp_policy as jmp

X = jax.ShapeDtypeStruct((2, 4), "float32")
MIXED = "mixed_bfloat16"
EXACT = "params=float32,compute=float32,output=bfloat16"


@pytest.fixture(autouse=True)
def _promotion():
    """A leak is made by promotion; and Flax's norms need it, too."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_block(api, *, post_norm=False):
    @api.module(norm=api.norm, dense=api.dense)
    class Block:
        def __call__(self, x):
            return x + (self.norm(self.dense(x)) if post_norm else self.dense(self.norm(x)))

    return Block


def make_net(api):
    """Modules in modules, several methods, a dtype that its author wrote, and a policy inside."""
    inner = lambda: jmp.with_policy(make_block(api)(), "params=float32,compute=float16,output=float32")

    @api.module(block=make_block(api), inner=inner, head=lambda: api.dense(3, dtype=jnp.float16))
    class Net:
        def encode(self, x):
            return self.block(x)

        def __call__(self, x, train=True):
            return self.head(self.inner(self.encode(x))) if train else self.encode(x)

    return Net


def explain(api, kind, policy, x=X, **kwargs):
    return jmp.explain(api.make(kind) if policy is None else api.under(kind, policy), x, **kwargs)


def column(explanation, name):
    return {row.path: getattr(row, name) for row in explanation.rows}


def test_each_module_has_its_rule_policy_and_type_in_the_order_of_calls(api):
    rules = jmp.PolicyMap({".*norm": "float32", api.dense_type: "mixed_float16"}, MIXED)
    found = explain(api, make_net(api), rules)
    assert list(column(found, "rule").items()) == [
        ("", "default"), ("block", "default"), ("block/norm", ".*norm"), ("block/dense", api.dense_type.__name__),
        ("inner", "its own policy"), ("inner/norm", "inherited"), ("inner/dense", "inherited"),
        ("head", "author's dtype"),
    ]  # fmt: skip
    assert found["block/norm"].policy is jmp.get_policy("float32")
    assert found.to_dict()["rows"][0]["policy"] == MIXED
    assert column(found, "type")["block/norm"] == "LayerNorm"


def test_dtypes_are_those_that_were_traced_inputs_before_the_cast_and_outputs_after_it(api):
    found = explain(api, make_net(api), MIXED)
    assert [(row.path, *row.input_dtypes, *row.compute_dtypes, *row.output_dtypes) for row in found.rows] == [
        ("", "float32", "bfloat16"),
        ("block", "bfloat16", "bfloat16", "bfloat16"),
        ("block/norm", "bfloat16", "float32", "bfloat16"),  # Flax reduces in float32, whatever the policy
        ("block/dense", "bfloat16", "bfloat16", "bfloat16"),
        ("inner", "bfloat16", "float16", "float32"),
        ("inner/norm", "float16", "float32", "float16"),
        ("inner/dense", "float16", "float16", "float16"),
        ("head", "float32", "float16", "float16"),
    ]
    assert found["block/dense"].param_dtypes == ("float32",)


def test_parameter_bytes_are_those_of_the_module_itself(api):
    found = explain(api, make_block(api), "bfloat16")
    assert column(found, "param_bytes") == {"": 0, "norm": 16, "dense": 40}
    assert (found.total_bytes, found.float32_bytes) == (56, 112)


def test_rules_that_decide_nothing_are_named_and_no_warning_is_raised(api):
    rules = jmp.PolicyMap({"block": "float32", "block/norm": "float16", "blokc/dense": "float16"}, MIXED)
    with warnings.catch_warnings(action="ignore" if api is NNX else "error"):  # nnx warns when it is given
        assert explain(api, make_net(api), rules).unused == (
            "policy rule 'block/norm' decides nothing: the earlier rule 'block' hides it",
            "policy rule 'blokc/dense' matches no module; the closest path is 'block/dense'",
        )


def test_the_models_own_warnings_are_raised(api):
    @api.module()
    class Warning_:
        def __call__(self, x):
            warnings.warn("mine", stacklevel=1)
            return x

    with pytest.warns(UserWarning, match="^mine$"):
        explain(api, Warning_, None)


class TestLeaks:
    """A leak is a result in float32 that goes on into arithmetic of a module whose policy says less."""

    def test_wide_output_in_a_residual_sum_is_one_and_narrowed_outputs_are_none(self, api):
        rules = jmp.PolicyMap({".*norm": "float32"}, MIXED)
        found = explain(api, make_block(api, post_norm=True), rules)
        assert column(found, "leaks_into") == {"": (), "dense": (), "norm": ("",)}
        assert not any(column(explain(api, make_block(api), rules), "leaks_into").values())
        exact = jmp.PolicyMap({".*norm": EXACT}, MIXED)
        assert not any(column(explain(api, make_block(api, post_norm=True), exact), "leaks_into").values())

    @pytest.mark.parametrize(
        ("rule", "leaks", "use"),
        [
            ("float32", (), lambda module, x: module.dense(module.norm(x).reshape(-1, 2, 2).transpose(0, 2, 1))),
            ("float32", ("",), lambda module, x: jax.jit(jnp.sin)(module.norm(x).reshape(-1))),
            (EXACT, (), lambda module, x: jnp.exp(module.norm(x).astype(jnp.bfloat16)) + jnp.exp(x.astype("float32"))),
        ],
        ids=["moved before a layer narrows it", "through a jitted function", "converted by the author"],
    )
    def test_what_is_done_with_a_wide_output_decides(self, api, rule, leaks, use):
        @api.module(norm=api.norm, dense=lambda: api.dense(inputs=2))
        class Uses:
            def __call__(self, x):
                return use(self, x)

        assert explain(api, Uses, jmp.PolicyMap({"norm": rule}, MIXED))["norm"].leaks_into == leaks

    def test_wide_arithmetic_inside_the_named_module_is_none(self, api):
        @api.module()
        class Softmax:
            def __call__(self, x):
                return jnp.exp(x.astype(jnp.float32))

        @api.module(softmax=Softmax)
        class Outer:
            def __call__(self, x):
                return self.softmax(x)

        found = explain(api, Outer, jmp.PolicyMap({"softmax": MIXED}, MIXED))
        assert (found["softmax"].compute_dtypes, found["softmax"].leaks_into) == (("float32",), ())


def list_called(found):
    return [row.path for row in found.rows if row.output_dtypes]


class TestMethods:
    @pytest.mark.slow
    def test_only_what_the_method_calls_is_traced(self, api):
        net = make_net(api)
        for method in ("encode", net.encode, lambda model, x: model.encode(x)):
            found = explain(api, net, MIXED, method=method)
            assert list_called(found) == ["", "block", "block/norm", "block/dense"]

    @pytest.mark.slow
    def test_arguments_that_are_no_arrays_are_passed_as_they_are(self, api):
        assert "head" in list_called(explain(api, make_net(api), MIXED, train=True))
        assert "head" not in list_called(explain(api, make_net(api), MIXED, train=False))


def test_model_without_policy_shows_what_is_traced(api):
    found = explain(api, make_block(api), None)
    assert {(row.policy, row.rule) for row in found.rows} == {(None, "")}
    assert found["dense"].output_dtypes == ("float32",)


def test_missing_input_is_the_models_own_error(api):
    with pytest.raises(TypeError, match=r"^make_net.<locals>.Net.__call__\(\) missing 1 required positional arg.* 'x'"):
        jmp.explain(api.make(make_net(api)))


def test_compute_dtype_that_is_inferred_is_shown(api):
    row = explain(api, make_block(api), "infer_float32_vars", jax.ShapeDtypeStruct((2, 4), "float16"))["dense"]
    assert row.compute_dtypes == ("float16",)
    assert str(row.policy.compute_dtype) == ("float16" if api is LINEN else "None")


@pytest.mark.slow
def test_model_too_large_to_exist_is_explained(api):
    make = {"up": lambda: api.dense(2**17, 2**15), "down": lambda: api.dense(2**15, 2**17)}
    layers = {f"{name}_{index}": make[name] for index in range(8) for name in make}

    @api.module(embed=lambda: api.embed(2**17, 2**15), **layers)
    class Huge:
        def __call__(self, tokens):
            x = self.embed(tokens)
            for name in layers:
                x = getattr(self, name)(x)
            return x

    found = explain(api, Huge, "bfloat16", jax.ShapeDtypeStruct((8, 8192), "int32"))
    assert found.float32_bytes == 2 * found.total_bytes > 4 * 70e9


def multiply(*args, **kwargs):
    return jax.lax.dot_general(*args, **kwargs)


class TestQuantization:
    """The format of a weight, or why it is left, or computed with as numbers."""

    def make_wide(self, api):
        own = lambda: api.dense(64, 64, dot_general=multiply)
        masked = lambda: api.conv(64, (3,), mask=jnp.ones((3, 64, 64)))
        mlp, head = lambda: api.dense(64, 64), lambda: api.dense(4, 64)

        @api.module(embed=lambda: api.embed(64, 64), own=own, mlp=mlp, conv=masked, head=head)
        class Wide:
            def __call__(self, tokens):
                return self.head(self.conv(self.mlp(self.own(self.embed(tokens)))))

        return Wide

    @pytest.mark.slow
    def test_is_the_format_of_a_weight_or_why_it_is_left(self, api):
        rules = jmp.PolicyMap({"mlp": "int4/64_from_mixed_bfloat16", "embed": MIXED}, "int8_from_mixed_bfloat16")
        found = explain(api, self.make_wide(api), rules, jax.ShapeDtypeStruct((2, 4), "int32"))
        own, conv = {
            LINEN: ("int8, computed with as numbers: its author wrote dot_general",
                    "int8, computed with as numbers: its weight is rewritten before it is used"),
            NNX: ("left: its author wrote the functions that it computes with", "int8"),
        }[api]  # fmt: skip
        left = "left: 256 elements are fewer than min_size=4096"
        expected = {"": "", "embed": "", "own": own, "mlp": "int4/64", "conv": conv, "head": left}
        assert column(found, "quantization") == expected
        found = explain(api, self.make_wide(api), MIXED, jax.ShapeDtypeStruct((2, 4), "int32"))
        assert set(column(found, "quantization").values()) == {""}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("format", "dense", "conv"),
        [
            ("mxfp8", "mxfp8", "mxfp8, computed with as numbers: it is a convolution"),
            ("nvfp4(activations=false)", "nvfp4(activations=false)", "nvfp4(activations=false)"),
            ("mxfp4/16", "mxfp4/16", "mxfp4/16"),
            ("e4m3/-1(activations=true)", "e4m3/-1(activations=true)",
             "e4m3/-1(activations=true), computed with as numbers: it is a convolution"),
            ("int4/16(activations=true)", "int4/16(activations=true)",
             "int4/16(activations=true), computed with as numbers: it is a convolution"),
            ("mxfp8/16", "mxfp8/16, in blocks that no hardware multiplies",
             "mxfp8/16, computed with as numbers: it is a conv"),
            ("mxfp8/48", "mxfp8/48, padded from 64 to 96 inputs, in blocks that no hardware multiplies",
             "mxfp8/48, computed with as numbers: it is a conv"),
            ("int4/48", "int4/48, padded from 64 to 96 inputs", "int4/48"),
        ],
    )  # fmt: skip
    def test_tells_of_blocks_that_do_not_fit_and_of_those_that_no_hardware_multiplies(self, api, format, dense, conv):
        @api.module(embed=lambda: api.embed(64, 64), dense=lambda: api.dense(64, 64), conv=lambda: api.conv(64, (3,)))
        class Blocks:
            def __call__(self, tokens):
                return self.conv(self.dense(self.embed(tokens)))

        found = explain(api, Blocks, f"{format}_from_mixed_bfloat16", jax.ShapeDtypeStruct((2, 4), "int32"))
        found = column(found, "quantization")
        assert (found["dense"], found["conv"].startswith(conv)) == (dense, True)
        left = "left: the rows of a table are read, and its logits want all the bits"
        kind = jmp.get_policy(f"{format}_from_float32").quantization
        assert found["embed"] == str(getattr(kind, "for_tables", left))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("format", "ending"),
        [
            (
                "int8(min_size=0)",
                ", computed with as numbers: no policy can replace the function that it multiplies by",
            ),
            ("int8(activations=false,min_size=0)", ""),
            ("mxfp4/4(min_size=0)", ""),
        ],
    )
    def test_of_a_transposed_convolution_is_that_of_a_layer_whose_function_stays(self, api, format, ending):
        make = lambda: api.conv(4, (3, 3), kind="ConvTranspose")
        found = explain(api, make, f"{format}_from_mixed_bfloat16", jax.ShapeDtypeStruct((2, 8, 8, 4), "float32"))
        assert found[""].quantization == format + ending

    def test_bytes_of_a_quantized_weight_are_those_of_its_integers_and_scales(self):
        model = jmp.quant.quantize(NNX.make(self.make_wide(NNX)), "int8_from_mixed_bfloat16")
        mlp = jmp.explain(model, jax.ShapeDtypeStruct((2, 4), "int32"))["mlp"]
        assert (mlp.param_bytes, mlp.float32_bytes) == (64 * 64 + 4 * 64 + 4 * 64, 4 * (64 * 64 + 64))
        assert (mlp.quantization, set(mlp.param_dtypes)) == ("int8", {"int8", "float32"})
