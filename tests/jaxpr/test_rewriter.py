"""The interpreter serves any rule: here one that counts, one that puts cosines for sines, one that narrows."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from programs import program_text
from zoo import ZOO

# The package `_jaxpr` has no public names: what it computes is seen outside only through slower programs.
from jmp_policy._jaxpr import AbstractValue, Rewriter, Rule, float_dtype, is_float, trace


@dataclasses.dataclass(frozen=True)
class Copying(Rule):
    """Writes every equation as it was traced."""

    def contexts(self, outer, program):
        return [outer] * len(program.eqns)

    def equation(self, eqn, values, body, context):
        return body.append(
            eqn, [value.atom for value in values], [AbstractValue(float_dtype(var)) for var in eqn.outvars]
        )

    def argument(self, dtype):
        return AbstractValue(dtype)

    def literal(self, literal):
        return AbstractValue(float_dtype(literal))

    def join(self, kinds):
        return kinds[0]

    def accumulated(self, kind):
        return kind

    def rewrites_custom_rule(self, eqn, context):
        return True

    def rewrites_primal_only(self, eqn, context):
        return True


@dataclasses.dataclass(frozen=True)
class Counting(Copying):
    """Counts the equations of programs, and how deep they are nested in functions that are jitted."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter, hash=False, compare=False)

    def contexts(self, outer, program):
        return [outer + (eqn.primitive.name == "jit") for eqn in program.eqns]

    def equation(self, eqn, values, body, context):
        self.counts[eqn.primitive.name, context] += 1
        return super().equation(eqn, values, body, context)


COSINE = jax.make_jaxpr(jnp.cos)(1.0).eqns[0]


@dataclasses.dataclass(frozen=True)
class Turning(Copying):
    """Puts the cosine where a sine was."""

    def equation(self, eqn, values, body, context):
        if eqn.primitive.name == "sin":
            eqn = eqn.replace(primitive=COSINE.primitive, params=COSINE.params)
        return super().equation(eqn, values, body, context)


@dataclasses.dataclass(frozen=True)
class Narrowing(Copying):
    """Runs sines in float16, and everything that follows; where dtypes meet, the wide one wins."""

    def equation(self, eqn, values, body, context):
        narrow = eqn.primitive.name == "sin" or any(value.kind.dtype == np.float16 for value in values)
        kind = AbstractValue(np.dtype(np.float16 if narrow else np.float32))
        atoms = [body.cast(v.atom, kind.dtype, eqn) if v.kind.dtype is not None else v.atom for v in values]
        return body.append(eqn, atoms, [kind if is_float(var) else AbstractValue(None) for var in eqn.outvars])

    def join(self, kinds):
        return max(kinds, key=lambda kind: 0 if kind.dtype is None else kind.dtype.itemsize)


def rewritten(rule, fun, *args, context=0):
    program = trace(fun, args, {}).program
    kinds = [rule.argument(float_dtype(var)) for var in program.jaxpr.invars]
    return Rewriter(rule).rewrite(program, kinds, context)


def run(rule, fun, *args):
    return jaxpr_as_fun(rewritten(rule, fun, *args).program)(*args)


X = jnp.linspace(0.0, 1.0, 4)


@pytest.mark.parametrize("name", ZOO)
def test_a_rule_that_copies_gives_the_same_program(name):
    animal = ZOO[name]
    with animal.context():
        program = trace(animal.fun, animal.args, {}).program
        kinds = [AbstractValue(float_dtype(var)) for var in program.jaxpr.invars]
        copy = Rewriter(Copying()).rewrite(program, kinds, None)
        assert str(copy.program) == str(program)
        assert [kind.dtype for kind in copy.kinds] == [float_dtype(atom) for atom in program.jaxpr.outvars]


def test_equations_that_do_not_change_are_the_same_objects():
    program = trace(lambda x: jnp.exp(x) + 1, (X,), {}).program
    copy = Rewriter(Copying()).rewrite(program, [AbstractValue(np.dtype(np.float32))], None).program
    assert all(a is b for a, b in zip(copy.eqns, program.eqns, strict=True))


