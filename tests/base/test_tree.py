"""Law 7: only real floating arrays are cast, and everything else passes through by identity."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from properties import examples

import jmp_policy as jmp

HALVES = ["float16", "bfloat16", "float8_e5m2", "float32"]

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
    lambda: np.array(1.0, jnp.bfloat16),
    lambda: jnp.ones((2, 2)),
    lambda: jnp.bfloat16(2),
    lambda: jax.ShapeDtypeStruct((4, 1), jnp.float32),
]

trees = st.recursive(
    st.one_of(st.sampled_from(UNTOUCHED), st.sampled_from([make() for make in FLOATING]), st.none()),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.tuples(child, child),
        st.dictionaries(st.sampled_from("abcd"), child, max_size=3),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("leaf", UNTOUCHED)
def test_what_is_no_real_floating_array_passes_through_by_identity(leaf):
    assert jmp.cast_floating(leaf, "float16") is leaf


@pytest.mark.parametrize(("make", "dtype"), list(zip(FLOATING, itertools.cycle(HALVES))))
def test_floating_arrays_are_cast_and_keep_their_kind_and_shape(make, dtype):
    leaf = make()
    cast = jmp.cast_floating(leaf, dtype)
    assert cast.dtype == jnp.dtype(dtype)
    assert cast.shape == leaf.shape
    numpy_kinds = np.ndarray | np.generic
    assert isinstance(cast, numpy_kinds) == isinstance(leaf, numpy_kinds)
    assert isinstance(cast, jax.ShapeDtypeStruct) == isinstance(leaf, jax.ShapeDtypeStruct)
    assert jmp.cast_floating(leaf, leaf.dtype) is leaf


@given(trees, st.sampled_from(HALVES))
@examples(40)
def test_casting_keeps_structure_is_idempotent_and_touches_floats_only(tree, dtype):
    once = jmp.cast_floating(tree, dtype)
    assert jax.tree.structure(once) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(once), strict=True):
        is_floating = hasattr(before, "dtype") and jnp.issubdtype(before.dtype, jnp.floating)
        assert (after.dtype == jnp.dtype(dtype)) if is_floating else (after is before)
    twice = jmp.cast_floating(once, dtype)
    assert all(a is b for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True))


@pytest.mark.slow
@given(st.lists(st.floats(width=64), min_size=1, max_size=20), st.sampled_from(["float16", "bfloat16"]))
@examples(40)
def test_numpy_and_jax_round_alike(numbers, dtype):
    array = np.asarray(np.clip(numbers, -1e38, 1e38), np.float32)
    array = np.where(np.abs(array) < np.finfo(np.float32).tiny, np.float32(0), array)  # XLA may flush subnormals
    there = np.asarray(jmp.cast_floating(jnp.asarray(array), dtype).astype(jnp.float32))
    here = jmp.cast_floating(array, dtype).astype(np.float32)
    np.testing.assert_array_equal(there, here)


def test_casts_to_none_to_a_bad_name_to_full_and_half_and_of_nodes_that_stay_whole():
    tree = {"w": np.ones(2)}
    assert jmp.cast_floating(tree, None) is tree
    with pytest.raises(ValueError, match=r"^Unknown dtype 'int8'"):
        jmp.cast_floating(tree, "int8")
    tree = {"w": np.ones(2, np.float64), "n": 3, "scale": jmp.DynamicLossScale(), "node": (np.ones(2),)}
    assert jmp.cast_to_full(tree)["w"].dtype == np.float32
    assert jmp.cast_to_half(tree)["w"].dtype == np.float16
    assert jmp.cast_to_half(tree)["n"] == 3
    kept = jmp.cast_floating(tree, "float16", is_leaf=lambda x: isinstance(x, tuple))
    assert kept["scale"] is tree["scale"]
    assert kept["node"] is tree["node"]
    assert np.isinf(jmp.cast_floating(np.float32(1e6), "float16"))  # without a warning of numpy


FORMATS = [name for name in dir(ml_dtypes) if name.startswith(("bfloat", "float"))]


# ml_dtypes may have formats that JAX does not know yet, such as float8_e5m3fnu.
@pytest.mark.parametrize("name", [name for name in FORMATS if jnp.issubdtype(getattr(ml_dtypes, name), jnp.floating)])
def test_one_bad_number_is_found_in_every_format_that_has_one(name):
    """XLA cannot compute in some of those without infinities."""
    kind, compiles = getattr(ml_dtypes, name), name not in ("float6_e2m3fn", "float6_e3m2fn")
    assert bool(jmp.all_finite([np.ones(2, kind), None, 3]))
    for bad in (np.nan, np.inf, -np.inf):
        with np.errstate(all="ignore"):
            array = np.array([1, bad, 1]).astype(kind)
        if compiles:
            assert bool(jmp.all_finite({"w": array})) == np.isfinite(array.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("numbers", "finite"),
    [
        (np.array([1j, complex(np.inf, 0)], np.complex64), False),
        (np.array([1j, complex(0, np.nan)], np.complex64), False),
        (np.array([complex(3e38, 3e38)], np.complex64), True),  # although their magnitude is not
        ([1.0, float("nan")], False),
        (complex(0, float("inf")), False),
    ],
)
def test_both_parts_of_complex_numbers_and_floats_of_python_count(numbers, finite):
    assert bool(jmp.all_finite(numbers)) == finite


@pytest.mark.slow
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
