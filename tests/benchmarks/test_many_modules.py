"""A policy adds at most a tenth to the tracing of a model of many modules: in calls of functions, for seconds flake.

The rules of a map may add more to a model as small as this one: what JAX jits inside of a linen module is traced once
for each rule that covers some, however many modules it covers.
"""

import functools

import pytest

from benchmarks.many_modules import contestants, count_calls

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
    assert rules <= (1.3 if case[0] == "linen" else 1.12) * by_hand
