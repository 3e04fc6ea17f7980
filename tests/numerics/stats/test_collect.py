"""`numerics.collect`: which values have rows, whose they are, and what is refused."""

import functools
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.experimental import pallas as pl
from observed import (
    assert_measures,
    assert_same,
    check_collect,
    find,
    find_sites,
    observe,
    observe_quick,
)

from jmp_policy import autocast, numerics
from jmp_policy.numerics import audit, collect, first_nonfinite


def draw(seed, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


PARAMS = {"first": draw(1, 4, 8) / 30, "second": draw(2, 8, 3) * 1e-5}
X, Y = draw(3, 5, 4) / 10, draw(4, 5, 3) * 1e-4
W, SQUARE = draw(5, 4, 3), draw(6, 4, 4)


def mlp(params, x):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["first"])
    with jax.named_scope("second"):
        return x @ params["second"]


def loss_fn(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


@pytest.mark.slow
def test_a_gradient_has_a_row_for_each_product_argument_and_result():
    (loss, grads), stats = jax.jit(observe_quick(jax.value_and_grad(loss_fn)))(PARAMS, X, Y)
    assert_same((loss, grads), jax.value_and_grad(loss_fn)(PARAMS, X, Y))
    for row, path, tensor in zip(
        find(stats, "argument"), ["params/first", "params/second", "x", "y"], (*PARAMS.values(), X, Y), strict=True
    ):
        assert row.path == path
        assert_measures(row, tensor)
    hidden = jnp.tanh(X @ PARAMS["first"])
    error = 2 * (hidden @ PARAMS["second"] - Y) / Y.size
    [first], [second] = (find(stats, "forward", path=path) for path in ("first", "second"))
    assert_measures(first, X @ PARAMS["first"])
    assert_measures(second, hidden @ PARAMS["second"])
    assert [row.path for row in find(stats, "backward")] == ["second", "second", "first"]
    assert_measures(find(stats, "backward", shape=(5, 8))[0], error @ PARAMS["second"].T)
    results = find(stats, "result")
    assert [row.path for row in results] == ["result/0", "result/1/first", "result/1/second"]
    for row, tensor in zip(results, (loss, *grads.values()), strict=True):
        assert_measures(row, tensor)


@pytest.mark.slow
def test_the_gradient_of_what_is_observed_is_the_gradient():
    grads, stats = jax.jit(jax.grad(observe(loss_fn, of=("forward", "backward")), has_aux=True))(PARAMS, X, Y)
    assert_same(grads, jax.grad(loss_fn)(PARAMS, X, Y))
    assert [row.path for row in stats] == ["first", "second"]


def test_a_row_knows_its_line():
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if 'x @ params["first"]' in text)
    first, _ = find_sites(mlp, PARAMS, X, of="forward")
    assert (first.source, first.function, first.primitive) == (f"{__file__}:{line}", "mlp", "dot_general")
    assert (first.turn, first.dtype, first.shape) == (None, "float32", (5, 8))
    [site] = find_sites(nnx.Linear(4, 4, rngs=nnx.Rngs(0)).__call__, X, of="forward")  # a line of a library
    file, _, line = site.source.rpartition(":")
    assert (file.endswith("linear.py"), line.isdigit(), site.function) == (True, True, "Linear.__call__")
    [site] = find_sites(jnp.tanh, X, of="forward", where="all")
    assert (site.source, site.function) == ("", "")


def layers(x, ws):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def nest(x, ws):
    return lax.scan(lambda x, ws: (layers(x, ws), None), x, ws)[0]


def repeat(x, ws):
    return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ ws[0])), (0, x))[1]


THREE, MANY = draw(7, 3, 4, 4), draw(8, 70, 4, 4)
LOOPS = {
    "a scan": (layers, THREE, "auto", [0, 1, 2]),
    "a merged scan": (layers, THREE, "merge", [None]),
    "a long scan": (layers, MANY, "auto", [None]),
    "a long scan, split": (layers, MANY, "split", [*range(70)]),
    "scans in a scan": (nest, draw(9, 2, 3, 4, 4), "auto", [(i, j) for i in range(2) for j in range(3)]),
    "a while": (repeat, jnp.stack([SQUARE] * 5), "split", [None]),
}


