"""The time of imports, by fresh processes."""

import pytest

from benchmarks import imports

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def _made(jax_seconds, our_seconds):
    return {
        "jax": imports.Import(jax_seconds, jax_seconds, frozenset()),
        "jmp_policy": imports.Import(our_seconds, jax_seconds, frozenset({"jmp_policy", "jmp_policy.policy._policy"})),
    }


def test_ratios_are_medians_over_rounds():
    table = imports.import_table([_made(1.0, 1.1), _made(2.0, 2.1), _made(1.0, 9.0)], ["keras"])
    assert table.rows[1] == ("jmp_policy", "1.10", "2100", "2")
    assert table.rows[2] == ("keras", *["not installed"] * 3)
    assert set(table.timed) == {"over import jax", "ms of process time"}


def test_an_import_is_measured_in_a_process_of_its_own(tmp_path):
    first, second = (imports.measure("xml.dom.minidom", str(tmp_path)) for _ in range(2))
    assert first.seconds > first.of_jax > 0
    assert first.modules == second.modules
    assert "xml.dom.minidom" in first.modules
    assert "jax" not in first.modules
    assert list(tmp_path.rglob("minidom*.pyc"))


def test_the_import_loads_few_modules_that_jax_does_not():
    [table] = imports.tables(quick=True)
    [row] = [row for row in table.rows if row[0] == "jmp_policy"]
    assert 1 < int(row[3]) <= 40
