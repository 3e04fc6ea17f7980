"""The tables name every primitive of JAX, and nothing else."""

# The tables themselves, in which each primitive of JAX must have a row.
from jmp_policy._jaxpr import PRIMITIVES
from jmp_policy._jaxpr._rewriter import WRITERS
from jmp_policy.autocast import _tables
from jmp_policy.autocast._tables import Precision

TABLES = {precision: getattr(_tables, precision.name) for precision in Precision}


def test_every_primitive_is_in_a_table_or_is_interpreted():
    assert set(PRIMITIVES) - set(WRITERS) == set().union(*TABLES.values())


def test_no_primitive_is_in_two_tables():
    names = [name for table in TABLES.values() for name in table] + list(WRITERS)
    assert sorted(names) == sorted(set(names))


def test_every_row_has_a_reason():
    rows = [row for table in (*TABLES.values(), _tables.FULL_IN_FLOAT16) for row in table.items()]
    assert [name for name, reason in rows if not reason.strip()] == []
    assert [name for name, reason in rows if reason.startswith("as ") and reason[3:].split(",")[0] == name] == []


def test_what_is_full_in_float16_follows_its_inputs_in_bfloat16():
    assert set(_tables.FULL_IN_FLOAT16) <= set(_tables.INFER)
