"""A `NonfiniteOrigin` as data: the same shapes for every program, through everything that a state goes through."""

import copy
import math
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.numerics import NonfiniteOrigin, first_nonfinite
from jmp_policy.numerics._remedies import Words, read_words, write_words


def divide(x, y):
    with jax.named_scope("ratio"):
        return x / y


find = jax.jit(first_nonfinite(divide))
FOUND = find(jnp.ones(3), jnp.array([1.0, 0.0, 2.0]))[1]


def shapes(origin):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tuple(origin))


@pytest.mark.slow
def test_every_program_has_the_shapes_of_nothing_found():
    other = first_nonfinite(lambda x: jnp.log(jnp.sum(x)))(-jnp.ones(2))[1]
    assert shapes(FOUND) == shapes(other) == shapes(NonfiniteOrigin.empty())
    assert jax.tree.structure(FOUND) == jax.tree.structure(NonfiniteOrigin.empty())


def test_it_holds_integers_alone_which_no_policy_casts():
    assert not any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in FOUND)


@pytest.mark.slow
def test_the_last_one_found_goes_around_a_scan_of_steps():
    def step(last, y):
        _, now = first_nonfinite(divide)(jnp.ones(3), y)
        return jax.tree.map(lambda new, old: jnp.where(now.status > 0, new, old), now, last), now

    ys = jnp.ones((4, 3)).at[2, 1].set(0.0)
    last, each = jax.jit(lambda ys: lax.scan(step, NonfiniteOrigin.empty(), ys))(ys)
    assert (last.primitive, last.path) == (each.primitive, each.path) == ("div", "ratio")
    assert each.status.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), jax.device_get])
def test_copies_say_the_same(carry):
    assert str(carry(FOUND)) == str(FOUND)
    assert carry(FOUND).describe() == FOUND.describe()


def test_flax_saves_it():
    state = serialization.to_bytes(FOUND)
    assert str(serialization.from_bytes(NonfiniteOrigin.empty(), state)) == str(FOUND)


@pytest.mark.exhaustive
def test_under_vmap_the_first_that_was_found_speaks():
    ys = jnp.ones((4, 3)).at[2, 1].set(0.0)
    _, found = jax.vmap(first_nonfinite(divide), in_axes=(None, 0))(jnp.ones(3), ys)
    assert (found.found, found.kind, found.operands) == (True, "inf", ((1.0, 1.0), (0.0, 1.0)))


def test_inside_of_jit_it_says_that_it_is_read_on_the_host():
    with pytest.raises(TypeError, match=r"A NonfiniteOrigin is read on the host, but this one is traced.* origin.desc"):
        jax.jit(lambda origin: origin.found)(FOUND)
    jax.jit(lambda origin: (repr(origin) == "<NonfiniteOrigin: inside of a program>") or 1 / 0)(FOUND)


def test_long_words_keep_their_end_and_code_its_beginning():
    words = Words("dot_general", "/" + "a" * 300 + "/train.py:12", "f", "x = " + "y + " * 90, "blocks/" * 60 + "mlp")
    back = read_words(write_words(words))
    assert back.source.endswith("/train.py:12")
    assert back.path.endswith("/mlp")
    assert back.code.startswith("x = y + ")
    assert back.primitive == words.primitive


def test_words_of_other_alphabets_are_cut_between_letters():
    words = Words(code="é" * 200, path="模" * 200)
    back = read_words(write_words(words))
    assert set(back.code) == {"é", "…"}
    assert set(back.path) == {"模", "…"}


@pytest.mark.exhaustive
def test_good_steps_keep_their_bits_and_their_donation():
    rng = np.random.default_rng()

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    w, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in [(64, 32), (96, 64)])
    plain = jax.jit(jax.value_and_grad(loss))(w, x)
    watched, origin = jax.jit(first_nonfinite(jax.value_and_grad(loss)))(w, x)
    assert not origin.found
    jax.tree.map(np.testing.assert_array_equal, plain, watched)

    def step(w, x):
        (value, grad), origin = first_nonfinite(jax.value_and_grad(loss))(w, x)
        return w - grad, value, origin

    compiled = jax.jit(step, donate_argnums=0).lower(w, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= w.nbytes


@pytest.mark.slow
def test_gradients_go_through():
    fun = first_nonfinite(lambda x: jnp.sum(jnp.sqrt(x)))
    grad, origin = jax.grad(fun, has_aux=True)(jnp.array([4.0, 1.0]))
    assert grad.tolist() == [0.25, 0.5]
    assert not origin.found


def test_what_may_not_run_twice_is_refused():
    from jax.experimental import io_callback

    def fun(x):
        return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    message = (
        r"runs a function a second time .* and io_callback of .*test_origin_as_data.py:\d+ \(.*would then act twice"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(first_nonfinite(fun))(jnp.ones(2))


def test_references_are_refused():
    def fun(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] / 0
        return ref[...]

    with pytest.raises(ValueError, match="would then act twice"):
        first_nonfinite(fun)(jnp.ones(2))


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


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"first_nonfinite takes a function, got .*For example"):
        first_nonfinite(3)


@pytest.mark.slow
def test_closed_over_arrays_are_named_as_such():
    table = jnp.array([1.0, jnp.nan])
    _, origin = jax.jit(first_nonfinite(lambda x: x * table))(jnp.ones(2))
    assert origin.argument == "a constant"


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
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_shard_map_on_any_kind_of_mesh_is_searched(kind):
    fun = jax.shard_map(lambda x: lax.psum(jnp.log(x), "data"), in_specs=P("data"), out_specs=P())
    mesh = make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.array([1.0, 2.0, -3.0, 4.0]), NamedSharding(mesh, P("data")))
        _, origin = jax.jit(first_nonfinite(fun))(x)
    assert (origin.kind, origin.primitive, origin.operands) == ("nan", "log", ((-3.0, 4.0),))


