"""`explain`: what it takes, for both Flax APIs."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

X = jax.ShapeDtypeStruct((4, 3), "float32")
MIXED = "params=float32,compute=bfloat16,output=float32"


class LinenHead(nn.Module):
    between: Callable = lambda x: x

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(self.between(nn.Dense(3, name="body")(x)))


class NnxHead(nnx.Module):
    def __init__(self, between=lambda x: x):
        self.body, self.head = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2))
        self.adapter = nnx.LoRAParam(jnp.zeros((3, 3)))
        self.between = between

    def __call__(self, x):
        return self.head(self.between(self.body(x)))


KINDS = [LinenHead, NnxHead]


def test_bad_input_is_refused():
    for target in (3, len, nn.Dense):
        message = (
            f"explain takes a Flax module, got {target!r}. For example: "
            "explain(Net(), jax.ShapeDtypeStruct((8, 28, 28), 'float32')); of a function, "
            "jmp_policy.numerics.audit(fun)(params, x) has the dtype of each operation."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            jmp.explain(target, X)
    variables = jax.eval_shape(nn.Dense(3).init, jax.random.key(0), X)
    with pytest.raises(TypeError, match=r"^explain takes the inputs of a model and no variables, "):
        jmp.explain(nn.Dense(3), variables, X)
    with pytest.raises(TypeError, match=r"no variables, but the argument `variables` is a dictionary with 'params', "):
        jmp.explain(nn.Dense(3), X, variables=variables)
    with pytest.raises(TypeError, match=r"takes 2 positional arguments but 3 were given"):
        jmp.explain(nn.Dense(3), X, X)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tuple_where_a_shape_was_meant_is_no_array_of_two_integers(kind):
    """linen explained a model with an input of two integers, and nnx failed in a matmul."""
    message = (
        "explain takes inputs, not their shapes, got (2, 4). For example: explain(model, jax.ShapeDtypeStruct((2, "
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        jmp.explain(kind(), (2, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_head_in_float32_that_the_root_casts_to_bfloat16_has_a_line(kind):
    def explain(default):
        return jmp.explain(jmp.with_policy(kind(), jmp.PolicyMap({"head": "float32"}, default)), X)

    cast = explain("mixed_bfloat16")
    line = (
        "head returns f32, and the output dtype of the whole model casts it to bf16; "
        "give the model an output dtype of float32 to keep it"
    )
    assert line in " ".join(str(cast).split())
    assert [row.output_cast for row in cast.rows] == ["", "", "bfloat16"]
    kept = explain(MIXED)
    assert [row.output_cast for row in kept.rows] == ["", "", ""]
    assert "whole model" not in " ".join(str(kept).split())


@pytest.mark.parametrize("kind", KINDS)
def test_module_whose_float32_a_later_float32_module_reads_is_not_what_the_root_casts(kind):
    rules = jmp.PolicyMap({"body": "float32", "head": "float32"}, "mixed_bfloat16")
    for between, leaks in ((lambda x: x, ()), (nn.relu, ("",))):
        report = jmp.explain(jmp.with_policy(kind(between), rules), X)
        assert (report["body"].output_cast, report["head"].output_cast) == ("", "bfloat16")
        assert report["body"].leaks_into == leaks


FAULTS = [
    (jax.checkpoint(nn.softmax), "a softmax in bfloat16, whose probabilities may not add up to 1; cast its input to f"),
    (lambda x: x * np.linspace(0, 1, 3, dtype=np.float32),
     "(bfloat16 becomes float32 through a constant); cast that operand"),
    (lambda x: x * jnp.ones(3), "(bfloat16 becomes float32 through a constant); cast that operand"),
    (lambda x: x + jax.random.categorical(jax.random.key(0), x)[:, None], "(Gumbel noise in bfloat16); cast"),
    (lambda x: x * x.astype("int32"), "(bfloat16 skips integers above 256); pass tokens and indices as integers"),
]  # fmt: skip


def check_fault(make, fault):
    with jax.numpy_dtype_promotion("standard"):
        found = jmp.explain(jmp.with_policy(make(), MIXED), X)
        wide = jmp.explain(jmp.with_policy(make(), "float32"), X)
    assert [len(row.precision_faults) for row in found.rows] == [1, 0, 0]
    lines = " ".join(str(found).split())
    assert f"{type(make()).__name__} (!)" in lines
    assert "the model itself (!): " in lines
    assert fault in lines
    assert not any(row.precision_faults for row in wide.rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_half_softmax_and_a_promotion_to_float32_have_a_line(kind):
    for between, fault in FAULTS:
        check_fault(lambda between=between: kind(between), fault)


def test_a_parameter_that_is_read_as_an_adapter_of_qwix_does_has_a_line():
    class Adapted(NnxHead):
        def __call__(self, x):
            return self.head(self.body(x) @ self.adapter.get_raw_value())

    check_fault(Adapted, "(bfloat16 becomes float32 through a parameter or argument); cast that operand")


def test_tokens_that_a_policy_rounds_have_a_line():
    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Embed(512, 4)(tokens.astype("int32"))

    [fault] = jmp.explain(jmp.with_policy(Tagger(), MIXED), X)[""].precision_faults
    assert fault.startswith("an integer made from half precision, which may have rounded it (bfloat16 skips integers ")
    kept = jmp.with_policy(Tagger(), MIXED, no_cast=["tokens"])
    for model, tokens in [(kept, X), (jmp.with_policy(Tagger(), MIXED), jax.ShapeDtypeStruct((4,), "int32"))]:
        assert not jmp.explain(model, tokens)[""].precision_faults


@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_computes_nothing(kind):
    for between, dtypes in [(lambda x: x.astype("float32").astype(x.dtype), ()), (lambda x: x * 2, ("bfloat16",))]:
        assert jmp.explain(jmp.with_policy(kind(between), MIXED), X)[""].compute_dtypes == dtypes


def test_the_softmax_of_a_layer_of_flax_has_no_line():
    model = jmp.with_policy(nn.MultiHeadDotProductAttention(1), "mixed_bfloat16")
    assert not any(row.precision_faults for row in jmp.explain(model, X).rows)


class OwnLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64, name="head")(x @ self.param("w", nn.initializers.lecun_normal(), (64, 64)))


class OwnNnx(nnx.Module):
    def __init__(self, rngs):
        self.w, self.head = nnx.Param(jnp.ones((64, 64))), nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return self.head(x @ self.w[...])


@pytest.mark.parametrize("make", [OwnLinen, lambda: OwnNnx(nnx.Rngs(0))], ids=["linen", "nnx"])
def test_a_weight_that_a_module_multiplies_by_in_its_own_code_has_a_row(make):
    explain = lambda policy: jmp.explain(jmp.with_policy(make(), policy), jnp.ones((2, 64)))
    rows = {row.path: row.quantization for row in explain("int8(min_size=0)_from_mixed_bfloat16").rows}
    assert rows == {"": "", "w": "int8(min_size=0)", "head": "int8(min_size=0)"}
    assert not any(row.quantization for row in explain("mixed_bfloat16").rows)
