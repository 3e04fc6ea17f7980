"""`numerics.collect` on programs of all kinds: what is odd about them, and what must not be."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh
from observed import assert_row_is, assert_same, check_collect, find, find_sites, observe

from jmp_policy.numerics import collect

X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
W = jnp.asarray(np.random.default_rng(2).normal(size=(3, 4)), jnp.float32)


def loss_fn(w, x):
    return jnp.sum(jnp.tanh(x @ w))


@jax.custom_vjp
def with_own_vjp(x):
    return jnp.tanh(x @ W)


with_own_vjp.defvjp(lambda x: (with_own_vjp(x), x), lambda x, ct: (ct @ W.T,))


@jax.custom_jvp
def with_own_jvp(x):
    return x @ W


with_own_jvp.defjvp(lambda primals, tangents: (with_own_jvp(*primals), tangents[0] @ W))


def count_equations(program, name):
    """Counts calls of a recorder, also inside other calls."""
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in program.eqns if eqn.primitive.name == "jit"]
    return sum(eqn.params.get("name") == name for eqn in program.eqns) + sum(count_equations(b, name) for b in bodies)


def test_values_with_the_same_magnitudes_are_measured_once():
    def fun(x):
        return jnp.sin(-x.T.reshape(2, -1)), jnp.abs(x)

    def count(formats):
        stats = jax.jit(collect(fun, formats, where="all"))(X)[1]
        program = jax.make_jaxpr(collect(fun, formats, where="all"))(X).jaxpr
        return stats, count_equations(program, "jmp_record_measure")

    stats, measured = count(["float16"])
    same = [row for row in stats if row.amax == jnp.max(jnp.abs(X))]
    assert (len(stats), len(same), measured) == (8, 6, 2)
    assert len({(row.rms, row.histogram.tobytes()) for row in same}) == 1
    _, measured = count(["int8/2"])  # the blocks of a transposed tensor are others
    assert measured == 4


def test_functions_inside_do_not_gather_rows_of_their_own():
    def fun(x):
        return jax.nn.relu(jax.jit(lambda x: jnp.exp(jax.jit(jnp.tanh)(x)))(x)) * 2.0

    collected = collect(fun, where="all", of="forward")
    program = jax.make_jaxpr(collected)(X).jaxpr
    assert count_equations(program, "jmp_record_gather") == 1
    assert [row.primitive for row in collected(X)[1]] == ["tanh", "exp", "custom_jvp_call", "mul"]


def run_kernel(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 4), jnp.float32), interpret=True)(x)


def attend(x):
    x = x[None, :, None]
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)


PROGRAMS = {
    "custom_vjp": (with_own_vjp, (X,), {}, ["custom_vjp_call"]),
    "gradient of custom_vjp": (jax.grad(lambda x: with_own_vjp(x).sum()), (X,), {}, ["dot_general"]),
    "custom_jvp": (with_own_jvp, (X,), {}, ["custom_jvp_call"]),
    "gradient of custom_jvp": (jax.grad(lambda x: with_own_jvp(x).sum()), (X,), {}, ["dot_general"]),
    "a kernel": (run_kernel, (X,), {"where": "pallas_call"}, ["pallas_call"]),
    "attention": (attend, (X,), {}, ["dot_general"] * 2),
    "map": (lambda x: lax.map(lambda row: row @ W, x), (X,), {}, ["dot_general"] * 4),
    "a mapped loop with several tests": (
        jax.vmap(lambda x: lax.while_loop(lambda c: c.sum() < 50, lambda c: c @ c * 2, x)),
        (jnp.stack([jnp.eye(3), 0.7 * jnp.eye(3)]),),
        {},
        ["while"],
    ),
    "associative_scan": (lambda x: lax.associative_scan(jnp.multiply, x), (X,), {"where": "mul"}, ["mul"] * 4),
    "a loss": (
        jax.grad(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.arange(4) % 3).mean()),
        (X,),
        {"where": "exp"},
        ["exp"],
    ),
    "complex numbers": (lambda x: lax.complex(x, x) @ lax.complex(W, W), (X,), {}, []),
    "a Fourier transform": (lambda x: jnp.fft.fft(x).real, (X,), {"where": "all"}, ["real"]),
    "integers": (lambda x: x @ x.T, (jnp.arange(6).reshape(2, 3),), {"where": "all"}, []),
    "a linear solve": (
        lambda b: lax.custom_linear_solve(lambda v: 2 * v, b, lambda _, b: b / 2, symmetric=True),
        (X[0],),
        {"where": "custom_linear_solve"},
        ["custom_linear_solve"],
    ),
    "empty arrays": (lambda x: x @ W, (jnp.zeros((0, 3)),), {}, ["dot_general"]),
    "a loop of no turns": (lambda x: lax.scan(lambda x, _: (x @ x, None), x, length=0)[0], (W[:, :3],), {}, []),
    "no arguments": (lambda: jnp.ones(2), (), {}, []),
    "keys": (lambda key: jax.random.split(key), (jax.random.key(0),), {}, []),
    "jit inside": (jax.jit(lambda x: jax.jit(lambda x: x @ W)(x)), (X,), {}, ["dot_general"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_did_and_its_ends_are_measured(name):
    fun, args, options, expected = PROGRAMS[name]
    _, stats = check_collect(fun, *args, **options)
    assert [row.primitive for row in stats if row.primitive] == expected


@pytest.mark.slow
def test_eagerly_products_have_the_bits_that_they_had():
    (product, name), stats = observe(lambda x: (x @ W, "adam"))(X)
    np.testing.assert_array_equal(product, X @ W)
    assert name == "adam"
    assert_row_is(find(stats, "forward")[0], product)


class Bound:
    weight = W

    def call(self, x):
        return x @ self.weight

    __call__ = call
    of_class = classmethod(lambda cls, x: x @ cls.weight)


CALLABLES = {
    "a method": Bound().call,
    "a class method": Bound.of_class,
    "a callable object": Bound(),
    "a partial": functools.partial(lambda w, x: x @ w, W),
    "a partial by name": functools.partial(lambda x, w: x @ w, w=W),
    "a jitted function": jax.jit(lambda x, double: x @ W if double else x, static_argnames="double"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLABLES)
def test_anything_that_can_be_called_is_collected(name):
    static = {"double": True} if name == "a jitted function" else {}
    out, stats = observe(CALLABLES[name])(X, **static)
    assert_same(out, X @ W)
    assert "x" in [row.path for row in find(stats, "argument")]
    assert [row.primitive for row in find(stats, "forward")] == ["dot_general"]


@pytest.mark.slow
def test_python_arguments_are_constants():
    observed = observe(lambda x, layers, name=None: (x @ W if layers else x, name))
    (out, name), stats = observed(X, 1, name="head")
    assert (out.shape, name) == ((4, 4), "head")
    assert [row.path for row in stats] == ["x", "", "result/0"]
    assert len(jax.jit(observed, static_argnums=1)(X, 0)[1]) == 2


def test_what_a_library_calls_has_the_line_of_the_library():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    [site] = find_sites(model.__call__, X, of="forward")
    file, _, line = site.source.rpartition(":")
    assert (file.endswith("linear.py"), line.isdigit(), site.function) == (True, True, "Linear.__call__")
    [site] = find_sites(jnp.tanh, X, of="forward", where="all")
    assert (site.source, site.function) == ("", "")


def test_modules_of_equinox_pass_through():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 4, 5, 1, key=jax.random.key(0))
    grad = eqx.filter_value_and_grad(lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2))
    expected = grad(model, X)
    (loss, grads), stats = observe(grad, of=("arguments", "results"))(model, X)
    assert_same((loss, eqx.filter(grads, eqx.is_array)), (expected[0], eqx.filter(expected[1], eqx.is_array)))
    assert grads.activation is expected[1].activation
    assert_row_is(find(stats, "argument", path="model/layers/0/weight")[0], model.layers[0].weight)
    assert_row_is(find(stats, "result", path="result/1/layers/0/weight")[0], grads.layers[0].weight)


@pytest.mark.slow
def test_modules_of_haiku_have_their_paths():
    net = hk.transform(lambda x: hk.Sequential([hk.Linear(5), jax.nn.relu, hk.Linear(2)])(x).sum())
    params = net.init(jax.random.key(0), X)
    sites = find_sites(jax.grad(lambda params, x: net.apply(params, None, x)), params, X)
    products = [(site.direction, site.path.rpartition("/")[2]) for site in sites if site.primitive]
    assert products == [
        ("forward", "linear"), ("backward", "linear_1"), ("backward", "linear_1"), ("backward", "linear"),
    ]  # fmt: skip
    assert "result/linear_1/w" in [site.path for site in sites]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_sharded_is_measured_as_on_one_device(kind):
    mesh = make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    grad = jax.value_and_grad(loss_fn)
    expected, one = jax.jit(observe(grad))(W, X)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        w = jax.device_put(W, NamedSharding(mesh, P(None, "model")))
        out, stats = jax.jit(observe(grad))(w, x)
    assert_same(jax.device_get(out), jax.device_get(expected))
    assert len(stats) == len(one)
    for row, other in zip(stats, one, strict=True):
        assert (row.path, row.direction, row.shape, row.count) == (
            other.path,
            other.direction,
            other.shape,
            other.count,
        )
        np.testing.assert_allclose([row.amax, row.rms], [other.amax, other.rms], rtol=1e-5)
    assert_row_is(find(stats, "argument", path="w")[0], W)
