"""`contrib.diverge`: errors are compared with NumPy on the values of a model whose scopes are called one by one."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import io_callback

import jmp_policy as jmp
from jmp_policy.contrib import diverge

RNG = np.random.default_rng(0)
W, X = (jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32) for _ in range(2))


def first(w, x):
    return jnp.tanh(x @ w)


def low_first(w, x):
    return jnp.tanh((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))


def second(w, x):
    return jnp.sin(x @ w.T)


def make_model(first=first, second=second, between=lambda x: x):
    def model(w, x):
        with jax.named_scope("first"):
            x = first(w, x)
        x = between(x)
        with jax.named_scope("second"):
            return second(w, x)

    return model


def make_grad(first):
    """The gradient of a model of which only the first scope reads the weights."""
    model = make_model(first, lambda w, x: second(X, x))
    return jax.grad(lambda w, x: jnp.sum(model(w, x) ** 2))


MODEL, LOW = make_model(), make_model(low_first)


@pytest.fixture(scope="module")
def low():
    return diverge(MODEL, LOW)(W, X)


@pytest.fixture(scope="module")
def low_grad():
    return diverge(make_grad(first), make_grad(low_first))(W, X)


# XLA may keep the float32 sum of a bfloat16 matmul that is cast up: the errors of two compilations differ.
CLOSE = 0.1


def relative(reference, value):
    reference, value = (np.asarray(x, np.float64) for x in (reference, value))
    return np.linalg.norm(value - reference) / np.linalg.norm(reference)


def find(divergence, path, direction="forward"):
    [row] = [row for row in divergence.rows() if (row.path, row.direction) == (path, direction)]
    return row


@pytest.mark.slow
def test_errors_equal_those_of_scopes_that_are_called_one_by_one(low):
    rows = low.rows()
    assert [(row.path, row.direction) for row in rows] == [("first", "forward"), ("second", "forward")]
    passed, low_passed = first(W, X), low_first(W, X)
    made, low_made = (np.asarray(second(W, x), np.float64) for x in (passed, low_passed))
    error = relative(passed, low_passed)
    for row, numbers in zip(rows, [(0, error, error), (error, relative(made, low_made), 0)], strict=True):
        np.testing.assert_allclose((row.incoming, row.outgoing, row.introduced), numbers, rtol=CLOSE)
    assert rows[1].introduced == 0
    np.testing.assert_allclose(rows[1].amplification, rows[1].outgoing / rows[1].incoming)
    assert rows[0].amplification == math.inf
    cosine = np.vdot(made, low_made) / np.linalg.norm(made) / np.linalg.norm(low_made)
    np.testing.assert_allclose(1 - rows[1].cosine, 1 - cosine, rtol=3 * CLOSE)
    np.testing.assert_allclose(low.outputs()[0].error, rows[1].outgoing, rtol=1e-6)
    assert low.log_probability_gap is None


@pytest.mark.slow
def test_worst_element_has_its_place_and_values():
    def model(w, x, bad=False):
        with jax.named_scope("only"):
            return x.at[2, 3].add(1000.0) if bad else x * 1

    worst = find(diverge(model, lambda w, x: model(w, x, True))(W, X), "only").worst
    assert worst.where == (2, 3)
    np.testing.assert_allclose((worst.reference, worst.value), (X[2, 3], X[2, 3] + 1000), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fun", [MODEL, make_grad(first)])
def test_equal_functions_have_no_error(fun):
    divergence = diverge(fun, lambda *args: fun(*args))(W, X)
    for row in divergence.rows():
        assert (row.incoming, row.outgoing, row.introduced, row.cosine, row.worst) == (0, 0, 0, 1, None)
        assert math.isnan(row.amplification)
    assert divergence.unaligned == ()
    assert not divergence.policy_map(1e-6).rules


def test_backward_scope_is_the_derivative_of_the_replaced_scope(low_grad):
    cotangent = jax.grad(lambda passed: jnp.sum(second(X, passed) ** 2))(first(W, X))
    gradients = [jax.jit(lambda w, x, fun=fun: jax.vjp(fun, w, x)[1](cotangent)[0])(W, X) for fun in (first, low_first)]
    np.testing.assert_allclose(find(low_grad, "first", "backward").introduced, relative(*gradients), rtol=CLOSE)
    assert [axes.get_title("left") for axes in low_grad.plot().axes] == ["forward", "backward"]


@pytest.mark.slow
def test_rounding_between_scopes_is_charged_to_the_reader():
    rounded = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    divergence = diverge(MODEL, make_model(between=rounded))(W, X)
    assert find(divergence, "first").introduced == 0
    row, passed = find(divergence, "second"), first(W, X)
    np.testing.assert_allclose(row.introduced, relative(second(W, passed), second(W, rounded(passed))), rtol=1e-3)
    assert row.dtype == "float32 → bfloat16"


@pytest.mark.slow
def test_scope_in_float32_behind_one_in_half_introduces_nothing():
    model = make_model(lambda w, x: low_first(w, x).astype(jnp.float16), lambda w, x: second(w, x.astype(jnp.float32)))
    divergence = diverge(MODEL, model)(W, X)
    assert find(divergence, "second").introduced == 0
    assert find(divergence, "first").introduced > 1e-4


def test_iterations_of_a_scan_are_aligned_one_by_one():
    def scan_model(w, x, first):
        with jax.named_scope("loop"):
            return lax.scan(lambda x, shift: (make_model(first)(w, x + shift), jnp.sum(x)), x, jnp.arange(3.0))

    divergence = diverge(lambda w, x: scan_model(w, x, first), lambda w, x: scan_model(w, x, low_first))(W, X)
    expected, x = [], X
    for shift in range(3):
        expected.append(relative(first(W, x + shift), low_first(W, x + shift)))
        x = MODEL(W, x + shift)
    np.testing.assert_allclose(find(divergence, "loop/first").iterations, expected, rtol=CLOSE)
    assert find(divergence, "loop/second").introduced == 0 < find(divergence, "loop/second").outgoing
    assert divergence.unaligned == ()


@pytest.mark.slow
def test_a_scope_in_a_loop_and_around_it_has_the_narrowest_dtype_of_both():
    def run(weight, x):
        state, total = lax.scan(lambda state, row: (0.9 * state + row, state.sum()), jnp.zeros(8), jnp.tanh(x @ weight))
        return total.sum() + state.sum()

    weight, x = (np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in range(2))
    (row,) = diverge(run, jmp.autocast(run, "params=float32,compute=bfloat16,output=none"))(weight, x).rows()
    assert row.dtype == "float32 → bfloat16"


def test_calls_of_one_module_branches_and_unbounded_loops_are_operations_of_their_scope():
    def model(w, x, low):
        for i in range(3):
            with jax.named_scope("cell"):
                x = (low_first if low and i == 2 else first)(w, x)
        with jax.named_scope("branch"):
            x = lax.cond(x[0, 0] < 9, low_first if low else first, second, w, x)
        with jax.named_scope("loop"):
            return lax.while_loop(lambda x: jnp.max(x) < 9, lambda x: 2 * jnp.abs(x) + 1, x)

    divergence = diverge(lambda w, x: model(w, x, False), lambda w, x: model(w, x, True))(W, X)
    assert [row.path for row in divergence.rows()] == ["cell", "branch", "loop"]
    assert 1e-4 < find(divergence, "cell").introduced < 1e-2
    assert 1e-4 < find(divergence, "branch").introduced < 1e-2
    assert find(divergence, "loop").introduced == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_last", [False, True])
def test_scope_that_only_one_function_has_introduces_the_error(is_last):
    def scale(x):
        with jax.named_scope("scale"):
            return x * 0.5

    scaled = (lambda w, x: scale(MODEL(w, x))) if is_last else make_model(between=scale)
    for f, g, name, expected in ((scaled, MODEL, "first", 1.0), (MODEL, scaled, "second", 0.5)):
        divergence = diverge(f, g)(W, X)
        assert divergence.unaligned == (f"scale is only in the {name} function (forward)",)
        np.testing.assert_allclose(find(divergence, "scale").introduced, expected, rtol=1e-6)
        assert find(divergence, "second").introduced == 0


@pytest.mark.slow
def test_inner_scopes_come_before_the_scope_around_them():
    def loss(w, x):
        with jax.named_scope("outer"):
            return jnp.sum(MODEL(w, x + 1) * 2)

    rows = diverge(jax.value_and_grad(loss), jax.value_and_grad(lambda w, x: loss(w, x)))(W, X).rows()
    paths = lambda name: [row.path for row in rows if row.direction == name and row.path]
    assert paths("forward") == ["outer/first", "outer/second", "outer"]
    assert paths("backward") == ["outer/second", "outer/first", "outer"]


def test_log_probabilities_have_an_absolute_gap():
    f, g = (lambda w, x, own=own: (jax.nn.log_softmax(own(w, x)), jnp.sum(x)) for own in (first, low_first))
    divergence = diverge(f, g)(W, X)
    difference = np.asarray(g(W, X)[0] - f(W, X)[0], np.float64)
    np.testing.assert_allclose(divergence.log_probability_gap, np.sqrt(np.mean(difference**2)), rtol=CLOSE)
    assert [output.is_log_probability for output in divergence.outputs()] == [True, False]
    text = str(divergence)
    assert 'Name the parts: with jax.named_scope("encoder")' in text


VALUES = {
    "not finite": (lambda x: x * 1.0, lambda x: x * jnp.float32(1e30) * jnp.float32(1e30), math.inf),
    "tiny": (lambda x: x * jnp.float32(1e-30), lambda x: x * jnp.float32(1.001e-30), 1e-3),
    "huge": (lambda x: x * jnp.float32(1e30), lambda x: x * jnp.float32(1.001e30), 1e-3),
    "masked": (
        lambda x: jnp.where(x > 0, x, -1e30),
        lambda x: jnp.where(x > 0, x.astype(jnp.float16) * 1.1, -6e4),
        0.1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_errors_are_relative_whatever_the_values_are(name):
    f, g, expected = VALUES[name]
    [row] = diverge(f, g)(X).rows()
    np.testing.assert_allclose(row.introduced, expected, rtol=0.05)


@pytest.mark.slow
def test_policy_map_keeps_scopes_with_large_introduced_errors(low):
    chosen = low.policy_map(1e-4)
    assert chosen["first"].compute_dtype == jnp.float32
    assert chosen["second"].compute_dtype == chosen[""].compute_dtype == jnp.bfloat16
    assert low.policy_map(0.5)["first"].compute_dtype == jnp.bfloat16
    int8 = low.policy_map(1e-4, "int8_from_float32")
    assert int8["first"].quantization is None is not int8["second"].quantization


class ScopedHead(nnx.Module):
    def __init__(self):
        self.head = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        with jax.named_scope("outer"):
            return self.head(x)


@pytest.mark.parametrize(("attach", "key"), [(jmp.with_policy, "head"), (jmp.autocast, "outer/head")])
def test_the_keys_of_a_map_have_named_scopes_only_for_autocast(attach, key):
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    run = lambda model, x: model(x)
    low = jmp.autocast(run, policy) if attach is jmp.autocast else lambda model, x: jmp.with_policy(model, policy)(x)
    chosen = diverge(run, low)(ScopedHead(), X).policy_map(1e-4, policy)
    assert [rule.key for rule in chosen.rules] == [key]


def test_a_map_of_float32_for_a_float64_function_keeps_what_needs_float64():
    def fun(x):
        with jax.named_scope("cancel"):
            difference = (jnp.exp(x) + 1e-6) - jnp.exp(x)
        with jax.named_scope("rest"):
            return jnp.sin(1e6 * difference)

    with jax.enable_x64(True):
        x = np.random.default_rng().normal(size=8)
        low = jmp.PolicyMap({"": "params=float32,compute=float32,output=none"}, "float64")
        found = diverge(fun, jmp.autocast(fun, low))(x)
        kept, nothing = (found.policy_map(tolerance, low[""]) for tolerance in (1e-5, 10))
        errors = [np.abs(jmp.autocast(fun, policy_map)(x) - fun(x)).max() for policy_map in (kept, nothing)]
    assert kept["cancel"].compute_dtype == np.float64
    assert kept["rest"].compute_dtype == np.float32
    # A few roundings of sin in float32, and of a difference of 1e-6 between numbers near 1.
    assert 0 < errors[0] < 2.0**-21
    assert errors[1] > 1e-4


def read_inside_jit(w, x):
    divergence = diverge(MODEL, LOW)(w, x)
    assert str(divergence).startswith("<Divergence: ")
    assert "print it for the table" in divergence._repr_html_()
    return divergence.rows()


def run_on_host(x):
    return io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


ERRORS = {
    "no tolerance": (lambda low: low.policy_map(0), "must be a relative error above 0, got 0. For example: 1e-3"),
    "nan": (lambda low: low.policy_map(math.nan), "must be a relative error above 0, got nan. For example: 1e-3"),
    "a map": (lambda low: low.policy_map(0.1, jmp.PolicyMap({}, "float32")),
              r"takes the policy of all other scopes, got PolicyMap.*For example: 'bfloat16'"),
    "rows inside jit": (lambda _: jax.jit(read_inside_jit)(W, X),
                        r"there are none yet inside jit.*jax.jit\(diverge\(f, g\)\)\(x\).rows\(\)"),
    "a callback": (lambda _: diverge(run_on_host, run_on_host)(X),
                   r"diverge runs a function in parts.*io_callback of .*test_diverge.py"),
    "no function": (lambda _: diverge(MODEL, 3), r"takes a function, got 3. .*: diverge\(train_step, other\)\(state"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_done_is_an_error(name, low):
    call, message = ERRORS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call(low)


@pytest.mark.slow
def test_weights_of_a_closure_belong_to_the_scope_that_reads_them():
    close_over = lambda weights: lambda x: MODEL(weights, x)
    row = find(diverge(close_over(W), close_over(2 * W))(X), "second")
    expected = relative(second(W, first(W, X)), second(2 * W, first(W, X)))
    np.testing.assert_allclose(row.introduced, expected, rtol=1e-5)


def test_text_names_the_scope_that_introduces_the_error_and_a_dictionary_is_strict_json(low):
    lines = str(low).splitlines()
    assert next(word for word in lines[0].split() if word in ("introduced", "incoming", "outgoing")) == "introduced"
    assert any(line.startswith("first introduces the largest error: 0.00") for line in lines)
    assert "<table" in low._repr_html_()
    document = json.loads(json.dumps(low.to_dict(), allow_nan=False))
    assert [(row["path"], row["amplification"] is None) for row in document["rows"]] == [
        ("first", True),
        ("second", False),
    ]
    assert document["outputs"][0]["path"] == "result"


@pytest.mark.parametrize("missing", ["attention", pytest.param("mlp", marks=pytest.mark.slow)])
def test_missing_residual_connection_is_charged_to_the_block_around(missing):
    def model(w, x, missing=None):
        with jax.named_scope("block"):
            for name, fun in (("attention", jnp.tanh), ("mlp", jnp.sin)):
                with jax.named_scope(name):
                    made = fun(x @ w)
                x = made if missing == name else x + made
        with jax.named_scope("head"):
            return jnp.tanh(x)

    divergence = diverge(model, lambda w, x: model(w, x, missing))(W, X)
    assert [row.path for row in divergence.rows() if row.introduced > 0] == ["block"]
    assert divergence.unaligned == ("block has 1 output unaligned (forward)",)


def mix_complex(factor):
    def model(x):
        with jax.named_scope("mix"):
            mixed = jnp.fft.fft(x) * factor
        with jax.named_scope("head"):
            return mixed * jnp.exp(1j * x)

    return model


def test_complex_values_are_compared_by_their_parts():
    x = X[:4, :4]
    with jax.numpy_dtype_promotion("standard"):
        divergence = diverge(mix_complex(1.0), mix_complex(3.0))(x)
        introduced = {row.path: row.introduced for row in divergence.rows()}
        # Three times as large: the difference is twice the reference, up to a few roundings of float32.
        assert introduced == {"mix": pytest.approx(2.0, rel=2**-20), "head": 0.0}
        [output] = divergence.outputs()
        assert (output.error, output.is_log_probability) == (pytest.approx(2.0, rel=2**-20), False)
        reference, value = (np.asarray(mix_complex(factor)(x), np.complex128) for factor in (1.0, 3.0))
    row = find(divergence, "head")
    part = np.stack([reference.real, reference.imag], -1)[row.worst.where]
    np.testing.assert_allclose(row.worst.reference, part, rtol=1e-5)
    np.testing.assert_allclose(output.gap, np.sqrt(np.mean(np.abs(value - reference) ** 2) / 2), rtol=1e-5)


def test_integers_and_booleans_that_differ_are_counted():
    def route(x, sign, least):
        with jax.named_scope("router"):
            chosen = jnp.argmax(sign * x, -1)
        with jax.named_scope("experts"):
            return 2 * jnp.take_along_axis(x, chosen[:, None], 1), chosen, x > least, x > 0

    x = X.at[0].set(1.0)  # of equal numbers both choose the first
    divergence = diverge(lambda x: route(x, 1, 0), lambda x: route(x, -1, -jnp.inf))(x)
    assert find(divergence, "router").introduced == pytest.approx(7 / 8)
    errors = {output.path: output.error for output in divergence.outputs()}
    assert [path for path, error in errors.items() if error > 0] == ["result/0", "result/1", "result/2"]
    assert errors["result/2"] == pytest.approx(np.mean(np.asarray(x) <= 0))
    assert errors["result/3"] == 0


def test_outputs_that_are_not_compared_are_said():
    divergence = diverge(lambda x: (x, x > 0), lambda x: (x, jnp.sum(x), jax.random.key(0)))(X)
    assert divergence.unaligned[-2:] == (
        "result/1 is not compared: only one function returns such numbers",
        "result/2 is not compared: only one function returns such numbers",
    )
    assert "result/1 is not compared" in " ".join(str(divergence).split())


@pytest.mark.slow
def test_nnx_modules_have_paths_as_closures_arguments_and_methods():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs))
    rules = jmp.PolicyMap({"layers/0": "params=float32,compute=bfloat16,output=float32"}, "float32")
    low = jmp.with_policy(model, rules)
    for divergence in (diverge(lambda x: model(x), lambda x: low(x))(X), diverge(model.__call__, low.__call__)(X)):
        assert [row.path for row in divergence.rows() if row.introduced > 0] == ["layers/0"]
    loss = lambda scale: lambda model, x: jnp.mean(model(x) ** 2) * scale
    before = nnx.state(model)
    diverge(nnx.grad(loss(1.0)), nnx.grad(loss(1.01)))(model, X)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model))))
