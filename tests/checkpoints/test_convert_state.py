"""`convert_state` from every way to train to every other, after every saver."""

import functools

import pytest
from saved_states import RUNS, SAVERS, assert_same, fresh_state, make_state, random_params

import jmp_policy as jmp


@functools.cache
def saved_state(name):
    return make_state(RUNS[name], random_params())


@functools.cache
def restored(name, saver):
    return SAVERS[saver](saved_state(name))


@functools.cache
def expected_state(saved, target):
    """The state that the target's run makes of the exact values of what was saved."""
    state = saved_state(saved)
    if saved in ("masters", "masters_float16", "split", "kahan"):
        wide = jmp.optim.master_params(state["opt_state"], state["params"])
    else:
        wide = jmp.cast_to_full(state["params"])
    return make_state(RUNS[target], wide, RUNS[saved])


@pytest.mark.slow
@pytest.mark.parametrize("target", RUNS)
@pytest.mark.parametrize("saved", ["float32", "masters_float16"])
def test_a_saved_state_becomes_every_other(saved, target):
    new = jmp.convert_state(saved_state(saved), fresh_state(RUNS[target], random_params()))
    assert_same(new, expected_state(saved, target))


@pytest.mark.slow
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("target", RUNS)
@pytest.mark.parametrize("saved", RUNS)
def test_every_saver_gives_what_becomes_every_state(saver, saved, target):
    new = jmp.convert_state(restored(saved, saver), fresh_state(RUNS[target], random_params()))
    assert_same(new, expected_state(saved, target))
