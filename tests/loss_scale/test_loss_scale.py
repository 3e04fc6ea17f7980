"""Law 12: what a loss scale does to numbers, and how a dynamic one moves."""

import copy
import dataclasses
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from properties import examples

import jmp_policy as jmp

LARGEST = float(np.finfo(np.float32).max)
SCALES = [jmp.NoOpLossScale(), jmp.StaticLossScale(2.0**10), jmp.DynamicLossScale(), jmp.DynamicLossScale(hysteresis=3)]

adjust = jax.jit(lambda scale, finite: scale.adjust(finite))


ROWS = [
    ({"loss_scale": 8.0, "period": 3}, "++++++", [8, 8, 16, 16, 16, 32]),
    ({"loss_scale": 8.0, "period": 2}, "+-++", [8, 4, 4, 8]),
    ({"loss_scale": 6.0, "counter": 1, "period": 2, "max_loss_scale": 10.0}, "+++", [6, 6, 6]),
    ({"loss_scale": 2.0**127, "period": 1, "max_loss_scale": math.inf}, "+", [2.0**127]),
    (
        {"loss_scale": 2.0, "period": 1, "min_loss_scale": 0.5, "max_loss_scale": 8.0},
        "---+++++",
        [1, 0.5, 0.5, 1, 2, 4, 8, 8],
    ),
    ({"loss_scale": 16.0, "factor": 2, "backoff_factor": 0.25}, "-", [4]),
    ({"loss_scale": 1.0, "period": 1, "factor": 4.0}, "+-+", [4, 1, 4]),
    # longer than int32 counts
    ({"loss_scale": 8.0, "counter": 2**31 - 2, "period": 2**40}, "+", [8]),
]


@pytest.mark.parametrize(("settings", "steps", "expected"), ROWS)
def test_a_scale_moves_as_documented(settings, steps, expected):
    """Growth on exactly the last step of a period, bounds for ever, and a backoff factor of its own."""
    scale, seen = jmp.DynamicLossScale(**settings), []
    for step in steps:
        scale = adjust(scale, step == "+")
        seen.append(float(scale.loss_scale))
    assert seen == expected
    assert int(scale.counter) <= 2**31 - 1


SETTINGS = {
    "period": 7, "factor": 4.0, "min_loss_scale": 0.5, "backoff_factor": 0.125, "max_loss_scale": 2.0**20,
    "hysteresis": 2, "consecutive_hysteresis": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: jax.jit(lambda s: s.adjust(False))(s),
        lambda s: jax.eval_shape(lambda s: s.adjust(True), s),
        lambda s: jax.tree.unflatten(jax.tree.structure(s), [None, object(), "x"]),
        lambda s: pickle.loads(pickle.dumps(s)),
        copy.deepcopy,
        lambda s: dataclasses.replace(s, loss_scale=3.0),
    ],
)
def test_settings_survive_every_operation(operation):
    after = operation(jmp.DynamicLossScale(8.0, **SETTINGS))
    assert {name: getattr(after, name) for name in SETTINGS} == SETTINGS


def test_leaves_are_strong_typed_float32_and_int32_whatever_was_given():
    for given_scale in (2.0**15, np.float64(8), jnp.bfloat16(8), np.float16(8)):
        scale = adjust(jmp.DynamicLossScale(given_scale, counter=np.int64(1), hysteresis=2), True)
        leaves = jax.tree.leaves(scale)
        assert [str(x.dtype) for x in leaves] == ["float32", "int32", "int32"]
        assert not any(x.weak_type for x in leaves)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(jmp.DynamicLossScale())]
    assert paths == [".loss_scale", ".counter"]


def test_adjusting_does_not_trace_again():
    traces = []

    @jax.jit
    def step(scale, finite):
        traces.append(scale)
        return scale.adjust(finite)

    scale = jmp.DynamicLossScale(8.0)
    for finite in (True, False, True):
        scale = step(scale, jnp.array(finite))
    step(jmp.DynamicLossScale(4.0, 1), jnp.array(True))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("scale", "dtype"), [(SCALES[1], "float16"), (SCALES[2], "float8_e5m2"), (SCALES[2], "float32")], ids=repr
)
def test_scaling_is_done_and_stays_in_float32(scale, dtype):
    tree = {"w": jnp.full(2, 3.0, dtype), "n": jnp.arange(2), "k": jax.random.key(0), "none": None}
    scaled = scale.scale(tree)
    assert scaled["w"].dtype == jnp.float32
    assert scaled["w"].tolist() == [3.0 * float(scale.loss_scale)] * 2
    assert scaled["n"] is tree["n"]
    assert scaled["k"] is tree["k"]
    assert scale.unscale(scaled)["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("number", [1.5, np.float64(1.5), np.float16(1.5), np.ones(2), np.complex64(1 + 2j), 1 + 2j,
                                    np.complex128(1j), jnp.ones(2, jnp.complex64)], ids=repr)  # fmt: skip
