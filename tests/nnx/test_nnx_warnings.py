"""Warnings that teach: given once, at the user's line, with what to write."""

import re
import warnings

import jax.numpy as jnp
import pytest
from flax import nnx

import jmp_policy as jmp

MIXED = "params=float32,compute=bfloat16,output=float32"


class Net(nnx.Module):
    """Four layers whose dtype is written, the first ones at least."""

    def __init__(self, written: int = 3, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([
            nnx.Linear(4, 4, dtype=dtype if n < written else None, rngs=rngs) for n in range(4)
        ])  # fmt: skip

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_authors_dtypes_that_keep_most_of_a_model_out_of_half_are_told_with_the_remedy():
    message = (
        "3 of 4 layers with weights compute in the dtype that their author wrote, not in the compute dtype of the "
        "policy: 'layers/0' has dtype=float32. Write dtype=None, which the policy fills in, or use autocast, which "
        "casts each operation. For example: autocast(lambda model, x: model(x), 'mixed_bfloat16')."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as caught:
        jmp.with_policy(Net(), MIXED)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [((2,), MIXED), ((3,), "float32"), ((4, jnp.bfloat16), MIXED), ((3,), jmp.PolicyMap({"layers": "float32"}, MIXED))],
)
def test_nothing_is_told_where_most_of_a_model_is_in_the_dtype_that_its_policy_says(arguments, policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.with_policy(Net(*arguments), policy)


def test_instances_of_a_decorated_class_tell_once():
    Decorated = jmp.with_policy(Net, jmp.PolicyMap({"haed": "float32"}, MIXED))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            Decorated()
    assert [str(warning.message).partition(" ")[0] for warning in caught] == ["policy", "3"]
    assert {warning.filename for warning in caught} == {__file__}