def test_a_rule_sees_each_equation_once_and_where_it_is():
    def fun(x):
        x = jnp.sin(jax.jit(lambda x: jnp.exp(jax.jit(jnp.cos)(x)))(x))
        return lax.scan(lambda x, _: (jnp.tanh(x), None), x, None, length=3)[0]

    rule = Counting()
    rewritten(rule, fun, X)
    # The scan's body is rewritten once for the kinds that it is entered with, whatever its carry had to become.
    assert rule.counts == {("sin", 0): 1, ("exp", 1): 1, ("cos", 2): 1, ("tanh", 0): 1}


@pytest.mark.parametrize(
    "around",
    {
        "nothing": lambda f, x: f(x),
        "jit": lambda f, x: jax.jit(f)(x),
        "scan": lambda f, x: lax.scan(lambda x, _: (f(x), None), x, None, length=1)[0],
        "while": lambda f, x: lax.while_loop(lambda c: c[1] < 1, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0],
        "cond": lambda f, x: lax.cond(x[0] < 5, f, lambda x: x, x),
        "remat": lambda f, x: jax.checkpoint(f)(x),
        "vmap": lambda f, x: jax.vmap(f)(x),
        "custom_jvp": lambda f, x: custom_jvp_of(f)(x),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_rule_replaces_primitives_in_bodies(around):
    _, fun = around
    [result] = run(Turning(), lambda x: fun(jnp.sin, x), X)
    np.testing.assert_array_equal(result, jnp.cos(X))


def custom_jvp_of(fun):
    wrapped = jax.custom_jvp(fun)
    wrapped.defjvps(lambda t, out, x: t * jnp.sin(x))
    return wrapped


def test_a_rule_reaches_a_derivative_that_it_opens():
    new = rewritten(Turning(), custom_jvp_of(jnp.sin), X).program
    _, tangent = jax.jvp(lambda x: jaxpr_as_fun(new)(x)[0], (X,), (X,))
    np.testing.assert_allclose(tangent, X * jnp.cos(X), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_carry_has_the_dtype_that_reaches_it_after_some_turns(loop):
    def fun(x):
        narrow = jnp.sin(x)
        turn = lambda carry: (carry[1], carry[2], x)
        if loop == "scan":
            return lax.scan(lambda carry, _: (turn(carry), None), (narrow,) * 3, None, length=4)[0]
        return lax.while_loop(lambda carry: carry[0][0] != x[0], turn, (narrow,) * 3)

    new = rewritten(Narrowing(), fun, X + 1)
    assert [kind.dtype for kind in new.kinds] == [np.float32] * 3
    np.testing.assert_array_equal(jaxpr_as_fun(new.program)(X + 1)[0], X + 1)


def test_branches_give_what_they_have_in_common():
    results = lambda *branches: rewritten(Narrowing(), lambda i, x: lax.switch(i, branches, x), 1, X).kinds
    assert [kind.dtype for kind in results(jnp.sin, jnp.exp, lambda x: x)] == [np.float32]
    assert [kind.dtype for kind in results(jnp.sin, lambda x: jnp.sin(x) * 2)] == [np.float16]


def test_equal_rules_share_what_they_rewrote():
    program = trace(jnp.sin, (X,), {}).program
    kinds = [AbstractValue(np.dtype(np.float32))]
    one, other = (Rewriter(Turning()).rewrite(program, kinds, None).program for _ in range(2))
    assert one is other
    assert Rewriter(Copying()).rewrite(program, kinds, None).program is not one


def test_results_are_cast_to_the_dtypes_that_are_wanted():
    program = trace(lambda x: (jnp.sin(x), 1.0, x), (X,), {}).program
    half = np.dtype(np.float16)
    new = Rewriter(Copying()).rewrite(program, [AbstractValue(np.dtype(np.float32))], None, [half, half, None])
    assert [float_dtype(atom) for atom in new.program.jaxpr.outvars] == [half, half, np.float32]


def test_five_calls_of_one_function_stay_one_function():
    f = jax.jit(lambda x: jnp.sin(x) @ x)
    new = rewritten(Turning(), lambda x: sum(f(x) for _ in range(5)), jnp.ones((4, 4))).program
    bodies = {id(eqn.params["jaxpr"]) for eqn in new.eqns if eqn.primitive.name == "jit"}
    assert len(bodies) == 1
    text = program_text(jax.jit(lambda x: jaxpr_as_fun(new)(x)).lower(jnp.ones((4, 4))))
    assert text.count("func.func private") == 1
