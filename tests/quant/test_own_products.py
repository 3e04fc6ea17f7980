"""Matmuls that a module writes in its own code, by its own weights, under a quantized policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax

import jmp_policy as jmp
from jmp_policy._jaxpr import walk

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


@pytest.mark.parametrize("call", [call_own, call_own_linen], ids=["nnx", "linen"])
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
    return [str(step.operands[0].aval.dtype) for step in steps if step.name == "dot_general"]


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


@jax.custom_jvp
def multiply(x, w):
    return x @ w


multiply.defjvp(lambda primals, tangents: (multiply(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]))

LEFT = {
    "too small": ("int8", lambda x, w: x @ w, "2048 elements are fewer than min_size=4096"),
    "a lookup": (INT8, lambda x, w: x[:1, :32] * w[jnp.array([1])], "its rows are looked up, by code that is no layer"),
    "a vector": (INT8, lambda x, w: x @ w[:, 0], "it is multiplied as a vector"),
    "no matmul": (INT8, lambda x, w: (x[..., None] * w).sum(1), "mul reads it in"),
    "opaque": (INT8, multiply, "custom_jvp_call reads it in"),
    "a gradient": (INT8, lambda x, w: jax.grad(lambda x: (jnp.sin(x) @ w).sum())(x), "its gradient is computed inside"),
    "a state": ("float8", lambda x, w: x @ w, "the format keeps a state or a key for each layer"),
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


def test_a_module_sees_values_under_disable_jit():
    seen = []
    note = lambda x, w: x @ w if isinstance(x, jax.core.Tracer) else seen.append(float(x[0, 0]))
    with jax.disable_jit():
        jmp.with_policy(nnx.Sequential(Own(draw((64, 64)), lambda x, w: x @ w), lambda x: note(x, None)), INT8)(X)
    assert len(seen) == 1
