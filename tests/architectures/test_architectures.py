"""Architectures as their authors write them: under a policy, each is the program that an expert writes by hand."""

import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from benchmarks.architectures._programs import gradients, shapes
from benchmarks.architectures._registry import ARCHITECTURES

CASES = [*((name, "mixed_float16") for name in ARCHITECTURES), ("transformer", "float32"), ("VAE", "mixed_bfloat16")]


@pytest.fixture(autouse=True)
def _standard_promotion():
    """As their authors run them: the norms of Flax rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_the_program_is_the_one_by_hand(name, policy):
    """The same text: the same results, gradients, costs and new variables, to the bit."""
    architecture, policy = ARCHITECTURES[name], jmp.get_policy(policy)
    ours, by_hand = (
        gradients(model, architecture.batch).lower().as_text()
        for model in (architecture.with_policy(policy), architecture.by_hand(policy.compute_dtype))
    )
    assert ours == by_hand


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_and_variables_are_those_without_a_policy(name):
    architecture = ARCHITECTURES[name]
    plain = shapes(architecture.without_policy())
    assert shapes(architecture.with_policy(jmp.get_policy("mixed_float16"))) == plain
    floating = [leaf for leaf in jax.tree.leaves(plain) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floating} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_resnet_50_has_fifty_layers_with_weights_and_four_projections():
    params, _ = shapes(ARCHITECTURES["ResNet-50"].without_policy())
    assert sum(path[-1].key == "kernel" for path, _ in jax.tree.leaves_with_path(params)) == 50 + 4
