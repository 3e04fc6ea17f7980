"""Submodules of a linen model that are given several policies: each computes in its own, with the same parameters."""

from typing import Any

import jax
import pytest
from flax import linen as nn
from flax_apis import X

import jmp_policy as jmp

KEY = jax.random.key(0)


class Body(nn.Module):
    """Has its layer in setup."""

    def setup(self):
        self.dense = nn.Dense(4)

    def __call__(self, x):
        return self.dense(x)


class InSetup(nn.Module):
    kind: Any
    specs: tuple[str, ...]

    def setup(self):
        self.body = self.kind()
        self.views = [jmp.with_policy(self.body, spec) for spec in self.specs]

    def __call__(self, x):
        return [view(x) for view in self.views] + [self.body(x)]


class InCompact(nn.Module):
    kind: Any
    specs: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        body = self.kind(name="body")
        return [jmp.with_policy(body, spec)(x) for spec in self.specs] + [body(x)]


class AsField(nn.Module):
    body: nn.Module
    specs: tuple[str, ...]

    def setup(self):
        self.views = [jmp.with_policy(self.body, spec) for spec in self.specs]

    def __call__(self, x):
        return [view(x) for view in self.views] + [self.body(x)]


def make_dense(**name):
    return nn.Dense(4, **name)


def as_field(kind, specs):
    return AsField(kind(), specs)


def shapes(model):
    """What a model returns, and its parameters: their dtypes are all that is asked about."""
    return jax.eval_shape(model.init_with_output, KEY, X)


@pytest.mark.parametrize(("make", "kind"), [(InSetup, Body), (InCompact, make_dense), (as_field, Body)])
def test_submodule_given_two_policies_computes_in_each_and_keeps_one_set_of_parameters(make, kind):
    model = make(kind, ("mixed_bfloat16", "mixed_float16"))
    outs, variables = shapes(model)
    assert [out.dtype for out in outs] == ["bfloat16", "float16", "float32"]
    assert set(variables["params"]) == {"body"}
    assert [leaf.dtype for leaf in jax.tree.leaves(variables)] == ["float32"] * 2
    assert jax.eval_shape(model.apply, variables, X) == outs


@pytest.mark.parametrize("make", [InSetup, InCompact, as_field])
def test_parameters_are_stored_as_the_policy_of_the_first_call_says(make):
    with jax.numpy_dtype_promotion("standard"):  # the submodule itself has no policy
        _, variables = shapes(make(Body, ("bfloat16", "float16")))
    assert [leaf.dtype for leaf in jax.tree.leaves(variables)] == ["bfloat16"] * 2