def test_numbers_of_python_and_numpy_are_scaled_too(number):
    scaled = jmp.StaticLossScale(4.0).scale(number)
    np.testing.assert_array_equal(scaled, np.asarray(number) * 4)
    assert scaled.dtype in (jnp.float32, jnp.complex64)


def test_infinite_parts_and_numbers_near_the_largest_are_unscaled_alike_eagerly_and_under_jit():
    unscaled = jmp.StaticLossScale(2.0).unscale(jnp.array(complex(np.inf, 4.0), jnp.complex64))
    assert (float(unscaled.real), float(unscaled.imag)) == (np.inf, 2.0)
    scale = jmp.DynamicLossScale(2.0**127, max_loss_scale=2.0**127)
    for unscale in (lambda scale, x: scale.unscale(x), jax.jit(lambda scale, x: scale.unscale(x))):
        assert float(unscale(scale, jnp.float32(2.0**127))) == 1.0


@pytest.mark.slow
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8), st.floats(0.5, 65536, width=32))
@examples(25)
def test_scale_then_unscale_is_within_one_rounding_of_float64(numbers, scale):
    # Multiplication and division each round once, 2^-24 relative; twice that much is allowed.
    x = np.asarray(numbers, np.float32)
    x = x[np.abs(x) > 1e-30]
    there_and_back = jmp.StaticLossScale(scale).unscale(jmp.StaticLossScale(scale).scale(jnp.asarray(x)))
    np.testing.assert_allclose(np.asarray(there_and_back, np.float64), x.astype(np.float64), rtol=2**-22, atol=0)


@pytest.mark.slow
def test_in_64_bits_numbers_are_scaled_in_float64_and_the_state_keeps_its_dtypes():
    with jax.enable_x64(True):
        scale = jmp.DynamicLossScale(2.0**15, period=np.int64(1), factor=np.float64(2))
        assert scale.unscale(jnp.ones(2, jnp.float64)).dtype == jnp.float64
        assert [str(x.dtype) for x in jax.tree.leaves(scale.adjust(True))] == ["float32", "int32"]
        assert float(scale.unscale(jnp.float64(1.0))) == 2.0**-15


def test_no_op_hands_trees_through():
    tree = {"w": jnp.ones(2)}
    scale = jmp.NoOpLossScale()
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.array(False)) is scale
    assert scale.loss_scale == 1


@pytest.mark.parametrize("scale", SCALES[:2], ids=repr)
def test_static_scales_have_no_leaves_and_are_their_values(scale):
    assert isinstance(scale, jmp.LossScale)
    assert jax.tree.leaves(scale) == []
    assert scale.adjust(jnp.array(False)) is scale
    assert jax.jit(lambda s: s)(scale) == scale
    assert hash(jax.jit(lambda s: s)(scale)) == hash(scale)