def mark_slow(names, *quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_slow(LOOPS, "scans in a scan"))
def test_iterations_of_loops_have_rows(name):
    fun, ws, loops, turns = LOOPS[name]
    _, stats = jax.jit(observe_quick(fun, loops=loops, of="forward"))(X, ws)
    x, made = X, []
    for w in ws.reshape(-1, 4, 4):
        made.append(x @ w)
        x = jnp.tanh(made[-1])
    assert [row.turn for row in stats] == turns
    for row, tensors in zip(stats, [made] if turns == [None] else [[each] for each in made], strict=True):
        assert_measures(row, *tensors)


@pytest.mark.slow
def test_iterations_of_a_backward_pass_are_those_of_the_layers_though_it_begins_with_the_last():
    grad = jax.grad(lambda ws, x: layers(x, ws).sum())
    dws, stats = jax.jit(observe_quick(grad, of="backward"))(THREE, X)
    rows = find(stats, "backward", shape=(4, 4))
    assert sorted(row.turn for row in rows) == [0, 1, 2]
    for row in rows:
        assert_measures(row, dws[row.turn])


@pytest.mark.slow
def test_a_branch_that_is_not_taken_has_a_count_of_zero():
    fun = lambda i, x: lax.switch(i, [lambda x: x @ x.T, lambda x: (2 * x) @ x.T, lambda x: x @ x.T * 0], x)
    _, stats = jax.jit(observe_quick(fun, of="forward"))(1, X)
    assert [row.count for row in stats] == [0, 25, 0]
    assert_measures(stats.rows()[1], 2 * X @ X.T)


@pytest.mark.slow
def test_recomputed_values_are_left_out_unless_asked_for():
    fun = jax.value_and_grad(lambda params, x: jax.checkpoint(mlp)(params, x).sum())
    list_passes = lambda *of: [site.direction for site in find_sites(fun, PARAMS, X, of=of)]
    assert list_passes("forward", "backward") == ["forward"] * 2 + ["backward"] * 3
    assert list_passes("recomputed") == ["recomputed"]


@pytest.mark.slow
def test_steps_that_are_skipped_keep_their_bits_and_have_empty_rows():
    observed = jax.jit(observe_quick(lambda x: jnp.tanh(x @ SQUARE), every=3, of=("forward", "arguments")))
    total = None
    for step in range(5):
        out, stats = observed(step, X * step)
        assert_same(out, jnp.tanh((X * step) @ SQUARE))
        assert {row.times for row in stats} == {int(step % 3 == 0)}
        total = stats if total is None else total.merge(stats)
    assert_measures(find(total, "argument")[0], 0 * X, 3 * X)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("matmuls", ["first dot_general", "second dot_general"]),
        ("tanh", ["first tanh"]),
        ("first", ["first dot_general", "first tanh"]),
        (("matmuls", "first"), ["first dot_general"]),
        (("tanh", "matmuls"), ["first dot_general", "first tanh", "second dot_general"]),
        (("all", "sec.*"), ["second dot_general"]),
    ],
)
def test_where_chooses_by_operation_and_by_path(where, expected):
    sites = find_sites(mlp, PARAMS, X, where=where, of="forward")
    assert [f"{site.path} {site.primitive}" for site in sites] == expected


def count_equations(program, name):
    """Counts calls of a recorder, also inside other calls."""
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in program.eqns if eqn.primitive.name == "jit"]
    return sum(eqn.params.get("name") == name for eqn in program.eqns) + sum(count_equations(b, name) for b in bodies)


@pytest.mark.slow
def test_values_with_the_same_magnitudes_are_measured_once():
    fun = lambda x: (jnp.sin(-x.T.reshape(2, -1)), jnp.abs(x))
    count = lambda formats: count_equations(
        jax.make_jaxpr(collect(fun, formats, where="all"))(X).jaxpr, "jmp_record_measure"
    )
    assert (count(["float16"]), count(["int8/2"])) == (2, 4)  # the blocks of a transposed tensor are others
    stats = jax.jit(collect(fun, ["float16"], where="all"))(X)[1]
    same = [row for row in stats if row.amax == jnp.max(jnp.abs(X))]
    assert (len(stats), len(same)) == (8, 6)
    assert len({(row.rms, row.histogram.tobytes()) for row in same}) == 1


