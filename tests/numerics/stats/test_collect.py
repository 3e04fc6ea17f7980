"""`numerics.collect`: rows are compared by value with NumPy on the same tensors."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import make_mesh

from jmp_policy import numerics
from jmp_policy.numerics import collect

FORMATS = ("float16", "float8_e4m3fn")
observe = functools.partial(collect, formats=FORMATS, histogram=False)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 10.0 ** -(3 + seed % 3), jnp.float32)


def find(stats, direction, primitive=None, path=None):
    """The measured rows of a pass."""
    return [
        row
        for row in stats.rows()
        if row.direction == direction and primitive in (None, row.primitive) and path in (None, row.path)
    ]


def assert_is(row, *tensors):
    """The row is of these tensors together, as NumPy sees them."""
    values = np.concatenate([np.asarray(tensor, np.float64).ravel() for tensor in tensors])
    sizes = np.abs(values)
    assert row.count == values.size
    np.testing.assert_allclose(row.amax, sizes.max(initial=0), rtol=2e-6)
    np.testing.assert_allclose(row.rms, np.sqrt(np.mean(sizes**2)), rtol=2e-6)
    np.testing.assert_allclose(row.min_nonzero, sizes[sizes > 0].min(), rtol=2e-6)
    for name, dtype in zip(FORMATS, (jnp.float16, jnp.float8_e4m3fn), strict=True):
        lost = np.mean((values.astype(dtype).astype(np.float64) == 0) & (values != 0))
        np.testing.assert_allclose(row.formats[name].underflow, lost, atol=2 / values.size)


def mlp(params, x):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["first"])
    with jax.named_scope("second"):
        return x @ params["second"]


PARAMS = {"first": draw(1, 4, 8) * 300, "second": draw(2, 8, 3)}
X, Y = draw(3, 5, 4) * 100, draw(4, 5, 3)


def loss_fn(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def expected_backward(params, x, y):
    """By hand: dx of the second product, its dw, and dw of the first."""
    hidden = jnp.tanh(x @ params["first"])
    error = 2 * (hidden @ params["second"] - y) / y.size
    inner = (error @ params["second"].T) * (1 - hidden**2)
    return hidden, {"first": x.T @ inner, "second": hidden.T @ error}, error


@pytest.mark.exhaustive
def test_a_gradient_has_a_row_for_each_product_argument_and_result():
    (loss, grads), stats = jax.jit(observe(jax.value_and_grad(loss_fn)))(PARAMS, X, Y)
    hidden, expected, error = expected_backward(PARAMS, X, Y)
    plain = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), (loss, grads), plain)

    assert [row.path for row in find(stats, "argument")] == ["params/first", "params/second", "x", "y"]
    for row, tensor in zip(find(stats, "argument"), (*PARAMS.values(), X, Y), strict=True):
        assert_is(row, tensor)
    [first] = find(stats, "forward", path="first")
    [second] = find(stats, "forward", path="second")
    assert_is(first, X @ PARAMS["first"])
    assert_is(second, hidden @ PARAMS["second"])
    assert [row.path for row in find(stats, "backward")] == ["second", "second", "first"]
    by_shape = {row.shape: row for row in find(stats, "backward")}
    assert_is(by_shape[3, 8] if (3, 8) in by_shape else by_shape[8, 3], expected["second"])
    assert_is(by_shape[5, 8], error @ PARAMS["second"].T)
    assert [row.path for row in find(stats, "result")] == ["result/0", "result/1/first", "result/1/second"]
    for row, tensor in zip(find(stats, "result"), (loss, *expected.values()), strict=True):
        assert_is(row, tensor)


@pytest.mark.exhaustive
def test_a_row_knows_its_line():
    _, stats = observe(loss_fn)(PARAMS, X, Y)
    [first, _] = find(stats, "forward")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if 'x @ params["first"]' in text)
    assert (first.source, first.function, first.primitive) == (f"{__file__}:{line}", "mlp", "dot_general")
    assert (first.turn, first.dtype, first.shape) == (None, "float32", (5, 8))


@pytest.mark.slow
def test_the_gradient_of_what_is_observed_is_the_gradient():
    grad = jax.grad(observe(loss_fn, of=("forward", "backward")), has_aux=True)
    grads, stats = jax.jit(grad)(PARAMS, X, Y)
    plain = jax.jit(jax.grad(loss_fn))(PARAMS, X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), grads, plain)
    assert [row.path for row in stats.rows()] == ["first", "second"]
    assert_is(stats.rows()[0], X @ PARAMS["first"])


@pytest.mark.exhaustive
def test_what_is_mapped_merges_when_it_is_read():
    xs = jnp.stack([X, 3 * X, X / 7])
    _, stats = jax.vmap(observe(mlp), (None, 0))(PARAMS, xs)
    assert_is(find(stats, "forward", path="first")[0], *(x @ PARAMS["first"] for x in xs))
    assert_is(find(stats, "argument", path="x")[0], xs)


def layers(x, ws):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


@pytest.mark.exhaustive
def test_turns_of_a_scan_have_rows_of_their_own_in_both_passes():
    ws, x = draw(5, 3, 4, 4) * 1e4, draw(6, 2, 4) * 1e3
    grad = jax.value_and_grad(lambda ws, x: layers(x, ws).sum())
    (_, dws), stats = jax.jit(observe(grad, of=("forward", "backward")))(ws, x)
    forward = find(stats, "forward")
    assert [row.turn for row in forward] == [0, 1, 2]
    for row, w in zip(forward, ws, strict=True):
        assert_is(row, x @ w)
        x = jnp.tanh(x @ w)
    gradients = [row for row in find(stats, "backward") if row.shape == (4, 4)]
    assert sorted(row.turn for row in gradients) == [0, 1, 2]  # of the layer, though the pass runs from the last
    for row in gradients:
        assert_is(row, dws[row.turn])


@pytest.mark.exhaustive
def test_nested_turns_are_named_from_the_outermost():
    ws, x = draw(7, 2, 3, 4, 4) * 1e4, draw(8, 2, 4)
    _, stats = observe(lambda x, ws: lax.scan(lambda x, ws: (layers(x, ws), None), x, ws)[0])(x, ws)
    rows = find(stats, "forward")
    assert [row.turn for row in rows] == [(i, j) for i in range(2) for j in range(3)]
    for row in rows:
        assert_is(row, x @ ws[row.turn])
        x = jnp.tanh(x @ ws[row.turn])


@pytest.mark.slow
@pytest.mark.parametrize(("loops", "count"), [("auto", 1), ("merge", 1), ("split", 70)])
def test_long_loops_merge_unless_they_are_split(loops, count):
    ws, x = draw(9, 70, 4, 4) * 1e5, draw(10, 2, 4) * 1e3
    _, stats = jax.jit(observe(layers, loops=loops, of="forward"))(x, ws)
    made = []
    for w in ws:
        made.append(x @ w)
        x = jnp.tanh(made[-1])
    assert len(stats.rows()) == count
    if count == 1:
        assert stats.rows()[0].turn is None
        assert_is(stats.rows()[0], *made)
    else:
        for row, tensor in zip(stats.rows(), made, strict=True):
            assert_is(row, tensor)


@pytest.mark.slow
def test_short_loops_merge_if_asked():
    _, stats = observe(layers, loops="merge", of="forward")(X[:2], draw(5, 3, 4, 4))
    assert [row.count for row in stats.rows()] == [3 * 2 * 4]


@pytest.mark.slow
def test_a_while_merges_its_turns():
    w, x = draw(11, 4, 4) * 1e4, draw(12, 2, 4)
    loop = lambda x, w: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]
    _, stats = jax.jit(observe(loop, of="forward"))(x, w)
    made = []
    for _ in range(5):
        made.append(x @ w)
        x = jnp.tanh(made[-1])
    assert_is(*stats.rows(), *made)


@pytest.mark.slow
def test_a_branch_that_is_not_taken_has_a_count_of_zero():
    fun = lambda i, x: lax.switch(i, [lambda x: x @ x.T, lambda x: (2 * x) @ x.T, lambda x: x @ x.T * 0], x)
    _, stats = jax.jit(observe(fun, of="forward"))(1, X)
    assert [row.count for row in stats.rows()] == [0, 25, 0]
    assert_is(stats.rows()[1], 2 * X @ X.T)


@pytest.mark.exhaustive
def test_recomputed_values_are_left_out_unless_asked_for():
    fun = jax.value_and_grad(lambda params, x: jax.checkpoint(mlp)(params, x).sum())
    _, stats = jax.jit(observe(fun, of=("forward", "backward")))(PARAMS, X)
    assert [row.direction for row in stats.rows()] == ["forward"] * 2 + ["backward"] * 3
    _, stats = jax.jit(observe(fun, of=("forward", "recomputed", "backward")))(PARAMS, X)
    [again] = find(stats, "recomputed", path="first")
    assert_is(again, X @ PARAMS["first"])


@pytest.mark.slow
def test_devices_of_a_shard_map_are_one_row():
    mesh = make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ws, x = draw(13, 3, 4, 8) * 1e3, draw(14, 6, 8) * 1e2

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P(None, None, "model")), out_specs=P("data", "model")
    )
    def fun(x, ws):
        def turn(x, w):
            y = lax.psum(lax.dynamic_slice_in_dim(x, 0, 4, 1) @ w, "model")
            return x + jnp.tile(y, (1, 2)), None

        return lax.scan(turn, lax.pcast(x, "model", to="varying"), ws)[0][:, :4]

    _, stats = jax.jit(observe(fun, of="forward"))(x, ws)
    assert [(row.turn, row.count) for row in stats.rows()] == [(turn, 4 * 3 * 4) for turn in range(3)]
    parts = [x[3 * i : 3 * i + 3, :4] @ ws[0][:, 4 * j : 4 * j + 4] for i in range(2) for j in range(2)]
    assert_is(stats.rows()[0], *parts)


@pytest.mark.exhaustive
def test_sharded_arguments_are_measured_whole():
    mesh = make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    params = {"first": draw(1, 4, 8) * 300, "second": draw(2, 8, 4)}
    x, y = draw(3, 8, 4), draw(4, 8, 4)
    observed = jax.jit(observe(jax.value_and_grad(loss_fn)))
    _, stats = observed(put(params, P("fsdp")), put(x, P("data")), put(y, P("data")))
    _, whole = observed(params, x, y)
    for ours, theirs in zip(stats.rows(), whole.rows(), strict=True):
        assert (ours.path, ours.count, ours.zeros) == (theirs.path, theirs.count, theirs.zeros)
        np.testing.assert_allclose([ours.amax, ours.rms], [theirs.amax, theirs.rms], rtol=1e-5)


@pytest.mark.exhaustive
def test_arguments_can_be_donated():
    step = lambda params, x, y: jax.tree.map(lambda p, g: p - g, params, jax.grad(loss_fn)(params, x, y))
    donated = jax.jit(observe(step), donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    new, stats = donated(params, X, Y)
    assert params["first"].is_deleted()
    assert_is(find(stats, "argument", path="params/first")[0], PARAMS["first"])
    assert_is(find(stats, "result", path="result/first")[0], new["first"])


@pytest.mark.exhaustive
def test_every_step_that_is_skipped_keeps_its_bits_and_has_empty_rows():
    train = jax.value_and_grad(loss_fn)
    observed, plain = jax.jit(observe(train, every=3)), jax.jit(train)
    total, seen = None, []
    for step in range(7):
        params = jax.tree.map(lambda p, step=step: p * (1 + step), PARAMS)
        out, stats = observed(step, params, X, Y)
        if step % 3:
            jax.tree.map(np.testing.assert_array_equal, out, plain(params, X, Y))
            assert {row.count for row in stats.rows()} == {0}
        else:
            seen.append(params["first"])
        total = stats if total is None else total.merge(stats)
    assert_is(find(total, "argument", path="params/first")[0], *seen)


@pytest.mark.exhaustive
def test_merging_a_thousand_steps_is_measuring_all_at_once():
    xs = draw(15, 1000, 6, 4) * 10.0 ** np.random.default_rng(0).integers(-6, 6, (1000, 1, 1))
    fun = lambda x: x @ x.T
    observed = collect(fun, of=("forward", "arguments"))

    def turn(stats, x):
        return stats.merge(observed(x)[1]), None

    empty = jax.eval_shape(observed, xs[0])[1].empty()
    merged, _ = jax.jit(lambda xs: lax.scan(turn, empty, xs))(xs)
    _, whole = jax.jit(lambda xs: lax.map(lambda x: observed(x), xs))(xs)
    for ours, theirs in zip(merged.rows(), whole.rows(), strict=True):
        assert (ours.count, ours.zeros, ours.amax, ours.min_nonzero) == (
            theirs.count,
            theirs.zeros,
            theirs.amax,
            theirs.min_nonzero,
        )
        assert ours.histogram.tolist() == theirs.histogram.tolist()
        np.testing.assert_allclose(ours.rms, theirs.rms, rtol=1e-6)
        for name in ours.formats:
            np.testing.assert_allclose(ours.formats[name].underflow, theirs.formats[name].underflow, rtol=1e-12)
            np.testing.assert_allclose(ours.formats[name].error, theirs.formats[name].error, rtol=1e-5)
    np.testing.assert_allclose(merged.rows()[0].rms, np.sqrt(np.mean(np.float64(xs) ** 2)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("matmuls", [("first", "dot_general"), ("second", "dot_general")]),
        ("tanh", [("first", "tanh")]),
        ("first", [("first", "dot_general"), ("first", "tanh")]),
        (("matmuls", "first"), [("first", "dot_general")]),
        (("tanh", "matmuls"), [("first", "dot_general"), ("first", "tanh"), ("second", "dot_general")]),
        ("all", [("first", "dot_general"), ("first", "tanh"), ("second", "dot_general")]),
        (("all", "sec.*"), [("second", "dot_general")]),
    ],
)
def test_where_chooses_by_operation_and_by_path(where, expected):
    _, stats = observe(mlp, where=where, of="forward")(PARAMS, X)
    assert [(row.path, row.primitive) for row in stats.rows()] == expected


@pytest.mark.slow
def test_an_operation_that_is_not_entered_counts_as_what_it_does():
    @jax.custom_vjp
    def product(x, y):
        return x @ y

    product.defvjp(lambda x, y: (x @ y, (x, y)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    _, stats = observe(product, of="forward")(X, X.T)
    [row] = stats.rows()
    assert row.primitive == "custom_vjp_call"
    assert_is(row, X @ X.T)
    _, stats = observe(jax.grad(lambda x: product(x, X.T).sum()), of=("forward", "backward"))(X)
    assert [row.primitive for row in stats.rows()] == ["dot_general"]  # the forward product is dead


def test_a_program_without_what_is_chosen_is_an_empty_report():
    out, stats = observe(lambda x: x + 1, of=("forward", "backward"))(1)
    assert (int(out), len(stats), stats.rows()) == (2, 0, ())
    assert "nothing" in str(stats).lower()


@pytest.mark.slow
def test_what_is_no_array_passes_through():
    out, stats = observe(lambda x, name, n: {"y": x * n, "name": name, "none": None})(X, "adam", 2)
    assert (out["name"], out["none"]) == ("adam", None)
    assert [row.path for row in stats.rows()] == ["x", "result/y"]


@pytest.mark.slow
def test_arguments_go_by_the_names_of_their_parameters():
    def fun(params, *batches, scale):
        return params["w"] * scale + sum(batches)

    _, stats = observe(fun, of="arguments")({"w": X}, X, X, scale=X)
    assert [row.path for row in stats.rows()] == ["params/w", "batches/0", "batches/1", "scale"]


BAD = {
    "a format": ({"formats": ("float17",)}, ValueError, r"Unknown format 'float17'.*Did you mean 'float1"),
    "a pass": ({"of": ("backwards",)}, ValueError, r"of has 'backwards'. Did you mean 'backward'\?"),
    "no pass": ({"of": ()}, ValueError, r"of is empty.*of=\('forward', 'backward'\)"),
    "loops": ({"loops": "splitt"}, ValueError, r"Unknown loops 'splitt'. Did you mean 'split'\?"),
    "every": ({"every": 0}, ValueError, r"every must be a positive integer or None, got 0.*every=100"),
    "where": ({"where": (3,)}, TypeError, r"where takes strings, got 3.*where=\('matmuls', 'blocks/\.\*'\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_at_once(name):
    options, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        collect(mlp, **options)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"collect takes a function, got .*collect\(train_step\)\(state, batch\)"):
        collect(3)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("frist", r"where has 'frist', but the function has no such operation.*Did you mean 'first'\?"),
        ("dot_generall", r"Did you mean 'dot_general'\?"),
        ("(", r"where has '\(', which is not a pattern"),
    ],
)
def test_where_must_match_something(where, text):
    with pytest.raises(ValueError, match=text):
        observe(mlp, where=where)(PARAMS, X)


def test_every_needs_the_number_of_the_step():
    with pytest.raises(TypeError, match=r"the first argument is the number of the step.*collect\(train_step, every="):
        observe(mlp, every=2)(PARAMS, X)


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 2])
def test_effects_happen_once_a_call(every):
    seen, ref = [], jax.new_ref(jnp.zeros(()))

    def fun(x):
        io_callback(lambda x: seen.append(float(x)), None, x, ordered=True)
        ref[...] += x
        return x

    step = () if every is None else (0,)
    observed = jax.jit(collect(fun, every=every))
    for _ in range(2):
        jax.block_until_ready(observed(*step, jnp.float32(3)))
    jax.effects_barrier()
    assert (seen, float(ref[...])) == ([3, 3], 6)


def test_collected_functions_are_public():
    assert numerics.collect is collect


def test_a_complex_array_has_a_row_of_its_parts():
    z = lax.complex(draw(0, 3, 4), draw(1, 3, 4))
    (_, _), stats = jax.jit(observe(lambda z: (z * z, z.shape[0]), where="mul"))(z)
    argument, product, result = stats.rows()
    parts = lambda value: (np.real(value), np.imag(value))
    square = np.asarray(z * z)
    assert_is(argument, *parts(z))
    assert_is(product, *parts(square))
    assert_is(result, *parts(square))
    assert (product.dtype, product.shape, result.path) == ("complex64", (3, 4, 2), "result/0")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3,), (2, 5001), (0, 3)])
def test_a_finite_function_is_measured_under_jax_debug_nans(shape):
    x = draw(2, *shape)
    observed = collect(lambda x: lax.scan(lambda c, x: (c, x * 2), 0, x)[1], ["float16", "mxfp8"], where="all")
    with jax.debug_nans(True):
        out, stats = observed(x)
    np.testing.assert_array_equal(out, 2 * x)
    assert [row.to_dict() for row in stats.rows()] == [row.to_dict() for row in observed(x)[1].rows()]


def test_a_small_array_is_measured_under_jax_debug_nans():
    with jax.debug_nans(True):
        _, stats = collect(jnp.exp2, [], where=["exp2"], of="forward", histogram=False)(jnp.zeros(3))
    [row] = stats.rows()
    assert (row.count, row.zeros, row.nans, row.amax) == (3, 0.0, 0, 1.0)
