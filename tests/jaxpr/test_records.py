"""Records of the zoo: each value that a program makes is in its row, through every construct and transformation."""

import dataclasses
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from replay import CannotReplay, replay
from specimen import is_floating, total
from zoo import ZOO
from zoo_control_flow import CONTROL_FLOW
from zoo_custom_rules import CUSTOM_RULES
from zoo_devices import DEVICES, sharded
from zoo_effects import EFFECTS

# The package `_jaxpr` has no public names: what it computes is seen outside only through slower programs.
from jmp_policy._jaxpr import Recorder, evaluate, float_dtype, is_recorded, record_program, trace

QUICKLY = {"xla_backend_optimization_level": 0}
CONSTRUCTS = CONTROL_FLOW | CUSTOM_RULES | DEVICES | EFFECTS
UNMAPPED = {"linear_call_with_a_transpose"}
LARGEST = 1e30
"""Larger magnitudes count as this one, so that no sum is infinite."""


@dataclasses.dataclass(frozen=True)
class Magnitudes(Recorder):
    """How often a value was made, and the sum of its magnitudes."""

    most_turns: int = 64

    def enter(self, outer, eqn):
        return None

    def choose(self, eqn, context):
        named = [i for i, var in enumerate(eqn.outvars) if float_dtype(var) is not None and str(var) != "_"]
        return [] if is_recorded(eqn) else named

    def splits(self, turns):
        return turns <= self.most_turns

    def measure(self, value):
        magnitude = jnp.sum(jnp.minimum(jnp.abs(lax.stop_gradient(value).astype(jnp.float32)), LARGEST))
        return {"times": jnp.int32(1), "sum": magnitude}

    def gather(self, measured):
        return measured

    def join(self, records):
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *records)

    def merge(self, one, other):
        return jax.tree.map(jnp.add, one, other)

    def fold(self, record, order):
        return jax.tree.map(lambda leaf: jnp.sum(leaf, 0, dtype=leaf.dtype), record)

    def empty(self, rows):
        return {"times": jnp.zeros(rows, jnp.int32), "sum": jnp.zeros(rows, jnp.float32)}


def observe(fun, recorder=Magnitudes(), lines=None):
    """`fun`, which returns its record as well; `lines` gets what the rows are of."""

    def observed(*args):
        traced = trace(fun, args, {})
        recorded = record_program(traced.program, recorder, None)
        if lines is not None:
            lines[:] = recorded.lines
        out = evaluate(recorded.program, *traced.leaves)
        count = len(traced.program.jaxpr.outvars)
        sums, times = out[count:] or (jnp.zeros(0), jnp.zeros(0, jnp.int32))
        return jax.tree.unflatten(traced.out_tree, out[:count]), {"times": times, "sum": sums}

    return observed


def collect_values(fun, args, recorder=Magnitudes()):
    """For each operation and turn, how often it ran and the sum of what it made: recorded, and as run on the host."""
    traced = trace(fun, args, {})
    expected = defaultdict(lambda: np.zeros(2))
    for name, turns, value in replay(traced.program, traced.leaves):
        expected[name, turns] += (1, np.minimum(np.abs(value), LARGEST).sum())
    lines, found = [], defaultdict(lambda: np.zeros(2))
    _, record = jax.jit(observe(fun, recorder, lines)).lower(*args).compile(QUICKLY)(*args)
    for line, times, magnitude in zip(lines, record["times"], record["sum"], strict=True):
        if times:
            found[line.step.name, line.turns] += (times, magnitude)
    return dict(found), dict(expected)


def assert_same_records(found, expected):
    assert {key: value[0] for key, value in found.items()} == {key: value[0] for key, value in expected.items()}
    for key, value in expected.items():
        np.testing.assert_allclose(found[key][1], value[1], rtol=2e-3, atol=1e-4, err_msg=str(key))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONSTRUCTS][::2])
def test_each_value_is_recorded_forward_and_backward(name):
    animal = ZOO[name]
    with animal.context():
        try:
            assert_same_records(*collect_values(animal.with_gradient(animal.fun), animal.args))
        except CannotReplay:
            pytest.skip("references and devices are tested one by one")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONSTRUCTS][1::2])
