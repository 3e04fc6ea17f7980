"""The carry of a recurrent cell keeps its dtypes from step to step, so that a scan takes the cell."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_policy as jmp

KEY = jax.random.key(0)
SEQUENCE = jnp.ones((2, 3, 4))
BF16_INSIDE = "params=float32,compute=bfloat16,output=float32"


class Counting(nn.RNNCellBase):
    """A user's cell, whose carry is a tree of several dtypes and whose layers return another one."""

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return {"hidden": jnp.zeros(input_shape, jnp.float32), "steps": jnp.zeros((), jnp.int32)}

    @nn.compact
    def __call__(self, carry, inputs):
        hidden = nn.Dense(4)(inputs + carry["hidden"].astype(inputs.dtype))
        return {"hidden": hidden, "steps": carry["steps"] + 1}, hidden

    @property
    def num_feature_axes(self):
        return 1


class Step(nn.Module):
    """One step of a cell, as it stands in a model."""

    cell: nn.RNNCellBase

    def __call__(self, carry, inputs):
        return self.cell(carry, inputs.astype(jnp.bfloat16))


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # the gates of Flax's cells promote to their carry
        yield


def dtypes(module, *args, **kwargs):
    """The dtypes of what a module returns: nothing here needs numbers."""
    out, _ = jax.eval_shape(lambda: module.init_with_output(KEY, *args, **kwargs))
    return [str(x.dtype) for x in jax.tree.leaves(out)]


def lifted(cell):
    """A user's own scan over a cell, from the carry that the cell makes."""

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda cell, carry, x: cell(carry, x), variable_broadcast="params", split_rngs={"params": False}
            )
            return scan(cell.copy(), cell.initialize_carry(KEY, x.shape[1:]), x)

    return Scanned()


@pytest.mark.sample(1)
@pytest.mark.parametrize("spec", ["mixed_bfloat16", BF16_INSIDE, "params=float32,compute=bfloat16,output=none"])
@pytest.mark.parametrize("kind", [nn.SimpleCell, nn.LSTMCell])
@pytest.mark.parametrize("scanned", [lambda cell: nn.RNN(cell, return_carry=True), lifted], ids=["RNN", "scan"])
def test_cell_with_a_policy_of_its_own_scans_from_the_carry_that_it_makes(scanned, kind, spec):
    expected = "float32" if spec == BF16_INSIDE else "bfloat16"
    assert set(dtypes(scanned(jmp.with_policy(kind(3), spec)), SEQUENCE)) == {expected}


def test_cell_with_a_policy_of_its_own_returns_output_dtype():
    cell = jmp.with_policy(nn.SimpleCell(4), "mixed_bfloat16")
    assert dtypes(cell, jnp.zeros((2, 3, 4)), SEQUENCE) == ["bfloat16", "bfloat16"]


def test_author_of_a_cell_may_derive_it_from_one_with_a_policy():
    class Ones(jmp.with_policy(nn.SimpleCell, "mixed_bfloat16")):
        @nn.nowrap
        def initialize_carry(self, rng, input_shape):
            return super().initialize_carry(rng, input_shape).astype(jnp.float32) + 1

    assert dtypes(nn.RNN(Ones(3)), SEQUENCE) == ["bfloat16"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [nn.SimpleCell, nn.GRUCell])
def test_cell_inside_a_model_returns_the_dtype_of_the_carry_it_was_given(kind, dtype):
    model = jmp.with_policy(Step(kind(3)), "p=f32,c=bf16,o=none", no_cast=["carry"])
    assert dtypes(model, jnp.zeros((2, 3, 3), dtype), SEQUENCE)[0] == dtype


def test_cell_of_a_user_scans_with_a_carry_of_several_dtypes():
    model = jmp.with_policy(nn.RNN(Counting(), return_carry=True), BF16_INSIDE)
    assert dtypes(model, SEQUENCE) == ["float32", "int32", "float32"]


def test_carry_given_by_name_keeps_its_dtypes():
    class ByName(nn.Module):
        @nn.compact
        def __call__(self, carry, inputs):
            return Counting()(inputs=inputs, carry=carry)

    model = jmp.with_policy(ByName(), "p=f32,c=bf16,o=none", no_cast=["carry"])
    carry = Counting().initialize_carry(KEY, SEQUENCE.shape)
    assert dtypes(model, carry, SEQUENCE) == ["float32", "int32", "bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["float32", "p=f32,c=bf16,o=bf16", "p=f32,c=bf16,o=f32"])
@pytest.mark.parametrize("kind", [nn.SimpleCell, nn.LSTMCell])
def test_cell_under_a_rule_of_a_map_scans_whatever_the_rule_says(kind, spec):
    given = jmp.PolicyMap({kind: spec}, "mixed_bfloat16")
    plain = nn.RNN(kind(3), return_carry=True)
    assert set(dtypes(jmp.with_policy(plain, given), SEQUENCE)) == {"bfloat16"}
    carry = kind(3).initialize_carry(KEY, (2, 4))  # enters the model as bfloat16
    assert set(dtypes(jmp.with_policy(plain, given), SEQUENCE, initial_carry=carry)) == {"bfloat16"}


def test_what_is_no_step_of_a_cell_is_left_alone():
    class Odd(nn.RNNCellBase):
        """Its step returns a carry of another structure, and its other method what looks like a step's result."""

        def __call__(self, carry, inputs):
            return (inputs,), inputs

        def peek(self, carry, inputs):
            return inputs, inputs

    class Around(nn.Module):
        cell: nn.Module
        name_of_method: str

        def __call__(self, carry, inputs):
            return getattr(self.cell, self.name_of_method)(carry, inputs)

    for name in ("__call__", "peek"):
        model = jmp.with_policy(Around(Odd(), name), "p=f32,c=bf16,o=none", no_cast=["carry"])
        assert dtypes(model, SEQUENCE, SEQUENCE) == ["bfloat16", "bfloat16"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("p=bf16,c=bf16,o=none", "bfloat16"),
        ("p=f32,c=bf16,o=none", "float32"),
        ("p=bf16,c=f32,o=none", "float32"),
        ("p=none,c=bf16,o=none", "float32"),
        ("p=bf16,c=none,o=none", "bfloat16"),
        (jmp.PolicyMap({"cell": "p=f32,c=f32,o=none"}, "p=bf16,c=bf16,o=none"), "float32"),
    ],
)
def test_first_carry_is_in_param_dtype_or_as_wide_as_what_the_cell_computes_in(spec, dtype):
    model = jmp.with_policy(nn.RNN(nn.SimpleCell(3), return_carry=True), spec)
    assert dtypes(model, SEQUENCE.astype(jnp.bfloat16))[0] == dtype


def test_cell_without_a_param_dtype_makes_its_carry_as_its_author_wrote():
    model = jmp.with_policy(nn.RNN(Counting(), return_carry=True), "bfloat16")
    assert dtypes(model, SEQUENCE) == ["bfloat16", "int32", "bfloat16"]  # at the boundary
    model = jmp.with_policy(nn.RNN(Counting(), return_carry=True), "p=bf16,c=bf16,o=none")
    assert dtypes(model, SEQUENCE) == ["float32", "int32", "bfloat16"]