NORMAL = r"a normal number of float32, from 2\.0\*\*-126 to 2\.0\*\*128"


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"loss_scale": 0.0}, r"^loss_scale must be a positive number, got 0\.0. For example: loss_scale=2"),
        ({"loss_scale": math.nan}, r"^loss_scale must be a positive number, got nan"),
        ({"loss_scale": "2**15"}, r"^loss_scale must be a positive number, got '2\*\*15'"),
        ({"loss_scale": None}, r"^loss_scale must be a positive number, got None"),
        ({"period": 0}, r"^period must be a positive int, got 0\. For example: period=2000\.$"),
        ({"period": 2.5}, r"^period must be a positive int, got 2\.5"),
        ({"period": math.inf}, r"^period must be a positive int, got inf"),
        ({"period": "7"}, r"^period must be a positive int, got '7'"),
        ({"factor": 1}, r"^factor must be greater than one, got 1\. For example: factor=2\.$"),
        ({"factor": 0}, r"^factor must be greater than one, got 0"),
        ({"backoff_factor": 1.0}, r"^backoff_factor must be between zero and one, got 1\.0. For example: .*=0\.5\.$"),
        ({"backoff_factor": 0.0}, r"^backoff_factor must be between zero and one"),
        ({"min_loss_scale": -1.0}, r"^min_loss_scale must be a positive number, got -1\.0. For example: .*=1\.0\.$"),
        ({"min_loss_scale": math.nan}, r"^min_loss_scale must be a positive number, got nan"),
        ({"max_loss_scale": 0.5}, r"^max_loss_scale must be at least min_loss_scale=1\.0, got 0\.5. For example: "),
        ({"max_loss_scale": math.nan}, r"^max_loss_scale must be at least min_loss_scale"),
        ({"loss_scale": np.float32(-1)}, r"^loss_scale must be a positive number, got np\.float32\(-1\.0\)"),
        ({"loss_scale": jnp.float32(-1)}, r"^loss_scale must be a positive number, got Array\(-1"),
        ({"loss_scale": 1e39}, rf"^loss_scale must be {NORMAL}, got 1e\+39\. For example: loss_scale=2\.0\*\*15"),
        ({"loss_scale": 1e-46}, rf"^loss_scale must be {NORMAL}, got 1e-46"),
        ({"loss_scale": jnp.float32(1e-40)}, rf"^loss_scale must be {NORMAL}, got Array"),
        ({"loss_scale": jnp.ones(2)}, r"^loss_scale must be a scalar, got an array of shape \(2,\)"),
        ({"counter": np.zeros(2, int)}, r"^counter must be a scalar, got an array of shape \(2,\)\. .*: counter=0\.$"),
        ({"credits": jnp.ones(1), "hysteresis": 2}, r"^credits must be a scalar, got an array of shape \(1,\)"),
        ({"min_loss_scale": 1e-40}, rf"^min_loss_scale must be {NORMAL}, got 1e-40\. For example: min_loss_scale=1"),
        ({"min_loss_scale": 1e39, "max_loss_scale": math.inf}, rf"^min_loss_scale must be {NORMAL}"),
        ({"min_loss_scale": np.ones(2)}, r"^min_loss_scale must be a scalar, got an array of shape \(2,\)"),
        ({"hysteresis": 2.5}, r"^hysteresis must be a positive int, got 2\.5"),
        ({"hysteresis": 0}, r"^hysteresis must be a positive int, got 0\. For example: hysteresis=2\.$"),
    ],
)
def test_bad_settings_are_errors(bad, text):
    with pytest.raises(ValueError, match=text):
        jmp.DynamicLossScale(**bad)


POSITIVE = r"a positive number, got .* loss_scale=2\.0\*\*15\.$"


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        *((bad, POSITIVE) for bad in (-1.0, math.inf, None, "2**15", jnp.float32(-1), 10**400)),
        *((bad, NORMAL) for bad in (1e39, 1e-46, 1e-40)),
    ],
)
def test_bad_static_scales_are_errors(bad, text):
    with pytest.raises(ValueError, match=f"^loss_scale must be {text}"):
        jmp.StaticLossScale(bad)


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0)])
def test_a_static_scale_of_zero_is_taken_as_jmp_does_with_a_warning(zero):
    with pytest.warns(UserWarning, match=r"^loss_scale=0 makes every gradient 0 / 0, .*: StaticLossScale\(2\.0"):
        assert jmp.StaticLossScale(zero).loss_scale == 0


def test_a_floor_of_zero_is_taken_as_the_smallest_normal_number_and_reached_safely():
    with pytest.warns(UserWarning, match=r"^min_loss_scale=0 would let the loss scale become zero, .*=1\.0\.$"):
        scale = jmp.DynamicLossScale(10.0, min_loss_scale=0.0)
    scale = jax.jit(lambda scale: jax.lax.fori_loop(0, 200, lambda _, s: s.adjust(jnp.array(False)), scale))(scale)
    assert float(scale.loss_scale) == scale.min_loss_scale == 2.0**-126
    for unscale in (scale.unscale, jax.jit(scale.unscale)):
        assert float(unscale(scale.scale(jnp.float32(3.0)))) == 3.0