@pytest.mark.slow
def test_functions_inside_do_not_gather_rows_of_their_own():
    fun = lambda x: jax.nn.relu(jax.jit(lambda x: jnp.exp(jax.jit(jnp.tanh)(x)))(x)) * 2.0
    program = jax.make_jaxpr(collect(fun, where="all", of="forward"))(X).jaxpr
    assert count_equations(program, "jmp_record_gather") == 1
    sites = find_sites(fun, X, where="all", of="forward")
    assert [site.primitive for site in sites] == ["tanh", "exp", "custom_jvp_call", "mul"]


@jax.custom_vjp
def with_own_vjp(x):
    return jnp.tanh(x @ W)


with_own_vjp.defvjp(lambda x: (with_own_vjp(x), x), lambda x, ct: (ct @ W.T,))


@jax.custom_jvp
def with_own_jvp(x):
    return x @ W


with_own_jvp.defjvp(lambda primals, tangents: (with_own_jvp(*primals), tangents[0] @ W))


def run_kernel(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((5, 5), jnp.float32), interpret=True)(x)


PROGRAMS = {
    "custom_vjp": (with_own_vjp, X, {}, ["custom_vjp_call"]),
    "custom_jvp": (with_own_jvp, X, {}, ["custom_jvp_call"]),
    "a kernel": (run_kernel, X, {"where": "pallas_call"}, ["pallas_call"]),
    "map": (lambda x: lax.map(lambda row: row @ W, x), X, {}, ["dot_general"] * 5),
    "a mapped loop with several tests": (
        jax.vmap(lambda x: lax.while_loop(lambda c: c.sum() < 50, lambda c: c @ c * 2, x)),
        jnp.stack([jnp.eye(3), 0.7 * jnp.eye(3)]), {}, ["while"],
    ),
    "associative_scan": (lambda x: lax.associative_scan(jnp.multiply, x), X, {"where": "mul"}, ["mul"] * 4),
    "a Fourier transform": (lambda x: jnp.fft.fft(x).real, X, {"where": "real"}, ["real"]),
    "a linear solve": (
        lambda b: lax.custom_linear_solve(lambda v: 2 * v, b, lambda _, b: b / 2, symmetric=True),
        X[0], {"where": "custom_linear_solve"}, ["custom_linear_solve"],
    ),
    "empty arrays": (lambda x: x @ W, jnp.zeros((0, 4)), {}, ["dot_general"]),
    "a loop of no turns": (lambda x: lax.scan(lambda x, _: (x @ x, None), x, length=0)[0], SQUARE, {}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", mark_slow(PROGRAMS, "empty arrays"))
def test_a_program_does_what_it_did_and_its_ends_are_measured(name):
    fun, x, options, expected = PROGRAMS[name]
    _, stats = check_collect(fun, x, **options)
    assert [row.primitive for row in stats if row.primitive] == expected


@pytest.mark.slow
def test_numbers_of_64_bits_are_measured_as_they_are():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3)) * 1e-200, jnp.float64)
        grads, stats = check_collect(jax.grad(lambda w: jnp.sum(x @ w)), W.T.astype(jnp.float64))
        assert find(stats, "result")[0].amax == float(jnp.abs(grads).max()) < 1e-190


@pytest.mark.slow
def test_a_complex_array_has_a_row_of_its_parts():
    z = lax.complex(X, 2 * X)
    _, stats = observe_quick(lambda z: (z * z, z.shape[0]), where="mul")(z)
    for row, value in zip(stats, (z, z * z, z * z), strict=True):
        assert_measures(row, np.real(value), np.imag(value))
        assert (row.dtype, row.shape) == ("complex64", (5, 4, 2))
    assert [row.path for row in stats] == ["z", "", "result/0"]


@pytest.mark.slow
def test_tensors_without_a_number_have_no_smallest_one():
    for value in (jnp.nan, jnp.inf):
        _, stats = observe_quick(lambda x: x, of="results")(jnp.full(3, value))
        assert [(row.min_nonzero, row.amax, row.nonfinite) for row in stats] == [(None, 0, 1)]


def test_a_program_without_what_is_chosen_is_an_empty_report():
    out, stats = observe(lambda x: x + 1, of=("forward", "backward"))(1)
    assert (int(out), len(stats), stats.rows()) == (2, 0, ())
    assert "nothing" in str(stats).lower()


