"""What `NonfiniteOrigin.describe` suggests fits: poles, derivatives at zero, guards, indices, single operations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.experimental import pallas as pl
from jax.scipy.special import digamma
from jax.scipy.stats import uniform
from programs import walk

import jmp_policy as jmp

# The roles of operations, without compiling a search for each.
from jmp_policy.numerics._remedies import Words, find_op_roles, find_remedy, read_words, write_words

ZERO = np.array([0.0, 2.0], np.float32)
W = np.arange(9, dtype=np.float32).reshape(3, 3)
SYMMETRIC, ONES, HALF = W + W.T, np.ones((3, 2), np.float32), np.float16


def grad_of(fun):
    return jax.grad(lambda x: jnp.sum(fun(x)))


def describe(fun, *args):
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(jmp.numerics.first_nonfinite(fun))(*args)[1].describe()


def call_on_host(x):
    return jax.pure_callback(lambda x: np.float32([np.inf, 1]), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def run_kernel(x):
    def kernel(given, out):
        out[...] = jnp.log(given[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


SUGGESTIONS = {
    "half power of abs at zero": (grad_of(lambda x: jnp.abs(x) ** 0.5), ZERO, "of a power of 0.5. Keep the base"),
    "half power of abs, times zero": (grad_of(lambda x: jnp.abs(x * 0) ** 0.5), ZERO, "0.5. Keep the base"),
    "density outside of its support": (uniform.logpdf, ZERO + 5, "of a function outside of its domain"),
    "variance of one element": (lambda x: jnp.var(x, ddof=1), ZERO[:1], "returns nan for these arguments"),
    "half power of abs in float16": (grad_of(lambda x: jnp.abs(x) ** 0.5), ZERO.astype(HALF), "0.5. Keep the base"),
    "a negative power in float16": (lambda x: x**-0.5, ZERO.astype(HALF), "Keep the base away from zero"),
    "an inverse": (lambda x: x**-1, ZERO, "Keep the base away from zero"),
    "elu by where": (grad_of(lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1)), ZERO * 50, "A branch of a `jnp.where`"),
    "sqrt at zero": (grad_of(jnp.sqrt), ZERO, "derivative of a square root, which is infinite at zero. Add an epsilon"),
    "norm at zero": (jax.grad(jnp.linalg.norm), ZERO[:1], "`jnp.sqrt(jnp.sum(x * x) + 1e-6)`"),
    "gradient of log at zero": (grad_of(lambda x: x * jnp.log(x)), ZERO, "the derivative of a logarithm, which is inf"),
    "gradient of an angle": (
        jax.value_and_grad(lambda x: jnp.sum(jnp.arccos(jnp.clip(x, -1, 1)))), ZERO + 5, "of an arccosine or arcsine"
    ),
    "cast to float8": (
        lambda x: x.astype(jnp.float8_e4m3fn), np.float32([700]), "float8_e4m3fn ends at 448: scale the values first"
    ),
    "digamma at zero in float16": (digamma, ZERO.astype(HALF), "poles at zero and at the negative integers"),
    "solution of a singular system": (lambda a: jnp.linalg.solve(a, jnp.ones(2)), ONES[:2], "The matrix is singular"),
    "eigenvectors of equal eigenvalues in a batch": (
        grad_of(lambda a: jax.vmap(jnp.linalg.eigh)(a)[1] * W), np.stack([SYMMETRIC, np.eye(3)]), "`jnp.linalg.eigvalsh"
    ),
    "singular vectors of equal values": (
        grad_of(lambda a: jnp.linalg.svd(a)[0] * W), np.eye(3, dtype=np.float32), "where two singular values are equal"
    ),
    "singular vectors of value zero": (
        grad_of(lambda a: jnp.linalg.svd(a)[0] * W), np.diag(np.float32([2, 0, 0])), "or one is zero"
    ),
    "zero by a sum of zeros in float16": (
        lambda x: x / x.sum(), np.zeros(2, HALF), "Dividend and divisor are both zero. Choose the result for this case"
    ),
    "gradient of zero by zero in a branch": (
        grad_of(lambda x: jnp.where(x != 0, jnp.sin(x) / x, 1.0)), ZERO, "This is the derivative of a division"
    ),
    "take out of bounds": (lambda x: jnp.take(x, jnp.array([0, 5])), ZERO, "An index is out of bounds"),
    "callback": (call_on_host, ZERO, "its function on the host made it from finite operands"),
    "pallas kernel": (run_kernel, ZERO, "its kernel made it from finite operands"),
    "erf_inv at its end in float16": (
        jax.scipy.special.erfinv, np.ones(1, HALF), "Keep its operand strictly between -1 and 1"
    ),
}  # fmt: skip
QUICK = (
    "half power of abs at zero",
    "half power of abs, times zero",
    "sqrt at zero",
    "zero by a sum of zeros in float16",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUGGESTIONS]
)
def test_the_suggestion_fits_the_operation(name):
    fun, x, expected = SUGGESTIONS[name]
    text = describe(fun, x)
    assert expected in text
    assert not any(words in text for words in ("too large", "subtract the largest", "the divisor", "ends at 65504"))


@pytest.mark.slow
def test_an_exponential_without_a_softmax_and_a_gradient_without_a_loss_scale_have_a_fix():
    assert "Otherwise bound its operand, with `jnp.minimum`" in describe(lambda x: jnp.exp(x * 100), ZERO)
    text = describe(grad_of(lambda x: x.astype(HALF).astype(np.float32) * 1e9), ZERO)
    assert text.endswith("Without a loss scale, or with one of 1, keep this in float32: `jmp.force_full_precision`.")


@pytest.mark.slow
@pytest.mark.parametrize("power", [2, 2.5])
def test_a_power_of_large_numbers_is_too_large_and_not_at_a_pole(power):
    assert "too large for float32" in describe(lambda x: x**power, np.float32([0.0, 1e30]))
    text = describe(lambda x: x**power, np.float16([0.0, 300.0]))
    assert "Keep this in float32" in text
    assert "away from zero" not in text


@pytest.mark.slow
def test_the_square_of_a_scaled_gradient_is_part_of_the_search_for_a_scale():
    """The gradient of this function is a square of what comes in, times the loss scale."""
    squared = jax.custom_vjp(lambda x: x)
    squared.defvjp(lambda x: (x, None), lambda _, g: (g**2,))

    def loss_fn(params):
        return jnp.sum(jnp.arange(2.0) * squared(params.astype(jnp.float16)).astype(jnp.float32))

    tx = jmp.optim.loss_scaled(optax.sgd(0.0), jmp.DynamicLossScale(2.0**9))
    skip = jmp.optim.find_origin(loss_fn, tx)(jnp.ones(2), tx.init(jnp.ones(2)))
    assert skip is not None
    assert skip.is_search


@pytest.mark.slow
def test_what_is_suggested_for_degenerate_matrices_and_zeros_has_finite_gradients():
    apart = lambda decompose: grad_of(lambda a: decompose(a + jnp.diag(1e-3 * jnp.arange(3.0)))[1] * W)
    gradients = [apart(jnp.linalg.eigh), apart(jnp.linalg.svd), grad_of(jnp.linalg.eigvalsh)]
    quotient = lambda x: jnp.where(x != 0, jnp.sin(x) / jnp.where(x != 0, x, 1.0), 1.0)
    assert all(np.isfinite(gradient(np.eye(3, dtype=np.float32))).all() for gradient in gradients)
    assert np.isfinite(grad_of(quotient)(ZERO)).all()


def test_an_overflow_whose_reciprocal_is_the_zero_of_a_logarithm_is_its_cause():
    def fun(x):
        return jnp.log(jnp.sum(1 / jnp.sqrt(jnp.sum(x * x, dtype=jnp.float16))))

    _, found = jax.jit(jmp.numerics.first_nonfinite(fun))(np.full(64, 100, np.float16))
    assert (found.kind, found.primitive, found.cause.kind, found.cause.primitive) == ("inf", "log", "inf", "reduce_sum")
    text = found.describe()
    assert "Its zero is the reciprocal of an earlier infinity. An infinity was made by reduce_sum" in text
    assert "Keep this in float32" in text


@pytest.mark.slow
def test_the_turn_in_which_a_vanished_infinity_was_made_is_told():
    def body(carry, x):
        return carry + jax.lax.rsqrt(jnp.exp(x)), None

    fun = lambda xs: jnp.log(jax.lax.scan(body, jnp.float32(0), xs)[0])
    for turns in (3, 80):  # with rows of their own, and without
        xs = np.full(turns, 200, np.float32)
        _, found = jax.jit(jmp.numerics.first_nonfinite(fun))(xs)
        assert (found.primitive, found.cause.primitive) == ("log", "exp")
        assert len(found.cause.turns) == 1


@pytest.mark.slow
def test_a_mask_whose_exponential_is_the_zero_of_a_logarithm_is_no_cause():
    fun = lambda x: jnp.log(jnp.sum(jnp.exp(jnp.where(x > 9, x, -jnp.inf))))
    _, found = jax.jit(jmp.numerics.first_nonfinite(fun))(ZERO)
    assert (found.primitive, found.cause) == ("log", None)


def list_roles(fun, *args):
    program = jax.make_jaxpr(fun)(*args).jaxpr
    roles = find_op_roles(program)
    names = {}
    for step in walk(program):
        if id(step.eqn) in roles:
            names.setdefault(roles[id(step.eqn)], set()).add(step.name)
    return names


ROLES = {
    "sqrt": (grad_of(jnp.sqrt), ZERO, {"sqrt": {"div"}}),
    "sqrt in jit": (grad_of(jax.jit(jnp.sqrt)), ZERO, {"sqrt": {"div"}}),
    "log": (grad_of(jnp.log), ZERO, {"log": {"div"}}),
    "cbrt": (grad_of(jnp.cbrt), ZERO, {"cbrt": {"integer_pow"}}),
    "a divisor": (lambda x: 0.5 / jnp.sqrt(x), ZERO, {}),
    "div": (grad_of(lambda x: x / (x + 1)), ZERO, {"div": {"integer_pow"}}),
    "its own": (lambda x: x / x, ZERO, {}),
    "a power": (grad_of(lambda x: x**-2), ZERO, {}),
    "log of exp": (lambda x: jnp.log(jnp.sum(jnp.exp(x))), ZERO, {}),
}


@pytest.mark.parametrize("name", ROLES)
def test_derivatives_with_a_pole_at_zero_have_the_role_of_their_function(name):
    fun, x, expected = ROLES[name]
    assert list_roles(fun, x) == expected


def test_only_what_a_decomposition_or_a_branch_uses_has_its_role():
    assert "eigh" not in list_roles(grad_of(lambda a: 1 / jnp.linalg.eigvalsh(a)), SYMMETRIC)
    assert "svd" not in list_roles(lambda a: jnp.sum(1 / jnp.linalg.svd(a, compute_uv=False)), SYMMETRIC)
    assert "svd" in list_roles(grad_of(lambda a: jnp.linalg.svd(a)[0]), SYMMETRIC)
    assert "exp" in list_roles(lambda x: jnp.where(x > 0, x, 2 * (jnp.exp(x) - 1)), ZERO)["where"]
    assert "exp" not in list_roles(lambda x: jnp.exp(jnp.where(x > 0, 0.0, x)), ZERO)["where"]


def test_a_constant_that_made_a_nan_may_be_a_mask():
    assert "A softmax over only masked values is nan" in find_remedy(Words(argument="a constant"), "inf", [], "forward")
    assert "choose the results to check" in find_remedy(Words(argument="a constant"), "inf", [])


def test_a_guard_is_suggested_only_for_an_infinity_that_did_harm_elsewhere():
    words = Words("exp", dtype="float16", role="where")
    assert "Guard the input" in find_remedy(words, "inf", [(-1.0, 20.0)], "backward")
    assert "float16 ends at 65504" in find_remedy(words, "inf", [(-1.0, 20.0)], "forward")
    assert "float16 ends at 65504" in find_remedy(words, "inf", [(-1.0, 20.0)])


def test_a_smaller_loss_scale_is_suggested_on_condition_that_there_is_one():
    words = Words("mul", dtype="float16", path="norm", direction="backward")
    assert "If a loss scale multiplies the gradients, start" in find_remedy(words, "inf", [(1e4, 1e4), (8.0, 8.0)])


def test_size_is_blamed_only_where_an_operand_is_large_or_the_operation_adds():
    suggest = lambda name, *operands: find_remedy(Words(name, dtype="float32"), "inf", operands)
    assert "too large for float32" in suggest("reduce_sum", (1.0, 1.0))
    assert "too large for float32" in suggest("bessel_i0e", (1.0, 1e30))
    assert "None of its operands is large" in suggest("bessel_i0e", (0.0, 2.0))
    assert suggest("bessel_i0e", None) == ""
    assert "too large for float32" in suggest("lgamma", (3.0, 1e38))


def test_a_role_is_read_back_and_a_text_that_was_saved_without_one_has_none():
    words = Words("div", path="a" * 200, argument="b" * 200, role="sqrt")
    assert read_words(write_words(words)).role == "sqrt"
    saved = b"\0".join([b"div", b"s" * 160, b"f" * 48, b"c" * 96, b"p" * 128, b"forward", b"float16", b"a" * 112])
    text = np.frombuffer(saved.ljust(write_words(words).size, b"\0"), np.uint8)
    assert (read_words(text).argument, read_words(text).role) == ("a" * 112, "")


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(3, 3, kernel_init=nnx.initializers.constant(1e5), rngs=rngs)

    @jax.named_scope("feed_forward")
    def __call__(self, x):
        return self.up(x)


class LinenMLP(nn.Module):
    @nn.compact
    @jax.named_scope("feed_forward")
    def __call__(self, x):
        return nn.Dense(3, kernel_init=nn.initializers.constant(1e5), name="up")(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.mlp = NnxMLP(rngs)

    def __call__(self, x):
        with jax.named_scope("around"):
            return self.mlp(x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        with jax.named_scope("around"):
            return LinenMLP(name="mlp")(x)


@pytest.mark.parametrize("by", ["with_policy", "autocast"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_suggested_map_is_accepted_and_helps_in_named_scopes(api, by):
    def find(policy):
        model = NnxNet(nnx.Rngs(0)) if api == "nnx" else LinenNet()
        given = model if api == "nnx" else model.init(jax.random.key(0), ONES.T)
        attached = jmp.with_policy(model, policy) if by == "with_policy" else model
        if api == "nnx":
            run, given = lambda model, x: model(x), attached
        else:
            run = attached.apply
        run = run if by == "with_policy" else jmp.autocast(run, policy)
        return jmp.numerics.first_nonfinite(run)(given, ONES.T)[1]

    origin = find(policy := jmp.get_policy("params=float32,compute=float16,output=float32"))
    assert origin.path.startswith("around/mlp/feed_forward")
    suggested = re.search(r"PolicyMap\(.*?, policy\)", origin.describe())
    fixed = find(eval(suggested[0], {"PolicyMap": jmp.PolicyMap, "policy": policy}))  # a rule without effect warns
    assert not fixed.found


class NnxWrap(nnx.Module):
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


class LinenWrap(nn.Module):
    inner: nn.Module

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_suggested_key_begins_at_the_module_that_has_the_policy(api):
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    if api == "nnx":
        run, given = lambda model, x: model(x), NnxWrap(jmp.with_policy(NnxNet(nnx.Rngs(0)), policy))
    else:
        model = LinenWrap(jmp.with_policy(LinenNet(), policy))
        run, given = model.apply, model.init(jax.random.key(0), ONES.T)
    text = jmp.numerics.first_nonfinite(run)(given, ONES.T)[1].describe()
    assert "`PolicyMap({'mlp/up': 'float32'}, policy)`" in text


def test_no_map_is_suggested_where_no_key_reaches_the_module():
    find = lambda path: find_remedy(Words("mul", dtype="float16", key=path), "inf", [(0.0, 4e4), (0.0, 2.0)])
    assert "Keep this in float32: `PolicyMap({'head'" in find("head")
    assert "Keep this in float32: `jmp.force_full_precision`" in find("")
    cut = read_words(write_words(Words(key="blocks/" * 60 + "mlp"))).key
    assert "Keep this in float32: `jmp.force_full_precision`" in find(cut)


def test_no_map_is_suggested_for_a_function_under_with_policy_which_reads_no_rules():
    scoped, large = jax.named_scope("head")(lambda x: jnp.dot(x, x)), np.full((2, 2), 300, np.float32)
    half = jmp.get_policy("params=float32,compute=float16,output=float32")
    assert "`jmp.force_full_precision`" in describe(jmp.with_policy(scoped, half), large)
    assert "`PolicyMap({'head': 'float32'}, policy)`" in describe(jmp.autocast(scoped, half), large)
