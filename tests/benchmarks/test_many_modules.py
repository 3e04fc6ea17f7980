"""A policy adds at most a tenth to the tracing of a model of many modules: in calls of functions, for seconds flake."""

import functools

import jax
import pytest

from benchmarks.many_modules import contestants, count_calls, step_traces

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

CASES = [
    ("linen", "nested", "init"),
    ("linen", "nested", "apply"),
    ("nnx", "nested", "constructor, policy and call"),
    ("nnx", "nested", "call"),
]
models = functools.cache(lambda: contestants({"nested": (2, 2, 12)}))


def test_every_contestant_is_a_case():
    assert list(models()) == CASES


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_tracing_with_a_policy_calls_at_most_a_tenth_more_functions(case):
    for trace in models()[case]:  # what the first tracing imports and fills
        trace()
    _, by_hand, policy, rules = map(count_calls, models()[case])
    assert policy <= 1.1 * by_hand
    assert rules <= (1.1 if case[0] == "linen" else 1.12) * by_hand


def test_tracing_a_step_takes_at_most_two_thirds_more_calls_for_any_number_of_parameters():
    with jax.numpy_dtype_promotion("standard"):
        few, many = ({name: [*map(count_calls, traces)] for name, traces in step_traces(n).items()} for n in (10, 40))
    assert len(few) == 3
    for name, (calls, plain) in many.items():
        assert calls <= 1.66 * plain
        assert calls <= 4.3 * few[name][0]
