"""What `collect` promises of any function: it returns what it did, and rows are what NumPy sees in its tensors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy.numerics import collect

FORMATS = ("float16", "float8_e4m3fn")
observe = functools.partial(collect, formats=FORMATS)
observe_quick = functools.partial(collect, formats=(), histogram=False)  # compiles in a third of the time


def check_collect(fun, *args, bound=1e-5, **options):
    """Collects a function of trees of arrays under jit; results are within `bound` of the largest element of each."""
    expected = jax.jit(fun)(*args)
    out, stats = jax.jit(observe(fun, **options))(*args)
    assert_same(out, expected, bound)
    for direction, tree in (("argument", args), ("result", out)):
        if direction + "s" in options.get("of", ("arguments", "results")):
            tensors = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
            for row, tensor in zip(find(stats, direction), tensors, strict=True):
                assert_row_is(row, tensor)
    return out, stats


def assert_same(tree, expected, bound=1e-5):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        leaf, other = (np.asarray(each, np.complex128) for each in (leaf, other))
        finite = np.isfinite(other)
        np.testing.assert_array_equal(leaf[~finite], other[~finite])
        np.testing.assert_allclose(
            leaf[finite], other[finite], rtol=0, atol=bound * np.abs(other[finite]).max(initial=0)
        )


def assert_row_is(row, tensor):
    """A row is of this tensor: counts are equal, and a float32 sum of squares is within 2e-6."""
    assert row.dtype == str(tensor.dtype)
    values = np.asarray(tensor).astype(np.float64).ravel()
    sizes = np.abs(values[np.isfinite(values)])
    nonzero = sizes[sizes > 0]
    assert (row.times, row.count) == (1, values.size)
    assert (row.nans, row.infs) == (np.isnan(values).sum(), np.isinf(values).sum())
    assert row.zeros == (np.mean(values == 0) if values.size else 0)
    assert row.amax == sizes.max(initial=0)
    assert row.min_nonzero == (nonzero.min() if nonzero.size else None)
    unit = row.amax or 1.0
    np.testing.assert_allclose(row.rms / unit, np.sqrt(np.mean((sizes / unit) ** 2)) if sizes.size else 0, rtol=2e-6)
    bins = np.clip(np.frexp(nonzero)[1] + 46, 0, 63)
    np.testing.assert_array_equal(row.histogram, np.bincount(bins, minlength=64))
    for name, dtype in zip(FORMATS, (jnp.float16, jnp.float8_e4m3fn), strict=True):
        with np.errstate(over="ignore"):
            cast = nonzero.astype(dtype).astype(np.float64)
        lost = row.formats[name]
        assert round(lost.underflow * row.count) == np.sum(cast == 0)
        assert round(lost.overflow * row.count) == np.sum(~np.isfinite(cast))


def assert_measures(row, *tensors):
    """A row is of these tensors together, up to the rounding of another program."""
    values = np.concatenate([np.asarray(tensor, np.float64).ravel() for tensor in tensors])
    assert row.count == values.size
    expected = np.abs(values).max(), np.abs(values[values != 0]).min(), np.sqrt(np.mean(values**2))
    np.testing.assert_allclose((row.amax, row.min_nonzero, row.rms), expected, rtol=1e-5)


def find(stats, direction, **fields):
    """The rows of a pass that have these fields."""
    rows = [row for row in stats if row.direction == direction]
    return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def find_sites(fun, *args, **options):
    """What the rows of a function are of, without running it."""
    return jax.eval_shape(observe(fun, **options), *args)[1].layout.sites
