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
