"""The benchmark of origins judges reports by its rule, and what it says of `first_nonfinite` holds."""

import sys

import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from benchmarks import _origins_jax, origins
from benchmarks._origins_cost import check_bits, compare_entries, make_steps, measure
from benchmarks._origins_reports import ARGUMENTS, NAMES_IT, Fault, judge
from benchmarks._targets import cpu

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

OURS = "`numerics.first_nonfinite`"


def _faulty(x):
    masked = x / 0  # harmless
    large = x * 1e38  # cause
    made = large - large  # fault
    return masked, made


FAULT = Fault.read(_faulty)
HARMLESS, CAUSE, LINE = sorted(FAULT.marks)


def _traceback(*lines):
    return "Traceback (most recent call last):\n" + "".join(f'  File "{FAULT.file}", line {line}\n' for line in lines)


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        ("", "silent"),
        ("something is nan", "no line"),
        (_traceback(1), "no line"),
        (_traceback(1, LINE), "line"),
        (_traceback(LINE, LINE + 1), "other line"),
        (_traceback(HARMLESS), "**false alarm**"),
        (_traceback(CAUSE), "cause"),
        (_traceback(CAUSE) + _traceback(LINE), "line and cause"),
        (f"a nan, {FAULT.file}:{LINE} (_faulty), of an infinity, {FAULT.file}:{CAUSE} (_faulty)", "line and cause"),
        (f"a nan, other.py:{LINE}", "no line"),
        ("a nan came in with argument `x`", "no line"),
    ],
)
def test_a_report_is_judged_by_the_lines_that_it_names(report, verdict):
    assert judge(report, FAULT, "argument `x`") == verdict


def test_where_no_line_is_marked_the_argument_is_to_be_named():
    fault = FAULT._replace(marks={})
    assert judge("a nan came in with argument `x`", fault, "argument `x`") == "argument"
    assert judge(_traceback(LINE), fault, "argument `x`") == "other line"


def test_every_fault_has_arguments_at_which_its_gradient_is_not_finite():
    assert list(_origins_jax.FAULTS) == list(ARGUMENTS)
    for name, fault in _origins_jax.FAULTS.items():
        args = [jnp.asarray(values, jnp.float32) for values in ARGUMENTS[name]]
        with jax.numpy_dtype_promotion("standard"):
            out = jax.value_and_grad(fault.fun)(*args)
        assert not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(out)), name


@pytest.mark.parametrize("name", ["norm of zeros", "harmless ones before it", "argument that is nan"])
def test_ours_names_what_nobody_else_does(name):
    with jax.numpy_dtype_promotion("standard"):
        argument = _origins_jax.SECOND_ARGUMENT
        said = judge(_origins_jax.report_of(OURS, name), _origins_jax.FAULTS[name], argument)
    assert said in NAMES_IT


def test_others_name_no_less_than_the_benchmark_says_of_them():
    """A release of theirs may name more."""
    with jax.numpy_dtype_promotion("standard"):
        said = {
            contestant: _origins_jax.judge_all(contestant)
            for contestant in _origins_jax.CONTESTANTS
            if contestant != OURS
        }
    named = {contestant: sum(verdict in NAMES_IT for verdict in own.values()) for contestant, own in said.items()}
    assert all(named[contestant] >= least for contestant, least in zip(said, (2, 5, 6), strict=True)), said


def test_what_is_not_installed_is_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(_origins_jax, "judge_all", lambda contestant: dict.fromkeys(ARGUMENTS, "line"))
    monkeypatch.setattr(origins, "judge_in_torch", lambda python: {})
    last = origins.make_peers_table(origins.judge_peers(sys.executable)).rows[-1]
    assert last == ("named", *["10 of 10"] * 4, *["not installed"] * 2)


def _loss_and_grads(weights, x):
    def loss(weights):
        y = x
        for weight in weights:
            y = y + jnp.tanh(y @ weight)
        return jnp.mean(y * y)

    return jax.value_and_grad(loss)(weights)


WEIGHTS, X = list(0.1 * jax.random.normal(jax.random.key(0), (3, 128, 128))), jnp.ones((2048, 128))


def test_a_good_step_has_the_same_bits_and_accesses_little_more():
    before = jax.jit(_loss_and_grads).lower(WEIGHTS, X).as_text()
    assert check_bits(_loss_and_grads, (WEIGHTS, X)) == 0
    ratios = measure(make_steps(_loss_and_grads, (WEIGHTS, X)), cpu(), repeats=1)
    assert 1 < ratios.bytes <= 1.02
    assert 1 <= ratios.temporaries <= 1.25
    jax.clear_caches()
    assert jax.jit(_loss_and_grads).lower(WEIGHTS, X).as_text() == before


def test_programs_that_differ_outside_of_the_conditional_are_told_apart():
    entry = """ENTRY %main (x: f32[2]) -> f32[2] {
      %x = f32[2]{0} parameter(0)
      %made = (f32[2]{0}) tuple(%x)
      %scalar = f32[] reduce(%x)
      ROOT %add.1 = f32[2]{0} add(%x, %x)
    }""".replace("\n    }", "\n}")
    other = entry.replace("add(", "multiply(").replace("tuple(%x)", "tuple(%x, %x)").replace("reduce", "fusion")
    assert compare_entries(entry, entry) == {}
    assert compare_entries(entry, other) == {"f32[2]{0} add": 1, "f32[2]{0} multiply": -1}


def test_the_search_is_left_out_of_the_good_step():
    good = make_steps(jnp.sin, (jnp.zeros(2),)).good.step
    infinite = jnp.full(2, jnp.inf)
    assert "cond" in str(jax.make_jaxpr(good)(infinite))
    assert not jmp.numerics.NonfiniteOrigin(*good(infinite)[1:]).found
