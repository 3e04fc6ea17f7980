"""Caches in 8 bits: decoding beside attention over the whole sequence in float64, and what a step reads and writes."""

import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jmp_policy as jmp
from jmp_policy.quant import CacheSlot

FORMATS = ["int8", "float8_e4m3fn"]
HEADS, DEPTH, FEATURES, TOKENS, BATCH = 2, 8, 16, 12, 3
LENGTHS = np.array([12, 5, 9])  # rows are padded on the left


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's decoding compares and promotes as it goes
        yield


def draw_weights():
    """Draws projections of an attention layer, and of a head above it."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)
    weights = {name: normal(FEATURES, HEADS, DEPTH) for name in ("query", "key", "value")}
    return weights | {"out": normal(HEADS, DEPTH, FEATURES) / HEADS, "head": normal(FEATURES, 32)}


def draw_tokens(tokens=TOKENS, batch=BATCH):
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, tokens, FEATURES)), jnp.float32)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        x = nn.MultiHeadAttention(HEADS, qkv_features=HEADS * DEPTH, decode=True, use_bias=False, name="attend")(
            x, mask=mask
        )
        return nn.Dense(32, use_bias=False, name="head")(x)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        options = {"qkv_features": HEADS * DEPTH, "decode": True, "use_bias": False}
        self.attend = nnx.MultiHeadAttention(HEADS, FEATURES, **options, rngs=rngs)
        self.head = nnx.Linear(FEATURES, 32, use_bias=False, rngs=rngs)

    def __call__(self, x, mask=None):
        return self.head(self.attend(x, mask=mask))


def make_linen(policy, weights, x):
    """Returns a function `(cache, token, mask) -> (logits, cache)`, and the first cache."""
    model = jmp.with_policy(Model(), policy)
    attend = {name: {"kernel": weights[name]} for name in ("query", "key", "value", "out")}
    params = {"attend": attend, "head": {"kernel": weights["head"]}}
    cache = jax.jit(model.init)(jax.random.key(0), x)["cache"]

    def step(cache, token, mask):
        logits, new = model.apply({"params": params, "cache": cache}, token, mask, mutable=["cache"])
        return logits, new["cache"]

    return step, cache


def make_nnx(policy, weights, x):
    model = jmp.with_policy(NnxModel(nnx.Rngs(0)), policy)
    for name in ("query", "key", "value", "out"):
        getattr(model.attend, name).kernel[...] = weights[name]
    model.head.kernel[...] = weights["head"]
    model.attend.init_cache(x.shape)
    graph, cache, rest = nnx.split(model, nnx.Cache, ...)

    def step(cache, token, mask):
        model = nnx.merge(graph, cache, rest)
        return model(token, mask), nnx.state(model, nnx.Cache)

    return step, cache


ADAPTERS = {"linen": make_linen, "nnx": make_nnx}
PAIRS = list(zip(ADAPTERS, FORMATS, strict=True))


def decode(step, cache, x, mask=None):
    """Decodes `(batch, position, feature)` inputs one by one; returns all logits, and the last cache."""

    @jax.jit
    def decode_all(cache, x):
        def decode_one(cache, token):
            logits, cache = step(cache, token[:, None], mask)
            return cache, logits[:, 0]

        cache, logits = lax.scan(decode_one, cache, x.swapaxes(0, 1))
        return logits.swapaxes(0, 1), cache

    return decode_all(cache, x)


def attend_to_all(weights, x, start, format):
    """Computes the logits of one sequence in float64, and a bound on what rounding its keys and values changes.

    A key that is off by `d` changes a logit by `|q| @ |d| / sqrt(DEPTH)`, at most `E`; the probabilities change by
    factors from `exp(-2 E)` to `exp(2 E)`. Int8 is off by half of a scale, which is the amax of the row over 127; e4m3
    by 2**-4 of each value, or by 2**-10 of the amax of the row over 448.
    """
    weights = {name: np.float64(weight) for name, weight in weights.items()}
    query, key, value = (np.einsum("tf,fhd->htd", np.float64(x), weights[name]) for name in ("query", "key", "value"))

    def error(rows):
        amax = np.abs(rows).max(-1, keepdims=True)
        if format == "int8":
            return np.broadcast_to(amax / 254, rows.shape)
        return np.maximum(np.abs(rows) / 16, amax / 448 / 1024)

    visible = np.tril(np.ones((len(x), len(x)), bool))[start:]
    visible[:, :start] = False
    logits = np.einsum("hqd,hkd->hqk", query[:, start:], key) / DEPTH**0.5
    odds = np.where(visible, np.exp(logits), 0)
    shares = odds / odds.sum(-1, keepdims=True)
    moved = np.einsum("hqd,hkd->hqk", np.abs(query[:, start:]), error(key)) / DEPTH**0.5
    most = np.where(visible, moved, 0).max(-1, keepdims=True)
    wrong = np.expm1(2 * most) * (shares @ np.abs(value)) + np.exp(2 * most) * (shares @ error(value))
    out = np.einsum("hqd,hdf,fv->qv", shares @ value, weights["out"], weights["head"])
    bound = np.einsum("hqd,hdf,fv->qv", wrong, np.abs(weights["out"]), np.abs(weights["head"]))
    return out, bound + 1e-5  # the sums in float32


# The root mean square of errors over that of logits. A row of 8 normal numbers has an amax of 2.1 standard deviations
# on average, so that int8 is off by 2.1 / 254 / 3**0.5 of one; e4m3 is off by 0.026 of a value. Keys and values are.
RELATIVE = {"int8": 0.01, "float8_e4m3fn": 0.05}


def check_logits(logits, weights, x, starts, format):
    for row, start in enumerate(starts):
        exact, bound = attend_to_all(weights, np.asarray(x[row]), start, format)
        error = np.abs(np.float64(logits[row, start:]) - exact)
        assert (error <= bound).all()
        relative = (error**2).mean() ** 0.5 / (exact**2).mean() ** 0.5
        assert RELATIVE[format] / 8 < relative < RELATIVE[format]


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "format"), PAIRS)
def test_decoding_a_batch_of_mixed_lengths_is_within_a_bound_of_the_whole_sequences_in_float64(adapter, format):
    weights, x = draw_weights(), draw_tokens()
    starts = TOKENS - LENGTHS
    mask = (np.arange(TOKENS) >= starts[:, None])[:, None, None]
    step, cache = ADAPTERS[adapter](f"params=float32,cache={format}", weights, x)
    check_logits(decode(step, cache, x, jnp.asarray(mask))[0], weights, x, starts, format)


def list_arrays(cache):
    """Returns the arrays of a cache by name, without its index."""
    spell = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    names = {spell(path).split("/")[1]: leaf for path, leaf in jax.tree.leaves_with_path(cache)}
    return {name: leaf for name, leaf in names.items() if name != "cache_index"}


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "platform"), list(zip(ADAPTERS, ["tpu", "cuda"], strict=True)))
def test_exported_steps_read_and_update_int8_and_no_cache_in_the_compute_dtype(adapter, platform):
    weights, x = draw_weights(), draw_tokens()
    step, cache = ADAPTERS[adapter]("params=float32,compute=bfloat16,cache=int8", weights, x)
    step = jax.jit(functools.partial(step, mask=None))
    text = export.export(step, platforms=[platform])(cache, x[:, :1]).mlir_module()
    whole, row = (f"tensor<{BATCH}x{n}x{HEADS}x{DEPTH}x" for n in (TOKENS, 1))
    updates = [line for line in text.splitlines() if "dynamic_update_slice" in line]
    assert sum(f"{whole}i8>, {row}i8>" in line for line in updates) == 2
    assert not any(f"{whole}bf16>" in line or f"{whole}f32>" in line for line in updates)
    read = [line for line in text.splitlines() if "stablehlo.convert" in line and f"{whole}i8>" in line]
    assert len(read) == 2


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_sharded_cache_stays_sharded(adapter):
    mesh = meshes.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    weights, x = draw_weights(), draw_tokens(4, 2)
    step, cache = ADAPTERS[adapter]("params=float32,cache=int8", weights, x)
    place = lambda spec: NamedSharding(mesh, spec)
    specs = jax.tree.map(lambda leaf: place(P("data", None, "model") if leaf.ndim else P()), cache)
    step = functools.partial(step, mask=None)
    alone, _ = jax.jit(step)(cache, x[:, :1])
    split, new = jax.jit(step, out_shardings=(None, specs))(jax.device_put(cache, specs), jax.device_put(
        x[:, :1], place(P("data"))))  # fmt: skip
    np.testing.assert_allclose(split, alone, rtol=0, atol=1e-6)
    assert {leaf.sharding.shard_shape(leaf.shape)[:3:2] for leaf in list_arrays(new).values()} == {(1, 1)}


@pytest.mark.slow
def test_a_cache_on_an_explicit_axis_keeps_it():
    mesh = meshes.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    weights, x = draw_weights(), draw_tokens(4, 2)
    step, cache = make_linen("params=float32,compute=bfloat16,cache=int8", weights, x)
    describe = lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        split = jax.tree.map(lambda leaf: describe(leaf, P("data") if leaf.ndim else P()), cache)
        logits, new = jax.eval_shape(functools.partial(step, mask=None), split, describe(x[:, :1], P("data")))
    assert {leaf.sharding.spec[0] for leaf in [logits, *list_arrays(new).values()]} == {"data"}


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_zeros_stay_zero_and_a_row_with_a_nan_is_nan(format):
    @jax.jit
    def write_and_read(position):
        stored = []
        values, scale = jnp.zeros((2, 3, 1, DEPTH), format), jnp.zeros((2, 3, 1, 1), jnp.float32)
        slot = CacheSlot(values, scale, jnp.int32(1), jnp.bfloat16, lambda *new: stored.append(new))
        slot[...] = position
        return slot.read(), stored

    read, [(values, scale)] = write_and_read(jnp.zeros((2, 1, 1, DEPTH)).at[1, 0, 0, 2].set(jnp.nan))
    assert (read[0] == 0).all()
    assert (read[1, ::2] == 0).all()
    assert jnp.isnan(read[1, 1]).all()
    assert (values.dtype, scale.dtype, read.dtype) == (format, jnp.float32, jnp.bfloat16)
