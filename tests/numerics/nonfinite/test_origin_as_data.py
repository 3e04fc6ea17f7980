"""A `NonfiniteOrigin` as data: the same shapes for every program, through everything that a state goes through."""

import copy
import functools
import math
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.numerics import NonfiniteOrigin, first_nonfinite

# Words of given lengths, which no program makes at will.
from jmp_policy.numerics._remedies import Words, read_words, write_words


def divide(x, y):
    with jax.named_scope("ratio"):
        return x / y


@functools.cache
def find_division():
    return jax.jit(first_nonfinite(divide))(jnp.ones(3), jnp.array([1.0, 0.0, 2.0]))[1]


def test_every_program_has_the_shapes_of_nothing_found_and_holds_integers_alone():
    found, empty = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), origin)
        for origin in (find_division(), NonfiniteOrigin.empty())
    )
    assert found == empty
    assert not any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in find_division())  # which a policy would cast


@pytest.mark.slow
def test_the_last_one_found_goes_around_a_scan_of_steps():
    def step(last, y):
        _, now = first_nonfinite(divide)(jnp.ones(3), y)
        return jax.tree.map(lambda new, old: jnp.where(now.status > 0, new, old), now, last), now

    ys = jnp.ones((4, 3)).at[2, 1].set(0.0)
    last, each = jax.jit(lambda ys: lax.scan(step, NonfiniteOrigin.empty(), ys))(ys)
    assert (last.primitive, last.path) == (each.primitive, each.path) == ("div", "ratio")
    assert each.status.tolist() == [0, 0, 1, 0]


def save(origin):
    return serialization.from_bytes(NonfiniteOrigin.empty(), serialization.to_bytes(origin))


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), jax.device_get, save])
def test_copies_say_the_same(carry):
    found = find_division()
    assert str(carry(found)) == str(found)
    assert carry(found).describe() == found.describe()


def test_long_words_keep_their_end_and_code_its_beginning():
    words = Words("dot_general", "/" + "a" * 300 + "/train.py:12", "f", "x = " + "y + " * 90, "blocks/" * 60 + "mlp")
    back = read_words(write_words(words))
    assert back.source.endswith("/train.py:12")
    assert back.path.endswith("/mlp")
    assert back.code.startswith("x = y + ")
    assert back.primitive == words.primitive
    back = read_words(write_words(Words(code="é" * 200, path="模" * 200)))  # cut between letters
    assert (set(back.code), set(back.path)) == ({"é", "…"}, {"模", "…"})


@pytest.mark.slow
def test_debug_callbacks_are_heard_once():
    heard = []

    def fun(x):
        jax.debug.callback(lambda x: heard.append(float(x[0])), x)
        return jnp.log(x)

    _, origin = jax.jit(first_nonfinite(fun))(-jnp.ones(2))
    jax.effects_barrier()
    assert origin.primitive == "log"
    assert heard == [-1.0]


def write_ref(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] / 0
    return ref[...]


def call_back(x):
    return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jax.jit(lambda origin: origin.found)(find_division()),
            r"A NonfiniteOrigin is read on .*traced.* origin.desc",
        ),
        (
            lambda: first_nonfinite(call_back)(jnp.ones(2)),
            r"runs a function a second time .*io_callback of .*test_origin_as_data.py:\d+ \(.*would then act twice",
        ),
        (lambda: first_nonfinite(write_ref)(jnp.ones(2)), "would then act twice"),
        (lambda: first_nonfinite(3), r"first_nonfinite takes a function, got .*For example"),
    ],
)
def test_what_cannot_be_searched_or_read_is_an_error(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
    jax.jit(lambda origin: (repr(origin) == "<NonfiniteOrigin: inside of a program>") or 1 / 0)(find_division())


def test_a_second_run_that_is_finite_says_so():
    origin = NonfiniteOrigin.empty()._replace(status=jnp.int32(2))
    assert (origin.found, origin.reproduced) == (False, False)
    assert "ran again" in origin.describe()
    assert jmp.numerics.NonfiniteOrigin is NonfiniteOrigin


@pytest.mark.slow
def test_inside_of_a_shard_map_devices_search_together():
    mesh = make_mesh((2,), ("data",))

    def fun(x):  # which communicates, so that a device that searched alone would wait for ever
        return jnp.log(x) + lax.psum(jnp.sum(jnp.abs(x)), "data")

    def run(x):
        out, origin = first_nonfinite(fun)(x)
        return out, jax.tree.map(lambda leaf: leaf[None], origin)

    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P("data"))))
    x = jax.device_put(jnp.array([-1.0, 1.0, 2.0, 3.0]), NamedSharding(mesh, P("data")))
    _, origin = sharded(x)
    assert origin.status.tolist() == [1, 2]
    assert (origin.kind, origin.primitive) == ("nan", "log")
    assert not sharded(jnp.abs(x))[1].found


