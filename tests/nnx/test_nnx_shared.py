"""Modules and Params that stand in several places of an nnx model, under policies that disagree."""

import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import X, rngs

import jmp_policy as jmp


class Tied(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self):
        self.first, self.second = (nnx.Linear(4, 4, use_bias=False, rngs=rngs()) for _ in range(2))
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.first(x).dtype, self.second(x).dtype


@pytest.mark.parametrize("attach", [lambda m, p: jmp.with_policy(m, p), jmp.nnx.cast_params])
def test_tied_parameter_that_two_rules_store_differently_is_an_error(attach):
    message = (
        r"^The parameter 'second/kernel' is 'first/kernel' as well, but one policy stores it in bfloat16 and the other "
        r"in float32\. Give both places one param dtype\. For example: 'params=float32,compute=bfloat16'\.$"
    )
    with pytest.raises(ValueError, match=message):
        attach(Tied(), jmp.PolicyMap({"second": "bfloat16"}, "float32"))


def test_tied_parameter_is_computed_with_as_the_rule_of_each_place_says():
    rules = jmp.PolicyMap({"second": "params=float32,compute=bfloat16"}, "float32")
    assert jmp.with_policy(Tied(), rules)(X) == (jnp.float32, jnp.bfloat16)


def test_shared_module_follows_the_rules_of_its_first_place_and_the_other_is_named():
    class Shared(Tied):
        def __init__(self):
            self.first = self.second = nnx.Linear(4, 4, rngs=rngs())

    with pytest.warns(UserWarning, match="policy rule 'second' matches no module"):
        model = jmp.with_policy(Shared(), jmp.PolicyMap({"second": "mixed_bfloat16"}, "float32"))
    assert model(X) == (jnp.float32, jnp.float32)
    assert model.first is model.second


def test_module_given_two_policies_computes_in_each_and_shares_its_parameters():
    body = nnx.Linear(4, 4, rngs=rngs())

    class Views(nnx.Module):
        def __init__(self):
            self.half, self.full = (jmp.with_policy(body, spec) for spec in ("mixed_bfloat16", "float32"))

        def __call__(self, x):
            return str(self.half(x).dtype), str(self.full(x).dtype)

    for model in (Views(), jmp.with_policy(Views(), "mixed_float16")):
        assert model(X) == ("bfloat16", "float32")
        assert model.half.kernel is model.full.kernel is body.kernel
    with pytest.raises(ValueError, match=r"'kernel' is stored in float32, but the policy 'bfloat16' stores parameters"):
        jmp.with_policy(body, "bfloat16")
