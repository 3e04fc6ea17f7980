import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy import quant

INT8 = "int8(min_size=0)_from_float32"
RULES = jmp.PolicyMap({"head": "float32", "blocks": "int4/4(min_size=0)_from_float32"}, INT8)
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8, name="dense")(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="first")(x)
        scan = nn.scan(Residual, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scan(name="blocks")(x, None)
        x = nn.remat(nn.Dense)(8, name="middle")(x)
        return nn.Dense(8, name="head")(x)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.small = nnx.Linear(8, 4, rngs=rngs)
        self.unused = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.small(self.up(x))

    def twice(self, x, shift=0.0):
        return self.up(self.up(x + shift))


def relative(after, before) -> float:
    before = np.asarray(before, np.float64)
    return float(np.linalg.norm(np.asarray(after, np.float64) - before) / np.linalg.norm(before))


@pytest.fixture(scope="module")
def linen_comparison():
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    quantized = quant.quantize(variables, RULES)
    policied = jmp.with_policy(model, RULES)
    comparison = quant.compare(model.bind(variables), policied.bind(quantized), X)
    return comparison, variables["params"], quantized["params"]


@pytest.mark.slow
def test_rows_of_linen_have_formats_bytes_and_errors_side_by_side(linen_comparison):
    comparison, params, quantized = linen_comparison
    rows = {row.path: row for row in comparison.rows}
    assert list(rows) == ["first", "blocks/dense", "middle", "head"]
    assert [row.type for row in comparison.rows] == ["Dense"] * 4
    assert [row.quantization for row in comparison.rows] == [
        "int8(min_size=0)", "int4/4(min_size=0)", "int8(min_size=0)", "left: no quantization in its policy"
    ]  # fmt: skip
    assert (rows["first"].bytes_before, rows["first"].bytes_after) == (256, 64 + 8 * 4)
    assert rows["blocks/dense"].bytes_after == 2 * (32 + 2 * 8 * (4 + 1))
    assert comparison.bytes_before == 256 * 5
    for path, names in (("first", ["first"]), ("blocks/dense", ["blocks", "dense"])):
        before, after = params, quantized
        for name in names:
            before, after = before[name], after[name]
        assert math.isclose(rows[path].weight_error, relative(after["kernel"].dequantize(), before["kernel"]))
    dense = nn.Dense(8)
    before = dense.apply({"params": params["first"]}, X)
    after = jmp.with_policy(dense, INT8).apply({"params": quantized["first"]}, X)
    assert math.isclose(rows["first"].output_error, relative(after, before), rel_tol=1e-4)
    assert rows["blocks/dense"].output_error > rows["first"].output_error
    assert rows["middle"].output_error is None  # remat has no numbers
    assert math.isclose(comparison.output_error, rows["head"].output_error)


@pytest.mark.slow
def test_a_comparison_is_a_table_a_page_a_plot_and_plain_data(linen_comparison):
    comparison, *_ = linen_comparison
    text = str(comparison)
    for line in ("output of the model: ", "those quantized, 3 of 4: ", "left: no quantization in its policy: head"):
        assert line in text
    assert "not seen" in text
    assert ">blocks/dense</td>" in comparison._repr_html_()
    assert repr(comparison) == "<Comparison: 3 of 4 layers quantized; print it for the table>"
    assert json.loads(json.dumps(comparison.to_dict()))["rows"][0]["path"] == "first"
    errors, sizes = comparison.plot().axes
    assert [label.get_text() for label in errors.get_yticklabels()] == [row.path for row in comparison.rows]
    assert [bar.get_width() for bar in sizes.patches[:4]] == [row.bytes_before for row in comparison.rows]
    with pytest.raises(KeyError, match="Those compared are 'first', 'blocks/dense', "):
        comparison["haed"]


@pytest.mark.slow
def test_layers_of_nnx_say_why_they_were_left():
    model = NnxModel(nnx.Rngs(0))
    comparison = quant.compare(model, quant.quantize(model, "int8(min_size=64)_from_float32"), X)
    assert [row.quantization for row in comparison.rows] == [
        "int8(min_size=64)",
        "left: 32 elements are fewer than min_size=64",
        "int8(min_size=64)",
    ]
    assert comparison["unused"].output_error is None
    assert comparison["small"].weight_error == 0
    assert comparison["small"].sqnr == math.inf
    assert 0 < comparison["up"].output_error < 0.05
    assert math.isclose(comparison["up"].sqnr, -20 * math.log10(comparison["up"].weight_error))


@pytest.mark.slow
def test_a_model_that_is_yet_to_be_quantized_is_compared_by_its_outputs():
    model = NnxModel(nnx.Rngs(0))
    trained = quant.compare(model, jmp.with_policy(model, INT8), X)
    assert trained["up"].quantization == "left: computes as int8(min_size=0), and is yet to be quantized"
    assert trained["unused"].quantization == "left: not called"
    assert trained.output_error == quant.compare(model, quant.quantize(model, INT8), X).output_error > 0


@pytest.mark.slow
def test_all_calls_of_a_layer_in_another_method_are_compared():
    model = NnxModel(nnx.Rngs(0))
    quantized = quant.quantize(model, INT8)
    comparison = quant.compare(model, quantized, X, method="twice", shift=1.0)  # over both calls of `up`
    calls = [np.stack([each.up(X + 1), each.up(each.up(X + 1))]) for each in (model, quantized)]
    assert math.isclose(comparison["up"].output_error, relative(calls[1], calls[0]), rel_tol=1e-4)


def test_a_model_compared_with_itself_lost_nothing():
    model = NnxModel(nnx.Rngs(0))
    comparison = quant.compare(model, model, X)
    assert comparison.output_error == 0
    assert [row.weight_error for row in comparison.rows] == [0.0] * 3
    assert not comparison.quantized
    zeros = quant.compare(model, model, jnp.zeros((4, 8)))
    assert zeros["up"].output_error == 0


def test_what_cannot_be_compared_is_refused():
    model, other = NnxModel(nnx.Rngs(0)), NnxModel(nnx.Rngs(0))
    other.up = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    norm, linear = nnx.LayerNorm(8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for before, after, error, text in (
        (model, other, ValueError, r"not the same model: the weight of 'up' has the shapes \(8, 8\) and \(8, 16"),
        (norm, linear, ValueError, r"the weight of '' has the shapes None and \(8, 8\)"),
        (norm, norm, ValueError, "There is nothing to compare: the model has no parameter of two"),
        (Model(), Model(), ValueError, "A linen module runs with variables, and is not bound to them"),
        (3, model, TypeError, "compare takes Flax modules, got 3"),
    ):
        with pytest.raises(error, match=text):
            quant.compare(before, after, X)


class OwnLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 64))
        b = self.param("b", nn.initializers.zeros, (64,))
        return nn.Dense(8, name="head")(x @ w + b)


