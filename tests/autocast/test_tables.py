"""The tables name every primitive of JAX, and nothing else."""

import subprocess
import sys

import jax
import pytest

from jmp_policy._jaxpr._rewriter import WRITERS
from jmp_policy.autocast._rewrite import _tables
from jmp_policy.autocast._rewrite._tables import Precision

TABLES = {precision: getattr(_tables, precision.name) for precision in Precision}

ALL_PRIMITIVES = """
import gc, jax, jax.lax, jax.extend.core.primitives
from jax.extend.core import Primitive
print(*{found.name for found in gc.get_objects() if isinstance(found, Primitive)})
"""
"""Whatever JAX has made by the time it is imported; in a process of its own, for other packages make some too."""

FROM_0_11 = {"log2", "one_minus_square", "relayout", "unreduced_pmax", "unreduced_pmin"}
FROM_0_12 = {"pbroadcast_dynamic", "polynomial", "reduced_vary_cast", "vary_unreduced_cast"}
ONLY_IN_0_11 = {"program_order"}
UNTIL_0_11 = {"reduced_vary_cast_p", "vary_unreduced_cast_p"}
UNTIL_0_10 = {
    "box_get", "box_set", "call", "core_map", "log_extend", "log_read", "new_box", "new_log", "pbroadcast_done",
    "pbroadcast_start", "psum_start", "unreduced_psum_start", "unreduced_reduce_scatter_start",
}  # fmt: skip


@pytest.fixture(scope="module")
def primitives() -> set[str]:
    command = [sys.executable, "-c", ALL_PRIMITIVES]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def absent_here() -> set[str]:
    version = jax.__version_info__[:2]
    if version <= (0, 10):
        return FROM_0_11 | FROM_0_12 | ONLY_IN_0_11
    if version == (0, 11):
        return UNTIL_0_10 | FROM_0_12
    return UNTIL_0_10 | UNTIL_0_11 | ONLY_IN_0_11


@pytest.mark.slow
def test_every_primitive_is_in_a_table_or_is_interpreted(primitives):
    assert primitives - set(WRITERS) - set().union(*TABLES.values()) == set()


@pytest.mark.slow
def test_every_row_is_a_primitive_of_a_jax_that_works(primitives):
    assert set().union(*TABLES.values()) - primitives == absent_here()


@pytest.mark.slow
def test_everything_that_is_interpreted_is_a_primitive(primitives):
    until_0_11 = set() if jax.__version_info__ < (0, 12) else {"closed_call"}
    assert set(WRITERS) - primitives == until_0_11


def test_no_primitive_is_in_two_tables():
    names = [name for table in TABLES.values() for name in table] + list(WRITERS)
    assert sorted(names) == sorted(set(names))


def test_every_row_has_a_reason():
    rows = [row for table in (*TABLES.values(), _tables.FULL_IN_FLOAT16) for row in table.items()]
    assert [name for name, reason in rows if not reason.strip()] == []
    assert [name for name, reason in rows if reason.startswith("as ") and reason[3:].split(",")[0] == name] == []


def test_what_is_full_in_float16_follows_its_inputs_in_bfloat16():
    assert set(_tables.FULL_IN_FLOAT16) <= set(_tables.INFER)
