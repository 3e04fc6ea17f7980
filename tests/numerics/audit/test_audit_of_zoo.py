"""An audit reads whatever the interpreter does."""

import pytest
from zoo import ZOO

from jmp_policy.numerics import audit


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ZOO)
def test_program_is_read_and_each_matmul_has_a_line_of_it(name):
    specimen = ZOO[name]
    with specimen.context():
        report = audit(specimen.with_gradient(specimen.fun))(*specimen.args)
    assert report.rows or name in ("returns_an_argument", "returns_a_constant")
    assert all("/zoo_" in matmul.source or "specimen.py" in matmul.source for matmul in report.matmuls)
    assert report.findings == ()  # all is float32


def test_zoo_has_loops_that_are_not_counted():
    whiles = [name for name in ZOO if "while" in name]
    assert whiles
    for name in whiles:
        assert audit(ZOO[name].fun)(*ZOO[name].args).uncounted_loops, name
