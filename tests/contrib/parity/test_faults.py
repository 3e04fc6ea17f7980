"""`contrib.parity` finds planted differences: the guilty scope first, and causes other than rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_model import (
    HALF,
    Options,
    make_cache,
    make_loop,
    make_params,
    make_step,
    make_tokens,
    make_trainer,
)

from jmp_policy.contrib import parity

PARAMS, TOKENS = make_params(), make_tokens()

FAULTS = {  # the options of the sampler, the guilty scope, and a part of the first cause
    "softmax in half precision": ({"softmax_dtype": HALF}, "attention", None),
    "rotary positions in bfloat16": ({"angle_dtype": HALF}, "rotary", None),
    "another epsilon": ({"eps": 1e-2}, "norm", "computes something else, such as another epsilon"),
    "a mask without the token itself": (
        {"shift": -1},
        "attention",
        "and that at the first position, too: it has other heads, keys or values, or weighs positions",
    ),
    "a mask with an empty slot": (
        {"shift": 1},
        "attention",
        "and that at the first position, too: it has other heads, keys or values, or weighs positions",
    ),
    "a window": ({"window": 3}, "attention", "The trainer's logits at position 7 change with the token at position 4"),
    "a cache in int8": ({"cache_dtype": jnp.int8}, "attention", None),
    "a head in half precision": ({"head_dtype": HALF}, "head", None),
    "ties of experts": ({"has_last_ties": True}, "router", "it chooses experts or tokens, and a near tie"),
    "a norm of another axis": (
        {"norm_axis": 0},
        "norm",
        "change with a token of another sequence: statistics of the batch",
    ),
    "dropout": ({"dropout": 0.2}, None, "In the sampler, dropout draws random numbers"),
    "another temperature": ({"temperature": 0.7}, "", "as with a temperature of 0.7: not a rounding error."),
    "quantized experts": ({"expert_dtype": jnp.int8}, "experts", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name):
    options, scope, sentence = FAULTS[name]
    found = parity(make_trainer(), make_step(Options(**options)), cache=make_cache())(PARAMS, TOKENS)
    if scope is None:
        assert "'dropout' of the sampler is not a scope of the trainer (did you mean 'router'?)" in found.unaligned
    else:
        first, second = found.rows()[:2]
        assert first.path == scope
        assert first.introduced > 50 * second.introduced
        assert len(first.iterations) == TOKENS.shape[1]
        assert found.unaligned == ()
    assert found.mean > 1e-5
    if sentence is None:
        assert found.causes == ()
    else:
        assert sentence in found.causes[0]
        assert found.causes[0] in " ".join(str(found).split())  # lines as wide as the terminal


@pytest.mark.slow
def test_a_loop_in_python_has_the_errors_of_a_scan():
    options = Options(softmax_dtype=HALF)
    scan = parity(make_trainer(), make_step(options), cache=make_cache())(PARAMS, TOKENS)
    loop = parity(make_trainer(), make_loop(options))(PARAMS, TOKENS)
    by_path = {row.path: row for row in loop.rows()}
    for row in scan.rows():
        np.testing.assert_allclose(by_path[row.path].iterations, row.iterations, rtol=0.05, atol=1e-6)


def change(params):
    random = np.random.default_rng(1)
    step = lambda leaf: leaf + jnp.asarray(0.01 * random.normal(size=leaf.shape), leaf.dtype)
    return jax.tree.map(step, params)


@pytest.mark.slow
def test_weights_of_another_update_in_a_closure_are_a_fact():
    found = parity(make_trainer(), make_step(weights=change(PARAMS)), cache=make_cache())(PARAMS, TOKENS)
    assert found.causes[0].startswith("The sampler closes over 8 arrays of weights that differ from the given ones")


@pytest.mark.slow
def test_weights_of_another_update_are_suspected():
    trainer, step = make_trainer(), make_step()
    pair = lambda params, cache, token: step(params["old"], cache, token)
    params = {"new": PARAMS, "old": change(PARAMS)}
    found = parity(lambda params, tokens: trainer(params["new"], tokens), pair, cache=make_cache())(params, TOKENS)
    assert found.causes == (
        "8 of 9 scopes with matmuls or embeddings introduce more than rounding explains: their weights may be from "
        "another update.",
    )


@pytest.mark.slow
def test_a_trainer_that_sees_later_tokens_is_a_fact():
    found = parity(make_trainer(Options(shift=1)), make_step(), cache=make_cache())(PARAMS, TOKENS)
    assert found.rows()[0].path == "attention"
    assert found.causes[0] == (
        "The trainer's logits at position 3 change with the token at position 4: its mask is not "
        "causal, or it norms over positions. This is not a rounding error."
    )


@pytest.mark.slow
def test_equal_functions_have_no_cause():
    found = parity(make_trainer(), make_step(), cache=make_cache())(PARAMS, TOKENS)
    assert found.causes == ()
    assert found.unaligned == ()
    assert found.rows()[0].introduced < 1e-6
    assert "No scope introduces more than rounding errors of float32" in " ".join(str(found).split())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_rounding_everywhere_has_no_cause(seed):
    options = Options(softmax_dtype=HALF, head_dtype=HALF, cache_dtype=jnp.int8, expert_dtype=jnp.int8)
    params, tokens = make_params(seed + 10), make_tokens(seed + 10)
    found = parity(make_trainer(), make_step(options), cache=make_cache())(params, tokens)
    assert found.causes == ()
    assert {row.path for row in found.rows() if row.introduced > 1e-3} == {"attention", "experts", "head"}
