"""Float8 state passes every cast as it is: rounded to bfloat16, a scale would be another one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.traverse_util import flatten_dict
from float8_problem import STATE, assert_same, batch_of, compiled, loss_fn, variables_of

import jmp_policy as jmp

VARIABLES = variables_of()
POLICY = jmp.get_policy("bfloat16")
TREES = {
    "a dictionary": VARIABLES,
    "a frozen one in others": {"model": [freeze(VARIABLES), None], "w": jnp.ones(2)},
    "a pure state of nnx": nnx.State({"layer": {"kernel": jnp.ones(2), STATE: VARIABLES[STATE]["used"]}}),
    "shapes": jax.eval_shape(lambda: VARIABLES),
    "one among parameters": [{"kernel": jnp.ones(2), **VARIABLES[STATE]["used"]}],
    "one flattened to slashes": flatten_dict(VARIABLES, sep="/"),
}


def dtypes_of(tree):
    """The dtypes of state, and those of everything else."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    is_state = lambda path: any(name in str(path[-1]) for name in VARIABLES[STATE]["used"])
    return tuple({x.dtype for path, x in leaves if is_state(path) == wanted} for wanted in (True, False))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_casts_leave_state_alone(tree):
    for cast in (POLICY.cast_to_compute, POLICY.cast_to_param, POLICY.cast_to_output):
        out = cast(tree)
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        assert dtypes_of(out) == ({np.dtype(np.float32)}, {jnp.dtype(jnp.bfloat16)})


def test_cast_passes_through_whole_what_it_is_told_to_even_where_that_holds_state():
    assert jmp.cast_floating(VARIABLES, "bfloat16", is_leaf=lambda node: isinstance(node, dict)) is VARIABLES


@pytest.mark.slow
def test_a_function_with_a_policy_trains_state_that_is_the_same_in_every_bit():
    batch = batch_of(0)
    half = jmp.with_policy(loss_fn, "params=float32,compute=bfloat16,output=float32")
    seen = lambda v: loss_fn(POLICY.cast_to_compute(v), jmp.cast_floating(batch, "bfloat16"))
    ours, expected = compiled(lambda v: [jax.grad(f)(v)[STATE] for f in (lambda v: half(v, batch), seen)])(VARIABLES)
    assert_same(ours, expected)
    assert dtypes_of({STATE: ours})[0] == {np.dtype(np.float32)}
