"""`quantize_state` stores what a model in NumPy stores, and steps on pieces as on the whole."""

import cProfile
import functools
import pstats

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_registry import bits
from quantized_moments import ELEMENTWISE, SIDES, Model, list_stored, make_grads, make_params

from benchmarks._measure import count_calls
from jmp_policy import optim

# The noise of a step never leaves it.
from jmp_policy.optim._moment_blocks import number_positions
from jmp_policy.optim._quantized_update import _hash

pytestmark = pytest.mark.usefixtures("small_chunks")

STEPS = 3
UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # LLVM would round a product before a sum here, and not there


def quantize(inner, **options):
    return optim.quantize_state(inner, min_size=500, **options)


SLOW = ("lion", "rmsprop", "amsgrad", "partition", "MultiSteps")


@functools.cache
def trained(name):
    """Some steps of an optimizer: the updates and the state of each."""
    tx = quantize(ELEMENTWISE[name]())
    params = make_params()
    state, update = tx.init(params), jax.jit(tx.update, compiler_options=UNOPTIMIZED)
    history = []
    for step in range(STEPS):
        updates, state = update(make_grads(params, step), state, params)
        params = optax.apply_updates(params, updates)
        history.append((updates, state))
    return history


@pytest.mark.parametrize("name", ["adamw", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_steps_store_what_a_model_in_numpy_stores(name):
    params = make_params()
    model = Model(ELEMENTWISE[name](), params, SIDES)
    for step, (updates, state) in enumerate(trained(name)):
        expected = model.update(make_grads(params, step), params)
        params = optax.apply_updates(params, expected)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), updates, expected)
        for stored, (codes, scales) in zip(model.stored, list_stored(state), strict=True):
            assert (stored is None) == (codes.dtype != np.uint8)
            if stored is not None:
                np.testing.assert_array_equal(codes, stored[0])
                np.testing.assert_allclose(scales, stored[1], rtol=1e-6)


def _count_calls_of_init(leaves):
    tx = quantize(optax.adam(1e-3))
    params = {f"w{index}": jax.ShapeDtypeStruct((64, 64), "float32") for index in range(leaves)}
    profile = cProfile.Profile()
    profile.runcall(jax.eval_shape, tx.init, params)
    return pstats.Stats(profile).total_calls


@pytest.mark.slow
def test_tracing_init_is_linear_in_the_number_of_parameters():
    """Counts Python calls, which do not depend on the machine. Quadratic work took six times as many."""
    _count_calls_of_init(1)  # fills caches
    assert _count_calls_of_init(16) <= 4.5 * _count_calls_of_init(4)


@pytest.mark.parametrize(
    "shape",
    [(3, 64, 64), (32, 512), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((7 * 32, 32), (4096,)))],
)
def test_each_block_is_updated_once_whatever_the_number_of_rows_of_blocks(shape):
    """A stack, one row of blocks, a prime number of them, and a vector."""
    params = {"w": jax.ShapeDtypeStruct(shape, "float32")}
    grads = {"w": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    states = []
    for elementwise in (True, False):
        tx = quantize(optax.trace(0.9), elementwise=elementwise)
        state = tx.init(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params))
        for _ in range(2):
            _, state = tx.update(grads, state)
        assert int(state.key) == 2  # the steps by which it rounds, which this optimizer does not count
        states.append(state)
    assert bits(states[0]) == bits(states[1])


def _follow(gradient, b2, steps):
    """Returns the norms of the updates of AdamW with 8-bit moments, over those of AdamW."""
    adamw = optax.adamw(1e-3, b2=b2)
    small = optim.quantize_state(adamw)
    params = {"w": jnp.zeros((64, 64))}

    def step(states, n):
        grads = {"w": gradient(n)}
        exact, one = adamw.update(grads, states[0], params)
        updates, other = small.update(grads, states[1], params)
        return (one, other), optax.tree.norm(updates) / optax.tree.norm(exact)

    return jax.lax.scan(step, (adamw.init(params), small.init(params)), jnp.arange(steps))[1]


