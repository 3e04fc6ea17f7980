"""What `collect` promises of any function: it returns what it did, and rows are what NumPy sees in its tensors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy.numerics import collect

FORMATS = ("float16", "float8_e4m3fn")
observe = functools.partial(collect, formats=FORMATS)


def check_collect(fun, *args, bound=1e-5, **options):
    """Collects what a function of trees of arrays does under jit, and returns its results and statistics.

    Args:
      fun: the function.
      *args: its arguments.
      bound: how far results may be from those without, relative to the largest number of an array.
      **options: of `collect`.
    """
    expected = jax.jit(fun)(*args)
    out, stats = jax.jit(observe(fun, **options))(*args)
    assert_same(out, expected, bound)
    for direction, tree in (("argument", args), ("result", out)):
        if direction + "s" in options.get("of", ("arguments", "results")):
            for row, tensor in zip(find(stats, direction), list_floats(tree), strict=True):
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
        largest = np.abs(other[finite]).max(initial=0)
        np.testing.assert_allclose(leaf[finite], other[finite], rtol=0, atol=bound * largest)


def assert_row_is(row, *tensors):
    """A row is of these tensors together: counts are equal, and a float32 sum of squares is within 2e-6."""
    tensors = [np.asarray(tensor) for tensor in tensors]
    assert row.dtype == str(tensors[0].dtype)
    values = np.concatenate([tensor.astype(np.float64).ravel() for tensor in tensors])
    sizes = np.abs(values[np.isfinite(values)])
    nonzero = sizes[sizes > 0]
    assert (row.times, row.count) == (len(tensors), values.size)
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


def list_floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def find(stats, direction, **fields):
    """The rows of a pass that have these fields."""
    rows = [row for row in stats if row.direction == direction]
    return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def find_sites(fun, *args, **options):
    """What the rows of a function are of, without running it."""
    return jax.eval_shape(observe(fun, **options), *args)[1].layout.sites
