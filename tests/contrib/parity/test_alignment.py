"""`contrib.parity` puts the steps of a decode loop at their positions, and says where it cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_model import (
    BATCH,
    HALF,
    LENGTH,
    Options,
    make_cache,
    make_loop,
    make_mask,
    make_params,
    make_step,
    make_tokens,
    make_trainer,
    run,
)

from jmp_policy.contrib import parity, record

PARAMS, TOKENS = make_params(), make_tokens()
FAULT = Options(head_dtype=HALF)
SHAPE, WEIGHT = (3, 5, 4), jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)


def spread(tokens):
    return tokens[..., None].astype(jnp.float32) + jnp.arange(4.0)


def toy(params, tokens, scale=1.0):
    """A teacher-forced pass of three scopes. The second one multiplies its values at position 2 by `scale`."""
    with jax.named_scope("embed"):
        x = jnp.sin(spread(tokens))
    with jax.named_scope("mix"):
        x = jnp.cumsum(x, 1).at[:, 2].multiply(scale)
    with jax.named_scope("head"):
        return x @ params


def record_toy(tokens, scale=1.0):
    return {name: np.asarray(x) for name, x in record(toy)(WEIGHT, tokens, scale).items()}


def scan(x):
    return np.moveaxis(x, 1, 0)[:, :, None]


LAYOUTS = {  # how a sampler may have recorded a value of shape (batch, length, width)
    "a scan with an axis for the query": lambda x: scan(x),
    "a scan without it": lambda x: np.moveaxis(x, 1, 0),
    "a Python loop": lambda x: [x[:, i : i + 1] for i in range(x.shape[1])],
    "a Python loop without an axis for the query": lambda x: [x[:, i] for i in range(x.shape[1])],
    "a prompt and a scan": lambda x: [x[:, :3], scan(x[:, 3:])],
    "a prompt and a loop": lambda x: [x[:, :2], *(x[:, i : i + 1] for i in range(2, x.shape[1]))],
    "no step for the last token": lambda x: scan(x[:, :-1]),
    "the whole": lambda x: x,
    "states beside it": lambda x: [np.ones((x.shape[1], 3, 9, 4), np.float32), scan(x)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_put_at_their_positions(layout):
    tokens = make_tokens(length=SHAPE[1]) % 6
    recording = record_toy(tokens, 1.5)
    given = {name: LAYOUTS[layout](recording[name]) for name in ("embed", "mix", "head")}
    found = parity(toy, given | {"result": recording["result"]})(WEIGHT, tokens)
    by_path = {row.path: row for row in found.rows()}
    assert (found.rows()[0].path, found.unaligned) == ("mix", ())
    # At position 2 the recorded value is 1.5 times the trainer's.
    np.testing.assert_allclose(by_path["mix"].iterations, [0, 0, 1 / 3, 0, 0], atol=1e-6)
    assert by_path["embed"].introduced < 1e-6


def test_rounding_in_a_recording_whose_dtypes_are_unknown_is_no_cause():
    tokens = make_tokens(length=SHAPE[1]) % 6
    recording = record_toy(tokens)
    rounded = {name: np.asarray(jnp.asarray(x).astype(HALF).astype(jnp.float32)) for name, x in recording.items()}
    found = parity(toy, rounded)(WEIGHT, tokens)
    assert found.rows()[0].introduced > 1e-3
    assert found.causes == ()
    [cause] = parity(toy, record_toy(tokens, 1.5))(WEIGHT, tokens).causes
    assert cause.startswith("mix introduces 0.2")
    assert "more than rounding in its dtypes explains (0.06): it computes something else" in cause


def test_several_values_of_a_scope_are_told_apart():
    def two(params, tokens):
        with jax.named_scope("two"):
            x = jnp.sin(spread(tokens))
            y = jnp.cos(spread(tokens))
        with jax.named_scope("head"):
            return (x * x + y) @ params

    tokens = make_tokens(length=5) % 6
    recording = record(two)(WEIGHT, tokens)
    steps = [recording[name][:, i : i + 1] for i in range(5) for name in ("two", "two:1")]
    found = parity(two, {"two": steps, "result": recording["result"]})(WEIGHT, tokens)
    assert found.rows()[0].introduced < 1e-6
    assert found.unaligned[0] == "the sampler has no values of head"


REFUSED = {  # values of the scope "mix", and the sentence
    "another width": (np.ones((5, 3, 1, 7)), "has shape (5, 3, 1, 7), which are not the steps of (3, 5, 4)"),
    "too few steps": (np.ones((3, 3, 1, 4)), "has shape (3, 3, 1, 4), which are not the steps of (3, 5, 4)"),
    "too few calls": (
        [np.ones((3, 1, 4))] * 3,
        "has 3 values of shape (3, 1, 4), which are not the steps of (3, 5, 4)",
    ),
    "an unknown scope": (None, "is not a scope of the trainer (did you mean 'mix'?)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_aligned_is_said(case):
    tokens = make_tokens(length=SHAPE[1]) % 6
    recording, (values, sentence) = record_toy(tokens), REFUSED[case]
    recording |= {"mixer": recording.pop("mix")} if values is None else {"mix": values}
    found = parity(toy, recording)(WEIGHT, tokens)
    name = "mixer" if values is None else "mix"
    assert any(line.startswith(f"{name!r} of the sampler {sentence}") for line in found.unaligned)
    assert f"Not aligned: {found.unaligned[0]}" in " ".join(str(found).split())  # lines as wide as the terminal


def test_a_batch_of_as_many_sequences_as_steps_is_not_guessed():
    tokens = jnp.concatenate([make_tokens(length=5) % 6] * 2)[:5]
    recording = record_toy(tokens)
    steps = {name: np.moveaxis(x, 1, 0) for name, x in recording.items() if name != "result"}
    found = parity(toy, steps | {"result": recording["result"]})(WEIGHT, tokens)
    assert found.unaligned[0] == (
        "'embed' of the sampler may have the steps on either of two axes, which both have 5 elements"
    )
    steps = {name: x[:, :, None] for name, x in steps.items()}  # with an axis for the query it is clear
    assert parity(toy, steps | {"result": recording["result"]})(WEIGHT, tokens).unaligned == ()


@pytest.mark.parametrize("has_heads", [False, True])
def test_positions_come_before_as_many_features_and_heads_are_not_guessed(has_heads):
    def square(params, tokens):
        with jax.named_scope("square"):
            x = jnp.sin(spread(tokens))[..., None] if has_heads else jnp.sin(spread(tokens))
        with jax.named_scope("head"):
            return (x[..., 0] if has_heads else x) @ params

    tokens = make_tokens(length=4) % 6  # as many positions as elements in a scope
    recording = record(square)(WEIGHT, tokens)
    steps = {name: np.moveaxis(np.asarray(x), 1, 0) for name, x in recording.items()} | {"result": recording["result"]}
    found = parity(square, steps)(WEIGHT, tokens)
    problem = "'square' of the sampler does not tell which axis of (3, 4, 4, 1) in the trainer has the positions: use"
    if has_heads:
        assert found.unaligned[0].startswith(problem)
    else:
        assert found.unaligned == ()
        assert max(row.introduced for row in found.rows()) < 1e-6


@pytest.mark.parametrize("is_sampler", [False, True])
def test_a_scope_around_all_of_one_side_is_passed_over(is_sampler):
    def wrapped(params, tokens, scale=1.0):
        with jax.named_scope("model"):
            return toy(params, tokens, scale)

    tokens = make_tokens(length=5) % 6
    trainer, sampler = (toy, wrapped) if is_sampler else (wrapped, toy)
    recorded = {**record(sampler)(WEIGHT, tokens, 1.5)}
    twice = next(name for name in recorded if name.endswith("embed"))
    steps = np.asarray(recorded.pop(twice))
    recorded |= {f"{twice}:{i}" if i else twice: steps[:, i] for i in range(5)}  # numbered, as of a loop in Python
    found = parity(trainer, recorded)(WEIGHT, tokens)
    assert found.unaligned == ()
    assert found.rows()[0].path == ("mix" if is_sampler else "model/mix")
    assert [row.introduced > 1e-6 for row in found.rows()] == [True, False, False]


def test_a_value_that_is_recorded_as_a_whole_needs_no_axis():
    tokens = make_tokens(length=4) % 6  # as many positions as elements in a scope
    recording = record_toy(tokens)
    assert parity(toy, recording)(WEIGHT, tokens).unaligned == ()


def test_values_of_experts_whose_batch_and_positions_are_one_axis_are_aligned():
    def flat(params, tokens):
        with jax.named_scope("experts"):
            x = jnp.tanh(spread(tokens.reshape(-1)))
        with jax.named_scope("head"):
            return x.reshape(*tokens.shape, 4) @ params

    tokens = make_tokens(length=5) % 6
    recording = record(flat)(WEIGHT, tokens)
    values = np.asarray(recording["experts"]).reshape(3, 5, 4)
    values = values * np.where(np.arange(5) == 4, 2.0, 1.0)[:, None]
    found = parity(flat, {"experts": np.moveaxis(values, 1, 0), "result": recording["result"]})(WEIGHT, tokens)
    [row] = [row for row in found.rows() if row.path == "experts"]
    np.testing.assert_allclose(row.iterations, [0, 0, 0, 0, 0.5], atol=1e-6)


def test_layers_in_a_scan_are_aligned():
    def layered(params, tokens):
        def layer(x, weight):
            with jax.named_scope("wave"):
                return jnp.sin(x * weight), None

        with jax.named_scope("embed"):
            x = spread(tokens)
        with jax.named_scope("layers"):
            x = jax.lax.scan(layer, x, jnp.arange(1.0, 3.0))[0]
        with jax.named_scope("head"):
            return x @ params

    tokens = make_tokens(length=5) % 6
    recording = record(layered)(WEIGHT, tokens)
    assert recording["layers/wave"].shape == (2, 3, 5, 4)
    steps = np.moveaxis(np.array(recording["layers/wave"]), 2, 0)[:, :, :, None]  # (length, layers, batch, 1, width)
    steps[3, 1] *= 1.25  # the second layer, which nothing but the head reads
    values = {"embed": recording["embed"], "layers/wave": steps, "result": recording["result"]}
    found = parity(layered, values)(WEIGHT, tokens)
    [row] = [row for row in found.rows() if row.path == "layers/wave"]
    assert np.argmax(row.iterations) == 3
    assert len(row.iterations) == 5


WEIGHTS = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 4)), jnp.float32)


def run_layers(params, tokens, is_scan, dtypes=(jnp.float32,) * 3, name="layers_{}"):
    """A model of three layers, in a scan or a Python loop."""

    def layer(x, weight, dtype=jnp.float32):
        with jax.named_scope("mlp"):
            return jnp.tanh((x.astype(dtype) @ weight.astype(dtype)).astype(jnp.float32)), None

    with jax.named_scope("embed"):
        x = jnp.sin(spread(tokens))
    if is_scan:
        with jax.named_scope("layers"):
            x = jax.lax.scan(functools.partial(layer, dtype=dtypes[0]), x, WEIGHTS)[0]
    else:
        for i, weight in enumerate(WEIGHTS):
            with jax.named_scope(name.format(i)):
                x, _ = layer(x, weight, dtypes[i])
    with jax.named_scope("head"):
        return x @ params


@pytest.mark.parametrize("name", ["layers_{}", "layer/{}"])
def test_numbered_layers_of_a_sampler_are_those_of_a_scan(name):
    dtypes = (jnp.float32, HALF, jnp.float32)
    step = lambda params, cache, token: (run_layers(params, token, False, dtypes, name), cache)
    trainer = lambda params, tokens: run_layers(params, tokens, True)
    found = parity(trainer, step, cache=())(WEIGHT, make_tokens(length=5) % 6)
    first, second = found.rows()[:2]
    assert (first.path, first.dtype) == ("layers/mlp", "bfloat16 → float32")
    assert first.introduced > 1000 * second.introduced
    assert (found.unaligned, found.causes) == ((), ())


def test_a_sampler_with_a_scan_has_the_numbered_layers_of_the_trainer():
    trainer = lambda params, tokens: run_layers(params, tokens, False, (jnp.float32, jnp.float32, HALF))
    step = lambda params, cache, token: (run_layers(params, token[:, None], True), cache)
    found = parity(trainer, step, cache=())(WEIGHT, make_tokens(length=5) % 6)
    first, second = found.rows()[:2]
    assert (first.path, first.dtype) == ("layers_2/mlp", "float32 → bfloat16")
    assert first.introduced > 1000 * second.introduced
    assert (found.unaligned, found.causes) == ((), ())


def test_layers_of_another_number_are_not_aligned():
    def two(params, cache, token):
        with jax.named_scope("layers_0"), jax.named_scope("mlp"):
            x = jnp.tanh(spread(token))
        with jax.named_scope("layers_1"), jax.named_scope("mlp"):
            return jnp.tanh(2 * x) @ params, cache

    trainer = lambda params, tokens: run_layers(params, tokens, True)
    found = parity(trainer, two, cache=())(WEIGHT, make_tokens(length=5) % 6)
    assert found.unaligned[0] == "the sampler has no values of embed, layers, head and 1 more"
    assert any(line.startswith("'layers_0/mlp' of the sampler is not a scope") for line in found.unaligned)


def prefill(params, tokens, options=FAULT, count=3):
    """Runs the first tokens in one pass, and decodes the others."""
    (stored, _), steps = make_cache(), jnp.arange(count)
    mask = make_mask(steps, jnp.arange(LENGTH), jnp.ones((BATCH, LENGTH), bool), options)
    positions = jnp.broadcast_to(steps, (BATCH, count))
    first, stored = run(params, tokens[:, :count], positions, mask, options, stored, 0)
    step = make_step(options)
    advance = lambda cache, token: step(params, cache, token)[::-1]
    rest = jax.lax.scan(advance, (stored, jnp.int32(count)), tokens[:, count:].T)[1]
    return jnp.concatenate([first, rest.swapaxes(0, 1)], 1)


def decode_all_but_the_last(params, tokens):
    return make_loop(FAULT)(params, tokens[:, :-1])


SAMPLERS = {
    "a prompt in one pass": (prefill, None),
    "no step for the last token": (decode_all_but_the_last, None),
    "a cache with more slots": (make_step(FAULT), make_cache(LENGTH + 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_of_other_forms_are_aligned(name):
    sampler, cache = SAMPLERS[name]
    found = parity(make_trainer(), sampler, cache=cache)(PARAMS, TOKENS)
    first, second = found.rows()[:2]
    assert (first.path, found.unaligned, found.causes) == ("head", (), ())
    assert first.introduced > 100 * second.introduced


@pytest.mark.slow
@pytest.mark.parametrize("is_left", [False, True])
def test_padding_is_not_compared(is_left):
    real = np.arange(LENGTH) < np.array([LENGTH, 5, 3])[:, None]
    real = real[:, ::-1] if is_left else real
    step = make_step(FAULT, real=jnp.asarray(real))

    def pad_with_another_token(params, cache, token):
        known = jax.lax.dynamic_slice_in_dim(jnp.asarray(real), cache[1], 1, 1)[:, 0]
        return step(params, cache, jnp.where(known, token, token - 1))

    trainer = make_trainer(real=jnp.asarray(real))
    found = parity(trainer, pad_with_another_token, cache=make_cache())(PARAMS, TOKENS, real)
    assert found.count == (LENGTH - 1) + 4 + 2
    first, second = found.rows()[:2]
    assert (first.path, found.unaligned, found.causes) == ("head", (), ())
    assert 1e-3 < first.introduced < 1e-2
    assert second.introduced < 1e-5


@pytest.mark.slow
def test_a_sampler_that_numbers_padding_is_found():
    real = np.arange(LENGTH) >= np.array([0, 3, 5])[:, None]
    found = parity(make_trainer(real=jnp.asarray(real)), make_step(), cache=make_cache())(PARAMS, TOKENS, real)
    assert {row.path for row in found.rows() if row.introduced > 0.1} == {"rotary", "attention"}
