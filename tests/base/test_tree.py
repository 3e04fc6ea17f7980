"""Law 7: only real floating arrays are cast, and everything else passes through by identity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from properties import examples

import jmp_policy as jmp
from jmp_policy._base import (
    Uncast,
    cast_floating,
    dtype_names,
    first_floating_dtype,
    floating_leaves,
    is_floating,
    parse_dtype,
)

HALVES = ["float16", "bfloat16", "float8_e5m2", "float32"]
COMPUTABLE = sorted({str(parse_dtype(name)) for name in dtype_names()} - {"float6_e2m3fn", "float6_e3m2fn"})

UNTOUCHED = [
    3, 2.5, 1 + 2j, True, "text", b"bytes", object(), np.int32(3), np.arange(3), jnp.arange(3), np.bool_(True),
    np.complex64(1j), np.ones(2, np.complex64), jnp.ones(2, jnp.complex64), np.array(["a"]), np.array([None]),
    jax.random.key(0), jax.random.split(jax.random.key(1)), jax.random.PRNGKey(0),
    jax.ShapeDtypeStruct((2,), jnp.int32),
]  # fmt: skip

FLOATING = [
    lambda: np.ones(3, np.float64),
    lambda: np.float64(1.5),
    lambda: np.float32(1.5),
    lambda: np.ones((2, 0), np.float16),
    lambda: np.array(1.0, parse_dtype("bfloat16")),
    lambda: jnp.ones((2, 2)),
    lambda: jnp.bfloat16(2),
    lambda: jax.ShapeDtypeStruct((4, 1), jnp.float32),
]

leaves = st.one_of(
    st.sampled_from(UNTOUCHED),
    st.sampled_from([make() for make in FLOATING]),
    st.none(),
)
trees = st.recursive(
    leaves,
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.tuples(child, child),
        st.dictionaries(st.sampled_from("abcd"), child, max_size=3),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("leaf", UNTOUCHED)
def test_what_is_no_real_floating_array_passes_through_by_identity(leaf):
    assert cast_floating(leaf, "float16") is leaf
    assert not is_floating(leaf)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", FLOATING)
def test_floating_arrays_are_cast_and_keep_their_kind_and_shape(make, dtype):
    leaf = make()
    cast = cast_floating(leaf, dtype)
    assert cast.dtype == parse_dtype(dtype)
    assert cast.shape == leaf.shape
    numpy_kinds = np.ndarray | np.generic
    assert isinstance(cast, numpy_kinds) == isinstance(leaf, numpy_kinds)
    assert isinstance(cast, jax.ShapeDtypeStruct) == isinstance(leaf, jax.ShapeDtypeStruct)


@pytest.mark.parametrize("make", FLOATING)
def test_a_leaf_that_has_the_dtype_is_returned_as_it_is(make):
    leaf = make()
    assert cast_floating(leaf, leaf.dtype) is leaf


@given(trees, st.sampled_from(HALVES))
@examples(40)
def test_casting_keeps_structure_is_idempotent_and_touches_floats_only(tree, dtype):
    once = cast_floating(tree, dtype)
    assert jax.tree.structure(once) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(once), strict=True):
        assert (after.dtype == parse_dtype(dtype)) if is_floating(before) else (after is before)
    twice = cast_floating(once, dtype)
    assert all(a is b for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True))


@given(st.lists(st.floats(width=64), min_size=1, max_size=20), st.sampled_from(["float16", "bfloat16"]))
@examples(40)
def test_numpy_and_jax_round_alike(numbers, dtype):
    array = np.asarray(np.clip(numbers, -1e38, 1e38), np.float32)
    array = np.where(np.abs(array) < np.finfo(np.float32).tiny, np.float32(0), array)  # XLA may flush subnormals
    there = np.asarray(cast_floating(jnp.asarray(array), dtype).astype(jnp.float32))
    here = cast_floating(array, dtype).astype(np.float32)
    np.testing.assert_array_equal(there, here)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_eager_and_jitted_casts_agree(dtype):
    tree = {"w": jnp.linspace(-3, 3, 7), "n": jnp.arange(3), "k": jax.random.key(0)}
    eager, jitted = cast_floating(tree, dtype), jax.jit(lambda t: cast_floating(t, dtype))(tree)
    assert jax.tree.map(jax.typeof, eager) == jax.tree.map(jax.typeof, jitted)
    np.testing.assert_array_equal(eager["w"].astype(jnp.float32), jitted["w"].astype(jnp.float32))


def test_casting_overflows_without_a_numpy_warning():
    assert np.isinf(cast_floating(np.float32(1e6), "float16"))


def test_casting_to_none_is_the_identity_and_to_a_bad_name_an_error():
    tree = {"w": np.ones(2)}
    assert cast_floating(tree, None) is tree
    with pytest.raises(ValueError, match=r"^Unknown dtype 'int8'"):
        cast_floating(tree, "int8")


def test_marked_containers_pass_through_whole():
    @jax.tree_util.register_pytree_node_class
    class Storage(Uncast):
        def tree_flatten(self):
            return (jnp.ones(2),), None

        @classmethod
        def tree_unflatten(cls, _, __):
            return cls()

    storage, scale = Storage(), jmp.DynamicLossScale()
    assert all(a is b for a, b in zip(cast_floating([storage, scale], "float16"), [storage, scale], strict=True))
    assert floating_leaves([storage, scale]) == []


def test_is_leaf_keeps_further_nodes_whole():
    node = (np.ones(2, np.float32),)
    assert cast_floating([node], "float16", is_leaf=lambda x: isinstance(x, tuple))[0] is node


def test_first_floating_dtype_is_the_one_jax_computes_in():
    assert first_floating_dtype([jnp.arange(2), np.ones(2), jnp.ones(1, jnp.float16)]) == np.float32
    assert first_floating_dtype([1.0, jnp.arange(2)]) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", COMPUTABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_is_found_in_every_format_that_has_one(dtype, bad):
    with np.errstate(all="ignore"):
        array = np.array([1, bad, 1]).astype(parse_dtype(dtype))
    has_it = not np.isfinite(array.astype(np.float32)).all()
    assert bool(jmp.all_finite({"w": array})) == (not has_it)
    assert bool(jmp.all_finite([np.ones(2, parse_dtype(dtype)), None, 3]))


@pytest.mark.parametrize("bad", [complex(np.inf, 0), complex(0, np.nan), complex(np.nan, np.inf)])
def test_one_bad_part_of_a_complex_number_is_found(bad):
    assert not jmp.all_finite(np.array([1j, bad], np.complex64))


def test_large_complex_numbers_are_finite_although_their_magnitude_is_not():
    assert jmp.all_finite(np.array([complex(3e38, 3e38)], np.complex64))


def test_formats_without_infinities_are_finite_even_where_xla_cannot_compute_in_them():
    for name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"):
        assert jmp.all_finite(np.ones(2, parse_dtype(name)))


@given(st.lists(st.lists(st.floats(width=32), max_size=4), max_size=4))
@examples(25)
def test_all_finite_agrees_with_numpy(arrays):
    tree = [np.array(a, np.float32) for a in arrays]
    assert bool(jmp.all_finite(tree)) == all(np.isfinite(a).all() for a in tree)


def test_trees_without_numbers_are_finite():
    for tree in (None, {}, [], "text", jnp.arange(3), jax.random.key(0), np.zeros((0,), np.float32), 3, True):
        finite = jmp.all_finite(tree)
        assert finite.shape == ()
        assert finite.dtype == jnp.bool_
        assert bool(finite)


def test_python_floats_count():
    assert not jmp.all_finite([1.0, float("nan")])
    assert not jmp.all_finite(complex(0, float("inf")))


def test_all_finite_is_per_example_under_vmap():
    rows = jnp.array([[1.0, 2.0], [jnp.nan, 1.0], [1.0, jnp.inf]])
    assert jax.jit(jax.vmap(jmp.all_finite))(rows).tolist() == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), jnp.array(True)], ids=repr)
def test_select_tree_takes_every_boolean_scalar(pred):
    chosen = jmp.select_tree(pred, {"w": jnp.ones(2), "k": jax.random.key(1), "n": None}, {"w": jnp.zeros(2),
                             "k": jax.random.key(0), "n": None})  # fmt: skip
    assert chosen["w"].tolist() == [1, 1]
    assert chosen["n"] is None
    assert bool((jax.random.key_data(chosen["k"]) == jax.random.key_data(jax.random.key(1))).all())


@pytest.mark.parametrize("pred", [jnp.array([True]), jnp.array(1), 1.0, None, "yes", np.ones((1, 1), bool)], ids=repr)
def test_select_tree_refuses_anything_else(pred):
    with pytest.raises(AssertionError, match=r"^expected boolean scalar, got .*for example: all_finite\(grads\)$"):
        jmp.select_tree(pred, jnp.ones(2), jnp.zeros(2))


def test_full_and_half_are_casts():
    tree = {"w": np.ones(2, np.float64), "n": 3}
    assert jmp.cast_to_full(tree)["w"].dtype == np.float32
    assert jmp.cast_to_half(tree)["w"].dtype == np.float16
    assert jmp.cast_to_half(tree)["n"] == 3
