"""Programs in the manner of JAX's own tests, through each function that rewrites or reads programs. Nothing runs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from programs import walk

import jmp_policy as jmp

FLOAT32, BFLOAT16 = (f"params=float32,compute={dtype},output=none" for dtype in ("float32", "bfloat16"))
X, KEY = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
PROGRAMS = {}


def program(*shapes):
    def register(fun):
        PROGRAMS[fun.__name__] = fun, shapes
        return fun

    return register


@program(X)
def while_whose_test_reads_a_constant(x):
    most = jnp.sum(jnp.abs(x))
    return lax.while_loop(lambda c: jnp.sum(c) < most, lambda c: c * 2 + 1, jnp.zeros_like(x))


@program(X)
def while_under_vmap(x):
    return jax.vmap(lambda row: lax.while_loop(lambda r: jnp.sum(r) < 9, lambda r: r + 1, row))(x)


@program(X)
def gradient_through_a_fori_loop(x):
    return jax.grad(lambda x: jnp.sum(lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) @ x, x)))(x)


@program(X)
def scan_with_a_tree_and_nothing_in_it(x):
    def body(carry, row):
        return {"sum": carry["sum"] + row, "none": None, "empty": ()}, (row * 2, None)

    return lax.scan(body, {"sum": jnp.zeros(4, x.dtype), "none": None, "empty": ()}, x)


@program(X)
def backward_scan_of_a_scan(x):
    def inner(carry, element):
        return carry * element, jnp.exp(carry)

    return lax.scan(lambda carry, row: lax.scan(inner, carry, row), jnp.float32(1), x, reverse=True)


@program(X)
def branch_on_a_closed_over_value(x):
    y = jnp.exp(x)
    return lax.cond(jnp.sum(x) > 0, lambda: {"a": y @ x, "b": (x,)}, lambda: {"a": y, "b": (y,)})


@program(X)
def gradient_of_a_switch_in_a_scan(x):
    def body(carry, row):
        index = jnp.sum(row > 0).astype(jnp.int32) % 3
        return lax.switch(index, [jnp.sin, lambda c: c @ x, lambda c: c], carry), index

    return jax.grad(lambda x: jnp.sum(lax.scan(body, x[0], x)[0]))(x)


@program(X)
def linear_solve_by_iteration(x):
    matvec = lambda v: x @ v + 4 * v
    solve = lambda matvec, b: lax.fori_loop(0, 5, lambda _, v: v - 0.1 * (matvec(v) - b), b)
    run = lambda b: lax.custom_linear_solve(matvec, b, solve, symmetric=True)
    return jax.vjp(run, x[0])[1](x[1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def apply(fun, x):
    return fun(x)


@apply.defjvp
def _(fun, primals, tangents):
    return apply(fun, primals[0]), tangents[0] * jnp.cos(primals[0])


@program(X)
def custom_jvp_with_a_static_argument(x):
    return jax.jvp(lambda x: apply(jnp.sin, x @ x), (x,), (x,)), jax.hessian(lambda a: apply(jnp.sin, a))(x[0, 0])


@jax.custom_vjp
def clip_gradient(x, low):
    return {"x": jnp.sin(x), "low": low}


clip_gradient.defvjp(
    lambda x, low: (clip_gradient(x, low), (jnp.cos(x), low)),
    lambda saved, g: (jnp.maximum(saved[0] * g["x"], saved[1]), None),
)


@program(X)
def custom_vjp_with_trees_and_no_cotangent(x):
    return jax.vmap(jax.grad(lambda row: jnp.sum(clip_gradient(row, jnp.float32(-1))["x"])))(x)


@program(X)
def custom_vjp_in_a_scan_in_a_remat(x):
    body = lambda c, row: (clip_gradient(c * row, jnp.float32(0))["x"], None)
    run = jax.checkpoint(lambda x: jnp.sum(lax.scan(body, x[0], x)[0]), prevent_cse=False)
    return jax.value_and_grad(run)(x)


@program(X)
def remat_with_a_policy_and_names(x):
    def run(x):
        hidden = checkpoint_name(jnp.tanh(x @ x), "hidden")
        return jnp.sum(jax.nn.softmax(hidden @ x))

    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    return jax.grad(jax.checkpoint(run, policy=policy))(x)


@program(X, KEY)
def random_layers(x, key):
    keep, noise = jax.random.split(key)
    x = jnp.where(jax.random.bernoulli(keep, 0.5, x.shape), x, 0)
    return x + jax.random.normal(noise, x.shape), jax.random.permutation(keep, x), jax.random.fold_in(key, 7)


@program(X)
def windows_and_transforms(x):
    pooled = lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")
    return pooled, jnp.fft.rfft(x).imag, jnp.convolve(x[0], x[1]), jnp.linalg.slogdet(x + 4 * jnp.eye(4))


def sharded(fun, out_specs):
    mesh = make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=out_specs)


@program(X)
def devices_that_pass_rows_around(x):
    def run(x):
        passed = lax.ppermute(x, "i", [(0, 1), (1, 0)])
        return lax.psum_scatter(lax.all_gather(passed, "i", axis=1, tiled=True), "i", scatter_dimension=1, tiled=True)

    return sharded(run, P("i"))(x)


@program(X)
def gradient_of_a_mean_over_devices(x):
    loss = lambda x: sharded(lambda x: lax.pmean(jnp.sum(jax.jit(jnp.tanh)(x @ x.T)), "i"), P())(x)
    return jax.value_and_grad(loss)(x)


@program(X)
def devices_of_a_row_inside_of_devices_of_a_column(x):
    grid = make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto, AxisType.Auto))
    inner = jax.shard_map(lambda x: jnp.sin(x) * x, in_specs=P(None, "j"), out_specs=P(None, "j"), axis_names={"j"})
    outer = lambda x: inner(jnp.exp(x)) * 2
    return jax.shard_map(outer, mesh=grid, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})(x)


def trace(name, rewrite):
    fun, shapes = PROGRAMS[name]
    return jax.make_jaxpr(rewrite(fun), return_shape=True)(*shapes)


def list_types(shapes):
    return jax.tree.map(lambda shape: (shape.shape, shape.dtype), shapes)


def list_operations(program):
    """The operations in order, without the names of variables and of shared functions."""
    steps = [step for step in walk(program.jaxpr) if step.name != "link"]
    return [(step.name, [str(atom.aval) for atom in (*step.operands, *step.results)]) for step in steps]


def spread(every, first=0):
    """Returns one program in `every`, from `first` on, as a case of `pytest`, and the others as slow cases."""
    return [pytest.param(name, marks=() if i % every == first else pytest.mark.slow) for i, name in enumerate(PROGRAMS)]


@pytest.mark.parametrize("name", spread(4))
def test_autocast_in_float32_gives_the_same_jaxpr(name):
    plain, _ = trace(name, lambda fun: fun)
    ours, _ = trace(name, lambda fun: jmp.autocast(fun, FLOAT32))
    assert list_operations(ours) == list_operations(plain)


REWRITES = {
    "autocast": lambda fun: jmp.autocast(fun, BFLOAT16),
    "autocast inside": lambda fun: jmp.autocast(fun, BFLOAT16, custom_rules="inside"),
    "collect": lambda fun: lambda *args: jmp.numerics.collect(fun, formats=("float16",), where="all")(*args)[0],
    "first_nonfinite": lambda fun: lambda *args: jmp.numerics.first_nonfinite(fun)(*args)[0],
}


@pytest.mark.parametrize("name", spread(12, first=6))
def test_a_rewritten_program_type_checks_and_has_the_same_results(name):
    _, plain = trace(name, lambda fun: fun)
    for rewrite in REWRITES:
        with jax.enable_checks(True):
            _, ours = trace(name, REWRITES[rewrite])
        assert list_types(ours) == list_types(plain), rewrite


@pytest.mark.parametrize("name", spread(4))
def test_programs_are_audited(name):
    fun, shapes = PROGRAMS[name]
    report = jmp.numerics.audit(fun)(*shapes)
    assert report.rows
