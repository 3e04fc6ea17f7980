"""Modules assigned after the policy was attached never run silently without it."""

import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, Net, Scale, X, dtype_of, rngs

import jmp_policy as jmp


def test_replaced_child_gets_the_policy_and_the_object_assigned_does_not():
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    new = model.embed = nnx.Linear(4, 4, rngs=rngs())
    model(X)
    assert model.probe.saw == "bfloat16"
    assert (model.embed.dtype, new.dtype) == (jnp.bfloat16, None)
    assert model.embed.kernel is new.kernel


def test_replaced_element_of_a_list_gets_the_policy():
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    model.blocks[1] = nnx.Linear(4, 4, rngs=rngs())
    model.blocks.append(nnx.Linear(4, 4, rngs=rngs()))
    model(X)
    assert [block.dtype for block in model.blocks] == [jnp.bfloat16] * 3


def test_child_replaced_inside_a_child_that_is_called_directly_gets_the_policy():
    class Outer(nnx.Module):
        def __init__(self, *, rngs):
            self.net = Net(rngs=rngs)

    model = jmp.with_policy(Outer(rngs=rngs()), BF16_INSIDE)
    model.net.embed = nnx.Linear(4, 4, rngs=rngs())
    model.net(X)
    assert model.net.probe.saw == "bfloat16"


def test_child_replaced_deep_inside_a_quantized_model_gets_the_policy():
    model = nnx.Sequential(nnx.Sequential(nnx.Linear(4, 4, rngs=rngs())))
    model = jmp.with_policy(model, "int8(min_size=0)_from_mixed_bfloat16")
    model.layers[0].layers[0] = nnx.Linear(4, 4, rngs=rngs())
    model(X)
    assert model.layers[0].layers[0].dtype == jnp.bfloat16


def test_child_taken_from_another_policied_model_gets_the_policy_of_its_new_place():
    other = jmp.with_policy(Net(rngs=rngs()), "mixed_float16")
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    model.embed, model.scale = other.embed, other.scale
    model(X)
    assert (model.probe.saw, model.scale.read, other.embed.dtype) == ("bfloat16", "bfloat16", jnp.float16)


@pytest.mark.slow
def test_new_child_gets_what_the_map_says_of_its_path():
    rules = jmp.PolicyMap({"head": "float32", "scale": "mixed_float16"}, BF16_INSIDE)
    model = jmp.with_policy(Net(rngs=rngs()), rules)
    model.head, model.scale = nnx.Linear(4, 3, rngs=rngs()), Scale(rngs=rngs())
    model(X)
    assert (model.head.dtype, model.scale.read, model.encoded) == (jnp.float32, "float16", "float16")


def test_new_child_whose_parameters_have_another_dtype_is_an_error():
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    model.embed = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=rngs())
    with pytest.raises(ValueError, match=r"The parameter 'embed/kernel' is stored in bfloat16, but .* in float32"):
        model(X)


def test_child_replaced_under_jit_stays_policied_and_does_not_retrace_for_ever():
    model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
    model.embed = nnx.Linear(4, 4, rngs=rngs())
    traces = []

    @nnx.jit
    def call(model, x):
        traces.append(None)
        return model(x)

    for _ in range(3):
        call(model, X)
    assert model.embed.dtype == jnp.bfloat16
    assert len(traces) <= 2  # with the child that was assigned, and with its copy
    assert dtype_of(model, X) == "float32"


def test_child_that_a_call_makes_has_the_policy_from_the_next_call_on():
    class Lazy(nnx.Module):
        def __init__(self):
            self.head = nnx.data(None)

        def __call__(self, x):
            if self.head is None:
                self.head = nnx.Linear(4, 3, rngs=rngs())
            return str(self.head(x.astype(jnp.float32)).dtype)

    model = jmp.with_policy(Lazy(), BF16_INSIDE)
    assert [model(X), model(X)] == ["float32", "bfloat16"]
    assert model.head.dtype == jnp.bfloat16
