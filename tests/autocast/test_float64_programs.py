"""Programs of science: `tune` finds the scopes that need float64, and maps solve them to the tolerance."""

import pathlib

import jax
import numpy as np
import pytest
from float64_programs import PROGRAMS

import jmp_policy as jmp
from jmp_policy import PolicyMap, autocast

MIXED = "params=float64,compute=float32,output=float64"
MARGIN = 2  # of 8,000 draws of the Gaussian process none is nearer to its tolerance than 2.6
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "float64.md"

pytestmark = pytest.mark.slow  # `test_float64.py` has one quick search


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):  # not TF32 on a GPU
        yield


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


def measure_error(program, policy, args):
    """Returns the largest relative error of outputs, and of gradients of a loss, under a policy or in float32."""
    exact, cast = program.fun, autocast(program.fun, policy) if policy else program.fun
    given = args if policy else jax.tree.map(lambda leaf: leaf.astype(np.float32), args)
    trees = jax.jit(program.run(cast))(*given), jax.jit(program.run(exact))(*args)
    pairs = zip(*(map(np.float64, jax.tree.leaves(tree)) for tree in trees), strict=True)
    errors = [np.linalg.norm(got - wanted) / np.linalg.norm(wanted) for got, wanted in pairs]
    return max(errors) if np.isfinite(errors).all() else np.inf


def test_tune_finds_the_scopes_that_need_float64(program):
    args = program.draw(np.random.default_rng())
    tuning = jmp.tune(program.fun, args, MIXED, tolerance=program.tolerance)
    assert set(tuning.scopes) == set(program.kept)
    assert (tuning.kept, tuning.low, tuning.is_minimal) == ("float64", "float32", True)
    assert tuning.error < program.tolerance / MARGIN
    assert tuning.low_error > program.tolerance * MARGIN
    assert len(tuning.trials) <= 1 + 3 * len(program.kept) + 3


def test_matmuls_of_other_scopes_may_be_in_float32(program):
    args = program.draw(np.random.default_rng())
    tried = {rest: PolicyMap(dict.fromkeys(rest, "float64"), MIXED) for rest in leave_out_one(program.kept)}
    errors = {rest: measure_error(program, policy, args) for rest, policy in tried.items()}
    assert errors.pop(program.kept) < program.tolerance / MARGIN
    assert min(errors.values()) > program.tolerance * MARGIN
    assert measure_error(program, None, args) > program.tolerance * MARGIN


def test_all_operations_of_some_scopes_may_be_in_float32(program):
    args = program.draw(np.random.default_rng())
    in_float32 = lambda *scopes: PolicyMap(dict.fromkeys(scopes, "float32"), "float64")
    assert measure_error(program, in_float32(*program.low), args) < program.tolerance / MARGIN
    for scope in program.needed:
        assert measure_error(program, in_float32(*program.low, scope), args) > program.tolerance * MARGIN


def test_tune_of_float32_tries_all_operations_in_it(program):
    args = program.draw(np.random.default_rng())
    tuning = jmp.tune(program.fun, args, "float32", tolerance=program.tolerance)
    assert set(tuning.scopes) == set(program.needed)
    assert tuning.policy_map.default.name == "params=float32,compute=float32,output=none"
    assert tuning.error < program.tolerance / MARGIN
    assert tuning.low_error > program.tolerance * MARGIN
    assert measure_error(program, tuning.policy_map, args) < program.tolerance / MARGIN


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_guide_has_the_scopes_tolerances_and_shares_of_flops(name):
    program = PROGRAMS[name]
    policy = PolicyMap(dict.fromkeys(program.kept, "float64"), MIXED)
    report = jmp.numerics.audit(program.run(autocast(program.fun, policy)))(*program.draw(np.random.default_rng()))
    share = sum(matmul.flops for matmul in report.matmuls if matmul.dtype == "float64")
    share /= sum(matmul.flops for matmul in report.matmuls)
    _, row = GUIDE.read_text(encoding="utf-8").split(f"\n| {name} | ")
    kept, needed, _, tolerance, *_, told = row.partition(" |\n")[0].split(" | ")
    assert kept == ", ".join(program.kept)
    assert needed == ", ".join(program.needed)
    assert float(tolerance) == program.tolerance
    assert told == f"{share:.0%}".replace("%", " %")


def leave_out_one(scopes):
    """Lists all scopes, and each set with one left out."""
    return [scopes, *(tuple(other for other in scopes if other != scope) for scope in scopes)]
