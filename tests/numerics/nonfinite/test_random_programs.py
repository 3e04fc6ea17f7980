"""Random programs with one fault planted: its line, operation, pass and turns are found in all of them."""

import jax
import numpy as np
import pytest
from faults import assert_is, assert_ranges_are
from oracle import find_origin
from random_programs import LOOPS, make_program

from jmp_policy.numerics import first_nonfinite

QUICK, SLOW, ALL, CLEAN = range(12), range(12, 80), range(80, 200), (3,)
"""Seeds: what each run has, what a slow one and an exhaustive one add, and programs that also run without faults."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", QUICK)
def test_the_planted_fault_is_found(seed, tmp_path):
    check_program(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_the_planted_fault_is_found_in_more(seed, tmp_path):
    check_program(seed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", ALL)
def test_the_planted_fault_is_found_in_all(seed, tmp_path):
    check_program(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", CLEAN)
def test_nothing_is_found_without_the_fault_and_bits_are_the_same(seed, tmp_path):
    program = make_program(seed)
    fun = program.load(tmp_path)
    args = program.make_arguments(is_faulty=False)
    out, found = jax.jit(first_nonfinite(fun))(*args)
    assert (found.found, found.reproduced, found.kind, str(found)) == (False, True, "", "every result is finite")
    for leaf, other in zip(jax.tree.leaves(out), jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        assert np.isfinite(leaf).all()
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint32), np.asarray(other).view(np.uint32))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", QUICK)
def test_what_was_planted_is_there_number_by_number(seed, tmp_path):
    program = make_program(seed)
    if "shard_map" not in program.constructs:
        check_oracle(program, find_origin(program.load(tmp_path), *program.make_arguments()))


def check_program(seed, folder):
    """Finds the fault of a program, and compares it with what was planted and with what the host sees."""
    program = make_program(seed)
    fun, args = program.load(folder), program.make_arguments()
    _, found = jax.jit(first_nonfinite(fun))(*args)
    assert found.found, program.text
    file, expected = str(folder / "random_program.py"), program.expected
    if program.argument:
        assert (found.argument, found.kind) == ("x", "nan")
        return
    assert_is(found, expected["origin"], file)
    assert (found.cause is None) == ("cause" not in expected)
    if found.cause is not None:
        assert_is(found.cause, expected["cause"], file)
    if program.scope:
        planted = found.cause if expected["origin"].primitive == "sub" else found
        assert planted.path.split("/")[-1] == program.scope
    if "shard_map" not in program.constructs:
        origin = find_origin(fun, *args)
        check_oracle(program, origin)
        assert_ranges_are(found, origin, has_loops=not set(LOOPS).isdisjoint(program.constructs))


def check_oracle(program, origin):
    """What the host sees is what was planted."""
    if program.argument:
        assert (origin.argument, origin.kind) == (4, "nan")
        return
    place = lambda origin: (origin.kind, origin.primitive, origin.direction, origin.turns)
    assert place(origin) == program.expected["origin"][:4]
    if "cause" in program.expected:
        assert place(origin.cause) == program.expected["cause"][:4]
