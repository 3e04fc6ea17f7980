"""`convert_state` from every way to train to every other, after every saver."""

import functools

import pytest
from saved_states import RUNS, SAVERS, assert_same, fresh_state, make_state, random_params

import jmp_policy as jmp


@functools.cache
def saved_state(name):
    return make_state(RUNS[name], random_params())


@functools.cache
def expected_state(saved, target):
    """The state that the target's run makes of the exact values of what was saved."""
    state = saved_state(saved)
    if saved in ("masters", "masters_float16", "split", "kahan"):
        wide = jmp.optim.master_params(state["opt_state"], state["params"])
    else:
        wide = jmp.cast_to_full(state["params"])
    return make_state(RUNS[target], wide, RUNS[saved])


CASES = [
    ("float32", "masters_float16", "structure"),
    ("masters_float16", "split", "structure"),
    ("split", "kahan", "msgpack"),
    ("kahan", "mixed_float16", "structure"),
    ("mixed_float16", "stochastic", "msgpack"),
    ("stochastic", "float32", "orbax"),
]
SLOW = [
    ("static", "bfloat16", "orbax"),
    ("bfloat16", "static", "msgpack"),
    ("masters", "masters", "orbax"),
    ("split", "split", "orbax"),
    ("kahan", "kahan", "msgpack"),
    ("mixed_float16", "mixed_float16", "orbax"),
    ("masters", "float32", "orbax"),
    ("float32", "stochastic", "msgpack"),
]


@pytest.mark.parametrize(
    ("saved", "target", "saver"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_every_saver_gives_what_becomes_every_state(saved, target, saver):
    new = jmp.convert_state(SAVERS[saver](saved_state(saved)), fresh_state(RUNS[target], random_params()))
    assert_same(new, expected_state(saved, target))