def test_arguments_go_by_their_names_and_what_is_no_array_passes_through():
    def fun(params, *batches, scale, name):
        return {"y": params["w"] * scale + sum(batches), "name": name, "none": None}

    out, stats = observe_quick(fun)({"w": X}, X, X, scale=X, name="adam")
    assert (out["name"], out["none"]) == ("adam", None)
    assert [row.path for row in stats] == ["params/w", "batches/0", "batches/1", "scale", "result/y"]
    observed = observe_quick(lambda x, layers: x @ W if layers else x)  # Python arguments are constants
    assert [len(observed(X, layers)[1]) for layers in (0, 1)] == [2, 3]


class Bound:
    def call(self, x):
        return x @ W

    __call__ = call
    of_class = classmethod(call)


CALLABLES = {
    "a method": Bound().call,
    "a class method": Bound.of_class,
    "a callable object": Bound(),
    "a partial": functools.partial(lambda w, x: x @ w, W),
    "a partial by name": functools.partial(lambda x, w: x @ w, w=W),
    "a jitted function": jax.jit(lambda x, double=True: x @ W if double else x, static_argnames="double"),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_anything_that_can_be_called_is_collected(name):
    sites = find_sites(CALLABLES[name], X)
    assert "x" in [site.path for site in sites if site.direction == "argument"]
    assert [site.primitive for site in sites if site.direction == "forward"] == ["dot_general"]


def test_modules_of_haiku_have_their_paths():
    net = hk.transform(lambda x: hk.Sequential([hk.Linear(5), jax.nn.relu, hk.Linear(2)])(x).sum())
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    sites = find_sites(jax.grad(lambda params, x: net.apply(params, None, x)), params, X)
    products = [(site.direction, site.path.rpartition("/")[2]) for site in sites if site.primitive]
    assert products == [("forward", "linear"), *[("backward", f"linear{end}") for end in ("_1", "_1", "")]]
    assert "result/linear_1/w" in [site.path for site in sites]


@pytest.mark.slow
def test_a_small_array_is_measured_under_jax_debug_nans():
    with jax.debug_nans(True):
        _, stats = observe_quick(jnp.exp2, where=["exp2"], of="forward")(jnp.zeros(3))
    [row] = stats
    assert (row.count, row.zeros, row.nans, row.amax) == (3, 0.0, 0, 1.0)


def test_an_audit_finds_nothing_in_what_is_measured():
    half = lambda w, x: jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) ** 2)
    plain, observed = audit(half)(W, X), audit(observe(half))(W, X)
    assert [finding.id for finding in observed.findings] == [finding.id for finding in plain.findings]
    assert observed.matmuls == plain.matmuls


def build(*kinds):
    return nnx.Sequential(*(kind(4, 4, rngs=nnx.Rngs(0)) for kind in kinds))