def _draw_gradients(kind):
    """Returns a function from a step to gradients that change in this way."""
    random = np.random.default_rng()
    size = random.normal(size=(64, 64)) * 10.0 ** random.uniform(-1.5, 0, (64, 64))
    rate = 10.0 ** random.uniform(-4, -2, (64, 64))
    size, rate, key = jnp.float32(size), jnp.float32(rate), jax.random.key(random.integers(2**31))
    noise = lambda n: size / 3 + jnp.abs(size) * jax.random.normal(jax.random.fold_in(key, n), size.shape)
    is_used = lambda n: jax.random.bernoulli(jax.random.fold_in(key, -n), (1 + jnp.arange(64)[:, None]) ** -0.7)
    return {
        "constant": lambda n: size,
        "shrinking": lambda n: size * jnp.exp(-rate * n),
        "growing": lambda n: size * jnp.exp(rate / 2 * n),
        "noisy": noise,
        "sparse": lambda n: jnp.where(is_used(n), noise(n), 0),
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "b2"), [("constant", 0.9), ("shrinking", 0.999), ("growing", 0.95), ("sparse", 0.99)])
def test_updates_are_not_larger_than_those_of_the_optimizer_whatever_its_b2(kind, b2):
    """Moments that were rounded to nearest did not follow gradients: updates were up to 46 % larger after 400 steps."""
    share = np.asarray(jax.jit(_follow, static_argnums=(0, 1, 2))(_draw_gradients(kind), b2, 401))
    np.testing.assert_allclose(share[[50, 150, 400]], 1, atol=0.03)


@pytest.mark.slow
def test_noise_is_uniform_and_independent_of_neighbors_and_of_other_keys():
    """Bounds are five standard deviations of independent uniform numbers."""
    count = 2**16
    places = number_positions((256, 256))
    bits_of = lambda seed: np.asarray(_hash(places, jax.random.key(seed)), np.float64).ravel()
    one, other = bits_of(0) / 2**16 - 0.5 + 2.0**-17, bits_of(1) / 2**16 - 0.5 + 2.0**-17
    bound = 5 / np.sqrt(count) / 12
    assert abs(one.mean()) <= 5 / np.sqrt(12 * count)
    for shifted in (np.roll(one, 1), np.roll(one, 8), np.roll(one, 256), other):
        assert abs(np.mean(one * shifted)) <= bound
    filled = np.histogram(one, 256)[0]
    assert abs(np.sum((filled - 256) ** 2 / 256) - 255) <= 5 * np.sqrt(2 * 255)


@pytest.mark.slow
def test_tracing_an_update_takes_at_most_six_times_the_calls_of_the_optimizer(monkeypatch):
    monkeypatch.undo()  # chunks of the usual size
    shapes = {f"w{i}": jax.ShapeDtypeStruct((64, 64), "float32") for i in range(24)}

    def count(tx):
        state = jax.eval_shape(tx.init, shapes)
        trace = lambda: jax.jit(lambda *args: tx.update(*args)).lower(shapes, state, shapes)
        trace()  # fills caches
        return count_calls(trace)

    assert count(optim.quantize_state(optax.adamw(1e-3))) <= 6 * count(optax.adamw(1e-3))


def _temporaries(tx, params):
    state = jax.eval_shape(tx.init, params)
    lowered = jax.jit(tx.update, donate_argnums=(0, 1)).lower(params, state, params)
    compiled = lowered.compile(compiler_options=UNOPTIMIZED)
    return compiled.memory_analysis().temp_size_in_bytes / sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.cpu("temporaries of XLA:CPU")
@pytest.mark.parametrize(
    ("count", "shape", "bound"),
    [(1, (2048, 2048), 0.15), (2, (1312, 1312), 0.15), (1, (32, 65536), 0.3), (1, (2**18, 4), 0.55)],
)
def test_an_update_needs_memory_for_one_chunk(count, shape, bound, monkeypatch):
    """XLA copied the whole state where chunks were one row of blocks or no divisor fitted their number; noise had the
    positions of all elements, 4 bytes each.
    """
    monkeypatch.undo()  # chunks of the usual size
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, "float32") for i in range(count)}
    noise = {"stochastic": jax.random.key(0)} if shape == (2048, 2048) else {}
    assert _temporaries(optim.quantize_state(optax.adamw(1e-3), **noise), params) <= bound