def test_records_pass_through_transformations(name):
    animal = ZOO[name]
    observed, floating = observe(animal.fun), tuple(i for i, arg in enumerate(animal.args) if is_floating(arg))

    def loss(fun):
        return lambda *args: (lambda out, record: (total(out), record))(*fun(*args))

    # One program, since compiling takes longest: plain, recorded, the gradients of both, and mapped.
    def run(*args):
        plain, (out, record) = animal.fun(*args), observed(*args)
        ours, theirs = {"out": out}, {"out": plain}
        if animal.differentiable and floating:
            grad = lambda fun: jax.grad(loss(fun), floating, has_aux=True)(*args)
            ours["grads"], ours["record"] = grad(observed)
            theirs["grads"], theirs["record"] = grad(lambda *args: (animal.fun(*args), record))
        if animal.differentiable and floating and name not in UNMAPPED:
            batched = [jnp.stack([arg, 2 * arg]) if is_floating(arg) else arg for arg in args]
            axes = [0 if is_floating(arg) else None for arg in args]
            mapped = jax.vmap(observed, axes)(*batched)
            ours["mapped"], theirs["mapped"] = jax.tree.map(lambda leaf: leaf[0], mapped), (plain, record)
        return ours, theirs

    with animal.context():
        assert_near(*jax.jit(run).lower(*animal.args).compile(QUICKLY)(*animal.args))


def assert_near(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if is_floating(a):
            scale = np.nanmax(np.abs(np.float64(b)), initial=0) or 1.0
            np.testing.assert_allclose(np.float64(a) / scale, np.float64(b) / scale, rtol=0, atol=1e-3)


def test_a_program_without_values_is_the_same_object():
    program = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c + 1, c), x, length=3))(1)
    assert record_program(program, Magnitudes(), None) == (program, (), ())


def test_equal_recorders_share_programs():
    program = jax.make_jaxpr(jnp.sin)(1.0)
    assert record_program(program, Magnitudes(3), None) is record_program(program, Magnitudes(3), None)


def test_equal_shapes_share_one_function():
    def fun(x, w):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return x

    text = jax.jit(observe(fun)).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).as_text()
    assert text.count("func.func private @jmp_record_measure") == 1
    assert text.count("call @jmp_record_measure") == 16


@pytest.mark.slow
def test_long_loops_have_one_row_and_short_ones_a_row_a_turn():
    fun = lambda x: lax.scan(lambda c, _: (c * 0.5, None), x, length=5)[0]
    x = jnp.float32(32)
    _, split = observe(fun)(x)
    assert split["sum"].tolist() == [16, 8, 4, 2, 1]
    _, merged = observe(fun, Magnitudes(most_turns=4))(x)
    assert (merged["sum"].tolist(), merged["times"].tolist()) == ([31], [5])


@pytest.mark.slow
def test_a_branch_that_is_not_taken_has_empty_rows():
    fun = lambda x, i: lax.switch(i, [jnp.sin, lambda x: jnp.cos(jnp.exp(x)), lambda x: x], x)
    lines = []
    _, record = jax.jit(observe(fun, lines=lines))(jnp.float32(1), 1)
    assert [(line.step.name, int(n)) for line, n in zip(lines, record["times"], strict=True)] == [
        ("sin", 0),
        ("exp", 1),
        ("cos", 1),
    ]


def test_several_tests_make_a_loop_an_operation():
    loop = lambda x: lax.while_loop(lambda c: c < 10, lambda c: c * 2, x)
    lines = []
    _, record = observe(jax.vmap(loop), lines=lines)(jnp.array([1.0, 5.0]))
    assert [line.step.name for line in lines] == ["while"]
    assert record["sum"].tolist() == [16 + 10]


