"""`Stats`: a pytree like any other inside `jit`, and exact numbers outside."""

import copy
import html
import json
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax import lax
from records import FORMATS, SHAPE, Record, StatsLayout, make_layout, make_record, make_site, split_words

from jmp_policy.numerics import Row, Stats

PATHS = ("blocks/0/attention", "blocks/0/mlp", "blocks/10/attention", "head")
LAYOUT = make_layout(*map(make_site, PATHS))


def draw_tensors(seed, spread=12, count=4):
    """Numbers over many binades, with some zeros."""
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=(count, *SHAPE)) * np.exp2(rng.uniform(-spread, spread, (count, *SHAPE)))
    return np.where(rng.random(wide.shape) < 0.2, 0, wide).astype(np.float32)


def make_stats(tensors, layout=LAYOUT):
    record = make_record(tensors, layout.meter.formats, layout.meter.histogram)
    return Stats(Record(*map(jnp.asarray, record)), layout)


STATS = make_stats(draw_tensors(0))


def stack(stats):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)


def assert_same_rows(left, right):
    """Counts and extremes are equal, and what comes of sums is within the rounding of a double float32."""
    for mine, theirs in zip(left, right, strict=True):
        mine, theirs = mine.to_dict(), theirs.to_dict()
        for row in (mine, theirs):
            row["errors"] = [row.pop("rms")] + [shares.pop("error") for shares in row["formats"].values()]
        np.testing.assert_allclose(mine.pop("errors"), theirs.pop("errors"), rtol=1e-10)
        assert mine == theirs


def test_a_row_has_the_numbers_of_its_tensor():
    tensor = draw_tensors(0, count=1)[0]
    tensor[0, :3] = np.nan, np.inf, -np.inf
    (row,) = make_stats([tensor], make_layout()).rows()
    finite = tensor[np.isfinite(tensor)].astype(np.float64)
    assert (row.count, row.times, row.nans, row.infs) == (32, 1, 1, 2)
    assert row.amax == np.abs(finite).max()
    assert row.min_nonzero == np.abs(finite[finite != 0]).min()
    assert row.zeros == np.mean(tensor == 0)
    assert row.rms == pytest.approx(np.sqrt(np.mean(finite**2)), rel=1e-10)
    assert row.nonfinite == 3 / 32
    assert row.histogram.dtype == np.int64
    assert row.histogram.sum() == (finite != 0).sum()


def test_shares_and_errors_are_those_of_casting():
    tensor = draw_tensors(1, spread=30, count=1)[0]
    (row,) = make_stats([tensor], make_layout()).rows()
    for name in ("float16", "bfloat16"):
        with np.errstate(over="ignore"):
            cast = tensor.astype(jnp.dtype(name)).astype(np.float64)
        shares = row.formats[name]
        assert shares.overflow == np.mean(np.isinf(cast))
        assert shares.underflow == np.mean((cast == 0) & (tensor != 0))
        saturated = np.clip(cast, -float(jnp.finfo(name).max), float(jnp.finfo(name).max))
        expected = np.linalg.norm(saturated - tensor) / np.linalg.norm(tensor.astype(np.float64))
        assert shares.error == pytest.approx(expected, rel=1e-10)
        assert shares.lost == shares.underflow + shares.overflow


def test_counts_use_both_words():
    record = make_record(np.ones((1, *SHAPE)))
    times = 10**9 * 2**20
    counts = [times, times * 7, 3, 2**40 + 1, *[5] * 9, *[times] * 64]
    words = split_words(counts).astype(np.uint32)
    (row,) = Stats(record._replace(counts=words[None]), make_layout()).rows()
    assert (row.times, row.count, row.nans, row.infs) == (times, times * 32, 3, 2**40 + 1)
    assert row.zeros == 7 / 32
    assert row.histogram.tolist() == [times] * 64


@pytest.mark.parametrize("exponent", [-149, -126, -100, 100, 127])
def test_the_rms_of_huge_and_tiny_numbers_is_finite(exponent):
    tensor = np.full(SHAPE, math.ldexp(1.5 if exponent > -149 else 1.0, exponent), np.float32)
    (row,) = make_stats([tensor], make_layout()).rows()
    assert row.rms == row.amax == tensor[0, 0]


