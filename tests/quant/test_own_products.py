"""Matmuls that a module writes in its own code, by its own weights, under a quantized policy."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import jmp_policy as jmp
from jmp_policy._jaxpr import walk
from jmp_policy.quant import QuantizedArray

FORMATS = [
    "int8",
    "int8(activations=false)",
    "int4/16",
    "e4m3/16(activations=true)",
    "nf4/16",
    "mxfp8",
    "float8(recipe=current)",
]
X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)
INT8 = "int8(min_size=0)_from_mixed_bfloat16"


def name_policy(format: str) -> str:
    kind, _, options = format.removesuffix(")").partition("(")
    return f"{kind}({','.join(filter(None, [options, 'min_size=0']))})_from_mixed_bfloat16"


def draw(shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 8, jnp.float32)


class Own(nnx.Module):
    """Multiplies by `w` as a function says."""

    def __init__(self, w, function):
        self.w, self.function = nnx.Param(w), function

    def __call__(self, x):
        return self.function(x, self.w[...])


class OwnLinen(nn.Module):
    shape: tuple
    function: object
    name_of_weight: str = "w"

    @nn.compact
    def __call__(self, x):
        return self.function(x, self.param(self.name_of_weight, lambda _: draw(self.shape)))


def call_with_gradients(call, w, x):
    loss = lambda w, x: jnp.sum(jnp.sin(call(w, x).astype(jnp.float32)))
    # XLA may leave out a rounding to bfloat16 where it fuses a cast.
    run = jax.jit(lambda w, x: (call(w, x), jax.grad(loss, (0, 1))(w, x)), compiler_options=_EXACT)
    return run(w, x)


_EXACT = {"xla_allow_excess_precision": False}


def call_own(function, w, policy, x):
    graph, _ = nnx.split(jmp.with_policy(Own(w, function), policy))
    return call_with_gradients(lambda w, x: nnx.merge(graph, nnx.State({"w": nnx.Param(w)}))(x), w, x)


def call_own_linen(function, w, policy, x):
    model = jmp.with_policy(OwnLinen(w.shape, function), policy)
    return call_with_gradients(lambda w, x: model.apply({"params": {"w": w}}, x), w, x)


def call_layer(layer, w, policy, x):
    graph, state = nnx.split(jmp.with_policy(layer, policy))
    state["kernel"] = nnx.Param(w)

    def call(w, x):
        return nnx.merge(graph, nnx.State({**state, "kernel": nnx.Param(w)}))(x)

    return call_with_gradients(call, w, x)


LINEAR = lambda: nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
FORMS = {
    "matmul": (lambda x, w: x @ w, lambda w: w),
    "einsum": (lambda x, w: jnp.einsum("bd,df->bf", x, w), lambda w: w),
    "weight on the left": (lambda x, w: lax.dot_general(w, x, (((0,), (1,)), ((), ()))).T, lambda w: w),
    "transposed": (lambda x, w: x @ w.T, lambda w: w.T),
    "reshaped": (lambda x, w: x @ w.reshape(64, 32), lambda w: w.reshape(8, 8, 32)),
    "one of a stack": (lambda x, w: x @ w[1], lambda w: jnp.stack([-w, w])),
    "cast by its author": (lambda x, w: x @ w.astype(jnp.bfloat16), lambda w: w),
    "in remat": (jax.checkpoint(lambda x, w: x @ w), lambda w: w),
    "in jit": (jax.jit(lambda x, w: x @ w), lambda w: w),
    "in vmap": (lambda x, w: jax.vmap(lambda row: row @ w)(x), lambda w: w),
    "two parts": (lambda x, w: x @ jnp.concatenate([w[0], w[1]], axis=1), lambda w: jnp.stack(jnp.split(w, 2, axis=1))),
}


@pytest.mark.parametrize("call", [call_own, pytest.param(call_own_linen, marks=pytest.mark.slow)], ids=["nnx", "linen"])
@pytest.mark.parametrize("form", FORMS)
def test_a_matmul_of_its_own_is_that_of_a_layer_of_flax_bit_by_bit(form, call):
    function, store = FORMS[form]
    w = draw((64, 32))
    wanted, (wanted_dw, wanted_dx) = call_layer(LINEAR(), w, INT8, X)
    found, (dw, dx) = call(function, store(w), INT8, X)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(dx, wanted_dx)
    assert dw.dtype == jnp.float32
    dense = jax.grad(lambda w: jnp.vdot(store(w), dw))(w)  # the gradient, in the order of the layer's kernel
    np.testing.assert_array_equal(dense, wanted_dw)


@pytest.mark.parametrize("call", [call_own, call_own_linen], ids=["nnx", "linen"])
@pytest.mark.parametrize("format", FORMATS)
def test_each_format_multiplies_as_in_a_layer_of_flax(format, call):
    w, policy = draw((64, 32)), name_policy(format)
    wanted = call_layer(LINEAR(), w, policy, X)
    jax.tree.map(np.testing.assert_array_equal, call(lambda x, w: x @ w, w, policy, X), wanted)


@pytest.mark.parametrize("format", ["int8(activations=false,min_size=0)", "int8(min_size=0)"])
def test_sums_in_an_accumulate_dtype_are_those_of_a_layer_of_flax(format):
    w, policy = draw((64, 32)), f"{format}_from_params=float32,compute=bfloat16,accumulate=float32,output=bfloat16"
    wanted, found = call_layer(LINEAR(), w, policy, X), call_own(jnp.matmul, w, policy, X)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    own = jax.make_jaxpr(lambda w: jmp.with_policy(Own(w, jnp.matmul), policy)(X))(w).jaxpr
    products = [step for step in walk(own, live_only=True) if step.name == "dot_general"]
    assert {step.results[0].aval.dtype.name for step in products} <= {"float32", "int32"}


def test_a_convolution_of_its_own_is_that_of_a_layer_of_flax():
    w, images = draw((3, 3, 8, 16)), X.reshape(2, 8, 8, 8)
    convolve = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    layer = nnx.Conv(8, 16, (3, 3), use_bias=False, rngs=nnx.Rngs(0))
    wanted, found = call_layer(layer, w, INT8, images), call_own(convolve, w, INT8, images)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_grouped_matmul_is_that_of_ragged_dot():
    w, sizes = draw((2, 64, 32)), jnp.array([10, 6], jnp.int32)
    own = jmp.with_policy(Own(w, lambda x, w: lax.ragged_dot(x, w, sizes)), INT8)
    wanted = jmp.quant.ragged_dot(X.astype(jnp.bfloat16), w, sizes, quantization="int8(min_size=0)")
    np.testing.assert_array_equal(own(X), wanted)


def count_matmuls(fun, *args) -> list[str]:
    steps = walk(jax.make_jaxpr(fun)(*args).jaxpr, live_only=True)
    return [str(step.operands[0].aval.dtype) for step in steps if step.name in ("dot_general", "ragged_dot_general")]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + x @ self.param("w", lambda _: draw((64, 64)))
        self.sow("intermediates", "x", x)
        return nn.Dropout(0.5, deterministic=False)(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "intermediates": 0}
        scan = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True, "dropout": True}, length=3)
        x, _ = scan(name="blocks")(x, None)
        return x


def test_weights_of_a_scan_of_linen_are_quantized_and_its_state_and_keys_stay():
    rngs, model = {"dropout": jax.random.key(1)}, jmp.with_policy(Stack(), INT8)
    variables = model.init({"params": jax.random.key(0), **rngs}, X)
    assert count_matmuls(lambda v: model.apply(v, X, rngs=rngs), variables) == ["int8"]
    run = lambda model: model.apply({"params": variables["params"]}, X, rngs=rngs, mutable="intermediates")
    (out, state), (wide, wide_state) = run(model), run(jmp.with_policy(Stack(), "mixed_bfloat16"))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, wide_state)
    np.testing.assert_array_equal(out == 0, wide == 0)  # the same elements are dropped


def multiply_in_half(x, w):
    return x @ w.astype(x.dtype)


class Jitted(nnx.Module):
    """Calls a module in a jitted function, of which JAX caches the trace."""

    def __init__(self, w):
        self.own = Own(w, multiply_in_half)

    def __call__(self, x):
        return nnx.jit(lambda own, x: own(x))(self.own, x)


JittedOwn = nn.jit(OwnLinen)  # one class, so that Flax jits one function


class JittedLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedOwn((64, 64), multiply_in_half, name="own")(x)

    def twice(self, x):
        return self(self(x))


def test_weights_inside_of_a_jitted_module_are_quantized_in_each_trace():
    linen = jmp.with_policy(JittedLinen(), INT8)
    variables = linen.init(jax.random.key(0), X)
    stored = jmp.quant.quantize(variables, INT8, explanation=jmp.explain(linen, X))
    graph, state = nnx.split(jmp.with_policy(Jitted(draw((64, 64))), INT8))
    for _ in range(3):
        assert count_matmuls(lambda state: nnx.merge(graph, state)(X), state) == ["int8"]
        for each in (variables, stored):
            assert count_matmuls(lambda v: linen.apply(v, X), each) == ["int8"]
            assert count_matmuls(lambda v: linen.apply(v, X, method="twice"), each) == ["int8"] * 2


class LaterOwn(nn.Module):
    """Reads a weight of its own only in some calls."""

    @nn.compact
    def __call__(self, x):
        if x.shape[-1] != 64:
            raise ValueError("64 are needed")
        needs = len(x) == 8 or self.is_mutable_collection("cache") or self.has_rng("noise") or self.is_initializing()
        return x @ self.param("w", lambda _: draw((64, 64))).astype(x.dtype) if needs else x


OTHER_CALLS = {
    "another shape": (8, {}),
    "another collection": (16, {"mutable": "cache"}),
    "another key": (16, {"rngs": {"noise": jax.random.key(1)}}),
}


@pytest.mark.parametrize("case", OTHER_CALLS)
def test_a_call_that_differs_or_follows_one_that_failed_is_tried_again(case):
    model, (rows, options) = jmp.with_policy(LaterOwn(), INT8), OTHER_CALLS[case]
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="64 are needed"):
        model.apply(variables, X[:rows, :32], **options)
    assert count_matmuls(lambda v: model.apply(v, X), variables) == []
    assert count_matmuls(lambda v: model.apply(v, X[:rows], **options), variables) == ["int8"]


def test_a_method_is_told_from_another_by_what_it_closes_over():
    model = jmp.with_policy(LaterOwn(), INT8)
    variables = model.init(jax.random.key(0), X)
    take = lambda rows: lambda module, x: module(x[:rows])
    for method, wanted in ((take(16), []), (take(8), ["int8"])):
        assert count_matmuls(lambda v, method=method: model.apply(v, X, method=method), variables) == wanted


def test_a_method_may_close_over_a_variable_that_is_set_later():
    model = jmp.with_policy(LaterOwn(), INT8)
    variables = model.init(jax.random.key(0), X)
    method = lambda module, x: module(x) if len(x) else later
    assert model.apply(variables, X, method=method).shape == X.shape
    later = None


def test_code_that_reads_values_before_its_weight_cannot_be_traced_either():
    class Reading(nn.Module):
        @nn.compact
        def __call__(self, x):
            return OwnLinen((64, 64), jnp.matmul)(x * float(x[0, 0]))

    model = jmp.with_policy(Reading(), INT8)
    variables = model.init(jax.random.key(0), X)
    for _ in range(2):
        with pytest.raises(jax.errors.ConcretizationTypeError):
            model.apply(variables, X)


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(x @ self.param("w", nn.with_partitioning(lambda _: draw((64, 64)), ("a", "b")))), None


class Layers(nn.Module):
    transform: Callable

    @nn.compact
    def __call__(self, x):
        return self.transform(Partitioned(name="block"), x)


def scan_rematted(block, x):
    metadata = {nn.PARTITION_NAME: "layers"}
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3, "metadata_params": metadata}
    return nn.scan(nn.remat(type(block)), **options)(name="blocks")(x, None)[0]


TRANSFORMED = {
    "remat of a function": lambda block, x: nn.remat(lambda block, x: block(x)[0])(block, x),
    "jit of a function": lambda block, x: nn.jit(lambda block, x: block(x)[0])(block, x),
    "scan of remat": scan_rematted,
}


@pytest.mark.parametrize("case", TRANSFORMED)
def test_partitioned_weights_under_transforms_of_flax_are_stored_and_multiply_as_stored(case):
    x, policy = draw((16, 64)), "int8(min_size=0)_from_float32"
    model = jmp.with_policy(Layers(TRANSFORMED[case]), policy)
    variables = model.init(jax.random.key(0), x)
    stored = jmp.quant.quantize(variables, policy, explanation=jmp.explain(model, x))
    for each in (variables, stored):
        assert count_matmuls(lambda v: model.apply(v, x), each) == ["int8"]
    np.testing.assert_array_equal(model.apply(stored, x), model.apply(variables, x))


@pytest.mark.parametrize("format", ["int4/16", "nf4/16"])
def test_blocks_of_heads_are_those_of_flax_and_of_the_stored_weight(format):
    """`einsum` lists the summed axes in another order than the weight has them."""
    x, w, policy = draw((8, 4, 16)), draw((4, 16, 32)), f"{name_policy(format).split('_from')[0]}_from_float32"
    layer = nnx.LinearGeneral((4, 16), 32, axis=(-2, -1), use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    own = Own(w, lambda x, w: jnp.einsum("bnh,nhd->bd", x, w))
    wanted = jmp.with_policy(layer, policy)(x)
    np.testing.assert_array_equal(jmp.with_policy(own, policy)(x), wanted)
    np.testing.assert_array_equal(store_own(own, policy, x)(x), wanted)


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_inputs_that_are_not_floating_are_converted_as_by_a_layer(dtype):
    x, w = jnp.round(X * 3).astype(dtype), draw((64, 32))
    layer = nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    own, wanted = Own(w, lambda x, w: jnp.matmul(x, w)), jmp.with_policy(layer, INT8)(x)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(jmp.with_policy(own, INT8)(x), wanted)
        np.testing.assert_array_equal(store_own(own, INT8, x)(x), wanted)


class Tied(nnx.Module):
    def __init__(self, kind, rngs):
        self.table = nnx.Param(draw((128, 64))) if kind == "own" else nnx.Embed(128, 64, rngs=rngs)
        self.layers = nnx.List([Own(draw((64, 64), seed), lambda x, w: x @ w) for seed in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.last = None

    def __call__(self, tokens):
        table = self.table[...] if isinstance(self.table, nnx.Param) else self.table.embedding[...]
        table = table.astype(jnp.bfloat16)
        x = table[tokens]
        for layer in self.layers:
            x = layer(x)
        self.calls[...] += 1
        self.last = "called"
        return self.drop(x) @ table.T, "logits"


@pytest.mark.parametrize("kind", ["own", "of a layer"])
def test_a_tied_table_is_quantized_where_it_multiplies_and_writes_reach_the_model(kind):
    tokens = jnp.arange(16)
    model = Tied(kind, nnx.Rngs(0))
    quantized = jmp.with_policy(model, INT8)
    out, text = quantized(tokens)
    assert (text, quantized.last, quantized.calls[...].item()) == ("logits", "called", 1)
    assert quantized.drop.rngs.count[...] == 1
    graph, state = nnx.split(quantized)
    assert count_matmuls(lambda state: nnx.merge(graph, state)(tokens)[0], state) == ["int8"] * 3
    wide = jmp.with_policy(Tied(kind, nnx.Rngs(0)), "mixed_bfloat16")(tokens)[0]
    assert 0 < jnp.linalg.norm(out - wide) / jnp.linalg.norm(wide) < 0.05


class TiedLinen(nn.Module):
    multiply: Callable

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(128, 64, name="embed")
        return self.multiply(embed, embed(tokens))


TIED = {
    "an attribute": lambda embed: embed.embedding,
    "variables": lambda embed: embed.variables["params"]["embedding"],
}


@pytest.mark.parametrize(
    "transform", [lambda kind: kind, *[pytest.param(t, marks=pytest.mark.slow) for t in (nn.jit, nn.remat)]]
)
@pytest.mark.parametrize("form", TIED)
def test_the_table_of_a_linen_layer_is_quantized_where_other_code_multiplies_by_it(form, transform):
    tokens = jnp.arange(16)
    tied, layer = (
        jmp.with_policy(transform(TiedLinen)(multiply), INT8)
        for multiply in (lambda embed, x: x @ TIED[form](embed).T.astype(x.dtype), lambda embed, x: embed.attend(x))
    )
    variables = tied.init(jax.random.key(0), tokens)
    assert count_matmuls(lambda v: tied.apply(v, tokens), variables) == ["int8"]

    @functools.partial(jax.jit, static_argnums=0, compiler_options=_EXACT)
    def with_gradient(model, variables):
        loss = lambda variables: jnp.sum(jnp.sin(model.apply(variables, tokens).astype(jnp.float32)))
        return model.apply(variables, tokens), jax.grad(loss)(variables)["params"]["embed"]["embedding"]

    (logits, grad), (wanted, wanted_grad) = (with_gradient(model, variables) for model in (tied, layer))
    np.testing.assert_array_equal(logits, wanted)
    # Flax's layer sums the gradient of its table in float32, and other code rounds it to bfloat16, as without int8.
    np.testing.assert_allclose(grad, wanted_grad, rtol=0, atol=2.0**-7 * np.abs(wanted_grad).max())


def test_models_of_one_class_are_told_apart_by_their_fields():
    """Code around a table that it does not multiply by is not traced, so it may read values."""
    reading = jmp.with_policy(TiedLinen(lambda embed, x: x * float(x[0, 0])), INT8)
    multiplying = jmp.with_policy(TiedLinen(lambda embed, x: x @ embed.embedding.T.astype(x.dtype)), INT8)
    tokens = jnp.arange(16)
    variables = reading.init(jax.random.key(0), tokens)
    for _ in range(2):
        reading.apply(variables, tokens)
        assert count_matmuls(lambda v: multiplying.apply(v, tokens), variables) == ["int8"]


@jax.custom_jvp
def multiply(x, w):
    return x @ w


multiply.defjvp(lambda primals, tangents: (multiply(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]))

LEFT = {
    "too small": ("int8", lambda x, w: x @ w, "2048 elements are fewer than min_size=4096"),
    "a lookup": (name_policy("mxfp8"), lambda x, w: x[:1, :32] * w[jnp.array([1])], "the rows of a table are read"),
    "a vector": (INT8, lambda x, w: x @ w[:, 0], "it is multiplied as a vector"),
    "no matmul": (INT8, lambda x, w: (x[..., None] * w).sum(1), "mul reads it in"),
    "opaque": (INT8, multiply, "custom_jvp_call reads it in"),
    "a gradient": (INT8, lambda x, w: jax.grad(lambda x: (jnp.sin(x) @ w).sum())(x), "its gradient is computed inside"),
    "noise": (
        "nvfp4(stochastic_rounding=true,min_size=0)",
        lambda x, w: x @ w,
        "the format draws noise by a key of each",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_explain_says_why_a_weight_is_left(case):
    policy, function, reason = LEFT[case]
    policy = policy if "_from_" in policy else f"{policy}_from_mixed_bfloat16"
    policy = policy.replace("float8_", "float8(min_size=0)_")
    for model in (Own(draw((64, 32)), function), OwnLinen((64, 32), function)):
        row = jmp.explain(jmp.with_policy(model, policy), X)["w"]
        assert f"left: {reason}" in row.quantization
        assert (row.type, row.is_weight, row.param_bytes) == ("weight [64, 32]", True, 64 * 32 * 4)


@pytest.mark.parametrize("format", ["int8", "int4/16"])
def test_rows_that_are_looked_up_are_those_of_a_table_of_flax_and_are_stored(format):
    """The table is tied to the head, as in Gemma."""
    table, tokens, policy = draw((128, 64)), jnp.array([[0, 5], [127, 3]]), name_policy(format)
    embed = nnx.Embed(128, 64, rngs=nnx.Rngs(0))
    embed.embedding[...] = table
    layer = jmp.with_policy(embed, policy)
    own = Own(table, lambda tokens, w: (w[tokens], w[tokens] @ w.T, jnp.take(w, tokens, axis=0)))
    rows, logits, again = jmp.with_policy(own, policy)(tokens)
    np.testing.assert_array_equal(rows, layer(tokens))
    np.testing.assert_array_equal(again, rows)
    np.testing.assert_array_equal(logits, layer.attend(layer(tokens)))
    stored = store_own(own, policy, tokens)
    assert stored.w.get_raw_value().values.dtype == jnp.int8
    jax.tree.map(np.testing.assert_array_equal, stored(tokens), (rows, logits, again))
    graph, state = nnx.split(stored)
    steps = walk(jax.make_jaxpr(lambda state: nnx.merge(graph, state)(tokens))(state).jaxpr, live_only=True)
    made = [step.results[0].aval for step in steps if "float" in str(step.results[0].aval.dtype)]
    # `int4` keeps tables in 8 bits for storage alone, and so multiplies by the dequantized table.
    assert any(aval.shape == (128, 64) for aval in made) == (format == "int4/16")


def test_a_table_in_a_format_of_blocks_is_left_as_that_of_a_layer_of_flax_is():
    explanation = jmp.explain(jmp.with_policy(Tied("own", nnx.Rngs(0)), name_policy("mxfp8")), jnp.arange(16))
    rows = {row.path: row.quantization for row in explanation.rows if row.is_weight}
    assert rows == {
        "table": "left: the rows of a table are read, and its logits want all the bits",
        "layers/0/w": "mxfp8(min_size=0)",
        "layers/1/w": "mxfp8(min_size=0)",
    }


def test_a_rule_leaves_the_weights_of_a_module_out():
    rules = jmp.PolicyMap({"layers/0": "mixed_bfloat16", "layers/1": "int4/16(min_size=0)_from_mixed_bfloat16"}, INT8)
    explanation = jmp.explain(jmp.with_policy(Tied("own", nnx.Rngs(0)), rules), jnp.arange(16))
    rows = {row.path: row.quantization for row in explanation.rows if row.is_weight}
    assert rows == {"table": "int8(min_size=0)", "layers/1/w": "int4/16(min_size=0)"}


def test_a_program_without_such_a_matmul_is_that_of_the_other_policy():
    scale = Own(draw((16, 64)), lambda x, w: jnp.sin(x) * w)
    programs = []
    for policy in (INT8, "mixed_bfloat16"):
        graph, state = nnx.split(jmp.with_policy(scale, policy))
        programs.append(jax.jit(lambda s, graph=graph: nnx.merge(graph, s)(X)).lower(state).as_text())
    assert programs[0] == programs[1]


def store_own(model, policy, *inputs):
    return jmp.quant.quantize(model, policy, explanation=jmp.explain(jmp.with_policy(model, policy), *inputs))


STORED = ["matmul", "einsum", "weight on the left", "transposed", "cast by its author", "in remat", "in jit"]
HEADS = lambda x, w: jnp.einsum("bd,ndh->bnh", x, w)


def scan_steps(x, w):
    return lax.scan(lambda carry, row: ((carry := jnp.tanh(row + carry @ w)), carry), jnp.zeros(64, x.dtype), x)[1]


INSIDE = {
    "a branch": (lambda x, w: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w + 1, w), (64, 64)),
    "each step of a scan": (scan_steps, (64, 64)),
    "each layer of a scan": (lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], (3, 64, 64)),
    "a loop": (lambda x, w: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x), (64, 64)),
    "a loop of unknown length": (
        lambda x, w: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 9 + x @ w, x),
        (64, 64),
    ),
    "a jitted scan": (lambda x, w: jax.jit(scan_steps)(x, w), (64, 64)),
    "each of a stack": (lambda x, w: sum(x @ w[n] for n in range(3)), (3, 64, 64)),
    "one of a stack by a number": (lambda x, w: lax.fori_loop(0, 3, lambda n, x: jnp.tanh(x @ w[n]), x), (3, 64, 64)),
    "one of a stack of stacks": (lambda x, w: x @ w[1, 2], (2, 3, 64, 64)),
    "one of a stack in jit": (lambda x, w: x @ lax.dynamic_index_in_dim(w, 1, 0, keepdims=False), (3, 64, 64)),
    "groups of rows": (lambda x, w: lax.ragged_dot(x, w, jnp.array([5, 0, 11], np.int32)), (3, 64, 64)),
    "a stack of one": (lambda x, w: x @ w[0], (1, 64, 64)),
}


@pytest.mark.parametrize("place", INSIDE)
def test_a_weight_that_is_read_around_a_loop_or_branch_is_multiplied_by_as_it_is_stored(place):
    function, shape = INSIDE[place]
    w, policy = draw(shape), "int8(min_size=0)_from_bfloat16"
    floating = jmp.with_policy(Own(w.astype(jnp.bfloat16), function), policy)
    stored = store_own(Own(w.astype(jnp.bfloat16), function), policy, X)
    np.testing.assert_array_equal(stored(X), floating(X))
    graph, state = nnx.split(stored)
    assert set(count_matmuls(lambda state: nnx.merge(graph, state)(X), state)) == {"int8"}
    assert jmp.explain(stored, X)["w"].quantization == "int8(min_size=0)"


@pytest.mark.parametrize("format", [*FORMATS[:-1], "mxfp4", "e4m3/-1(activations=true)", "int4/16(activations=true)"])
@pytest.mark.parametrize("place", ["each of a stack", pytest.param("groups of rows", marks=pytest.mark.slow)])
def test_each_format_multiplies_by_a_stored_stack_as_by_the_floating_one(place, format):
    function, shape = INSIDE[place]
    w, policy = draw(shape), name_policy(format)
    floating = jmp.with_policy(Own(w, function), policy)
    stored = store_own(Own(w, function), policy, X)
    assert stored.w.get_raw_value().shape == shape
    loss = lambda model, x: jnp.sum(jnp.sin(model(x).astype(jnp.float32)))
    (found, slope), (wanted, wanted_slope) = (
        jax.jit(jax.value_and_grad(functools.partial(loss, model)), compiler_options=_EXACT)(X)
        for model in (stored, floating)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(slope, wanted_slope, rtol=2e-2, atol=1e-4)  # float sums in another order


MULTIPLY = {
    "jit": jax.jit(jnp.matmul),
    "remat": jax.checkpoint(lambda x, w: jnp.tanh(x @ w)),
    "a branch": lambda x, w: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w + 1, w),
}


@pytest.mark.parametrize("place", MULTIPLY)
@pytest.mark.parametrize("cast", [jnp.float32, jnp.bfloat16])
def test_a_weight_that_is_cast_before_a_function_is_multiplied_inside_as_it_is_stored(place, cast):
    function = lambda x, w: MULTIPLY[place](x.astype(cast), w.astype(cast))
    policy = "int8(min_size=0)_from_float32"
    floating = jmp.with_policy(Own(draw((64, 64)), function), policy)
    stored = store_own(Own(draw((64, 64)), function), policy, X)
    np.testing.assert_array_equal(stored(X), floating(X))
    assert set(count_matmuls(stored, X)) == {"int8"}


@pytest.mark.parametrize("place", MULTIPLY)
@pytest.mark.parametrize(
    "move", [lambda w: w[1], lambda w: w[1].T, lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)[0]]
)
def test_a_weight_that_is_moved_before_a_function_is_not_stored(place, move):
    function = lambda x, w: MULTIPLY[place](x.astype(move(w).dtype), move(w))
    row = jmp.explain(jmp.with_policy(Own(draw((3, 64, 64)), function), INT8), X)["w"]
    assert (row.quantization, row.layout) == ("int8(min_size=0)", None)


@pytest.mark.parametrize("function", [
    lambda x, w: x @ w[:, :32],
    lambda x, w: x[:, :16] @ w[:16],
    lambda x, w: x[:, :1] @ w[:1],
    lambda x, w: x @ w[:, 1:2],
    lambda x, w: x @ w.T[1:2].T,
    lambda x, w: x @ w[:, 1],
])  # fmt: skip
def test_parts_of_a_matrix_are_not_stored_and_read_from_a_stored_one(function):
    model, w = jmp.with_policy(Own(draw((64, 64)), function), INT8), draw((64, 64))
    assert jmp.explain(model, X)["w"].layout is None
    stored = jmp.quant.quantize_array(w, "int8(min_size=0)")
    model.w = jmp.nnx.QuantizedParam(stored)
    plain = jmp.with_policy(Own(stored.dequantize(), function), "mixed_bfloat16")
    np.testing.assert_array_equal(model(X), plain(X))


def test_a_weight_that_is_cast_twice_is_rounded_from_its_own_dtype_and_read_as_cast():
    wide = lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.bfloat16).astype(jnp.float32)
    w = draw((64, 32))
    layer = nnx.Linear(64, 32, use_bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
    jax.tree.map(np.testing.assert_array_equal, call_own(wide, w, INT8, X)[0], call_layer(layer, w, INT8, X)[0])
    stored = store_own(Own(w, wide), INT8, X)
    np.testing.assert_array_equal(stored(X), jmp.with_policy(Own(w, wide), INT8)(X))
    other = lambda x, w: wide(x, w) + w.astype(jnp.bfloat16).astype(jnp.float32).sum()
    difference = jmp.with_policy(Own(w, other), INT8)(X) - jmp.with_policy(Own(w, wide), INT8)(X)
    np.testing.assert_allclose(difference, float(w.astype(jnp.bfloat16).astype(jnp.float32).sum()), rtol=0.1)


STORABLE = [
    (form, format)
    for form in [*STORED, "to heads"]
    for format in ["int8", "int8(activations=false)", "mxfp8"]
    if format != "mxfp8" or form not in ("transposed", "to heads")  # whose inputs do not come first
]


@pytest.mark.parametrize(("form", "format"), STORABLE)
def test_a_stored_weight_gives_the_output_of_the_floating_one_and_is_not_dequantized(form, format):
    function, store = FORMS.get(form, (HEADS, lambda w: w.reshape(64, 4, 8).transpose(1, 0, 2)))
    policy = name_policy(format)
    floating = jmp.with_policy(Own(store(draw((64, 32))), function), policy)
    stored = store_own(Own(store(draw((64, 32))), function), policy, X)
    run = jax.jit(lambda graph, state: nnx.merge(graph, state)(X), static_argnums=0, compiler_options=_EXACT)
    np.testing.assert_array_equal(run(*nnx.split(stored)), run(*nnx.split(floating)))
    before, after = jmp.explain(floating, X)["w"], jmp.explain(stored, X)["w"]
    assert (after.quantization, after.type) == (before.quantization, before.type)
    assert after.param_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(stored)))
    assert "read_stored" not in run.lower(*nnx.split(stored)).as_text()


@pytest.mark.parametrize("form", ["transposed", "to heads"])
def test_blocks_that_cannot_lie_along_the_inputs_are_not_stored(form):
    function, store = FORMS.get(form, (HEADS, lambda w: w.reshape(64, 4, 8).transpose(1, 0, 2)))
    model = jmp.with_policy(Own(store(draw((64, 32))), function), name_policy("mxfp8"))
    row = jmp.explain(model, X)["w"]
    assert (row.quantization, row.layout) == ("mxfp8(min_size=0)", None)


def test_a_stored_weight_in_4_bits_is_rounded_as_in_training():
    policy, w = name_policy("int4/16"), draw((64, 32))
    stored = store_own(Own(w, lambda x, w: x @ w), policy, X)
    rounded = jmp.quant.quantize_array(w, "int4/16(min_size=0)").dequantize(jnp.bfloat16)
    np.testing.assert_array_equal(stored.w.get_raw_value().dequantize(jnp.bfloat16), rounded)
    np.testing.assert_array_equal(stored(X), X.astype(jnp.bfloat16) @ rounded)


class OwnStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(OwnLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(name="blocks")(x, None)
        return x @ self.param("kernel", lambda _: draw((64, 32)))


class OwnLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + x @ self.param("w", lambda _: draw((64, 64))), None


def test_weights_of_linen_are_stored_layer_by_layer_of_a_scan():
    model = jmp.with_policy(OwnStack(), INT8)
    variables = OwnStack().init(jax.random.key(0), X)
    explanation = jmp.explain(model, X)
    stored = jmp.quant.quantize(variables, INT8, explanation=explanation)
    weight = stored["params"]["blocks"]["w"]
    assert (weight.values.dtype, weight.shape, weight.scale.shape) == (jnp.int8, (3, 64, 64), (3, 1, 64))
    run = jax.jit(model.apply, compiler_options=_EXACT)
    np.testing.assert_array_equal(run(stored, X), run(variables, X))
    assert count_matmuls(lambda v: model.apply(v, X), stored) == ["int8"] * 2
    bound = jmp.explain(model, X)
    assert {row.path: row.quantization for row in bound.rows if row.is_weight} == {
        "blocks/w": "int8(min_size=0)", "kernel": "int8(min_size=0)"
    }  # fmt: skip


def test_a_kernel_is_quantized_as_it_is_multiplied_by_and_a_warning_says_if_it_was_stored_otherwise():
    """Another project's layer may have its outputs first, as GPT-2's in Hugging Face's Transformers."""
    model = OwnLinen((64, 128), lambda x, w: x @ w.T, "kernel")
    x, policied = draw((16, 128)), jmp.with_policy(model, INT8)
    variables, explanation = model.init(jax.random.key(0), x), jmp.explain(policied, x)
    assert explanation["kernel"].quantization == "int8(min_size=0)"
    assert count_matmuls(lambda v: policied.apply(v, x), variables) == ["int8"]
    stored = jmp.quant.quantize(variables, INT8, explanation=explanation)
    np.testing.assert_array_equal(policied.apply(stored, x), policied.apply(variables, x))
    stored = jmp.quant.quantize(variables, INT8)
    with pytest.warns(UserWarning, match="'kernel' is dequantized, and has other numbers .* quantized by its name"):
        out = policied.apply(stored, x)
    np.testing.assert_array_equal(out, x.astype(jnp.bfloat16) @ stored["params"]["kernel"].dequantize(jnp.bfloat16).T)


