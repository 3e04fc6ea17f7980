"""`contrib.parity`: its report, bounds, policy maps and errors."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from language_model import HALF, Options, make_cache, make_params, make_step, make_tokens, make_trainer

import jmp_policy as jmp
from jmp_policy.contrib import parity

TOKENS = make_tokens()
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 24)), jnp.float32)
LOW = "params=float32,compute=bfloat16,output=float32"


def give(logits):
    return lambda params, tokens: logits


@functools.cache
def compare_heads():
    options = Options(head_dtype=HALF)
    return parity(make_trainer(), make_step(options), cache=make_cache())(make_params(), TOKENS)


def test_report_names_the_scope_its_dtypes_and_its_worst_position():
    found = compare_heads()
    row, position = found.rows()[0], int(np.argmax(found.rows()[0].iterations))
    line, note = (line for line in str(found).splitlines() if line.startswith("head "))
    assert line.split() == ["head", "bfloat16", "→", "float32", f"{row.introduced:.2g}", str(position)]
    assert note == f"head introduces the largest error: {row.introduced:.2g}."
    assert re.search(r"effective sample size +[\d.]+ of 21\n", str(found))
    assert repr(found) == f"<Parity: 21 tokens, mean difference {found.mean:.2g}; print it for the table>"
    assert "<table>" in found._repr_html_()


def test_dictionary_is_plain_data():
    found = compare_heads()
    document = json.loads(json.dumps(found.to_dict()))
    assert document["mean"] == found.mean
    assert document["rows"][0]["path"] == "head"
    assert document["perplexity_gap"] == found.perplexity_gap
    assert {"divergence", "pair"}.isdisjoint(document)


@pytest.mark.slow
def test_plot_has_the_difference_and_the_scopes_over_positions():
    figure = compare_heads().plot()
    top, bottom = figure.axes
    np.testing.assert_allclose(top.lines[0].get_ydata(), compare_heads().by_position)
    assert [line.get_label() for line in bottom.lines] == ["head"]
    without = parity(give(LOGITS), give(LOGITS + 0.1), scopes=False)(None, TOKENS)
    assert len(without.plot().axes) == 1


def test_without_scopes_only_log_probabilities_are_compared():
    found = parity(make_trainer(), make_step(), cache=make_cache(), scopes=False)(make_params(), TOKENS)
    assert (found.rows(), found.unaligned, found.divergence) == ((), (), None)
    assert found.mean < 1e-5


def test_bounds_hold_or_raise_with_the_report():
    found = parity(give(LOGITS), give(LOGITS * 1.1))(None, TOKENS)
    found.assert_within(mean=found.mean, largest=found.largest, percentile_99=found.percentile_99)
    with pytest.raises(AssertionError) as raised:
        found.assert_within(mean=found.mean / 2, largest=found.largest, percentile_99=0.001)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"The mean difference is {found.mean:.2g}, more than {found.mean / 2:g}."
    assert lines[1] == f"The 99th percentile is {found.percentile_99:.2g}, more than 0.001."
    assert str(raised.value).endswith(str(found))


def test_a_difference_that_is_not_a_number_exceeds_any_bound():
    found = parity(give(LOGITS), give(LOGITS.at[0, 0].set(jnp.nan)))(None, TOKENS)
    with pytest.raises(AssertionError, match=r"^The largest is inf, more than 1e\+09\."):
        found.assert_within(largest=1e9)


def deep(params, x):
    """A model of three scopes; the head needs float32 most."""
    with jax.named_scope("embed"):
        x = params["embed"][x]
    with jax.named_scope("body"):
        x = x + 0.01 * jnp.tanh(x @ params["query"])
    with jax.named_scope("head"):
        return x @ params["head"]


def deep_step(params, cache, token):
    return deep(params, token), cache


@pytest.mark.slow
@pytest.mark.parametrize("share", [2.0, 0.05, 0.001])
def test_map_meets_the_tolerance_and_no_larger_policy_does(share):
    params = {name: leaf * (8.0 if name == "head" else 1.0) for name, leaf in make_params().items()}
    found = parity(deep, deep_step, cache=())(params, TOKENS)

    def measure(policy):
        low = [jmp.autocast(f, policy)(params, TOKENS).astype(jnp.float32) for f in (deep, deep)]
        return parity(give(deep(params, TOKENS)), give(low[0]), scopes=False)(None, TOKENS).mean

    tolerance = share * measure(LOW)
    chosen = found.policy_map(tolerance)
    assert measure(chosen) <= tolerance * 1.01
    default = str(chosen.default)
    if share == 2.0:
        assert (default, len(chosen.rules)) == (LOW, 0)
    elif share == 0.05:
        assert not chosen.rules or [rule.key for rule in chosen.rules] == ["head"]
        assert default != LOW
    else:
        assert "head" in [rule.key for rule in chosen.rules]
        assert "compute=float16" in default  # the best policy for all other scopes
        assert measure(chosen.default) > tolerance


@pytest.mark.slow
def test_map_for_a_recording_is_of_the_trainer():
    params = make_params()
    logits = deep(params, TOKENS)
    found = parity(deep, {"result": np.asarray(logits)})(params, TOKENS)
    assert found.policy_map(1.0) == jmp.PolicyMap({}, LOW)
    with pytest.raises(
        ValueError, match=r"^No map meets 1e-06: with all scopes in float32, the mean difference of log-p"
    ):
        parity(deep, {"result": np.asarray(logits) * 1.1})(params, TOKENS).policy_map(1e-6)


PAIR = functools.partial(parity, give(LOGITS), give(LOGITS))
CASES = {  # a call, the error, and the beginning of its text
    "no function": (lambda: parity(3, give(LOGITS)), TypeError, "parity takes a function, got 3. For example: parity("),
    "no sampler": (lambda: parity(give(LOGITS), 3), TypeError, "parity takes a function, got 3. For example: parity("),
    "cache of a recording": (
        lambda: parity(give(LOGITS), {"result": LOGITS}, cache=1),
        ValueError,
        "cache=1 belongs to a sampler that is one step, and ",
    ),
    "float tokens": (
        lambda: PAIR()(None, jnp.ones((3, 8))),
        ValueError,
        "parity takes tokens as integers of shape (batch, length), with a length of at least 2, got float32[3, 8]. For",
    ),
    "one sequence": (
        lambda: PAIR()(None, TOKENS[0]),
        ValueError,
        "parity takes tokens as integers of shape (batch, length), with a length of at least 2, got int32[8]. For",
    ),
    "another mask": (
        lambda: PAIR()(None, TOKENS, jnp.ones((3, 7), bool)),
        ValueError,
        "The mask has shape (3, 7), and the tokens (3, 8). For example: jnp.arange(length) < lengths[:, None].",
    ),
    "an empty mask": (
        lambda: PAIR()(None, TOKENS, jnp.zeros((3, 8), bool)),
        ValueError,
        "The mask of shape (3, 8) has no two real tokens in a row, so that no token is predicted. For example: ",
    ),
    "logits of another shape": (
        lambda: parity(give(LOGITS), give(LOGITS[:, :5]))(None, TOKENS),
        ValueError,
        "The sampler returns float32[3, 5, 24], not floating logits of shape (batch, length, vocabulary), here (3, 8,",
    ),
    "integers": (
        lambda: parity(give(TOKENS[..., None]), give(LOGITS))(None, TOKENS),
        ValueError,
        "The trainer returns int32[3, 8, 1], not floating logits of shape (batch, length, vocabulary), here (3, 8,",
    ),
    "a small vocabulary": (
        lambda: parity(give(LOGITS[..., :9]), give(LOGITS[..., :9]))(None, TOKENS % 9 + 1),
        ValueError,
        "The trainer has logits of 9 tokens, and the tokens are from 1 to 9. Give padding a token of the vocabulary",
    ),
    "a recording without logits": (
        lambda: parity(give(LOGITS), {"head": np.ones(3)})(None, TOKENS),
        ValueError,
        "The recording has neither logits, 'result', nor log-probabilities of the tokens, 'log_probs'. It has 'head'.",
    ),
    "recorded logits of another shape": (
        lambda: parity(give(LOGITS), {"result": np.ones((3, 4, 24))})(None, TOKENS),
        ValueError,
        "'result' of the sampler has shape (3, 4, 24), which are not the steps of (3, 8, 24) in the trainer. Record",
    ),
    "log-probabilities of another shape": (
        lambda: parity(give(LOGITS), {"log_probs": np.ones((3, 5))})(None, TOKENS),
        ValueError,
        "'log_probs' of the recording has shape (3, 5). It has the log-probability of each token, for example: (3, 8).",
    ),
    "no bound": (
        lambda: PAIR()(None, TOKENS).assert_within(),
        ValueError,
        "assert_within() has no bound. For example: assert_within(mean=0.01, largest=0.1).",
    ),
    "a tolerance of 0": (
        lambda: PAIR()(None, TOKENS).policy_map(0),
        ValueError,
        "tolerance is a difference of log-probabilities, a number above 0, got 0. For example: policy_map(0.01).",
    ),
    "a policy in float32": (
        lambda: PAIR()(None, TOKENS).policy_map(0.1, "float32"),
        ValueError,
        "policy_map takes a policy that computes in float16 or bfloat16, got Policy(",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_error_says_what_is_wrong(case):
    call, kind, text = CASES[case]
    with pytest.raises(kind, match=f"^{re.escape(text)}"):
        call()


@pytest.mark.slow
def test_map_needs_a_trainer_in_float32():
    found = parity(make_trainer(Options(head_dtype=HALF)), make_step(), cache=make_cache())(make_params(), TOKENS)
    with pytest.raises(ValueError, match=r"^The trainer computes in bfloat16 without a map, in head: there is nothing"):
        found.policy_map(0.1)
