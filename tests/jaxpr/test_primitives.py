"""Primitives that compute nothing are known by every table that reads programs: one that is new is asked for here."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_policy import NoOpLossScale, grad

# The package `_jaxpr` has no public names: what it computes is seen outside only through slower programs.
from jmp_policy._jaxpr import CALLED, DEVICE_SUMS, PRIMITIVES, Fact, _cost, _primitives, having
from jmp_policy._jaxpr._rewriter import WRITERS
from jmp_policy.autocast import _precision, _tables
from jmp_policy.gradients import _reduce_marks as reduction_tables
from jmp_policy.numerics import (
    _audit,
    _explain as _operations,
    _extremes,
    _predict_flow as prediction_flow,
    _traced,
    audit,
)
from jmp_policy.optim import _elementwise
from jmp_policy.sharding import _gather_params

ALL_PRIMITIVES = """
import gc, jax, jax.lax, jax.extend.core.primitives
from jax.extend.core import Primitive
print(*{found.name for found in gc.get_objects() if isinstance(found, Primitive)})
"""
"""Every primitive that JAX has made by the time it is imported; in a process of its own, without other packages."""

FROM_0_10_2 = {"mulhi", "philox2x32", "philox4x32", "threefry4x32"}
FROM_0_11 = {"log2", "one_minus_square", "relayout", "unreduced_pmax", "unreduced_pmin"}
FROM_0_12 = {"pbroadcast_dynamic", "polynomial", "reduced_vary_cast", "vary_unreduced_cast"}
ONLY_IN_0_11 = {"program_order"}
UNTIL_0_11_0 = {"closed_call"}  # since then an alias of `eval_jaxpr`
UNTIL_0_11 = {"reduced_vary_cast_p", "vary_unreduced_cast_p"}
UNTIL_0_10 = {
    "box_get", "box_set", "call", "core_map", "log_extend", "log_read", "new_box", "new_log", "pbroadcast_done",
    "pbroadcast_start", "psum_start", "unreduced_psum_start", "unreduced_reduce_scatter_start",
}  # fmt: skip
WITH_PALLAS = {"pallas_call"}


def absent_here() -> set[str]:
    version = jax.__version_info__[:2]
    new = FROM_0_10_2 if jax.__version_info__ < (0, 10, 2) else set[str]()
    gone = UNTIL_0_11_0 if jax.__version_info__ >= (0, 11, 1) else set[str]()
    if version <= (0, 10):
        return WITH_PALLAS | FROM_0_11 | FROM_0_12 | ONLY_IN_0_11 | new
    if version == (0, 11):
        return WITH_PALLAS | UNTIL_0_10 | FROM_0_12 | gone
    return WITH_PALLAS | UNTIL_0_10 | UNTIL_0_11 | ONLY_IN_0_11 | gone


def test_every_primitive_of_jax_has_a_row_and_every_row_is_a_primitive():
    run = subprocess.run([sys.executable, "-c", ALL_PRIMITIVES], capture_output=True, text=True, check=True)
    found = set(run.stdout.split())
    assert found - set(PRIMITIVES) == set()
    assert set(PRIMITIVES) - found == absent_here()


def test_no_primitive_has_two_rows():
    names = [name for names in _primitives._ROWS.values() for name in names.split()]
    assert sorted(names) == sorted(set(names))


def test_the_rewriter_enters_the_primitives_that_run_programs():
    assert set(WRITERS) == having(Fact.CALLS)
    assert set(CALLED) < having(Fact.CALLS)


MOVERS, ANNOTATIONS, TRANSFERS = having(Fact.MOVES), having(Fact.ANNOTATES), having(Fact.TRANSFERS)
ALL = MOVERS | ANNOTATIONS | TRANSFERS
TABLES = {
    "the costs and facts of audit": (_cost.MOVING, ALL),
    "the sums over devices of audit": (set(_audit.CHECKS), DEVICE_SUMS),
    "gradients in collectives": (_traced._KEEPING, ALL | DEVICE_SUMS),
    "collectives": (set(_traced.PRIMITIVES), TRANSFERS | DEVICE_SUMS),
    "operations of explain": (_operations.STRUCTURAL, (MOVERS - {"gather"}) | ANNOTATIONS),
    "constants of autocast": (_precision._CHOOSING, (MOVERS - {"gather"}) | ANNOTATIONS),
    "reduce_dtype": (reduction_tables.MOVES, ALL | DEVICE_SUMS),
    "reads of gather_params": (_gather_params.MOVES, ALL),
    "moves of predict": (prediction_flow._MOVES, ALL),
    "optimizers": (_elementwise._ELEMENTWISE, ANNOTATIONS),
    "origins": (_extremes._MOVES, ANNOTATIONS | {"tile", "transpose", "reshape", "rev"}),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_knows_all_that_it_should(table):
    known, needed = TABLES[table]
    assert needed - set(known) == set()


def stacked(x):
    """What goes through `stack` and back through `unstack`, which are primitives since JAX 0.10."""
    return jnp.unstack(jnp.stack([x, x]))[1]


X = jnp.ones((8, 4))


def test_stacking_costs_no_flops_in_audit():
    assert audit(stacked)(X).to_dict()["flops"] == 0


STACKED_FINDINGS = {
    "round-trip-cast": lambda x: stacked(x.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16),
    "infinite-constant": lambda x: stacked(x + np.float32(1e30)).astype(jnp.float16),
    "log-of-softmax": lambda x: jnp.log(stacked(jax.nn.softmax(x.astype(jnp.bfloat16)).astype(jnp.float32))),
}


@pytest.mark.parametrize("finding", STACKED_FINDINGS)
def test_audit_finds_behind_a_stack_what_it_finds_without(finding):
    assert finding in {found.id for found in audit(STACKED_FINDINGS[finding])(X).findings}


def test_a_parameter_that_is_stacked_or_padded_is_read_in_half():
    half = {jnp.dtype(jnp.bfloat16)}
    for move in (stacked, lambda w: jnp.pad(w, 1), lambda w: jnp.tile(w, (2, 1))):
        assert _gather_params.find_reads(lambda w, move=move: move(w).astype(jnp.bfloat16), X) == [half]


def test_a_gradient_behind_a_scatter_that_sets_is_followed():
    loss = lambda w, x: jnp.mean((x @ w.astype(jnp.bfloat16).at[0].set(0)).astype(jnp.float32) ** 2)
    taken = grad(loss, loss_scale=NoOpLossScale(), reduce_dtype="float32")
    program = str(jax.make_jaxpr(taken)(jnp.ones((4, 4)), jnp.ones((8, 4), jnp.bfloat16)))
    assert program.count("platform_index") == 1


def test_an_optimizer_that_takes_a_logarithm_of_base_two_is_elementwise():
    program = jax.make_jaxpr(lambda g: jnp.exp2(jnp.log2(g)) + lax.stop_gradient(g))(X)
    assert _elementwise.find_mixing(program.jaxpr) == ()


PRECISIONS = {precision: getattr(_tables, precision.name) for precision in _tables.Precision}


def test_every_primitive_is_in_a_table_of_autocast_or_is_interpreted():
    assert set(PRIMITIVES) - set(WRITERS) == set().union(*PRECISIONS.values())


def test_no_primitive_is_in_two_tables_of_autocast():
    names = [name for table in PRECISIONS.values() for name in table] + list(WRITERS)
    assert sorted(names) == sorted(set(names))


def test_every_row_has_a_reason():
    rows = [row for table in (*PRECISIONS.values(), _tables.FULL_IN_FLOAT16) for row in table.items()]
    assert [name for name, reason in rows if not reason.strip()] == []
    assert [name for name, reason in rows if reason.startswith("as ") and reason[3:].split(",")[0] == name] == []


def test_what_is_full_in_float16_follows_its_inputs_in_bfloat16():
    assert set(_tables.FULL_IN_FLOAT16) <= set(_tables.INFER)