@pytest.mark.slow
def test_ranges_are_those_of_the_operand_itself_behind_a_sign_a_factor_and_an_epsilon():
    _, origin = jax.jit(first_nonfinite(lambda x: jnp.log(0.25 - 0.5 * x)))(jnp.array([-1.5, 2.5]))
    assert (origin.primitive, origin.operands) == ("log", ((-1.0, 1.0),))
    _, origin = jax.jit(first_nonfinite(lambda x: jnp.log(-x / 4.0)))(jnp.array([-2.0, 2.0]))
    assert (origin.primitive, origin.operands) == ("log", ((-0.5, 0.5),))
    assert "Its operand ranges from -0.5 to 0.5." in origin.describe()


@pytest.mark.parametrize("fun", [lambda n: n + 1, lambda n: (3, jnp.zeros(0))])
def test_a_program_without_numbers_that_could_be_infinite_finds_nothing(fun):
    out, origin = jax.jit(first_nonfinite(fun))(jnp.arange(3))
    jax.tree.map(np.testing.assert_array_equal, out, fun(jnp.arange(3)))
    assert str(origin) == "every result is finite"


LITERALS = {
    "python number": (lambda x: (x, math.nan), "nan", "result/1"),
    "complex": (lambda x: (x, complex(0, math.inf)), "inf", "result/1"),
    "full in a jit": (lambda x: (jax.jit(lambda x: jnp.full_like(x, jnp.inf))(x), x), "inf", ""),
    "cond": (lambda x: lax.cond(x[0] < 1, lambda: jnp.nan, lambda: 1.0), "nan", ""),
    "scan start": (lambda x: lax.scan(lambda c, y: (jnp.minimum(c, y), c), jnp.inf, x), "inf", ""),
    "scan output": (lambda x: lax.scan(lambda c, y: (c + y, jnp.nan), 0.0, x), "nan", ""),
    "while start": (lambda x: lax.fori_loop(0, x.astype(int)[3], lambda i, c: c + 1, jnp.inf), "inf", ""),
}
"""By name: a function, the kind of its literal, and the path of the result if it is a Python number."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("python number", "scan output") else pytest.param(name, marks=pytest.mark.slow)
        for name in LITERALS
    ],
)
def test_a_literal_that_is_not_finite_is_the_origin(name):
    fun, kind, path = LITERALS[name]
    origin = jax.jit(first_nonfinite(fun))(jnp.arange(4.0))[1]
    assert (origin.found, origin.argument, origin.kind, origin.path) == (True, "a constant", kind, path)
    if not path:
        assert os.path.basename(origin.source).startswith("test_origin_as_data.py:")
    assert str(origin).startswith(f"{kind} in a constant")
    assert " is a constant of the program" in origin.describe()
    assert origin.describe().endswith("For example: numerics.first_nonfinite(fun, of=lambda out: out[0]).")


@pytest.mark.slow
def test_closed_over_arrays_are_named_as_such_and_those_of_branches_that_are_not_taken_are_not():
    table = jnp.array([1.0, jnp.nan])
    assert first_nonfinite(lambda x: x * table)(jnp.ones(2))[1].argument == "a constant"
    fun = lambda x: (lax.cond(x[0] > 5, lambda: jnp.nan, lambda: 1.0), jnp.log(x))
    assert jax.jit(first_nonfinite(fun))(jnp.arange(4.0))[1].primitive == "log"


@pytest.mark.parametrize("error", [ValueError, NotImplementedError])
def test_an_argument_that_cannot_be_indexed_by_numbers_is_named(error):
    """Haliax's named arrays raise a `ValueError`."""

    @jax.tree_util.register_pytree_node_class
    class Named:
        def __init__(self, array):
            self.array = array

        def __getitem__(self, name):
            raise error(name)

        def tree_flatten(self):
            return (self.array,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    fun = lambda x, batch: jnp.log(x) * batch["mask"].array
    batch = {"mask": Named(jnp.array([1.0, jnp.nan]))}
    assert first_nonfinite(fun)(jnp.ones(2), batch)[1].argument.startswith("batch['mask']")


@pytest.mark.slow
def test_infinities_of_a_batch_that_get_into_no_result_are_not_blamed_beside_objects_of_nnx():
    def write(model, mask):
        model.weight[...] = mask / 2

    model, mask = nnx.Module(), jnp.array([0.0, -jnp.inf, 0.0])
    model.weight = nnx.Param(jnp.ones(3))
    grad = nnx.value_and_grad(lambda model, mask: jnp.sum(nnx.softmax(model.weight[...] + mask)))
    assert not first_nonfinite(grad)(model, mask)[1].found
    assert first_nonfinite(write)(model, mask)[1].argument == "mask"


@pytest.mark.slow
def test_results_that_are_not_chosen_may_be_infinite_numbers():
    out, origin = first_nonfinite(lambda x: (x, math.inf), of=lambda out: out[0])(jnp.ones(2))
    assert (origin.found, out[1]) == (False, math.inf)