def test_an_rms_that_rounding_lifts_above_the_amax_is_the_amax():
    record, largest = make_record([np.ones(SHAPE)]), np.finfo(np.float64).max
    record = record._replace(
        sums=np.float64(record.sums) * 4.0000001, extremes=np.array([[largest] * 2]), exponents=np.array([1023])
    )
    (row,) = Stats(record, make_layout()).rows()
    assert row.rms == row.amax == largest


def test_a_row_that_was_never_measured_is_empty():
    (row,) = make_stats(np.ones((1, *SHAPE)), make_layout()).empty().rows()
    assert (row.count, row.times, row.amax, row.min_nonzero, row.rms, row.zeros) == (0, 0, 0, None, 0, 0)
    assert not row.histogram.any()
    assert all(shares.lost == shares.error == 0 for shares in row.formats.values())
    (row,) = make_stats(draw_tensors(0, count=1), make_layout(histogram=False))
    assert row.histogram is None
    assert Row.from_dict(row.to_dict()) == row != 1


def test_a_merge_under_jit_folds_axes_that_differ():
    one, batch = make_stats(draw_tensors(4)), stack([make_stats(draw_tensors(seed)) for seed in (5, 6)])
    merged = jax.jit(Stats.merge)(one, batch)
    assert merged.record.exponents.shape == (len(PATHS),)
    assert_same_rows(merged.rows(), one.merge(make_stats(draw_tensors(5))).merge(make_stats(draw_tensors(6))).rows())


def test_equal_layouts_are_one_object_and_compare_by_identity():
    assert make_layout(*map(make_site, PATHS)) is LAYOUT
    assert StatsLayout.__eq__ is object.__eq__
    assert StatsLayout.__hash__ is object.__hash__
    assert make_layout(*map(make_site, PATHS), formats=("float16",)) is not LAYOUT


def test_a_branch_may_skip():
    skip_or_take = jax.jit(lambda flag, stats: lax.cond(flag, lambda s: s, Stats.empty, stats))
    stats = make_stats(draw_tensors(7))
    assert_same_rows(skip_or_take(True, stats).rows(), stats.rows())
    assert sum(row.count for row in skip_or_take(False, stats)) == 0


def test_pickles_and_flax_bring_stats_back():
    unpickled = pickle.loads(pickle.dumps(STATS))
    assert unpickled.layout is copy.deepcopy(STATS).layout is LAYOUT
    restored = serialization.from_bytes(STATS.empty(), serialization.to_bytes(STATS))
    assert STATS.rows() == unpickled.rows() == restored.rows()


def test_a_path_selects_what_is_inside_it():
    assert [row.path for row in STATS["blocks/0"]] == ["blocks/0/attention", "blocks/0/mlp"]
    assert STATS["blocks/0"].rows() == STATS.rows()[:2]
    assert STATS["head"].rows() == STATS.rows()[3:]
    assert len(STATS["blocks"]) == 3
    assert STATS[""].rows() == STATS.rows()
    assert len(STATS) == 4


def test_an_empty_program_has_no_rows():
    empty = STATS.select(lambda site: False)
    assert empty.rows() == ()
    assert empty.merge(empty.empty()).scalars() == {}
    assert json.loads(empty.to_json())["rows"] == []
    with pytest.raises(KeyError, match=r"No row at 'head' or inside it. There is none."):
        empty["head"]


def test_json_is_strict_and_comes_back():
    tensors = draw_tensors(0)
    tensors[0, 0, 0], tensors[1] = np.nan, 0
    layout = make_layout(make_site("a", turn=(1, 2)), *map(make_site, PATHS[1:]))
    stats = make_stats(tensors, layout)

    def refuse(token):
        raise AssertionError(token)

    plain = json.loads(stats.to_json(), parse_constant=refuse)
    assert plain == stats.to_dict()
    assert plain["rows"][0]["turn"] == [1, 2]
    assert plain["rows"][1]["min_nonzero"] is None
    restored = tuple(map(Row.from_dict, plain["rows"]))
    assert restored == stats.rows()
    assert (restored[0].turn, restored[0].shape) == ((1, 2), SHAPE)


