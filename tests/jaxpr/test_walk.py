"""The steps of a program: scopes, trips, links and constants, in whatever they are nested."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var
from meshes import make_mesh

# The package `_jaxpr` has no public names: what it computes is seen outside only through slower programs.
from jmp_policy._jaxpr import ModulePaths, Modules, split_axes, sub_jaxprs, walk

X = jnp.ones((4, 4))
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SPEC = jax.sharding.PartitionSpec("data")


def steps(fun, *args, **options):
    return list(walk(jax.make_jaxpr(fun)(*args).jaxpr, **options))


def named(fun, name, **options):
    return [step for step in steps(fun, X, **options) if step.name == name]


@pytest.mark.parametrize(
    ("fun", "trips"),
    [
        (jax.jit(jnp.sin), 1),
        (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0], 3),
        (lambda x: lax.fori_loop(0, 2, lambda _, c: lax.fori_loop(0, 5, lambda _, c: jnp.sin(c), c), x), 10),
        (lambda x: lax.while_loop(lambda c: c[0, 0] < 1, jnp.sin, x), 1),
        (jax.shard_map(jnp.sin, mesh=MESH, in_specs=SPEC, out_specs=SPEC), 1),
    ],
    ids=["jit", "scan", "scan in scan", "while", "shard_map"],
)
def test_equation_runs_as_often_as_its_loops_say(fun, trips):
    assert [step.trips for step in named(fun, "sin")] == [trips]


def test_shard_map_runs_on_each_device():
    mesh = make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    fun = jax.shard_map(jnp.sin, mesh=mesh, in_specs=SPEC, out_specs=SPEC, axis_names={"data"})
    assert [step.trips for step in named(fun, "sin")] == [2]


def test_scopes_are_joined_from_the_outside_in():
    inner = jax.named_scope("inner")(jnp.sin)
    fun = jax.named_scope("outer")(lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0])
    assert [step.scope for step in named(fun, "sin")] == ["outer/inner"]
    assert [step.scope for step in steps(inner, X, scope="around")] == ["around/inner"]


def test_first_values_of_a_loop_are_told_from_its_constants():
    def fun(x):
        return lax.scan(lambda c, y: (c + y * x[0], None), x[0], x)[0]

    found = steps(fun, X)
    assert [step.name for step in found if step.name in ("carry", "link")] == ["link", "carry", "link", "link"]
    assert len(named(lambda x: lax.while_loop(lambda c: c[0, 0] < x[0, 0], lambda c: c + x, x), "carry")) == 2


def test_array_that_a_body_closes_over_is_a_constant():
    table = np.arange(4.0, dtype=np.float32)
    whole = jax.make_jaxpr(jax.jit(lambda x: x + table))(X)
    found = [np.asarray(step.operands[0]) for step in walk(whole.jaxpr) if step.name == "constant"]
    assert all((array == table).all() for array in [*found, *whole.consts])
    assert len(found) + len(whole.consts) == 1  # of the body, or of the program, as JAX has it


def test_equations_around_a_step_are_told_from_the_outside_in():
    fun = jax.jit(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x))
    [sin] = named(fun, "sin")
    assert [eqn.primitive.name for eqn, _ in sin.around] == ["jit", "cond"]
    assert sin.eqn in sin.around[-1][1].eqns


def test_dead_code_is_passed_over_if_asked():
    def fun(x):
        jnp.cos(x)
        jax.debug.callback(lambda x: None, jnp.tan(x))
        return jax.jit(lambda x: (jnp.sin(x), jnp.exp(x))[0])(x)

    def computed(**options):
        return [step.name for step in steps(fun, X, **options) if step.name in ("sin", "cos", "tan", "exp")]

    assert computed() == ["cos", "tan", "sin", "exp"]
    assert computed(live_only=True) == ["tan", "sin"]


def loop(c, _):
    count, total, unread, _ = c
    return (count + 1, jnp.sin(count) + total, jnp.cos(unread), 0.0), jnp.exp(unread)


def report(x):
    jax.debug.callback(lambda x: None, jnp.tan(x))
    return jnp.sin(x), jnp.cos(x)


COUNTED = ("sin", "cos", "tan", "exp", "log")
LIVE = {
    "jit": (lambda x: jax.jit(report)(x)[0], "sin tan"),
    "effects": (lambda x: jax.jit(report)(x) and None, "tan"),
    "remat": (lambda x: jax.checkpoint(lambda x, y: (jnp.sin(x), jnp.cos(y)))(x, jnp.exp(x))[0], "sin"),
    "nested jit": (lambda x: jax.jit(lambda x: jax.jit(lambda y: (jnp.sin(x), jnp.cos(y)))(jnp.exp(x)))(x)[0], "sin"),
    "scan": (lambda x: lax.scan(loop, (x, jnp.tan(x), jnp.log(x), x), length=3)[0][1], "sin tan"),
    "scan of what is stacked": (lambda x: lax.scan(loop, (x, jnp.tan(x), jnp.log(x), x), length=3)[1], "cos exp log"),
    "scan that may not run": (lambda x: lax.scan(loop, (x, x, x, jnp.tan(x)), length=0)[0][3], "tan"),
    "while": (
        lambda x: lax.while_loop(
            lambda c: jnp.tan(c[0]) < 1, lambda c: (c[0] + 1, jnp.sin(c[1]), jnp.cos(c[2])), (x, x, jnp.exp(x))
        )[1],
        "sin tan",
    ),
    "cond": (lambda x: lax.cond(x > 0, lambda: (jnp.sin(x), jnp.cos(x)), lambda: (jnp.tan(x), x))[0], "sin tan"),
    "derivative": (jax.grad(lambda x: jnp.sum(jax.jit(lambda x: jnp.log(jnp.sin(x)))(x))), "cos sin"),
}
"""By the equation around dead code: a function of one number, and the operations that it needs."""


@pytest.mark.parametrize("name", LIVE)
def test_dead_code_is_found_in_sub_jaxprs_too(name):
    fun, expected = LIVE[name]
    found = [step for step in steps(fun, 1.0, live_only=True, all_results=False) if step.name in COUNTED]
    assert sorted(step.name for step in found) == expected.split()
    program = jax.make_jaxpr(fun)(1.0).jaxpr
    made = {*program.invars, *program.constvars}
    for step in walk(program, live_only=True, all_results=False):  # whatever is read has been made
        read = [operand for operand in step.operands if isinstance(operand, Var)]
        assert made.issuperset(read)
        made.update(step.results, *(body.constvars for _, body in step.around))


def test_all_results_of_a_call_that_runs_may_count():
    loss = jax.jit(lambda x: (jnp.log(jnp.sin(x)), jnp.exp(x)))
    gradient = jax.grad(lambda x: sum(loss(x)))
    computed = lambda fun, **options: {step.name for step in steps(fun, 1.0, live_only=True, **options)}
    assert {"log", "exp"} & computed(gradient, all_results=False) == {"exp"}
    assert {"log", "exp"} <= computed(gradient)
    assert computed(lambda x: (jax.jit(jnp.cos)(x), x)[1]) == set()


@pytest.mark.parametrize("inside", [True, False], ids=["gradient in a scope", "gradient around scopes"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_a_rule_has_the_scopes_of_its_call(wrap, inside):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    @jax.custom_jvp
    def triple(x):
        return 3 * x

    in_rule = jax.named_scope("rule/inner")
    double.defvjp(lambda x: (2 * x, x), in_rule(lambda x, g: (jnp.sinh(x) * g,)))
    triple.defjvp(in_rule(lambda x, t: (triple(*x), lax.exp2(x[0]) * t[0])))

    @jax.named_scope("net/layer")
    def net(x):
        return wrap(lambda x: double(triple(x)))(x)

    step = jax.named_scope("step/micro")(jax.grad(net)) if inside else jax.grad(net)
    read, first = ModulePaths(Modules()).read_stack, "step/micro/" if inside else ""
    found = {step.name: read(step.scope) for step in steps(step, 1.0, live_only=True)}
    assert {found["sinh"], found["exp2"], found["mul"]} == {f"{first}net/layer/rule/inner"}


def test_kernel_and_reduction_have_no_bodies_to_look_into():
    scatter = jax.make_jaxpr(lambda x: x.at[0].add(1.0))(X)
    assert all(sub_jaxprs(eqn) == [] for eqn in scatter.eqns if eqn.primitive.name.startswith("scatter"))
    [reduce] = steps(lambda x: lax.reduce(x, 0.0, lambda x, y: x * y + 1, (0,)), X)
    assert reduce.name == "reduce"


@pytest.mark.parametrize("params", [{"newly_manual_axes": {"a"}}, {"manual_axes": {"a", "b"}}], ids=["new", "old"])
def test_axes_of_a_shard_map_have_two_names_in_versions_of_jax(params):
    mesh = types.SimpleNamespace(axis_names=("b", "a", "c"), manual_axes=("b",))
    assert split_axes({"mesh": mesh, **params}) == ("a",)