def test_a_kernel_whose_blocks_fit_no_matmul_is_rounded_as_it_is_stored_and_multiplied_as_numbers():
    model, policy = OwnLinen((64, 64), lambda x, w: x @ w.T, "kernel"), name_policy("int4/16")
    variables, policied = model.init(jax.random.key(0), X), jmp.with_policy(model, policy)
    explanation = jmp.explain(policied, X)
    assert explanation["kernel"].quantization == "int4/16(min_size=0), computed with as numbers"
    stored = jmp.quant.quantize(variables, policy, explanation=explanation)
    np.testing.assert_array_equal(policied.apply(stored, X), policied.apply(variables, X))


def test_an_explanation_of_another_kind_is_an_error():
    with pytest.raises(TypeError, match="explanation is the result of explain, got 'x'"):
        jmp.quant.quantize(Own(draw((64, 32)), HEADS), INT8, explanation="x")


class OwnHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = OwnLinen((64, 64), jnp.matmul, name="own")(x)
        return nn.Dense(64, name="dense", use_bias=False)(nn.tanh(x))


class AroundHead(nn.Module):
    """A module with a weight of its own, and a layer inside."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (64, 64))
        return nn.Dense(64, name="dense", use_bias=False)(nn.tanh(x @ w))


class NnxAroundHead(nnx.Module):
    def __init__(self, w, dense):
        self.w, self.dense = nnx.Param(w), dense

    def __call__(self, x):
        return self.dense(nnx.tanh(x @ self.w[...]))


class NnxHead(nnx.Module):
    def __init__(self, own, dense):
        self.own, self.dense = own, dense

    def __call__(self, x):
        return self.dense(nnx.tanh(self.own(x)))


HEADS_BY_API = {"linen": "own", "nnx": "own", "linen around a layer": "", "nnx around a layer": ""}
"""The paths of the modules that own a weight, before a layer of Flax."""


def make_heads(make):
    """Makes a model and its variables, or None of nnx; both compute the same."""
    own, dense = draw((64, 64), 3), draw((64, 64), 4)
    if make == "linen":
        return OwnHead(), {"params": {"own": {"w": own}, "dense": {"kernel": dense}}}
    if make == "linen around a layer":
        return AroundHead(), {"params": {"w": own, "dense": {"kernel": dense}}}
    layer = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = dense
    return (NnxHead(Own(own, jnp.matmul), layer) if make == "nnx" else NnxAroundHead(own, layer)), None


def read_own(stored, path):
    """Returns the own weight in what `quantize` returns."""
    if isinstance(stored, dict):
        return (stored["params"][path] if path else stored["params"])["w"]
    return (getattr(stored, path) if path else stored).w.get_raw_value()


@pytest.mark.parametrize("make", HEADS_BY_API)
def test_a_model_computes_the_same_under_disable_jit(make):
    model, variables = make_heads(make)
    policied = jmp.with_policy(model, INT8)
    run = lambda: policied(X) if variables is None else policied.apply(variables, X)
    with jax.disable_jit():
        found = run()
    np.testing.assert_array_equal(found, run())


@pytest.mark.parametrize("make", HEADS_BY_API)
def test_inputs_of_own_weights_are_calibrated_and_clipped(make):
    """As for a layer of Flax with the same inputs: its clip is the 99th percentile."""
    model, variables = make_heads(make)
    policied = jmp.with_policy(model, INT8)
    outlier = X.at[:, 0].mul(100.0)
    clips = jmp.quant.calibrate(policied, [outlier], variables=variables, clip=99.0)
    layer = jmp.with_policy(nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0)), INT8)
    path = HEADS_BY_API[make]
    assert clips.keys() == {path, "dense"}
    assert clips[path] == jmp.quant.calibrate(layer, [outlier], clip=99.0)[""]
    explanation = jmp.explain(policied, X)
    stored = jmp.quant.quantize(
        model if variables is None else variables, INT8, input_clips=clips, explanation=explanation
    )
    assert float(read_own(stored, path).input_clip) == np.float32(clips[path])


@pytest.mark.parametrize("make", HEADS_BY_API)
def test_compare_sees_own_weights_multiply_as_they_are_stored(make):
    model, variables = make_heads(make)
    explanation = jmp.explain(jmp.with_policy(model, INT8), X)
    stored = jmp.quant.quantize(model if variables is None else variables, INT8, explanation=explanation)
    if variables is None:
        comparison = jmp.quant.compare(model, stored, X)
        out, wide = stored(X), model(X)
    else:
        policied = jmp.with_policy(model, INT8)
        comparison = jmp.quant.compare(model.bind(variables), policied.bind(stored), X)
        out, wide = policied.apply(stored, X), model.apply(variables, X)
    row = comparison[f"{HEADS_BY_API[make]}/w".lstrip("/")]
    assert (row.quantization, row.bytes_after) == ("int8(min_size=0)", 64 * 64 + 64 * 4)
    error = np.linalg.norm(np.asarray(out, np.float64) - wide) / np.linalg.norm(np.asarray(wide, np.float64))
    np.testing.assert_allclose(comparison.output_error, error, rtol=1e-3)
    assert row.output_error > row.weight_error  # of inputs that are rounded too
    assert 0 < row.weight_error < comparison["dense"].output_error


METHODS = [jmp.contrib.gptq, pytest.param(jmp.contrib.awq, marks=pytest.mark.slow)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", HEADS_BY_API)
def test_own_weights_are_rounded_for_their_inputs_as_a_layer_of_flax_is(make, method):
    """The first weight has the inputs of the model. The second one has those that the rounded first one makes."""
    policy = "int4/16(min_size=0)_from_float32"
    model, variables = make_heads(make)
    explanation = jmp.explain(jmp.with_policy(model, policy), X)
    data = X @ draw((64, 64), 5)
    rounded = method(jmp.with_policy(model, policy), [data], variables=variables, explanation=explanation)
    twins = nnx.Sequential(*(nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2)))
    twins.layers[0].kernel[...], twins.layers[1].kernel[...] = draw((64, 64), 3), draw((64, 64), 4)
    wanted = method(jmp.with_policy(nnx.Sequential(twins.layers[0], nnx.tanh, twins.layers[1]), policy), [data])
    dense = rounded.dense.kernel.get_raw_value() if variables is None else rounded["params"]["dense"]["kernel"]
    found = read_own(rounded, HEADS_BY_API[make]), dense
    for weight, layer in zip(found, (wanted.layers[0], wanted.layers[2]), strict=True):
        jax.tree.map(np.testing.assert_array_equal, weight, layer.kernel.get_raw_value())


class AroundBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return AroundHead(name="around")(x), None


class Blocks(nn.Module):
    """Blocks that are scanned over, or one after the other."""

    scans: bool
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(AroundBlock) if self.remat else AroundBlock
        if self.scans:
            block = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return block(name="block")(x, None)[0]
        for i in range(3):
            x, _ = block(name=f"block{i}")(x)
        return x


def test_inputs_in_a_scan_are_calibrated_as_in_a_loop():
    """Also those of layers inside of the modules that own a weight."""
    variables = Blocks(scans=True).init(jax.random.key(0), X)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["block"]) for i in range(3)]
    looped = {"params": {f"block{i}": layer for i, layer in enumerate(layers)}}
    calibrate = lambda scans, variables: jmp.quant.calibrate(
        jmp.with_policy(Blocks(scans), INT8), [X], variables=variables, clip="absmax"
    )
    found, wanted = calibrate(True, variables), calibrate(False, looped)
    assert found.keys() == {"block/around", "block/around/dense"}
    for path, clip in found.items():
        assert clip == max(wanted[path.replace("block", f"block{i}")] for i in range(3))


def test_inputs_of_own_weights_that_have_no_value_are_named():
    model = jmp.with_policy(Blocks(scans=False, remat=True), INT8)
    variables = model.init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match="cannot read the inputs of .*'block1/around', "):
        clips = jmp.quant.calibrate(model, [X], variables=variables)
    assert clips.keys() == {f"block{i}/around/dense" for i in range(3)}


def test_inputs_of_a_layer_under_vmap_are_not_those_of_one_example():
    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            over_rows = nn.vmap(AroundHead, variable_axes={"params": 0}, split_rngs={"params": True})
            return over_rows(name="heads")(x.reshape(2, -1, 64))

    model = jmp.with_policy(Mapped(), INT8)
    variables = model.init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match="cannot read the inputs of 'heads/dense'"):
        clips = jmp.quant.calibrate(model, [X], variables=variables, clip="absmax")
    assert clips == {"heads": jnp.abs(X.astype(jnp.bfloat16)).max()}


def in_a_branch(module, x):
    return jax.lax.cond(jnp.sum(x) > -1e9, module.dense, lambda x: x, nnx.tanh(x @ module.w[...]))


def in_a_loop(module, x):
    def step(carry):
        return carry[0] + 1, module.dense(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0] < 2, step, (0, nnx.tanh(x @ module.w[...])))[1]


def in_remat(module, x):
    return jax.checkpoint(lambda x: module.dense(x))(nnx.tanh(x @ module.w[...]))


def without_use(module, x):
    x = nnx.tanh(x @ module.w[...])
    module.dense(x)
    return x


def in_a_gradient(module, x):
    return jax.grad(lambda x: jnp.sum(module.dense(x) ** 2))(nnx.tanh(x @ module.w[...]))


@pytest.mark.parametrize("call", [in_a_branch, in_a_loop, in_remat, without_use])
def test_a_layer_beside_an_own_weight_is_seen(call):
    model = NnxAroundHead(draw((64, 64), 3), nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0)))
    inputs = []

    class Model(NnxAroundHead):
        def __call__(self, x):
            return call(self, x)

    class Noting(nnx.Linear):
        def __call__(self, x):
            jax.debug.callback(lambda x: inputs.append(np.abs(x).max()), x)
            return super().__call__(x)

    policy = "int8(min_size=0)_from_float32"
    jmp.with_policy(Model(model.w[...], Noting(64, 64, use_bias=False, rngs=nnx.Rngs(0))), policy)(X)
    jax.effects_barrier()
    model = Model(model.w[...], model.dense)
    clips = jmp.quant.calibrate(jmp.with_policy(model, policy), [X], clip="absmax")
    np.testing.assert_allclose(clips["dense"], max(inputs), rtol=1e-6)
    stored = store_own(model, policy, X)
    if call is not in_remat:  # which hides the values of a model without a policy
        assert jmp.quant.compare(model, stored, X)["dense"].output_error > 0


def test_derivatives_of_a_layer_beside_an_own_weight_are_not_its_outputs():
    class Model(NnxAroundHead):
        def __call__(self, x):
            return in_a_gradient(self, x)

    model = Model(draw((64, 64), 3), nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0)))
    policies = ["int8(min_size=0)_from_float32", "int8(activations=false,min_size=0)_from_float32"]
    policied = [jmp.with_policy(model, policy) for policy in policies]
    with pytest.warns(UserWarning, match="cannot read the inputs of 'dense', inside of vmap, remat or a gradient"):
        assert jmp.quant.calibrate(policied[0], [X]).keys() == {""}
    hidden = [jmp.with_policy(Own(model.w[...], lambda x, w: nnx.tanh(x @ w)), policy)(X) for policy in policies]
    wide, narrow = (
        np.asarray(jmp.with_policy(model.dense, policy)(x), np.float64)
        for policy, x in zip(policies, hidden, strict=True)
    )
    found = jmp.quant.compare(*policied, X)
    relative = lambda new, old: np.linalg.norm(new - old) / np.linalg.norm(old)
    np.testing.assert_allclose(found["dense"].output_error, relative(narrow, wide), rtol=1e-3)
    outputs = [np.asarray(each(X), np.float64) for each in policied]
    np.testing.assert_allclose(found.output_error, relative(outputs[1], outputs[0]), rtol=1e-3)


def test_compare_returns_outputs_of_modules_as_they_are():
    class Inner(NnxAroundHead):
        def __call__(self, x):
            return {"z": super().__call__(x), "a": np.float32(2)}

    class Model(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            z, a = self.inner(x).values()  # in the order of the dict
            return z * float(a)

    model = Model(Inner(draw((64, 64), 3), nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))))
    stored = store_own(model, INT8, X)
    wide, out = np.asarray(model(X), np.float64), np.asarray(stored(X), np.float64)
    error = np.linalg.norm(out - wide) / np.linalg.norm(wide)
    np.testing.assert_allclose(jmp.quant.compare(model, stored, X).output_error, error, rtol=1e-3)


def test_arrays_of_a_tree_have_no_clip_of_their_own():
    class Tree(nn.Module):
        @nn.compact
        def __call__(self, x):
            weights = self.param("weights", lambda key: {"a": draw((64, 64), 3)})
            return nn.Dense(64, name="dense")(x @ weights["a"])

    model = jmp.with_policy(Tree(), INT8)
    variables = model.init(jax.random.key(0), X)
    clips = jmp.quant.calibrate(model, [X], variables=variables)
    assert clips.keys() == {"dense"}
    jmp.quant.quantize(variables, INT8, input_clips=clips)


@pytest.mark.parametrize("method", METHODS)
def test_own_weights_in_a_scan_are_rounded_as_in_a_loop(method):
    policy = "int4/16(min_size=0)_from_float32"
    variables = Blocks(scans=True).init(jax.random.key(0), X)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["block"]) for i in range(3)]
    rounded = []
    for scans, given in [(True, variables), (False, {"params": {f"block{i}": each for i, each in enumerate(layers)}})]:
        model = jmp.with_policy(Blocks(scans), policy)
        explanation, stacked = jmp.explain(model, X), ["block"] if scans else []
        data = X @ draw((64, 64), 5)
        rounded.append(method(model, [data], variables=given, explanation=explanation, stacked=stacked)["params"])
    stack = rounded[0]["block"]["around"]["w"].dequantize()
    np.testing.assert_array_equal(stack, [rounded[1][f"block{i}"]["around"]["w"].dequantize() for i in range(3)])


def test_compare_counts_a_weight_that_a_layer_takes_as_its_input():
    class Model(NnxAroundHead):
        def __call__(self, x):
            return x @ self.dense(self.w[...])

    model = Model(draw((64, 64), 3), nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0)))
    stored = store_own(model, "int4/16(min_size=0)_from_float32", X)
    wide, out = np.asarray(model(X), np.float64), np.asarray(stored(X), np.float64)
    error = np.linalg.norm(out - wide) / np.linalg.norm(wide)
    np.testing.assert_allclose(jmp.quant.compare(model, stored, X).output_error, error, rtol=1e-3)


def test_a_rewritten_model_inside_of_another_one_is_seen():
    class Outer(nnx.Module):
        def __init__(self, inner):
            self.w, self.inner = nnx.Param(draw((64, 64), 6)), inner

        def __call__(self, x):
            return self.inner(nnx.tanh(x @ self.w[...]))

    inner = nnx.bridge.ToNNX(AroundHead(), rngs=nnx.Rngs(0)).lazy_init(X)
    clips = jmp.quant.calibrate(jmp.with_policy(Outer(inner), INT8), [X])
    assert clips.keys() >= {"", "inner"}


def test_static_arrays_of_numpy_and_eager_values_reach_a_model_of_layers_as_before():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train, shape):
            x = nn.Dropout(0.5)(x.reshape(tuple(shape)), deterministic=not train)
            return nn.Dense(64)(x if float(x.max()) > 0 else -x)

    model, arguments = jmp.with_policy(Net(), INT8), (np.bool_(False), np.array([16, 64]))
    variables = Net().init(jax.random.key(0), X, *arguments)
    assert model.apply(variables, X, *arguments).shape == (16, 64)


def test_static_arrays_of_numpy_reach_code_with_weights_of_its_own():
    own = jmp.with_policy(Own(draw((64, 64)), None), INT8)
    own.function = lambda given, w: given[0].reshape(tuple(given[1])) @ w
    assert own((X.reshape(-1), np.array([16, 64]))).shape == (16, 64)


def test_no_tracers_are_left_in_a_call():
    model = jmp.with_policy(OwnHead(), INT8)
    variables = make_heads("linen")[1]
    with jax.check_tracer_leaks():
        jax.jit(model.apply).lower(variables, X)


@pytest.mark.parametrize("size", [3, 64])
def test_a_weight_under_vmap_over_another_axis_has_no_layout(size):
    """Also where the stack is as long as the axis in whose place it stands."""

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 1}, "split_rngs": {"params": True}, "in_axes": None}
            return nn.vmap(OwnLinen, **options, axis_size=size)((64, 32), jnp.matmul, name="own")(x)

    row = jmp.explain(jmp.with_policy(Stacked(), INT8), X)["own/w"]
    assert (row.quantization, row.layout) == ("int8(min_size=0)", None)


PARTS = [lambda x, w: w[:, jnp.arange(3)], lambda x, w: w[jnp.arange(3), :32]]


@pytest.mark.parametrize("function", PARTS)
def test_parts_of_rows_that_are_looked_up_are_left(function):
    row = jmp.explain(jmp.with_policy(Own(draw((64, 64)), function), INT8), X)["w"]
    assert (row.quantization, row.layout) == ("left: gather reads parts of it", None)


def test_a_table_that_is_transposed_before_its_rows_are_looked_up_is_not_stored():
    row = jmp.explain(jmp.with_policy(Own(draw((64, 64)), lambda x, w: w.T[jnp.arange(3)]), INT8), X)["w"]
    assert (row.quantization, row.layout) == ("int8(min_size=0)", None)


@pytest.mark.parametrize("make", [lambda fun: Own(draw((3, 64, 64)), fun), lambda fun: OwnLinen((3, 64, 64), fun)])
def test_rows_that_nothing_reads_leave_the_layout_of_a_weight(make):
    function = lambda x, w: (jnp.take(w, 0, axis=0), jnp.einsum("bd,ndh->bnh", x, w))[1]
    row = jmp.explain(jmp.with_policy(make(function), INT8), X)["w"]
    assert row.quantization == "int8(min_size=0)"
    assert row.layout is not None


TAKEN = [lambda x, w: x @ jnp.take(w, 1, axis=0), lambda x, w: x @ (1.0 * w[1].astype(jnp.bfloat16))]


@pytest.mark.parametrize("make", [lambda fun: Own(draw((3, 64, 64)), fun), lambda fun: OwnLinen((3, 64, 64), fun)])
@pytest.mark.parametrize("function", TAKEN)
def test_a_matrix_that_is_taken_or_times_one_is_quantized_and_has_no_layout(function, make):
    row = jmp.explain(jmp.with_policy(make(function), INT8), X)["w"]
    assert (row.quantization, row.layout) == ("int8(min_size=0)", None)


def test_a_stored_weight_of_another_policy_is_an_error():
    stored = store_own(Own(draw((64, 32)), jnp.matmul), INT8, X)
    with pytest.raises(ValueError, match=r"The weight 'w' is quantized, as 'int8.*', but the policy 'mixed_bfloat16'"):
        jmp.with_policy(stored, "mixed_bfloat16")
    with pytest.raises(ValueError, match=r"The weight 'w' is stored as 'int8.*', and its policy says 'int4/32"):
        jmp.with_policy(stored, name_policy("int4/32"))


def test_an_explanation_of_another_model_or_policy_is_an_error():
    explanation = jmp.explain(jmp.with_policy(Own(draw((64, 32)), jnp.matmul), INT8), X)
    for model, policy in (
        (Own(draw((32, 16)), jnp.matmul), INT8),
        (Own(draw((64, 32)), jnp.matmul), name_policy("mxfp8")),
    ):
        with pytest.raises(
            ValueError, match=r"The explanation is of another model or policy: it says that matmuls by 'w'"
        ):
            jmp.quant.quantize(model, policy, explanation=explanation)


def test_weights_without_a_layout_are_named_where_nothing_is_stored():
    model = Own(draw((64, 32)), lambda x, w: x @ (w[:32], w[32:])[0] if x.shape[1] == 32 else x @ w.reshape(64, 32))
    explanation = jmp.explain(jmp.with_policy(model, INT8), X[:, :32])
    with pytest.raises(ValueError, match=r"Nothing to quantize .* and the explanation has no layout for 'w'"):
        jmp.quant.quantize(model, INT8, explanation=explanation)


def test_a_stored_and_a_floating_weight_may_meet():
    class Both(nnx.Module):
        def __init__(self):
            self.stored, self.small = nnx.Param(draw((64, 64))), nnx.Param(draw((64, 64), 2))

        def __call__(self, x):
            joined = jnp.concatenate([self.small[...], self.stored[...]], axis=1)
            return (
                x @ self.stored[...]
                + x @ self.small[...]
                + x @ (self.small[...] + self.stored[...])
                + (x @ joined)[:, :64]
            )

    explanation = jmp.explain(jmp.with_policy(Both(), INT8), X)
    assert explanation["stored"].layout is explanation["small"].layout is None
    layouts = jmp.explain(jmp.with_policy(Own(draw((64, 64)), jnp.matmul), INT8), X)["w"].layout
    model = jmp.with_policy(Both(), INT8)
    model.stored = jmp.nnx.QuantizedParam(jmp.quant.quantize_array(draw((64, 64)), "int8(min_size=0)", layouts))
    np.testing.assert_allclose(model(X), jmp.with_policy(Both(), "mixed_bfloat16")(X), rtol=0.1, atol=0.1)


def test_weights_that_are_joined_before_they_multiply_have_no_layout():
    class Joined(nnx.Module):
        def __init__(self):
            self.first, self.second = nnx.Param(draw((64, 64))), nnx.Param(draw((64, 64), 2))

        def __call__(self, x):
            joined = x @ jnp.concatenate([self.first[...], self.second[...]], axis=1)
            return joined[:, :64] + x @ self.first[...] + x @ self.second[...]

    rows = [row for row in jmp.explain(jmp.with_policy(Joined(), INT8), X).rows if row.is_weight]
    assert [(row.quantization, row.layout) for row in rows] == [("int8(min_size=0)", None)] * 2


TREE = {"in": draw((64, 48)), "out": [draw((48, 32), 2)]}


class OwnTree(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(TREE)

    def __call__(self, x):
        return x @ self.w["in"] @ self.w["out"][0]


class OwnLinenTree(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", lambda _: TREE)
        return x @ w["in"] @ w["out"][0]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_each_array_of_a_parameter_that_is_a_tree_is_quantized_and_none_is_stored(kind):
    model = jmp.with_policy(OwnTree() if kind == "nnx" else OwnLinenTree(), INT8)
    found = model(X) if kind == "nnx" else model.apply({"params": {"w": TREE}}, X)
    apart = nnx.Sequential(Own(TREE["in"], jnp.matmul), Own(TREE["out"][0], jnp.matmul))
    np.testing.assert_array_equal(found, jmp.with_policy(apart, INT8)(X))
    rows = {row.path: (row.quantization, row.layout) for row in jmp.explain(model, X).rows if row.is_weight}
    assert rows == dict.fromkeys(["w/in", "w/out/0"], ("int8(min_size=0)", None))


class Twice(nnx.Module):
    def __init__(self):
        self.first, self.second = Own(draw((64, 64)), jnp.matmul), Own(draw((64, 64), 2), jnp.matmul)

    def __call__(self, x):
        return self.second(self.encode(x))

    def encode(self, x):
        return self.first(x)


def test_a_module_inside_that_is_called_alone_is_quantized_as_in_its_model():
    model, x = jmp.with_policy(Twice(), INT8), X.astype(jnp.bfloat16)
    wanted = model.encode(x)
    for call in (model.first, jax.jit(model.first)):
        np.testing.assert_array_equal(call(x), wanted)
        assert count_matmuls(call, x) == ["int8"]
    with jax.disable_jit():
        np.testing.assert_array_equal(model.first(x), wanted)


class Holding(nnx.Module):
    def __init__(self, inside):
        self.inside = inside

    def __call__(self, x, inside=None):
        return (inside or self.inside)(x)


@pytest.mark.parametrize("policy", ["float32", INT8])
@pytest.mark.parametrize("place", ["attribute", "argument", "function"])
def test_a_module_with_a_policy_of_its_own_is_quantized_inside_of_any_other(policy, place):
    """The one around may have another policy, and no weights."""
    own = jmp.with_policy(Own(draw((64, 64)), jnp.matmul), "int8(min_size=0)_from_float32")
    around = jmp.with_policy(Holding(own if place == "attribute" else None), policy)
    given = {"attribute": (), "argument": (own,), "function": (lambda x: own(x),)}[place]
    assert count_matmuls(lambda x: around(x, *given), X) == ["int8"]


class AroundLinen(nnx.Module):
    """Wraps a linen module that multiplies, as the code around does."""

    def __init__(self):
        self.inside = nnx.bridge.ToNNX(OwnLinen((64, 64), jnp.matmul), rngs=nnx.Rngs(0)).lazy_init(X)
        self.w = nnx.Param(draw((64, 32), 2))

    def __call__(self, x):
        return self.inside(x) @ self.w[...]


class AroundNNX(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nnx.bridge.to_linen(Own, draw((64, 64)), jnp.matmul, name="inside", skip_rng=True)(x)
        return x @ self.param("w", lambda _: draw((64, 32), 2))


@pytest.mark.parametrize("kind", [AroundLinen, AroundNNX])
def test_modules_across_the_bridge_of_flax_are_quantized_and_explained(kind):
    model = jmp.with_policy(kind(), INT8)
    call = model if kind is AroundLinen else lambda x: model.apply(model.init(jax.random.key(0), X), x)
    apart = nnx.Sequential(Own(draw((64, 64)), jnp.matmul), Own(draw((64, 32), 2), jnp.matmul))
    np.testing.assert_array_equal(call(X), jmp.with_policy(apart, INT8)(X))
    explanation = jmp.explain(model, X)
    rows = {row.path: row.quantization for row in explanation.rows if row.is_weight}
    assert rows == dict.fromkeys(["inside/w", "w"], "int8(min_size=0)")
    # A weight across the bridge is not stored.
    if kind is AroundLinen:
        stored = jmp.quant.quantize(model, INT8, explanation=explanation)
        values = stored.inside.w[...], stored.w.get_raw_value()
    else:
        stored = jmp.quant.quantize(model.init(jax.random.key(0), X), INT8, explanation=explanation)
        values = stored["params"]["inside"]["w"], stored["params"]["w"]
    assert [type(value) is QuantizedArray for value in values] == [False, True]


@pytest.mark.parametrize("wrap", ["nnx", "linen"])
def test_a_bridge_at_the_root_has_a_row_for_the_weight_inside(wrap):
    if wrap == "nnx":
        model = nnx.bridge.ToNNX(OwnLinen((64, 64), jnp.matmul), rngs=nnx.Rngs(0)).lazy_init(X)
    else:
        model = nnx.bridge.to_linen(Own, draw((64, 64)), jnp.matmul, skip_rng=True)
    explanation = jmp.explain(jmp.with_policy(model, INT8), X)
    rows = [(row.path, row.quantization, row.layout) for row in explanation.rows if row.is_weight]
    assert rows == [("w", "int8(min_size=0)", None)]


@pytest.mark.parametrize("call", [call_own, call_own_linen], ids=["nnx", "linen"])
def test_float8_with_a_history_scales_the_matmuls_of_other_code_by_the_current_step(call):
    w = draw((64, 32))
    wanted = call_layer(LINEAR(), w, "float8(recipe=current,min_size=0)_from_mixed_bfloat16", X)
    found = call(jnp.matmul, w, "float8(min_size=0)_from_mixed_bfloat16", X)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_format_with_noise_warns_of_the_matmuls_of_other_code():
    model = jmp.with_policy(Twice(), "nvfp4(stochastic_rounding=true,min_size=0)_from_mixed_bfloat16")
    with pytest.warns(UserWarning, match=r"by 'first/w' and 1 more without a layer: these matmuls stay"):
        model(X)


class Returned:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "function",
    [lambda x, w: lambda y: y + x @ w, lambda x, w: Returned(x @ w), lambda x, w: (x @ w).sum],
    ids=["function", "object", "method"],
)
def test_an_output_that_holds_arrays_of_the_traced_call_is_an_error(function):
    with pytest.raises(TypeError, match=r"returned .*, which holds arrays of the call"):
        jmp.with_policy(Own(draw((64, 64)), function), INT8)(X)


def make_empty_cell():
    def function():
        return later

    return function
    later = 0  # makes it a cell


@pytest.mark.parametrize("output", [nnx.relu, make_empty_cell(), Returned({1: 0, "a": 1})])
def test_an_output_that_holds_no_arrays_is_returned(output):
    assert jmp.with_policy(Own(draw((64, 64)), lambda x, w: (x @ w, output)), INT8)(X)[1] is output


class Positions(nnx.Module):
    """Resizes a table of positions, which JAX does by matmuls, as the Hiera of SAM 2."""

    def __init__(self, rngs):
        self.table = nnx.Param(rngs.params.normal((4, 4, 16)))

    def __call__(self, x):
        return x + jax.image.resize(self.table[...], (8, 8, 16), "bicubic")


def test_a_table_that_jax_image_resizes_is_no_weight():
    model, x = Positions(nnx.Rngs(0)), jnp.ones((8, 8, 16))
    policied = jmp.with_policy(model, "int4/16(min_size=0)_from_float32")
    assert jmp.explain(policied, x)["table"].quantization == "left: jax.image resizes it"
    np.testing.assert_allclose(policied(x), model(x), rtol=1e-6)
