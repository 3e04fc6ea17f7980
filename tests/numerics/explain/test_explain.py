"""`explain`: what it takes, for both Flax APIs."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp


@pytest.mark.parametrize("target", [3, lambda x: x, nn.Dense], ids=["number", "function", "class"])
def test_what_is_no_module_is_refused(target):
    message = (
        f"explain takes a Flax module, got {target!r}. For example: "
        "explain(Net(), jax.ShapeDtypeStruct((8, 28, 28), 'float32')); of a function, "
        "jmp_policy.numerics.audit(fun)(params, x) has the dtype of each operation."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        jmp.explain(target, jax.ShapeDtypeStruct((2, 4), "float32"))


@pytest.mark.parametrize("model", [nn.Dense(3), nnx.Linear(4, 3, rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_a_tuple_where_a_shape_was_meant_is_no_array_of_two_integers(model):
    """linen explained a model with an input of two integers, and nnx failed in a matmul."""
    message = (
        "explain takes inputs, not their shapes, got (2, 4). For example: explain(model, jax.ShapeDtypeStruct((2, 4), "
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        jmp.explain(model, (2, 4))


def test_variables_among_the_inputs_of_explain_are_an_error_that_says_so():
    model, x = nn.Dense(3), jax.ShapeDtypeStruct((2, 4), "float32")
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    with pytest.raises(TypeError, match=r"^explain takes the inputs of a model and no variables, "):
        jmp.explain(model, variables, x)
    with pytest.raises(TypeError, match=r"takes 2 positional arguments but 3 were given"):
        jmp.explain(model, x, x)


@pytest.mark.slow
def test_explain_is_there_before_rich_is_loaded():
    heavy = "{'rich'}"
    code = f"import sys, jmp_policy as jmp; print(jmp.explain.__name__, {heavy} & {{*sys.modules}})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert out.split() == ["explain", "set()"]


class LinenHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(nn.Dense(3, name="body")(x))


class NnxHead(nnx.Module):
    def __init__(self):
        self.body, self.head = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("model", [LinenHead(), NnxHead()], ids=["linen", "nnx"])
def test_head_in_float32_that_the_root_casts_to_bfloat16_has_a_line(model):
    def explain(default):
        policied = jmp.with_policy(model, jmp.PolicyMap({"head": "float32"}, default))
        return jmp.explain(policied, jax.ShapeDtypeStruct((4, 3), "float32"))

    cast = explain("mixed_bfloat16")
    line = (
        "head returns f32, and the output dtype of the whole model casts it to bf16; "
        "give the model an output dtype of float32 to keep it"
    )
    assert line in " ".join(str(cast).split())
    assert [row.output_cast for row in cast.rows] == ["", "", "bfloat16"]
    kept = explain("params=float32,compute=bfloat16,output=float32")
    assert [row.output_cast for row in kept.rows] == ["", "", ""]
    assert "whole model" not in " ".join(str(kept).split())


class LinenSoftmax(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(nn.softmax(nn.Dense(3, name="body")(x)))


class NnxSoftmax(NnxHead):
    def __call__(self, x):
        return self.head(jax.checkpoint(nnx.softmax)(self.body(x)))


class LinenConstant(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = np.linspace(0, 1, 3, dtype=np.float32)
        return nn.Dense(2, name="head")(nn.Dense(3, name="body")(x) * scale)


class NnxConstant(NnxHead):
    def __call__(self, x):
        return self.head(self.body(x) * jnp.ones(3))


class NnxAdapter(NnxHead):
    """Reads its parameter as an adapter of qwix does."""

    def __init__(self):
        super().__init__()
        self.adapter = nnx.LoRAParam(jnp.zeros((3, 3)))

    def __call__(self, x):
        return self.head(self.body(x) @ self.adapter.get_raw_value())


FAULTS = [
    (LinenSoftmax, "a softmax in bfloat16, whose probabilities may not add up to 1; cast its input to float32 first"),
    (NnxSoftmax, "a softmax in bfloat16, whose probabilities may not add up to 1; cast its input to float32 first"),
    (LinenConstant, "(bfloat16 becomes float32 through a constant); cast the float32 operand"),
    (NnxConstant, "(bfloat16 becomes float32 through a constant); cast the float32 operand"),
    (NnxAdapter, "(bfloat16 becomes float32 through a float32 parameter or argument); cast the float32 operand"),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS, ids=[kind.__name__ for kind, _ in FAULTS])
def test_a_half_softmax_and_a_promotion_to_float32_have_a_line(kind, fault):
    x = jax.ShapeDtypeStruct((4, 3), "float32")
    with jax.numpy_dtype_promotion("standard"):
        found = jmp.explain(jmp.with_policy(kind(), "params=float32,compute=bfloat16,output=float32"), x)
        wide = jmp.explain(jmp.with_policy(kind(), "float32"), x)
    assert [len(row.precision_faults) for row in found.rows] == [1, 0, 0]
    lines = " ".join(str(found).split())
    assert f"{kind.__name__} (!)" in lines
    assert "the model itself (!): " in lines
    assert fault in lines
    assert not any(row.precision_faults for row in wide.rows)


def test_the_softmax_of_a_layer_of_flax_has_no_line():
    model = jmp.with_policy(nn.MultiHeadDotProductAttention(1), "mixed_bfloat16")
    assert not any(row.precision_faults for row in jmp.explain(model, jax.ShapeDtypeStruct((4, 3), "float32")).rows)


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
def test_matmuls_that_a_quantized_policy_leaves_are_named(make):
    explain = lambda policy: jmp.explain(jmp.with_policy(make(), policy), jnp.ones((2, 64)))
    rows = {row.path: row.quantization for row in explain("int8(min_size=0)_from_mixed_bfloat16").rows}
    assert rows == {"": "left: its matmul is not that of a layer of Flax's", "head": "int8(min_size=0)"}
    assert not any(row.quantization for row in explain("mixed_bfloat16").rows)
