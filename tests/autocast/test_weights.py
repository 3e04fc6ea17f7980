"""`autocast(weights=)`: which matmuls are quantized, and that they are those of `with_policy`."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from compiles import compiles
from flax import linen as nn, nnx
from programs import products, walk
from test_weights_of_models import assert_equal, list_quantization, square

from jmp_policy import PolicyMap, autocast, explain, force_full_precision, quant, with_policy

# A weight of groups has no public layout.
from jmp_policy.quant._layout import Layout  # isort: skip

POLICY = "int8_from_mixed_bfloat16"
FORMATS = ["int8", "int4/32", "mxfp8", "mxfp4", "nvfp4", "float8(min_size=0,recipe=current)"]
W, X = jnp.ones((64, 64)), jnp.ones((16, 64))
STACK = jnp.ones((2, 64, 64))


def count_operations(fun, *args):
    """Counts the operations of a function and of its calls, by their name and types."""
    steps = (step for step in walk(jax.make_jaxpr(fun)(*args).jaxpr) if step.name not in ("link", "constant"))
    return collections.Counter((step.name, *(var.aval.str_short() for var in step.results)) for step in steps)


def is_int8(fun, *args):
    names = ("dot_general", "ragged_dot_general", "conv_general_dilated")
    return any(name in names and kind.startswith("int32") for name, kind, *_ in count_operations(fun, *args))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_multiplies_as_with_policy(format):
    """By the operations of the forward and backward pass; the slow tests compare bits."""
    policy, variables = f"{format}_from_mixed_bfloat16", {"params": {"kernel": W}}
    model, plain = nn.Dense(64, use_bias=False), lambda variables, x: x @ variables["params"]["kernel"]

    count = lambda apply: count_operations(jax.grad(functools.partial(square, apply)), variables, X)
    operations = count(autocast(plain, policy, weights=0))
    assert operations == count(with_policy(model, policy).apply)
    assert operations != count(autocast(plain, "mixed_bfloat16"))


EXPERTS, ROWS = jnp.ones((4, 64, 64)), jnp.array([5, 0, 8, 3])


def multiply_transposed(w, x):
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, w, ROWS, numbers)


EIGHT_BITS = ["int8", "mxfp8", "float8(min_size=0,recipe=current)", "float8(min_size=0,recipe=current/row)"]
RAGGED = {
    "plain": (lambda w, x: jax.lax.ragged_dot(x, w, ROWS), lambda w: w),
    "transposed": (multiply_transposed, lambda w: jnp.swapaxes(w, 1, 2)),
}


def make_expert_functions(format, way):
    """Makes losses by `autocast` and by `quant.ragged_dot`."""
    fun, turn = RAGGED[way]
    by_hand = lambda w, x: quant.ragged_dot(x.astype(jnp.bfloat16), turn(w), ROWS, quantization=format)
    ours = autocast(fun, f"{format}_from_mixed_bfloat16", weights=0)
    return [functools.partial(square, apply) for apply in (ours, by_hand)]


@pytest.mark.parametrize(("format", "way"), list(zip(EIGHT_BITS, ["plain", "transposed"] * 2, strict=True)))
def test_experts_are_multiplied_as_by_ragged_dot(format, way):
    """By the operations of the forward and backward pass; a slow test compares bits."""
    ours, by_hand = make_expert_functions(format, way)
    assert count_operations(jax.grad(ours, (0, 1)), EXPERTS, X) == count_operations(
        jax.grad(by_hand, (0, 1)), EXPERTS, X
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", EIGHT_BITS)
def test_experts_have_the_bits_of_ragged_dot(format):
    w, x = jax.random.normal(jax.random.key(0), EXPERTS.shape), jax.random.normal(jax.random.key(1), X.shape)
    assert_equal(*(jax.jit(jax.value_and_grad(loss, (0, 1)))(w, x) for loss in make_expert_functions(format, "plain")))


@pytest.mark.parametrize("format", ["int4/32", "nvfp4", "int8(activations=false)"])
def test_experts_in_other_formats_are_rounded(format):
    fun = autocast(RAGGED["plain"][0], f"{format}_from_p=f32,c=bf16,o=none", weights=0)

    def by_hand(w, x):
        rounded = quant.quantize_array(w, format, Layout((64,), 1)).dequantize(jnp.bfloat16)
        return jax.lax.ragged_dot(x.astype(jnp.bfloat16), rounded, ROWS).astype(jnp.float32)

    assert count_operations(fun, EXPERTS, X) == count_operations(by_hand, EXPERTS, X)
    [text] = list_quantization(fun, EXPERTS, X).values()
    assert text.startswith(format)


def test_sums_of_experts_are_in_the_accumulate_dtype():
    fun = autocast(RAGGED["plain"][0], "int8_from_p=f32,c=bf16,o=none,a=f32", weights=0)
    assert is_int8(fun, EXPERTS, X)
    # Only the input is cast to bfloat16.
    assert count_operations(fun, EXPERTS, X)["convert_element_type", "bfloat16[16,64]"] == 1


def split_heads(x):
    return x.reshape(-1, *x.shape[-2:-1], 4, 16)


def attend_by_jax(w, x):
    query, other = split_heads(x @ w), split_heads(x)
    return jax.nn.dot_product_attention(query, other, other).reshape(x.shape)


def attend_by_linen(w, x):
    query, other = split_heads(x @ w), split_heads(x)
    return nn.dot_product_attention(query, other, other).reshape(x.shape)


def attend_by_nnx(w, x):
    query, other = split_heads(x @ w), split_heads(x)
    return nnx.dot_product_attention(query, other, other).reshape(x.shape)


def attend_by_haiku(w, x):
    haiku = pytest.importorskip("haiku")
    net = haiku.transform(lambda x: haiku.MultiHeadAttention(4, 16, w_init=jnp.zeros)(x, x, x))
    params = jax.tree.map(lambda param: jnp.zeros(param.shape), jax.eval_shape(net.init, jax.random.key(0), x))
    return net.apply(params, None, x @ w)


def attend_by_equinox(w, x):
    equinox = pytest.importorskip("equinox")
    return equinox.nn.MultiheadAttention(4, 64, key=jax.random.key(0))(x @ w, x, x)


ATTENTION = [attend_by_jax, attend_by_linen, attend_by_nnx, attend_by_haiku, attend_by_equinox]


@pytest.mark.parametrize("attend", ATTENTION)
def test_attention_is_quantized_if_the_format_says_so(attend):
    is_linen = attend is attend_by_linen
    format, dtype = ("float8(recipe=current,min_size=0", "float8_e4m3fn") if is_linen else ("int8", "int8")

    def count_matmuls(attention):
        text = f"{format}{',' if '(' in format else '('}attention={attention})_from_mixed_bfloat16"
        fun = autocast(attend, text, weights=0)
        steps = [step.eqn for step in walk(jax.make_jaxpr(fun)(W, X).jaxpr) if step.name == "dot_general"]
        return sum(all(str(atom.aval.dtype) == dtype for atom in eqn.invars) for eqn in steps)

    assert (count_matmuls("false"), count_matmuls("true")) == (1, 3)


def count_int8(fun, *args):
    return sum(dtype == "int8" for _, dtype in products(jax.make_jaxpr(fun)(*args)))


def test_only_attention_without_a_rule_of_its_own_is_quantized():
    attend = lambda w, x: (jnp.einsum("bqhd,bkhd->bhqk", split_heads(x @ w), split_heads(x)), attend_by_jax(w, x))
    policy = "int8(attention=true)_from_mixed_bfloat16"
    left_out = autocast(jax.named_scope("half")(attend), PolicyMap({"half": "mixed_bfloat16"}, policy), weights=0)
    assert count_int8(autocast(attend, policy, weights=0), W, X) == 2 + 2
    assert count_int8(left_out, W, X) == 0


def test_a_rule_quantizes_the_attention_of_a_scope():
    inside = jax.named_scope("attention")(attend_by_jax)
    policy = PolicyMap({"attention": "int8(attention=true)_from_mixed_bfloat16"}, "int8_from_mixed_bfloat16")
    fun = autocast(lambda w, x: inside(w, x) + attend_by_jax(w, x), policy, weights=0)
    assert count_int8(fun, W, X) == 3 + 1


def scan(body, *args, **options):
    return jax.lax.scan(body, *args, **options)[0]


WAYS = {
    "transpose": (lambda w, x: x @ w.T, W),
    "cast": (lambda w, x: x @ w.astype(jnp.bfloat16).astype(jnp.float32), W),
    "slice": (lambda w, x: x @ w[1], STACK),
    "dynamic slice": (lambda w, x: x @ jax.lax.dynamic_index_in_dim(w, x[0, 0].astype(int), keepdims=False), STACK),
    "taken": (lambda w, x: x @ jnp.take(w, x[0, 0].astype(int), axis=0), STACK),
    "times one": (lambda w, x: x @ (1.0 * w), W),
    "rows that nothing reads": (lambda w, x: (w[x[:, 0].astype(int)], x @ w)[1], W),
    "split": (lambda w, x: x @ jnp.split(w, 2)[0][0], STACK),
    "left operand": (lambda w, x: w @ x.T, W),
    "einsum": (lambda w, x: jnp.einsum("bd,hdk->bhk", x, w), STACK),
    "scanned": (lambda w, x: scan(lambda x, w: (x @ w, None), x, w), STACK),
    "carried": (lambda w, x: scan(lambda c, _: ((c[0] @ c[1], c[1]), None), (x, w), length=2)[0], W),
    "rotated": (lambda w, x: scan(lambda c, w: ((c[0] @ c[1], w), None), (x, w[0]), w)[0], STACK),
    "while": (lambda w, x: jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ w, x), W),
    "branch": (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x, w), W),
    "jit": (jax.jit(lambda w, x: x @ jax.jit(jnp.transpose)(w)), W),
    "remat": (jax.checkpoint(lambda w, x: x @ w), W),
    "ragged": (RAGGED["plain"][0], EXPERTS),
    "vmap": (jax.vmap(lambda w, x: w @ x, (None, 0)), W),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_is_followed(way):
    fun, w = WAYS[way]
    quantized = autocast(fun, POLICY, weights=0)
    assert is_int8(quantized, w, X)
    assert list_quantization(quantized, w, X) == {"0": "int8"}


def test_transformations_work_around_it():
    quantized = autocast(lambda w, x: x @ w, POLICY, weights=0)
    assert is_int8(jax.jit(lambda w, x: jax.jit(quantized)(w, jnp.float32(quantized(w, x)))), W, X)
    assert is_int8(jax.vmap(quantized, (0, None)), STACK, X)
    assert is_int8(jax.grad(lambda w: jax.checkpoint(quantized)(w, X).astype(jnp.float32).sum()), W)


@pytest.mark.parametrize(
    ("multiply", "check_vma"),
    [(lambda w, x: x @ w, True), (lambda w, x: jax.lax.ragged_dot(x, w[None], ROWS[:1] + 11), False)],
)
def test_a_shard_map_is_entered(check_vma, multiply):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data"), "check_vma": check_vma}
    inside = jax.shard_map(autocast(multiply, POLICY, weights=0), mesh=mesh, **specs)
    around = autocast(jax.shard_map(multiply, mesh=mesh, **specs), POLICY, weights=0)
    for fun in (inside, around):
        assert is_int8(jax.grad(lambda w, fun=fun: fun(w, X).astype(jnp.float32).sum()), W)


def opaque(w, x):
    return x @ w


LOSSY = jax.custom_vjp(opaque)
LOSSY.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, grad: (kept[1].T @ grad, grad @ kept[0].T))
TANGENT = jax.custom_jvp(opaque)
TANGENT.defjvp(lambda primals, tangents: (TANGENT(*primals), primals[1] @ tangents[0] + tangents[1] @ primals[0]))


@pytest.mark.parametrize("fun", [LOSSY, TANGENT], ids=["custom_vjp", "custom_jvp"])
def test_a_custom_derivative_is_opaque_unless_asked(fun):
    also = lambda w, x: fun(w["inside"], x) + x @ w["outside"]
    both, default = {"inside": W, "outside": W}, autocast(also, POLICY, weights=0)
    found = list_quantization(default, both, X)
    assert "custom_rules='inside' quantizes its forward pass" in found["0/inside"]
    assert found["0/outside"] == "int8"
    inside = autocast(fun, POLICY, weights=0, custom_rules="inside")
    assert is_int8(inside, W, X)
    assert is_int8(jax.grad(lambda w: inside(w, X).sum()), W)  # the rule's own forward pass, too


REASONS = {
    "both operands are weights": lambda w, x: x @ (w["other"] @ w["own"]),
    "mul reads it": lambda w, x: x @ (w["own"] * 2),
    "64 elements are fewer than min_size=4096": lambda w, x: x[:, :8] @ w["own"][:8, :8],
    "it is multiplied as a vector": lambda w, x: x @ w["own"][0],
    "it does not run in the compute dtype": force_full_precision(lambda w, x: x @ w["own"]),
    "a rule leaves it out": jax.named_scope("half")(lambda w, x: x @ w["own"]),
    "the rows of a table are read": lambda w, x: w["own"][x[:, 0].astype(int)] @ w["own"],
    "it is the input of a convolution": lambda w, x: jax.lax.conv(w["own"][None, None], x[None, None], (1, 1), "SAME"),
    "it is not a matrix for each group of rows": lambda w, x: jax.lax.ragged_dot(w["own"], x[None].mT, jnp.array([64])),
    "nothing reads it": lambda w, x: x,
}


@pytest.mark.parametrize("reason", REASONS)
def test_an_explanation_says_why_a_weight_is_left(reason):
    fun = lambda w, x: (REASONS[reason](w, x), x @ w["other"])
    policy = PolicyMap({"half": "mixed_bfloat16"} if reason == "a rule leaves it out" else {}, POLICY)
    found = list_quantization(autocast(fun, policy, weights=0), {"own": W, "other": W}, X)
    assert found["0/own"].startswith(f"left: {reason}")
    assert found["0/other"] == ("int8" if reason != "both operands are weights" else f"left: {reason}; int8")


def test_a_carried_weight_that_changes_is_left():
    body = lambda c, _: ((c[0] @ c[1], c[1] * 2), None)
    fun = autocast(lambda w, x: scan(body, (x, w[0]), length=2)[0] + x @ w[1], POLICY, weights=(0,))
    found = list_quantization(fun, (W, W), X)
    assert found == {"0/0": "left: a loop carries it and changes it", "0/1": "int8"}
    assert count_int8(fun, (W, W), X) == 1


def test_a_predicate_and_several_numbers_choose_weights():
    fun = lambda x, first, *, params: x @ first + x @ params["kernel"] + x @ params["other"]
    call = lambda weights: lambda x: autocast(fun, POLICY, weights=weights)(x, W, params={"kernel": W, "other": W})
    choose = lambda weights: count_int8(call(weights), X)
    assert choose(1) == choose([1]) == choose(lambda path: path == "params/kernel") == choose((1,)) == 1
    assert choose(lambda path: path in ("1", "params/other")) == 2


def test_a_decorator_takes_weights():
    @autocast(POLICY, weights=0)
    def apply(w, x):
        return x @ w

    assert is_int8(apply, W, X)
    assert list_quantization(jax.jit(apply), W, X) == {"0": "int8"}


def test_explain_of_a_function_without_weights_is_refused():
    with pytest.raises(TypeError, match=r"^explain takes a Flax module, got"):
        explain(autocast(opaque, "mixed_bfloat16", weights=0), W, X)


def test_an_explicit_mesh_keeps_shardings():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        out = jax.eval_shape(autocast(opaque, POLICY, weights=0), W, x)
    assert out.sharding.spec == jax.P("data", None)


@pytest.mark.slow
def test_a_second_eager_call_compiles_nothing():
    step = lambda x, w: (x @ w, None)
    fun = autocast(lambda w, x: scan(step, x, w), POLICY, weights=0)
    fun(STACK, X)
    with compiles() as count:
        fun(STACK, X)
    assert count == [0]


@pytest.mark.slow
def test_tied_weights_are_one_weight():
    tied = jax.jit(jax.grad(lambda w: square(autocast(lambda w, x: x @ w @ w.T, POLICY, weights=0), w, X)))(W)
    untied = lambda w, x: autocast(lambda a, b, x: x @ a @ b.T, POLICY, weights=(0, 1))(w, w, x)
    assert_equal(tied, jax.jit(jax.grad(lambda w: square(untied, w, X)))(W))


@pytest.mark.slow
def test_a_left_operand_has_the_bits_of_a_right_one():
    w, x = jax.random.normal(jax.random.key(0), (64, 128)), jax.random.normal(jax.random.key(1), (16, 64))
    left = jax.jit(autocast(lambda w, x: (w.T @ x.T).T, POLICY, weights=0))(w, x)
    assert_equal(left, jax.jit(autocast(lambda w, x: x @ w, POLICY, weights=0))(w, x))


@pytest.mark.parametrize(
    ("fun", "weights", "message"),
    [
        (lambda w, x: x @ (w * 2), 0, r"weights=0 reaches no .* as a weight: '0' \(mul reads it in .*test_weights.py:"),
        (lambda w, x: w[x[:, 0].astype(int)], 0, r"weights=0 reaches .*: '0' \(the rows of a table are read"),
        (LOSSY, 0, r"weights=0 reaches .* custom_rules='inside'"),
        (opaque, 2, "weights=2 reaches .*: it names no floating array; the first paths are '0', '1'. For example:"),
        (opaque, lambda path: "kernel" in path, "weights reaches .*: it names no floating array; the first paths"),
    ],
)
def test_an_argument_that_reaches_no_matmul_is_refused(fun, weights, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(autocast(fun, POLICY, weights=weights), W, X)


def test_weights_that_blocks_do_not_divide_are_padded():
    w, x = jnp.sin(jnp.arange(12800.0)).reshape(200, 64), jnp.ones((16, 200))
    fun = autocast(lambda w, x: x @ w, "int4_from_float32", weights=0)
    assert (fun(w, x) == x @ quant.quantize_array(w, "int4").dequantize()).all()


def test_a_gradient_inside_is_warned_of():
    fun = autocast(jax.grad(lambda w, x: ((x @ w) ** 2).sum()), POLICY, weights=0)
    with pytest.warns(UserWarning, match=r"quantizes the forward pass alone.* write grad\(autocast\(f\)\)"):
        assert is_int8(fun, W, X)


def test_a_policy_without_quantization_ignores_weights():
    plain, named = (autocast(opaque, "mixed_bfloat16", weights=weights) for weights in (None, 0))
    assert str(jax.make_jaxpr(plain)(W, X)) == str(jax.make_jaxpr(named)(W, X))
