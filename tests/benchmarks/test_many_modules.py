"""A policy adds at most a tenth to the tracing of a model of many modules: in calls of functions, for seconds flake.

The rules of a map may add more to a model as small as this one: what JAX jits inside of a linen module is traced once
for each rule that covers some, however many modules it covers.
"""

import pytest

from benchmarks.many_modules import contestants, count_calls

CASES = contestants({"nested": (2, 2, 12)})


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_tracing_with_a_policy_calls_at_most_a_tenth_more_functions(case):
    for trace in CASES[case]:  # what the first tracing imports and fills
        trace()
    _, by_hand, policy, rules = map(count_calls, CASES[case])
    assert policy <= 1.1 * by_hand
    assert rules <= (1.3 if case[0] == "linen" else 1.12) * by_hand
