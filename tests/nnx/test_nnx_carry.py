"""The carry of a recurrent cell keeps its dtypes from step to step, so that a scan takes the cell."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, X, rngs

import jmp_policy as jmp

SEQUENCE = X[None]
HALF = X.astype(jnp.bfloat16)


class Counting(nnx.RNNCellBase):
    """A user's cell, whose carry is a tree of several dtypes and whose layers return another one."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return {"hidden": jnp.zeros(input_shape, jnp.float32), "steps": jnp.zeros((), jnp.int32)}

    def __call__(self, carry, inputs):
        hidden = self.linear(inputs + carry["hidden"].astype(inputs.dtype))
        return {"hidden": hidden, "steps": carry["steps"] + 1}, hidden

    @property
    def num_feature_axes(self):
        return 1


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # the gates of Flax's cells promote to their carry
        yield


def cell_of(kind):
    """A cell whose arrays are shapes and dtypes: nothing here needs numbers."""
    return nnx.eval_shape(lambda: kind(4, 3, rngs=rngs()))


def dtypes(fun, module, *args):
    """The dtypes of what a function of a module returns."""
    return [str(x.dtype) for x in jax.tree.leaves(nnx.eval_shape(fun, module, *args))]


def call(module, *args):
    return module(*args)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [nnx.SimpleCell, nnx.GRUCell])
def test_cell_inside_a_model_returns_the_dtype_of_the_carry_it_was_given(kind, dtype):
    model = jmp.with_policy(nnx.Sequential(cell_of(kind)), "mixed_bfloat16")
    carry = jnp.zeros((2, 3), dtype)
    assert dtypes(lambda model: model.layers[0](carry, HALF)[0], model) == [dtype]


@pytest.mark.slow
def test_cell_of_a_user_scans_with_a_carry_of_several_dtypes():
    model = jmp.with_policy(nnx.RNN(Counting(rngs=rngs()), return_carry=True), BF16_INSIDE)
    assert dtypes(call, model, SEQUENCE) == ["float32", "int32", "float32"]


def test_carry_given_by_name_keeps_its_dtypes():
    cell = jmp.with_policy(nnx.Sequential(Counting(rngs=rngs())), BF16_INSIDE).layers[0]
    carry = cell.initialize_carry(X.shape)
    assert dtypes(lambda cell: cell(inputs=HALF, carry=carry), cell) == ["float32", "int32", "bfloat16"]


@pytest.mark.parametrize("spec", ["mixed_bfloat16", BF16_INSIDE, "params=float32,compute=bfloat16,output=none"])
@pytest.mark.parametrize("kind", [nnx.SimpleCell, nnx.LSTMCell])
def test_cell_with_a_policy_of_its_own_scans_from_the_carry_that_it_makes(kind, spec):
    def scan(cell):
        initial = cell.initialize_carry((4,), rngs())
        return initial, jax.lax.scan(cell, initial, X)[0]

    initial, last = nnx.eval_shape(scan, jmp.with_policy(cell_of(kind), spec))
    assert initial == last


def test_cell_with_a_policy_of_its_own_returns_output_dtype():
    cell = jmp.with_policy(cell_of(nnx.SimpleCell), "mixed_bfloat16")
    assert dtypes(call, cell, jnp.zeros((2, 3)), X) == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cell_under_a_rule_of_a_map_scans(dtype):
    given = jmp.PolicyMap({"cell": f"params=float32,compute={dtype}"}, "mixed_bfloat16")
    model = jmp.with_policy(nnx.RNN(cell_of(nnx.SimpleCell), return_carry=True), given)
    assert dtypes(lambda model: model(SEQUENCE)[0], model) == ["bfloat16"]


def test_what_is_no_step_of_a_cell_is_left_alone():
    class Odd(nnx.RNNCellBase):
        """Its step returns a carry of another structure, and its other method what looks like a step's result."""

        def __call__(self, carry, inputs):
            return (inputs,), inputs

        def peek(self, carry, inputs):
            return inputs, inputs

    cell = jmp.with_policy(nnx.Sequential(Odd()), "mixed_bfloat16").layers[0]
    for method in (call, lambda cell, *args: cell.peek(*args)):
        assert dtypes(method, cell, X, HALF) == ["bfloat16", "bfloat16"]
