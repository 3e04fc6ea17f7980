"""Warnings that teach: given once, at the user's line, with what to write."""

import re
import warnings
from typing import Any

import flax_apis
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax_apis import BF16_INSIDE, LINEN, NNX, X

import jmp_policy as jmp

HERE = {__file__, flax_apis.__file__}
CALLS = {LINEN: "model.apply", NNX: "lambda model, x: model(x)"}


def make_kind(api, written=3, dtype=jnp.float32, layers=4):
    """Layers whose dtype is written, the first ones at least."""
    make = [lambda n=n: api.dense(dtype=dtype if n < written else None) for n in range(layers)]

    @api.module(**{f"dense_{n}": make[n] for n in range(layers)})
    class Net:
        def __call__(self, x):
            for n in range(layers):
                x = getattr(self, f"dense_{n}")(x)
            return x

    return Net


def collect(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {warning.filename for warning in caught} <= HERE
    return [str(warning.message) for warning in caught]


def test_authors_dtypes_that_keep_most_of_a_model_out_of_half_are_told_once_with_the_remedy(api):
    message = (
        "3 of 4 layers with weights compute in the dtype that their author wrote, not in the compute dtype of the "
        "policy: 'dense_0' has dtype=float32. Write dtype=None, which the policy fills in, or use autocast, which "
        f"casts each operation. For example: autocast({CALLS[api]}, 'mixed_bfloat16')."
    )

    def call():
        model = api.under(make_kind(api), BF16_INSIDE)
        for rows in (1, 2):
            api.run(model, jnp.ones((rows, 4)))

    assert collect(call) == [message]
    kind = jmp.with_policy(make_kind(api), BF16_INSIDE)
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        api.run(api.make(kind), X)


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [(jnp.bfloat16, BF16_INSIDE.replace("bfloat16", "float16")), (jnp.float16, BF16_INSIDE), (jnp.float16, "float32")],
)
def test_authors_half_dtypes_that_replace_that_of_the_policy_are_told(api, dtype, policy):
    (message,) = collect(lambda: api.run(api.under(make_kind(api, dtype=dtype), policy), X))
    assert message.endswith(
        f"not in the compute dtype of the policy: 'dense_0' has dtype={jnp.dtype(dtype)}. Write dtype=None, which the "
        "policy fills in."  # autocast does not bring back the digits
    )


def test_the_policy_and_not_float32_is_compared_with_authors_dtypes_in_a_region_of_full_precision(api):
    model = api.under(make_kind(api, dtype=jnp.bfloat16), BF16_INSIDE)
    assert collect(lambda: jmp.force_full_precision(api.run)(model, X)) == []


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"written": 3, "layers": 6}, BF16_INSIDE),  # half of them
        ({"written": 2, "layers": 2}, BF16_INSIDE),  # so few that it may be meant
        ({}, "float32"),
        ({"written": 4, "dtype": jnp.bfloat16}, BF16_INSIDE),
        ({}, jmp.PolicyMap({r"dense_[0-2]": "float32"}, BF16_INSIDE)),
    ],
)
def test_nothing_is_told_where_most_of_a_model_is_in_the_dtype_that_its_policy_says(api, options, policy):
    assert collect(lambda: api.run(api.under(make_kind(api, **options), policy), X)) == []


def test_rule_that_matches_nothing_is_named_once_however_many_instances_of_a_decorated_class_are_called(api):
    kind = jmp.with_policy(make_kind(api, 0), jmp.PolicyMap({"haed": "float32"}, BF16_INSIDE))
    (message,) = collect(lambda: [api.run(api.make(kind), jnp.ones((rows, 4))) for rows in (1, 2, 3)])
    assert message.startswith("policy rule 'haed' matches no module")


def test_rule_is_named_again_where_its_map_is_given_again(api):
    rules, kind = jmp.PolicyMap({"haed": "float32"}, BF16_INSIDE), make_kind(api, 0)
    for _ in range(2):
        assert len(collect(lambda: api.run(api.under(kind, rules), X))) == 1


class TestLinen:
    def test_rule_that_matches_nothing_is_named_once_for_all_types_that_have_its_map(self):
        rules = jmp.PolicyMap({"haed": "float32", "heda": "float32"}, BF16_INSIDE)
        models = [jmp.with_policy(kind, rules) for kind in (nn.Sequential([nn.Dense(4)]), nn.Dense(4))]
        found = collect(lambda: [LINEN.run(model, X) for model in models])
        assert sorted(message.partition(";")[0] for message in found) == [
            "policy rule 'haed' matches no module", "policy rule 'heda' matches no module"
        ]  # fmt: skip

    def test_default_of_a_field_that_is_passed_on_is_the_policys_to_fill_in(self):
        class Net(nn.Module):
            """As in Flax's example of a language model."""

            dtype: Any = jnp.float32

            @nn.compact
            def __call__(self, x):
                for _ in range(4):
                    x = nn.Dense(4, dtype=self.dtype)(x)
                return x

        assert collect(lambda: LINEN.run(LINEN.under(Net, BF16_INSIDE), X)) == []

    def test_remedies_that_the_warning_names_compute_in_half(self):
        written, free = make_kind(LINEN)(), make_kind(LINEN, 0)()
        variables = LINEN.init(written, X)
        for apply in (jmp.with_policy(free, BF16_INSIDE).apply, jmp.autocast(written.apply, "mixed_bfloat16")):
            jmp.numerics.audit(apply)(variables, X).assert_matmuls_in("bfloat16")
