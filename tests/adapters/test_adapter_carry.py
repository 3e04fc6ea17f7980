"""The carry of a recurrent cell keeps its dtypes from step to step, so that a scan takes the cell."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax_apis import BF16_INSIDE, LINEN

import jmp_policy as jmp

CARRY, SEQUENCE = jnp.zeros((2, 3)), jnp.ones((2, 3, 4))
INPUTS = SEQUENCE[:, 0].astype(jnp.bfloat16)
OPEN_OUTPUT = "params=float32,compute=bfloat16,output=none"


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # the gates of Flax's cells promote to their carry
        yield


def dtypes(api, model, *args, **kwargs):
    return [str(x.dtype) for x in jax.tree.leaves(api.run(model, *args, **kwargs))]


def make_counting(api):
    """A user's cell, whose carry is a tree of several dtypes and whose layers return another one."""

    @api.module(base=api.cell_base, dense=api.dense)
    class Counting:
        @nn.nowrap
        def initialize_carry(self, *args, **kwargs):
            (shape,) = (arg for arg in args if isinstance(arg, tuple))
            return {"hidden": jnp.zeros(shape, jnp.float32), "steps": jnp.zeros((), jnp.int32)}

        def __call__(self, carry, inputs):
            hidden = self.dense(inputs + carry["hidden"].astype(inputs.dtype))
            return {"hidden": hidden, "steps": carry["steps"] + 1}, hidden

        @property
        def num_feature_axes(self):
            return 1

    return Counting


@pytest.mark.parametrize(("kind", "dtype"), [("SimpleCell", "float32"), ("GRUCell", "bfloat16")])
def test_cell_inside_a_model_returns_the_dtype_of_the_carry_it_was_given(api, kind, dtype):
    @api.module(cell=lambda: api.cell(kind))
    class Step:
        def __call__(self, carry, inputs):
            return self.cell(carry, inputs)

    model = api.under(Step, OPEN_OUTPUT, no_cast=["carry"])
    assert dtypes(api, model, CARRY.astype(dtype), INPUTS)[0] == dtype


def test_cell_of_a_user_scans_with_a_carry_of_several_dtypes(api):
    model = api.under(lambda: api.rnn(make_counting(api)()), BF16_INSIDE)
    assert dtypes(api, model, SEQUENCE) == ["float32", "int32", "float32"]


def test_carry_given_by_name_keeps_its_dtypes(api):
    @api.module(cell=make_counting(api))
    class ByName:
        def __call__(self, carry, inputs):
            return self.cell(inputs=inputs, carry=carry)

    carry = {"hidden": SEQUENCE[:, 0], "steps": jnp.zeros((), jnp.int32)}
    model = api.under(ByName, OPEN_OUTPUT, no_cast=["carry"])
    assert dtypes(api, model, carry, INPUTS) == ["float32", "int32", "bfloat16"]


@pytest.mark.parametrize(
    ("kind", "spec"), [("SimpleCell", "mixed_bfloat16"), ("LSTMCell", BF16_INSIDE), ("SimpleCell", OPEN_OUTPUT)]
)
def test_cell_with_a_policy_of_its_own_scans_from_the_carry_that_it_makes(api, kind, spec):
    model = api.make(lambda: api.rnn(jmp.with_policy(api.cell(kind), spec)))
    assert dtypes(api, model, SEQUENCE)[-1] == ("float32" if spec == BF16_INSIDE else "bfloat16")


def test_cell_with_a_policy_of_its_own_returns_output_dtype(api):
    cell = api.under(lambda: api.cell("SimpleCell"), "mixed_bfloat16")
    assert dtypes(api, cell, CARRY, INPUTS) == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize(("kind", "spec"), [("SimpleCell", BF16_INSIDE), ("LSTMCell", "p=f32,c=f32,o=f32")])
def test_cell_under_a_rule_of_a_map_scans_whatever_the_rule_says(api, kind, spec):
    rules = jmp.PolicyMap({"cell": spec}, "mixed_bfloat16")
    assert set(dtypes(api, api.under(lambda: api.rnn(api.cell(kind)), rules), SEQUENCE)) == {"bfloat16"}


@pytest.mark.parametrize("method", ["__call__", "peek"])
def test_what_is_no_step_of_a_cell_is_left_alone(api, method):
    @api.module(base=api.cell_base)
    class Odd:
        """Its step returns a carry of another structure, and its other method what looks like a step's result."""

        def __call__(self, carry, inputs):
            return (inputs,), inputs

        def peek(self, carry, inputs):
            return inputs, inputs

    @api.module(cell=Odd)
    class Around:
        def __call__(self, carry, inputs):
            return getattr(self.cell, method)(carry, inputs)

    model = api.under(Around, OPEN_OUTPUT, no_cast=["carry"])
    assert dtypes(api, model, SEQUENCE, SEQUENCE) == ["bfloat16", "bfloat16"]


class TestFirstCarryOfLinen:
    """Linen's RNN makes the carry in the param dtype of its cell, which a policy sets."""

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
    def test_is_in_param_dtype_or_as_wide_as_what_the_cell_computes_in(self, spec, dtype):
        model = LINEN.under(lambda: LINEN.rnn(nn.SimpleCell(3)), spec)
        assert dtypes(LINEN, model, SEQUENCE.astype(jnp.bfloat16))[0] == dtype

    def test_is_as_its_author_wrote_for_a_cell_without_a_param_dtype(self):
        make = lambda: LINEN.rnn(make_counting(LINEN)())
        assert dtypes(LINEN, LINEN.under(make, "bfloat16"), SEQUENCE) == ["bfloat16", "int32", "bfloat16"]
        assert dtypes(LINEN, LINEN.under(make, "p=bf16,c=bf16,o=none"), SEQUENCE)[:2] == ["float32", "int32"]

    def test_author_of_a_cell_may_derive_it_from_one_with_a_policy(self):
        class Ones(jmp.with_policy(nn.SimpleCell, "mixed_bfloat16")):
            @nn.nowrap
            def initialize_carry(self, rng, input_shape):
                return super().initialize_carry(rng, input_shape).astype(jnp.float32) + 1

        assert dtypes(LINEN, nn.RNN(Ones(3)), SEQUENCE) == ["bfloat16"]

    def test_scan_of_an_author_takes_the_carry_that_a_cell_with_a_policy_makes(self):
        class Scanned(nn.Module):
            @nn.compact
            def __call__(self, x):
                cell = jmp.with_policy(nn.SimpleCell(3), BF16_INSIDE)
                lifted = {"variable_broadcast": "params", "split_rngs": {"params": False}}
                scan = nn.scan(lambda cell, carry, x: cell(carry, x), **lifted)
                return scan(cell, cell.initialize_carry(jax.random.key(0), x.shape[1:]), x)

        assert set(dtypes(LINEN, Scanned(), SEQUENCE)) == {"float32"}