class OwnNnx(nnx.Module):
    def __init__(self, rngs):
        self.w, self.b = nnx.Param(rngs.params.normal((16, 64))), nnx.Param(jnp.zeros(64))
        self.head = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(x @ self.w[...] + self.b[...])


@pytest.mark.parametrize("api", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_weights_of_modules_that_are_not_layers_have_rows_and_count(api):
    """They were left out, and 26 % was printed for 96 %."""
    policy, x = "int8(min_size=0)_from_float32", jnp.ones((2, 16))
    if api == "linen":
        variables = jax.jit(OwnLinen().init)(jax.random.key(0), x)
        quantized = quant.quantize(variables, policy)
        comparison = quant.compare(OwnLinen().bind(variables), jmp.with_policy(OwnLinen(), policy).bind(quantized), x)
        trees = variables, quantized
    else:
        before = OwnNnx(nnx.Rngs(0))
        after = quant.quantize(before, policy)
        comparison, trees = quant.compare(before, after, x), (nnx.state(before), nnx.state(after))
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in trees]
    assert [comparison.parameters_before, comparison.parameters_after] == sizes
    row = comparison["w"]
    assert (row.type, row.bytes_before, row.bytes_after) == (f"Own{api.title()}", 4096, 4096)
    assert row.quantization == "left: not stored, and not the weight of a Flax layer"
    assert [row.path for row in comparison.quantized] == ["head"]
    assert f"all parameters: {sizes[0] / 1000:.3g} kB, now {sizes[1] / 1000:.3g} kB" in str(comparison)