@pytest.mark.parametrize(
    ("start", "bound", "starts_at"),
    [
        (0.5, {}, 1.0),
        (np.float32(0.5), {}, 1.0),
        (jnp.float16(0.5), {"min_loss_scale": 0.75}, 0.75),
        (2.0**16, {"max_loss_scale": 65504.0}, 65504.0),
        (2.0**127, {}, 2.0**24),
    ],
    ids=str,
)
def test_a_scale_outside_its_bounds_starts_at_the_nearer_one_with_a_warning(start, bound, starts_at):
    (name,) = bound or ["max_loss_scale" if start > 1 else "min_loss_scale"]
    where = "below" if start < 1 else "above"
    text = f"loss_scale={float(start)} is {where} {name}={starts_at}, so the scale starts at {starts_at}. For"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}"):
        scale = jmp.DynamicLossScale(start, **bound)
    assert float(scale.loss_scale) == starts_at
    assert float(scale.adjust(jnp.array(False)).loss_scale) <= starts_at  # an overflow does not raise it
    traced = jax.jit(lambda start: jmp.DynamicLossScale(start, **bound))(jnp.asarray(start))
    assert float(traced.loss_scale) == starts_at


@pytest.mark.parametrize(("floor", "ceiling"), [(1.0, 65504.0), (0.37, 0.37), (0.37, math.inf)])
def test_a_scale_at_its_bound_needs_no_warning(floor, ceiling):
    for start in (floor, np.float32(floor), min(ceiling, LARGEST)):
        assert jmp.DynamicLossScale(start, min_loss_scale=floor, max_loss_scale=ceiling)


def test_equal_dynamic_scales_compare_equal_and_are_immutable():
    scale = jmp.DynamicLossScale(8.0, 1, 20)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scale.loss_scale = 3.0
    counts = jmp.DynamicLossScale(period=np.float32(3), hysteresis=np.int64(3))
    assert {type(counts.period), type(counts.hysteresis)} == {int}
    same = jmp.DynamicLossScale(np.float16(8), jnp.int32(1), 20)
    assert scale == same
    assert hash(scale) == hash(same)
    assert jax.tree.map(lambda x: x, scale) == scale
    assert jax.tree.map(np.asarray, scale) == scale
    assert adjust(scale, True) == scale.adjust(True)
    for other in (scale.adjust(True), scale.adjust(False), jmp.DynamicLossScale(8.0, 1, 21), 8.0, None):
        assert scale != other
    assert jmp.DynamicLossScale(8.0, hysteresis=2) != jmp.DynamicLossScale(8.0, hysteresis=2, credits=0)


def test_abstract_and_stacked_scales_compare_too():
    scale = jmp.DynamicLossScale()
    shapes = jax.eval_shape(lambda: scale)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
    assert shapes == jax.eval_shape(lambda: scale)
    assert stacked == jax.tree.map(jnp.copy, stacked)
    assert stacked != scale
    assert shapes != scale


def test_a_traced_scale_is_equal_to_itself_and_else_an_error_of_jax():
    def compare(one, other):
        assert one == one
        with pytest.raises(jax.errors.TracerBoolConversionError):
            one == other  # noqa: B015

    jax.eval_shape(compare, jmp.DynamicLossScale(), jmp.DynamicLossScale())


@pytest.mark.parametrize("bad", [jnp.array([True]), 1.0, jnp.array(1)], ids=repr)
def test_adjust_refuses_what_is_no_boolean_scalar(bad):
    with pytest.raises(ValueError, match=r"^Expected boolean scalar for grads_finite, got .*all_finite\(grads\)\.$"):
        jmp.DynamicLossScale().adjust(bad)


@pytest.mark.parametrize(
    ("name", "integer"), [("loss_scale", 2), ("min_loss_scale", np.int32(2)), ("loss_scale", jnp.int32(2))], ids=repr
)
def test_integers_warn_at_the_line_of_the_caller(name, integer):
    with pytest.warns(UserWarning, match=rf"^Expected floating type for {name}, got int(32|64)$") as caught:
        jmp.DynamicLossScale(**{name: integer})
    assert caught[0].filename == __file__


@pytest.mark.parametrize("scale", SCALES, ids=repr)
def test_flax_serializes_every_scale(scale):
    serialization = pytest.importorskip("flax.serialization")
    jmp.get_loss_scale(scale)  # a scale made before flax was loaded is registered where it is received
    stored = serialization.to_bytes(scale.adjust(jnp.array(False)))
    restored = serialization.from_bytes(scale, stored)
    assert jax.tree.structure(restored) == jax.tree.structure(scale)
    expected = jax.tree.leaves(scale.adjust(jnp.array(False)))
    assert [float(x) for x in jax.tree.leaves(restored)] == [float(x) for x in expected]
