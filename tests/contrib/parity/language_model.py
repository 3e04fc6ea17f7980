"""A small language model with rotary attention and experts, as a teacher-forced pass and as a decode step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, EXPERTS = 3, 8, 24, 16, 2, 4
HALF = jnp.bfloat16
MASK = -1e9


@dataclasses.dataclass(frozen=True)
class Options:
    """What one of the two sides may do in another way."""

    softmax_dtype: Any = jnp.float32
    angle_dtype: Any = jnp.float32
    head_dtype: Any = jnp.float32
    eps: float = 1e-6
    norm_axis: int = -1
    shift: int = 0  # of the causal mask
    window: int = LENGTH
    cache_dtype: Any = jnp.float32
    has_last_ties: bool = False
    dropout: float = 0.0
    temperature: float = 1.0
    expert_dtype: Any = jnp.float32


def make_params(seed=0):
    shapes = {"query": 2, "key": 2, "value": 2, "out": 2, "router": (WIDTH, EXPERTS), "head": (WIDTH, VOCABULARY)}
    shapes |= {"embed": (VOCABULARY, WIDTH), "experts": (EXPERTS, WIDTH, WIDTH)}
    random = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(random.normal(size=(WIDTH, WIDTH) if shape == 2 else shape) / 3, jnp.float32)
    return {name: draw(shape) for name, shape in shapes.items()}


def make_tokens(seed=0, length=LENGTH):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCABULARY, (BATCH, length)))


def round_to(x, dtype):
    """Rounds to int8 with a scale per tensor, or to a floating dtype."""
    if dtype != jnp.int8:
        return x.astype(dtype).astype(jnp.float32)
    scale = jnp.max(jnp.abs(x)) / 127
    return jnp.round(x / scale).astype(jnp.int8).astype(jnp.float32) * scale


def norm(x, o):
    with jax.named_scope("norm"):
        return x * jax.lax.rsqrt(jnp.mean(x * x, o.norm_axis, keepdims=True) + o.eps)


def dense(params, name, x, dtype=jnp.float32):
    with jax.named_scope(name):
        return (x.astype(dtype) @ params[name].astype(dtype)).astype(jnp.float32)


def rotate(x, positions, o):
    """`x`: `(batch, positions, heads, width)`, `positions`: `(batch, positions)`."""
    with jax.named_scope("rotary"):
        half = x.shape[-1] // 2
        frequencies = 30.0 ** -(jnp.arange(half) / half)
        angles = positions[..., None, None].astype(o.angle_dtype) * frequencies.astype(o.angle_dtype)
        sin, cos = jnp.sin(angles).astype(jnp.float32), jnp.cos(angles).astype(jnp.float32)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attend(q, k, v, mask, o):
    """`mask`: `(batch, queries, keys)`."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 2 / q.shape[-1] ** 0.5
    scores = jnp.where(mask[:, None], scores, MASK).astype(o.softmax_dtype)
    weights = jax.nn.softmax(scores, -1).astype(jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def route(params, x, o):
    with jax.named_scope("router"):
        logits = jnp.round(x @ params["router"])  # integers have ties
        chosen = jax.lax.top_k(logits[..., ::-1], 2)[1] if o.has_last_ties else jax.lax.top_k(logits, 2)[1]
        chosen = EXPERTS - 1 - chosen if o.has_last_ties else chosen
        gates = jnp.sum(jax.nn.one_hot(chosen, EXPERTS), -2)
        return gates * jax.nn.softmax(logits)


def mix(params, x, gates, o):
    with jax.named_scope("experts"):
        made = jnp.einsum("bqd,edf->bqef", x, round_to(params["experts"], o.expert_dtype))
        return jnp.einsum("bqef,bqe->bqf", jnp.tanh(made), gates)


def run(params, tokens, positions, mask, o, cache=None, index=None):
    """Returns logits and the cache: of all tokens, or of one at `index` with a cache."""
    with jax.named_scope("embed"):
        x = params["embed"][tokens]
    split = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
    h = norm(x, o)
    q, k, v = (split(dense(params, name, h)) for name in ("query", "key", "value"))
    q, k = rotate(q, positions, o), rotate(k, positions, o)
    with jax.named_scope("attention"):
        if cache is not None:
            k, v = (jax.lax.dynamic_update_slice_in_dim(c, new, index, 1) for c, new in zip(cache, (k, v), strict=True))
            cache = k, v
        k, v = round_to(k, o.cache_dtype), round_to(v, o.cache_dtype)
        y = attend(q, k, v, mask, o)
    x = x + dense(params, "out", y.reshape(*y.shape[:2], -1))
    if o.dropout:
        with jax.named_scope("dropout"):
            kept = jax.random.bernoulli(jax.random.key(0), 1 - o.dropout, x.shape)
            x = jnp.where(kept, x / (1 - o.dropout), 0)
    h = norm(x, o)
    x = x + mix(params, h, route(params, h, o), o)
    return dense(params, "head", norm(x, o), o.head_dtype) / o.temperature, cache


def make_mask(queries, keys, real, o):
    """`queries`: positions in the sequence, `real`: `(batch, keys)`."""
    distance = queries[:, None] - keys
    return ((distance >= -o.shift) & (distance < o.window))[None] & real[:, None]


def make_trainer(options=Options(), real=None):
    def trainer(params, tokens):
        known = jnp.ones(tokens.shape, bool) if real is None else real
        steps = jnp.arange(tokens.shape[1])
        mask = make_mask(steps, steps, known, options)
        return run(params, tokens, number(known), mask, options)[0]

    return trainer


def number(real):
    """Numbers the real tokens of each sequence from 0."""
    return jnp.maximum(jnp.cumsum(real, 1) - 1, 0)


def make_cache(length=LENGTH, batch=BATCH):
    empty = jnp.zeros((batch, length, HEADS, WIDTH // HEADS))
    return (empty, empty), jnp.zeros((), jnp.int32)


def make_step(options=Options(), real=None, weights=None):
    """Makes `(params, cache, token) -> (logits, cache)`."""

    def step(params, cache, token):
        stored, index = cache
        length = stored[0].shape[1]
        known = jnp.ones((token.shape[0], length), bool) if real is None else real
        mask = make_mask(index[None], jnp.arange(length), known, options)
        position = jax.lax.dynamic_slice_in_dim(number(known), index, 1, 1)
        given = params if weights is None else weights
        logits, stored = run(given, token[:, None], position, mask, options, stored, index)
        return logits[:, 0], (stored, index + 1)

    return step


def make_loop(options=Options(), real=None):
    """Makes a sampler with a Python loop."""
    step = make_step(options, real)

    def sampler(params, tokens):
        cache, made = make_cache(tokens.shape[1], tokens.shape[0]), []
        for token in tokens.T:
            logits, cache = step(params, cache, token)
            made.append(logits)
        return jnp.stack(made, 1)

    return sampler
