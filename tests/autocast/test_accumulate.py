"""Sums in `autocast`: with an `accumulate_dtype`, which nothing rounds, and those of gradients, in float32 always."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import make_mesh
from programs import trace, walk

import jmp_policy as jmp

PLAIN = "params=float32,compute=bfloat16,output=float32"
WIDE = f"{PLAIN},accumulate=float32"
HALF = "(tensor<bf16>, tensor<bf16>) -> tensor<f32>"


def draw(*shape, scale=1.0):
    """Numbers of bfloat16, in float32: rounding them loses nothing."""
    numbers = np.random.default_rng(shape).normal(size=shape) * scale
    return jnp.asarray(numbers, jnp.bfloat16).astype(jnp.float32)


def make_weights():
    shapes = {"up": (16, 32), "down": (32, 16), "head": (16, 24)}
    return {name: draw(*shape, scale=shape[0] ** -0.5) for name, shape in shapes.items()} | {"bias": draw(32)}


X = draw(4, 8, 16)
SCALE = 4.0


def mlp(w, x):
    hidden = jax.nn.gelu(x @ w["up"] + w["bias"])
    return jax.nn.log_softmax((hidden @ w["down"] + x) @ w["head"])


def attention(w, x):
    q = k = (x @ w["up"]).reshape(4, 8, 2, 16)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / SCALE
    weights = jax.nn.softmax(jnp.where(jnp.tri(8, dtype=bool), scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, q).reshape(4, 8, 32) @ w["down"]


def convolution(w, x):
    kernel = w["up"][:, :18].reshape(3, 3, 4, 8)
    images = jax.lax.conv_general_dilated(
        x.reshape(4, 4, 8, 4), kernel, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(images) ** 2


def looped(w, x):
    def turn(x, _):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], x[0, 0, 0]

    return jax.lax.scan(turn, x, None, length=3)[0] @ w["head"]


FUNCTIONS = (mlp, attention, convolution, looped)


def sum_of(fun):
    return lambda *args: jnp.sum(fun(*args) * 0.5)


def gradients(fun, policy):
    """Both ways to the gradient: of what autocast made, and made by autocast."""
    return {
        "outside": jax.grad(sum_of(jmp.autocast(fun, policy)), (0, 1)),
        "inside": jmp.autocast(jax.grad(sum_of(fun), (0, 1)), policy),
    }


def in_float64(fun, *args):
    with jax.enable_x64(True):
        return fun(*jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), args))


def error(found, true):
    """How far a tree of arrays is from another one, relative to that."""
    found, true = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]) for tree in (found, true)
    )
    return np.linalg.norm(found - true) / np.linalg.norm(true)


def is_rounded(x):
    """Whether an array consists of numbers of bfloat16."""
    return np.array_equal(x, x.astype(jnp.bfloat16).astype(jnp.float32))


def products(fun, *args, platform):
    """How often each kind of product stands in the StableHLO for a platform."""
    text = jax.export.export(jax.jit(fun), platforms=[platform])(*args).mlir_module()
    found = re.findall(r"stablehlo\.(?:dot_general|convolution).*: (\(.*\) -> \S+)", text)
    return collections.Counter(re.sub(r"(\d+x)+", "", kind) for kind in found)


@pytest.mark.slow
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_every_product_has_half_operands_and_sums_in_float32(fun):
    w = make_weights()
    for platform in ("cuda", "tpu"):
        for grad in gradients(fun, WIDE).values():
            assert set(products(grad, w, X, platform=platform)) == {HALF}


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_logits_and_the_gradient_of_their_weight_are_within_1e4_of_float64(compute):
    x, w, bias, cotangent = draw(16, 256), draw(256, 100, scale=1 / 16), draw(100), draw(16, 100)
    head = lambda w, x, bias=bias: x @ w + bias
    policy = f"params=float32,compute={compute},output=float32"
    true = np.asarray(in_float64(head, w, x, bias))
    weight_grad = lambda head: jax.grad(lambda w: jnp.sum(head(w, x) * cotangent))(w)
    true_grad = np.asarray(x, np.float64).T @ np.asarray(cotangent, np.float64)
    for accumulate, bound in (("", None), (",accumulate=float32", 1e-4)):
        fun = jmp.autocast(head, policy + accumulate)
        errors = [np.abs(np.asarray(fun(w, x)) - true).max(), np.abs(np.asarray(weight_grad(fun)) - true_grad).max()]
        if bound is None:
            assert min(errors) > 1e-3
        else:
            assert max(errors) < bound


SIZES = (5, 0, 8, 3)


def multiply_experts(w, x):
    return jax.lax.ragged_dot(x, w, jnp.array(SIZES))


def multiply_transposed_experts(w, x):
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, jnp.swapaxes(w, 1, 2), jnp.array(SIZES), numbers)


@pytest.mark.parametrize(
    ("fun", "policy", "sums", "precision"),
    [(multiply_experts, PLAIN, "bf16", None), (multiply_transposed_experts, WIDE, "f32", "highest")],
)
def test_experts_have_half_operands_and_sums_in_the_accumulate_dtype(fun, policy, sums, precision):
    for platform in ("tpu", "cuda"):
        with jax.default_matmul_precision(precision):
            grad = jax.jit(jax.value_and_grad(sum_of(jmp.autocast(fun, policy)), (0, 1)))
            text = jax.export.export(grad, platforms=[platform])(draw(4, 8, 24), draw(16, 8)).mlir_module()
        calls = [line for line in text.splitlines() if 'composite "chlo.ragged_dot"' in line]
        types = [re.findall(r"tensor<[0-9x]+x(\w+)>", line.rpartition(" : ")[2]) for line in calls]
        assert [(left, right, out) for left, right, _, out in types] == [("bf16", "bf16", sums)] * 3


@pytest.mark.slow
def test_sums_of_experts_and_their_gradients_are_within_1e4_of_float64():
    w, x, cotangent = draw(4, 256, 24, scale=1 / 16), draw(16, 256), draw(16, 24)
    fun = jmp.autocast(multiply_experts, WIDE)
    out, pull = jax.jit(lambda w, x: jax.vjp(fun, w, x))(w, x)
    rows = [np.asarray(part, np.float64) for part in np.split(np.asarray(x), np.cumsum(SIZES)[:-1])]
    grads = [np.asarray(part, np.float64) for part in np.split(np.asarray(cotangent), np.cumsum(SIZES)[:-1])]
    matrices = [*np.asarray(w, np.float64)]
    true = np.concatenate([part @ matrix for part, matrix in zip(rows, matrices, strict=True)])
    true_x = np.concatenate([part @ matrix.T for part, matrix in zip(grads, matrices, strict=True)])
    true_w = np.stack([part.T @ grad for part, grad in zip(rows, grads, strict=True)])
    for found, expected in zip((out, *pull(cotangent)), (true, true_w, true_x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert not is_rounded(out)


@pytest.mark.slow
def test_without_an_accumulate_dtype_the_program_is_what_it_was():
    """As it is with the compute dtype for one, which says what holds anyway."""
    w = make_weights()
    for fun in FUNCTIONS:
        text = {str(jax.make_jaxpr(jmp.autocast(fun, f"{PLAIN}{more}"))(w, X)) for more in ("", ",accumulate=bfloat16")}
        assert len(text) == 1
        assert "custom_vjp_call" not in text.pop()


def primitives(fun, *args):
    return [(step.name, str(step.results[0].aval.dtype)) for step in walk(jax.make_jaxpr(fun)(*args).jaxpr)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("follow", "kept"),
    [
        (lambda y: y + 1.5, True),
        (lambda y: y - jax.nn.logsumexp(y), True),
        (lambda y: y + jnp.cumsum(y, 1), True),
        (lambda y: y + y[:1], False),
        (lambda y: y.reshape(2, 2, 8, 24).transpose(1, 0, 2, 3), True),
        (lambda y: y * 0.3, True),
        (lambda y: jnp.where(y[0, 0, 0] > 0, y, -1e30), True),
        (lambda y: jnp.concatenate([y, y * 3]), True),
        (jnp.exp, True),
        (jax.nn.log_softmax, True),
        (jnp.tanh, False),
        (lambda y: 3.0 / y, False),
        (lambda y: checkpoint_name(y, "kept"), False),
    ],
)
def test_what_follows_reads_the_sums_as_they_are_or_rounded(follow, kept):
    w = make_weights()
    found = jmp.autocast(lambda w, x: follow(x @ w["head"]), WIDE)(w, X)
    exact = follow(jnp.matmul(X, w["head"], precision="highest"))
    assert found.dtype == jnp.float32
    assert (error(found, exact) < 1e-6) == kept


def test_a_sigmoid_that_a_logarithm_reads_stays_in_float32():
    loss = lambda w, x: -jnp.log(1 - jax.nn.sigmoid(x @ w))
    w, x = jnp.full((4, 1), 2.0), jnp.ones((1, 4))
    assert np.isfinite(jmp.autocast(loss, WIDE)(w, x)).all()


@pytest.mark.slow
def test_a_rule_for_the_head_alone_gives_logits_that_were_never_rounded():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(24, name="head")(nn.gelu(nn.Dense(32, name="body")(x)))

    net = Net()
    params = net.init(jax.random.key(0), X)
    fun = lambda rules: jmp.autocast(lambda params, x: net.apply(params, x), rules)
    rules = jmp.PolicyMap({"head": WIDE}, PLAIN)
    assert is_rounded(fun(PLAIN)(params, X))
    assert not is_rounded(fun(rules)(params, X))
    made = [dtype for name, dtype in primitives(fun(rules), params, X) if name == "dot_general"]
    assert made == ["bfloat16", "float32", "float32"]  # of the head, one for a CPU and one for others
    # Elsewhere than in the head, too, if the policy says so, and not there, if its rule does.
    assert not is_rounded(fun(WIDE)(params, X))
    assert is_rounded(fun(jmp.PolicyMap({"head": PLAIN}, WIDE))(params, X))


def test_a_rule_may_say_another_compute_dtype_and_nothing_of_sums():
    half = lambda x, w: jax.named_scope("half")(jnp.matmul)(x, w)
    rules = jmp.PolicyMap({"half": "params=float32,compute=float16,output=none"}, WIDE)
    names = primitives(jmp.autocast(half, rules), X, draw(16, 24))
    assert [dtype for name, dtype in names if name == "dot_general"] == ["float16"]


@pytest.mark.slow
def test_half_models_hand_over_their_sums_too():
    fun = lambda w, x: (x @ w).astype(jnp.float32)
    w, x = draw(16, 24).astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    assert is_rounded(jmp.autocast(fun, PLAIN)(w, x))
    assert not is_rounded(jmp.autocast(fun, WIDE)(w, x))
    found = jax.grad(lambda w: jmp.autocast(fun, WIDE)(w, x).sum())(w)
    assert found.dtype == jnp.bfloat16


@pytest.mark.slow
def test_there_is_no_forward_mode_outside():
    w = make_weights()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(functools.partial(jmp.autocast(mlp, WIDE), x=X), (w,), (w,))
    inside = jmp.autocast(lambda w: jax.jvp(functools.partial(mlp, x=X), (w,), (w,))[1], WIDE)
    assert inside(w).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "inside"), [("Auto", False), ("Explicit", True)])
def test_gradients_are_those_of_one_device_in_shard_map(kind, inside):
    mesh = make_mesh((2,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    w = make_weights()
    one = jmp.autocast(sum_of(mlp), WIDE) if inside else sum_of(mlp)
    with jax.set_mesh(mesh):
        args = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("data")))
        many = jax.shard_map(
            lambda w, x: jax.lax.psum(one(w, x), "data"), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        found = jax.jit(jax.grad(many if inside else jmp.autocast(many, WIDE)))(*args)
        assert set(products(jax.grad(many if inside else jmp.autocast(many, WIDE)), *args, platform="tpu")) == {HALF}
    assert error(found, jax.grad(jmp.autocast(sum_of(mlp), WIDE))(w, X)) < 1e-2


@pytest.mark.slow
def test_explicit_axes_shard_the_gradients_as_the_weights():
    mesh = make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    w = make_weights()["up"]
    fun = jmp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), WIDE)
    with jax.set_mesh(mesh):
        args = (
            jax.device_put(w, NamedSharding(mesh, P(None, "model"))),
            jax.device_put(X, NamedSharding(mesh, P("data"))),
        )
        found = jax.jit(jax.grad(fun))(*args)
        assert found.sharding.spec == P(None, "model")
    assert error(found, jax.grad(fun)(w, X)) < 1e-2


def test_loops_carry_and_keep_what_they_carry_and_keep_without():
    w = make_weights()
    kept = lambda policy: [
        sorted((str(var.aval.dtype), var.aval.shape) for var in eqn.outvars)
        for eqn in trace(jmp.autocast(jax.grad(sum_of(looped)), policy))(w, X).eqns
        if eqn.primitive.name == "scan"
    ]
    pairs = list(zip(kept(PLAIN), kept(WIDE), strict=True))
    assert len(pairs) == 2
    for plain, wide in pairs:
        assert sum(dtype == "float32" for dtype, _ in wide) <= sum(dtype == "float32" for dtype, _ in plain)


def test_a_checkpoint_keeps_what_it_is_given_in_half():
    w = make_weights()
    fun = lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x) @ w["down"])(w, x @ w["up"])
    [eqn] = [eqn for eqn in trace(jmp.autocast(fun, WIDE))(w, X).eqns if eqn.primitive.name in ("remat2", "checkpoint")]
    assert "bfloat16" in [str(var.aval.dtype) for var in eqn.invars if var.aval.shape == (4, 8, 32)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:autocast casts no matmul to bfloat16")
def test_rules_for_functions_of_the_user_hold():
    @jax.custom_vjp
    def product(w, x):
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (jnp.einsum("abi,abo->io", r[1], g), g @ r[0].T))
    w = make_weights()["head"]
    fun = lambda w, x: product(w, x) * 2
    opaque, inside = (jmp.autocast(fun, WIDE, custom_rules=rules) for rules in ("opaque", "inside"))
    assert [dtype for name, dtype in primitives(opaque, w, X) if name == "convert_element_type"] == []
    assert not is_rounded(inside(w, X))
    assert jax.grad(lambda w: inside(w, X).sum())(w).dtype == jnp.float32


def test_an_audit_counts_half_products_and_finds_nothing_wrong():
    report = jmp.numerics.audit(jmp.autocast(sum_of(mlp), WIDE))(make_weights(), X)
    assert {row.dtype for row in report.rows if row.operation == "dot_general"} == {"bfloat16"}
    assert "no findings" in str(report)


# The gradient of a weight that is used several times is summed in float32, wherever the derivative is taken.

HALF_POLICY = jmp.Policy("float32", "bfloat16", None)
USES = 64


def loss(weight, x):
    x = x @ weight  # the stream is in half precision
    for _ in range(USES - 1):
        x = x + 0.05 * jnp.tanh(x @ weight)
    return (x**2).mean()


def arguments():
    draw = np.random.default_rng().normal
    return jnp.asarray(draw(size=(8, 8)) / 8, jnp.float32), jnp.asarray(draw(size=(4, 8)), jnp.float32)


def sums(fun, *args):
    eqns = [eqn for eqn in trace(fun)(*args).eqns if eqn.primitive.name == "add_any"]
    return collections.Counter((eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype.name) for eqn in eqns)


@pytest.mark.slow
def test_gradients_of_activations_are_summed_in_half():
    counts = sums(jmp.autocast(jax.grad(loss), HALF_POLICY), *arguments())
    assert counts[(8, 8), "float32"] == USES - 1
    assert counts[(8, 8), "bfloat16"] == 0
    assert counts[(4, 8), "bfloat16"] >= USES - 1
    assert counts[(4, 8), "float32"] == 0


def test_the_gradient_of_logits_is_summed_in_float32_over_the_parts_of_a_loss():
    """Parts that JAX traces as jitted functions of their own: each would cast the logits for itself."""

    def classify(weight, x):
        with jax.numpy_dtype_promotion("standard"):
            return optax.softmax_cross_entropy_with_integer_labels(x @ weight, jnp.arange(4)).mean()

    counts = sums(jax.grad(jmp.autocast(classify, HALF_POLICY)), *arguments())
    assert counts[(4, 8), "float32"] >= 1
    assert counts[(4, 8), "bfloat16"] == 0


def test_an_accumulate_dtype_that_autocast_has_not_is_refused():
    policy = "params=float32,compute=bfloat16,output=float32,accumulate=float64"
    with pytest.raises(
        ValueError, match=r"^autocast cannot accumulate in 'float64', the accumulate dtype of the policy"
    ):
        jmp.autocast(mlp, policy)
    with pytest.raises(ValueError, match=r"cannot accumulate in 'float64'.*for the key 'head' of a PolicyMap"):
        jmp.autocast(mlp, jmp.PolicyMap({"head": policy}, PLAIN))
    with pytest.raises(ValueError, match=r"^autocast cannot accumulate in 'float64'"):  # no dtype to compare it with
        jmp.autocast(mlp, "params=float32,compute=none,output=none,accumulate=float64")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "params=float32,compute=bfloat16,output=none,accumulate=float32"])
def test_a_matmul_by_complex_numbers_runs_as_traced(policy):
    w, z = jax.random.normal(jax.random.key(0), (4, 3)), jnp.ones((2, 4), jnp.complex64) * (1 + 2j)
    product = lambda w, z: jax.lax.dot_general(z, w, (((1,), (0,)), ((), ())))
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(jmp.autocast(product, policy)(w, z), product(w, z))
