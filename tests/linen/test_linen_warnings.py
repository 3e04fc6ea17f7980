"""Warnings that teach: given once, at the user's line, with what to write."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jmp_policy as jmp

KEY = jax.random.key(0)
MIXED = "params=float32,compute=bfloat16,output=float32"


class Net(nn.Module):
    """Layers whose author passes a dtype on, as in Flax's example of a language model."""

    dtype: Any = jnp.float32
    written: int = 3

    @nn.compact
    def __call__(self, x):
        for n in range(4):
            x = nn.Dense(4, name=f"dense_{n}", **({"dtype": self.dtype} if n < self.written else {}))(x)
        return x


class Mine(nn.Module):
    """Four layers whose dtype is written, the first ones at least."""

    written: int = 3
    dtypes: tuple = (jnp.float32,)

    @nn.compact
    def __call__(self, x):
        for n in range(4):
            x = nn.Dense(4, name=f"dense_{n}", dtype=self.dtypes[0] if n < self.written else None)(x)
        return x


def said(*calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return caught


def calls_of(model):
    """Calls of each kind, traced and not, for inputs of several shapes."""
    variables = jax.eval_shape(model.init, KEY, jnp.ones((1, 4)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)
    return [
        *(lambda rows=rows: jax.eval_shape(model.apply, variables, jnp.ones((rows, 4))) for rows in range(1, 4)),
        *(lambda rows=rows: jax.jit(model.apply).lower(zeros, jnp.ones((rows, 4))) for rows in range(1, 3)),
        lambda: jax.eval_shape(model.init, KEY, jnp.ones((2, 4))),
    ]


def unmatched(**kwargs):
    return jmp.PolicyMap({"haed": "float32"} | kwargs, MIXED)


@pytest.mark.slow
def test_rule_that_matches_nothing_is_named_once_however_often_the_model_is_traced():
    class Fresh(Mine):
        pass

    model = jmp.with_policy(Fresh(0), unmatched())
    caught = said(lambda: [call() for call in calls_of(model)])
    assert [str(w.message).partition(";")[0] for w in caught] == ["policy rule 'haed' matches no module"]


@pytest.mark.slow
def test_rule_that_matches_nothing_is_named_once_for_all_types_that_have_its_map():
    rules = unmatched(heda="float32")
    models = [jmp.with_policy(kind, rules) for kind in (nn.Sequential([nn.Dense(4)]), nn.Dense(4), Mine(0))]
    calls = [lambda model=model: jax.eval_shape(model.init, KEY, jnp.ones((1, 4))) for model in models]
    assert sorted(str(warning.message).partition(";")[0] for warning in said(*calls)) == [
        "policy rule 'haed' matches no module", "policy rule 'heda' matches no module"
    ]  # fmt: skip


def test_rule_is_named_again_where_its_map_is_given_again_and_at_the_users_line():
    rules = unmatched()
    for _ in range(2):
        model = jmp.with_policy(Mine(0), rules)
        (warning,) = said(lambda model=model: jax.eval_shape(model.init, KEY, jnp.ones((1, 4))))
        assert warning.filename == __file__


def test_authors_dtypes_that_keep_most_of_a_model_out_of_half_are_told_once_with_the_remedy():
    message = (
        "3 of 4 layers with weights compute in the dtype that their author wrote, not in the compute dtype of the "
        "policy: 'dense_0' has dtype=float32. Write dtype=None, which the policy fills in, or use autocast, which "
        "casts each operation. For example: autocast(model.apply, 'mixed_bfloat16')."
    )
    model = jmp.with_policy(Mine(), MIXED)
    caught = said(lambda: [call() for call in calls_of(model)])
    assert [str(warning.message) for warning in caught] == [message]
    assert caught[0].filename == __file__
    model = jmp.with_policy(Mine, MIXED)()
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        jax.eval_shape(model.init, KEY, jnp.ones((1, 4)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "policy"),
    [
        (Mine(2), MIXED),  # half of them
        (nn.Sequential([nn.Dense(4, dtype=jnp.float32)] * 2), MIXED),  # so few that it may be meant
        (Mine(), "float32"),
        (Mine(4, (jnp.bfloat16,)), MIXED),
        (Mine(), jmp.PolicyMap({r"dense_[0-2]": "float32"}, MIXED)),
        (Net(), MIXED),  # the dtype is the default of a field, and so the policy's to fill in
    ],
)
def test_nothing_is_told_where_most_of_a_model_is_in_the_dtype_that_its_policy_says(model, policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jmp.with_policy(model, policy).init, KEY, jnp.ones((1, 4)))


def test_remedies_that_the_warning_names_compute_in_half():
    variables = jax.eval_shape(Mine().init, KEY, jnp.ones((1, 4)))
    for apply in (jmp.with_policy(Mine(0), MIXED).apply, jmp.autocast(Mine().apply, "mixed_bfloat16")):
        jmp.numerics.audit(apply)(variables, jnp.ones((1, 4))).assert_matmuls_in("bfloat16")