REFUSED = {
    "a format": (lambda: collect(mlp, ("float17",)), r"Unknown format 'float17'.*Did you mean 'float1"),
    "a pass": (lambda: collect(mlp, of=("backwards",)), r"of has 'backwards'. Did you mean 'backward'\?"),
    "no pass": (lambda: collect(mlp, of=()), r"of is empty.*of=\('forward', 'backward'\)"),
    "passes": (lambda: collect(mlp, of=3), r"of takes strings, got 3. For example: of=\('"),
    "loops": (lambda: collect(mlp, loops="splitt"), r"Unknown loops 'splitt'. Did you mean 'split'\?"),
    "every": (lambda: collect(mlp, every=0), r"every must be a positive integer or None, got 0.*every=100"),
    "sample": (lambda: collect(mlp, sample=1.5), r"sample must be a positive integer or None, got 1.5.*sample=4096"),
    "True": (lambda: collect(mlp, sample=True), r"sample must be a positive integer or None, got True"),
    "where": (lambda: collect(mlp, where=(3,)), r"where takes strings, got 3.*where=\('matmuls', 'blocks/\.\*'\)"),
    "a path": (lambda: collect(mlp, where="frist")(PARAMS, X), r"where has 'frist', but the .*Did you mean 'first'\?"),
    "an operation": (lambda: collect(mlp, where="dot_generall")(PARAMS, X), r"Did you mean 'dot_general'\?"),
    "a pattern": (lambda: collect(mlp, where="(")(PARAMS, X), r"where has '\(', which is not a pattern"),
    "a path of a model": (
        lambda: collect(lambda model, x: model(x), where="layer/0")(build(nnx.Linear, nnx.Linear), X),
        r"where has 'layer/0', but.*Did you mean 'layers/0'\?",
    ),
    "no step": (
        lambda: collect(mlp, every=2)(PARAMS, X),
        r"the first argument is the number of the step.*collect\(train_step, every=",
    ),
    "True as step": (lambda: collect(mlp, every=2)(True, PARAMS, X), "the first argument is the number of the step"),
    "no function": (lambda: collect(3), r"collect takes a function, got .*collect\(train_step\)\(state, batch\)"),
    "another class": (lambda: collect(dict), r"takes a function, got .*collect\(train_step\)\(state, batch\)"),
    "linen": (lambda: collect(nn.Dense(3)), r"takes a function, got .*: collect\(model.apply\)\(variables, x\)"),
    "linen class": (lambda: collect(nn.Dense), r"takes a function, got .*: collect\(model.apply\)\(variables, x\)"),
    "nnx": (
        lambda: collect(build(nnx.Linear)),
        r"function, got .*: collect\(lambda model, x: model\(x\)\)\(model, x\)",
    ),
    "nnx class": (lambda: collect(nnx.Linear), r"function, got .*: collect\(lambda model, x: model\(x\)\)\(model, x\)"),
    "its own error": (lambda: collect(lambda x: x @ x)(X), "dot_general requires contracting dimensions"),
    "its arguments": (lambda: collect(loss_fn)(PARAMS, X), "missing 1 required positional argument: 'y'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


NOTED = {
    "float": (lambda x: float(x[0, 0]) * x, "collect traces the function as jax.jit does"),
    "if": (lambda x: x if x.sum() > 0 else -x, "collect traces the function as jax.jit does"),
    "numpy": (lambda x: np.tanh(x), "collect traces the function as jax.jit does"),
    "an object that it writes to": (
        functools.partial(lambda model, x: model(x), nnx.BatchNorm(4, rngs=nnx.Rngs(0))),
        "collect(lambda model, x: model(x))(model, x)",
    ),
}


@pytest.mark.parametrize("name", NOTED)
def test_an_error_of_jax_has_a_note_of_what_collect_does(name):
    fun, note = NOTED[name]
    with jax.numpy_dtype_promotion("standard"), pytest.raises(Exception, match=r"traced|Tracer|trace level") as info:
        collect(lambda x: fun(x))(X)
    assert note in "".join(info.value.__notes__)


@pytest.mark.parametrize("instrument", [collect, first_nonfinite])
def test_inside_of_autocast_it_is_refused_as_dtypes_would_be_those_before(instrument):
    message = rf"{instrument.__name__} inside autocast would report the dtypes before .* outside. For example: "
    for fun in (instrument(loss_fn), jax.grad(instrument(loss_fn), has_aux=True)):
        with pytest.raises(ValueError, match=message + rf"{instrument.__name__}\(autocast\(loss_fn, 'mixed_bf"):
            jax.eval_shape(autocast(fun, "mixed_bfloat16"), PARAMS, X, Y)
    _, found = jax.eval_shape(instrument(autocast(loss_fn, "mixed_bfloat16")), PARAMS, X, Y)
    assert found is not None


def test_many_rows_are_a_warning():
    many = lambda x: lax.scan(lambda x, _: (jnp.sin(x), None), x, length=501)[0]
    with pytest.warns(UserWarning, match=r"measures 501 tensors.*seconds to compile.*where="):
        jax.eval_shape(observe_quick(many, where="sin", of="forward", loops="split"), jnp.ones(2))
    assert numerics.collect is collect


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX cannot run it")
def test_a_barrier_with_a_reference_returns_the_arrays_alone():
    def fun(x):
        _, one, two = lax.optimization_barrier((jax.new_ref(x), x, 4 * x))
        return one + two

    _, stats = collect(fun, where="optimization_barrier", of="forward")(jnp.ones(2))
    assert [float(row.amax) for row in stats.rows()] == [1.0, 4.0]
    assert "optimization_barrier" in {row.operation for row in audit(fun)(jnp.ones(2)).rows}