@pytest.mark.slow
def test_ranges_are_those_of_the_operand_itself_behind_a_sign_a_factor_and_an_epsilon():
    _, origin = jax.jit(first_nonfinite(lambda x: jnp.log(0.25 - 0.5 * x)))(jnp.array([-1.5, 2.5]))
    assert (origin.primitive, origin.operands) == ("log", ((-1.0, 1.0),))
    _, origin = jax.jit(first_nonfinite(lambda x: jnp.log(-x / 4.0)))(jnp.array([-2.0, 2.0]))
    assert (origin.primitive, origin.operands) == ("log", ((-0.5, 0.5),))
    assert "Its operand ranges from -0.5 to 0.5." in origin.describe()


@pytest.mark.sample(2)
@pytest.mark.parametrize("fun", [lambda n: n + 1, lambda n: 3, lambda n: (n, jnp.zeros(0))])
def test_a_program_without_numbers_that_could_be_infinite_finds_nothing(fun):
    out, origin = jax.jit(first_nonfinite(fun))(jnp.arange(3))
    jax.tree.map(np.testing.assert_array_equal, out, fun(jnp.arange(3)))
    assert str(origin) == "every result is finite"


@pytest.mark.slow
def test_a_result_that_is_a_number_in_the_program_is_a_constant():
    _, origin = jax.jit(first_nonfinite(lambda x: (x, jnp.float32(jnp.nan))))(jnp.ones(2))
    assert (origin.argument, origin.kind) == ("a constant", "nan")


@pytest.mark.exhaustive
def test_parameters_of_nnx_are_spelled_as_python_does():
    class Model(nnx.Module):
        def __init__(self):
            self.gains = nnx.List([nnx.Param(jnp.ones(2)), nnx.Param(jnp.array([1.0, jnp.nan]))])

    def loss(model, batch, *more):
        return jnp.sum(batch["x"] * model.gains[0][...] * model.gains[1][...] * (more[1]["y"] if more else 1))

    good, bad = {"x": jnp.ones(2)}, {"x": jnp.array([1.0, jnp.inf])}
    find = first_nonfinite(nnx.value_and_grad(loss))
    model = Model()
    assert find(model, good)[1].argument == "model.gains[1]"
    model.gains[1][...] = jnp.ones(2)
    assert find(model, bad)[1].argument == "batch['x']"
    _, origin = first_nonfinite(loss)(model, good, 1.0, {"y": jnp.float32(jnp.nan)})
    assert origin.argument == "more[1]['y']"


@pytest.mark.exhaustive
def test_infinities_of_a_batch_that_get_into_no_result_are_not_blamed_beside_objects_of_nnx():
    def loss(model, mask):
        return jnp.sum(nnx.softmax(model.weight[...] + mask))

    mask = jnp.array([0.0, -jnp.inf, 0.0])
    model = nnx.Module()
    model.weight = nnx.Param(jnp.ones(3))
    assert not first_nonfinite(nnx.value_and_grad(loss))(model, mask)[1].found
    assert first_nonfinite(lambda model, mask: (model, mask))(model, mask)[1].argument == "mask"

    def write(model, mask):
        model.weight[...] = mask / 2

    assert first_nonfinite(write)(model, mask)[1].argument == "mask"


LITERALS = {
    "python number": (lambda x: (x, math.nan), "nan", "result/1"),
    "python number in aux": (lambda x: (jnp.sum(x), {"best": math.inf}), "inf", "result/1/best"),
    "complex": (lambda x: (x, complex(0, math.inf)), "inf", "result/1"),
    "full": (lambda x: jnp.full(3, jnp.nan), "nan", ""),
    "full in a jit": (lambda x: (jax.jit(lambda x: jnp.full_like(x, jnp.inf))(x), x), "inf", ""),
    "cond": (lambda x: lax.cond(x[0] < 1, lambda: jnp.nan, lambda: 1.0), "nan", ""),
    "scan start": (lambda x: lax.scan(lambda c, y: (jnp.minimum(c, y), c), jnp.inf, x), "inf", ""),
    "long scan start": (lambda x: lax.scan(lambda c, y: (y, c), jnp.inf, jnp.ones(100)), "inf", ""),
    "scan output": (lambda x: lax.scan(lambda c, y: (c + y, jnp.nan), 0.0, x), "nan", ""),
    "while start": (lambda x: lax.fori_loop(0, x.astype(int)[3], lambda i, c: c + 1, jnp.inf), "inf", ""),
    "remat": (lambda x: jax.checkpoint(lambda x: (x * 2, jnp.full(2, jnp.nan)))(x), "nan", ""),
}
"""By name: a function, the kind of its literal, and the path of the result if it is a Python number."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LITERALS)
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
def test_a_literal_in_a_branch_that_is_not_taken_is_not_blamed():
    fun = lambda x: (lax.cond(x[0] > 5, lambda: jnp.nan, lambda: 1.0), jnp.log(x))
    assert jax.jit(first_nonfinite(fun))(jnp.arange(4.0))[1].primitive == "log"


@pytest.mark.slow
def test_results_that_are_not_chosen_may_be_infinite_numbers():
    out, origin = first_nonfinite(lambda x: (x, math.inf), of=lambda out: out[0])(jnp.ones(2))
    assert (origin.found, out[1]) == (False, math.inf)