def test_scalars_are_finite_floats_with_unique_names():
    sites = [
        make_site("a", direction="backward"),
        make_site("a", direction="backward"),
        make_site("a", turn=(3, 1)),
        make_site("", primitive="", direction="argument"),
    ]
    stats = make_stats(draw_tensors(0) * [[[np.nan]], [[1]], [[0]], [[1]]], make_layout(*sites, formats=FORMATS))
    scalars = stats.scalars()
    assert all(type(value) is float and math.isfinite(value) for value in scalars.values())
    prefixes = {name.rpartition("/amax")[0] for name in scalars if name.endswith("/amax")}
    assert prefixes == {
        "numerics/a/dot_general/backward",
        "numerics/a/dot_general/backward_1",
        "numerics/a/dot_general/forward/turn_3_1",
        "numerics/argument",
    }
    assert scalars["numerics/argument/float16/underflow"] == stats.rows()[3].formats["float16"].underflow
    assert scalars["numerics/a/dot_general/backward/nans"] == 32
    assert "numerics/a/dot_general/backward/min_nonzero" not in scalars
    assert set(stats.scalars(prefix="")) == {name.removeprefix("numerics/") for name in scalars}
    assert stats.empty().scalars() == {}


def test_names_of_sites_stay_unique_whatever_paths_are():
    sites = [make_site("a"), make_site("a"), make_site("a/dot_general/forward_1", primitive="", direction="forward")]
    sites.append(make_site("a", "dot_general/forward_1"))
    assert len(set(make_layout(*sites).list_names())) == 4


def test_what_is_shown_inside_jit_is_one_line():
    seen = []
    jax.jit(lambda stats: seen.extend([repr(stats), str(stats), stats._repr_html_()]))(STATS)
    line = "<Stats: 4 rows, float16, bfloat16, float8_e4m3fn; print it for the table>"
    assert seen == [line, line, f"<p>{html.escape(line)}</p>"]
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(STATS)] == [
        ".counts", ".extremes", ".exponents", ".sums",
    ]  # fmt: skip


def merge_with(*sites, **options):
    layout = make_layout(*sites, **options)
    return lambda: STATS.merge(make_stats(draw_tensors(0, count=len(sites)), layout))


SITES = list(map(make_site, PATHS))
ERRORS = {
    "misspelt path": (lambda: STATS["blocks/0/atention"], "No row at .* inside it. Did you mean 'blocks/0/attention'"),
    "near path": (lambda: STATS["block"], "No row at 'block' or inside it. Did you mean 'blocks'"),
    "unknown path": (lambda: STATS["zzz"], "No row at 'zzz' or inside it. Known are 'blocks', 'blocks/0'"),
    "no path": (lambda: STATS[0], r"indexed by paths, not by 0: stats\['blocks/0'\], or stats.rows\(\)\[0\]"),
    "rows in jit": (lambda: jax.jit(lambda stats: stats.rows())(STATS), "there are none yet: inside jit.*rows outside"),
    "no arrays": (lambda: jax.eval_shape(lambda: STATS).to_dict(), "there are none yet"),
    "other rows": (
        merge_with(*SITES[:2], make_site("tail", line=99), SITES[3]),
        r"different programs: row 2 of one is forward dot_general in 'blocks/10/attention': float32\[4, 8\] of "
        r"/home/me/train.py:12; of the other it is forward dot_general in 'tail': .*train.py:99. Stats merge where",
    ),
    "fewer rows": (merge_with(*SITES[:2]), "of different programs: one has 4 rows, and the other has 2"),
    "other formats": (
        merge_with(*SITES, formats=("float16",)),
        r"programs: the formats of one are \('float16', 'bfloat16', 'float8_e4m3fn'\), and of the other \('float16',\)",
    ),
    "other counts": (merge_with(*SITES, histogram=False), "the histogram of one is True, and of the other False"),
    "no stats": (lambda: STATS.merge({}), r"Only Stats merge with Stats, not a dict: stats.merge\(other_stats\)"),
    "a saved state": (
        lambda: serialization.from_bytes(
            make_stats(draw_tensors(0, count=1), make_layout()), serialization.to_bytes(STATS)
        ),
        r"target is <Stats: 1 row, .*the saved arrays have .*\(4, 2, 77\)",
    ),
    "a layout": (lambda: setattr(LAYOUT, "sites", ()), "A StatsLayout cannot be changed: cannot set 'sites'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_what_to_do(name):
    call, message = ERRORS[name]
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError), match=message):
        call()