COUNT = lambda x: lax.while_loop(lambda i: i < 5, lambda i: i + 2, x.astype(jnp.int32))
LOOPS_OF_INTEGERS = {
    "while_loop": lambda x: jnp.sin(x) * COUNT(x[0]).astype(jnp.float32),
    "fori_loop": lambda x: jnp.sin(x) * lax.fori_loop(0, COUNT(x[0]), lambda i, c: c + i, 0).astype(jnp.float32),
    "vmap": lambda x: jnp.sin(x) * jax.vmap(COUNT)(x).astype(jnp.float32),
    "searchsorted": lambda x: jnp.sin(x) * jnp.searchsorted(x, x).astype(jnp.float32),
}


@pytest.mark.parametrize("name", LOOPS_OF_INTEGERS)
def test_a_loop_of_integers_stays_as_it_is(name):
    lines = []
    jax.make_jaxpr(observe(LOOPS_OF_INTEGERS[name], lines=lines))(jnp.ones(3))
    assert {"sin", "mul"} <= {line.step.name for line in lines}


def test_a_loop_in_which_nothing_is_chosen_stays_as_it_is():
    program = jax.make_jaxpr(lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, -c[1]), (0, x)))(1.0)
    assert record_program(program, Nothing(), None) == (program, (), ())


class Nothing(Magnitudes):
    def choose(self, eqn, context):
        return []


def test_a_reference_is_not_recorded_but_what_is_read_of_it():
    def fun(x):
        ref = jax.new_ref(jnp.sin(x))
        ref[...] += x
        return ref[...]

    lines = []
    jax.make_jaxpr(observe(fun, lines=lines))(jnp.ones(3))
    assert [line.step.name for line in lines] == ["sin", "get", "add", "swap", "get"]


def test_records_inside_of_a_shard_map_vary_over_its_axes():
    fun = lambda x: sharded(lambda x, w: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x, x) @ w)(x, jnp.ones((4, 4)))
    with jax.enable_checks(True):
        jax.make_jaxpr(observe(fun))(jnp.ones((8, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(("outer_checked", "checked"), [(True, True), (False, False), (False, True)])
def test_records_inside_of_two_shard_maps_are_folded_over_the_devices_of_both(outer_checked, checked):
    grid, rows, columns = make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2), P("i"), P(None, "j")

    def outer(x):
        inner = jax.shard_map(jnp.negative, in_specs=columns, out_specs=columns, axis_names={"j"}, check_vma=checked)
        return inner(jnp.abs(x))

    options = {"axis_names": {"i"}, "check_vma": outer_checked}
    fun = jax.shard_map(outer, mesh=grid, in_specs=rows, out_specs=rows, **options)
    lines = []
    with jax.enable_checks(True):
        _, record = jax.jit(observe(fun, lines=lines))(jnp.ones((4, 4)))
    assert [line.step.name for line in lines] == ["abs", "neg"]
    assert (record["times"].tolist(), record["sum"].tolist()) == ([2, 4], [16, 16])


@pytest.mark.parametrize("checked", [True, False])
def test_records_type_check_inside_of_a_shard_map_that_keeps_explicit_axes(checked):
    def run(x):
        return lax.cond(jnp.sum(x) > 0, jnp.negative, jnp.abs, lax.scan(lambda c, row: (c + row, -c), x[0], x)[1])

    grid = make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(grid), jax.enable_checks(True):
        fun = jax.shard_map(run, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}, check_vma=checked)
        ones = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=jax.NamedSharding(grid, P("i", "j")))
        jax.make_jaxpr(observe(fun))(ones)


@pytest.mark.slow
def test_values_that_are_reduced_or_unreduced_inside_of_a_shard_map_are_recorded_as_whole():
    def run(w):
        return -lax.pcast(jnp.abs(lax.pcast(w, "i", to="reduced")), "i", to="varying"), partial_sums(w)

    partial_sums = lambda w: lax.pcast(lax.pcast(w, "i", to="varying"), "i", to="unreduced")
    line = make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(line), jax.enable_checks(True):
        fun = jax.shard_map(run, in_specs=P(), out_specs=(P("i"), P(None, unreduced={"i"})))
        _, record = jax.jit(observe(fun))(jnp.ones(4))
    assert record["sum"].tolist() == [8, 8, 8, 8, 8, 16]  # each device measures the sum over both
