"""Policied modules under the transforms of nnx and JAX, and inside those that their own methods use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_models import BF16_INSIDE, Net, Scale, X, is_bfloat16, rngs
from nnx_transforms import USES, Block, Outer

import jmp_policy as jmp

POLICY = jmp.get_policy(BF16_INSIDE)
CASTS = (POLICY.compute_dtype, POLICY.output_dtype)
RULES = jmp.PolicyMap({"block": POLICY}, "float32")


def made(kind, use, **by_hand):
    """A block, or a stack of two, in the way that a transform takes it."""

    def make(rngs):
        return kind(changes=use.changes, rngs=rngs, **by_hand)

    return nnx.vmap(make)(rngs().split(2)) if use.stack else make(rngs())


@functools.partial(jax.jit, static_argnums=(0, 1))
def program(graphdef, differentiable, state, x):
    """Calls a model and differentiates it; one jitted function for all models and policies."""
    model = nnx.merge(graphdef, state)

    def loss(model, x):
        out = model(x)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    out = (nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True) if differentiable else loss)(model, x)
    return nnx.to_pure_dict(nnx.state(model)), out


def lowered(model, use):
    return program.lower(nnx.graphdef(model), use.differentiable, nnx.state(model), X)


def assert_is_the_program_by_hand(use, by_hand, **models):
    expected = lowered(by_hand, use)
    for name, model in models.items():
        ours = lowered(model, use)
        assert ours.out_info == expected.out_info, name  # what the state holds, by name, among them
        assert ours.as_text() == expected.as_text(), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", USES)
def test_transform_outside_of_a_policy_and_inside_is_the_program_by_hand(name):
    use, compute = USES[name], POLICY.compute_dtype
    block = made(Block, use)
    assert_is_the_program_by_hand(
        use,
        Outer(made(Block, use, dtype=compute), use.call, CASTS),
        around=jmp.with_policy(Outer(block, use.call), POLICY),
    )
    assert_is_the_program_by_hand(
        use,
        Outer(made(Block, use, dtype=compute, casts=CASTS), use.call),
        by_rule=jmp.with_policy(Outer(block, use.call), RULES),
        on_the_block=Outer(jmp.with_policy(block, POLICY), use.call),
        on_its_class=Outer(made(jmp.with_policy(Block, POLICY), use), use.call),
    )


CALLS = {
    "plain": lambda model, x: model(x),
    "nnx.jit": nnx.jit(lambda model, x: model(x)),
    "nnx.jit of trees": nnx.jit(lambda model, x: model(x), graph=False),
    "jax.jit": jax.jit(lambda model, x: model(x)),
    "jax.jit of a split": lambda model, x: _split_call(*nnx.split(model), x),
    "nnx.remat": nnx.remat(lambda model, x: model(x)),
    "nnx.vmap": lambda model, x: nnx.vmap(lambda model, row: model(row), in_axes=(None, 0))(model, x),
    "nnx.cond": lambda model, x: nnx.cond(True, lambda m, x: m(x), lambda m, x: m(x), model, x),
}


@jax.jit(static_argnums=0)
def _split_call(graphdef, state, x):
    return nnx.merge(graphdef, state, copy=True)(x)


class Pure(nnx.Module):
    """A model whose calls change nothing, for the transforms that allow no change."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.scale = nnx.Param(jnp.linspace(0.9, 1.1, 4))

    def __call__(self, x):
        return self.linear(x) * self.scale


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_transforms_run_the_policied_program(name):
    model = jmp.with_policy(Pure(rngs=rngs()), "mixed_bfloat16")
    out = CALLS[name](model, X)
    assert out.dtype == jnp.bfloat16  # and strict promotion sees to it that the Param was read so
    exact = Pure(rngs=rngs())(X)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2e-2)
    assert model.scale.dtype == jnp.float32


@pytest.mark.slow
def test_one_jitted_function_keeps_policies_apart():
    plain = Pure(rngs=rngs())
    traces = []
    traced = nnx.jit(lambda model, x: (traces.append(None), model(x))[1])
    for spec in ("mixed_bfloat16", "mixed_float16", "mixed_bfloat16"):
        assert traced(jmp.with_policy(plain, spec), X).dtype == jmp.get_policy(spec).output_dtype
    assert traced(plain, X).dtype == jnp.float32
    assert len(traces) == 3  # the last mixed_bfloat16 is the program of the first


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_methods_that_are_transforms_keep_parameters_as_they_are_stored(transform):
    class Transformed(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.scale = nnx.Param(jnp.float32(1.001) * jnp.ones(4))

        __call__ = transform(lambda self, x: self.linear(x) * self.scale)

    model = jmp.with_policy(Transformed(rngs=rngs()), BF16_INSIDE)
    before = model.scale[...]
    out = model(X)
    assert is_bfloat16(out)
    np.testing.assert_array_equal(model.scale[...], before, strict=True)  # not rounded on the way back
    assert nnx.grad(lambda m: m(X).sum())(model)["scale"][...].dtype == jnp.float32


def _stacked(count):
    return nnx.vmap(lambda rngs: Scale(rngs=rngs))(rngs().split(count))


@pytest.mark.slow
def test_scan_over_policied_layers():
    layers = jmp.with_policy(_stacked(3), "mixed_bfloat16")
    scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    out = scan(X.astype(jnp.bfloat16), layers)
    assert out.dtype == jnp.bfloat16
    assert layers.scale.shape == (3, 4)


@pytest.mark.slow
def test_scan_inside_a_policied_model():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = _stacked(3)

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    model = jmp.with_policy(Stack(), BF16_INSIDE)
    out, grads = nnx.value_and_grad(lambda m: m(X).sum())(model)
    assert out.dtype == jnp.float32
    assert grads["layers"]["scale"][...].dtype == jnp.float32


@pytest.mark.slow
def test_state_that_a_call_writes_lands_in_the_module():
    model = jmp.with_policy(nnx.BatchNorm(4, rngs=rngs()), BF16_INSIDE)
    with jax.numpy_dtype_promotion("standard"):  # Flax's statistics promote
        nnx.jit(lambda m, x: m(x))(model, X + 1)
    assert model.mean[...].any()
    assert model.mean.dtype == jnp.float32


def test_intermediates_are_captured():
    class Sower(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = nnx.Param(jnp.ones(4, jnp.float32))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "hidden", x * self.scale)
            return x

    out, captured = nnx.capture(jmp.with_policy(Sower(rngs=rngs()), BF16_INSIDE), nnx.Intermediate)(X)
    assert captured["hidden"].get_value()[0].dtype == jnp.bfloat16
    assert out.dtype == jnp.float32


@pytest.mark.slow
def test_random_keys_advance_as_without_a_policy():
    plain, model = (nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    model = jmp.with_policy(model, "float32")
    for _ in range(2):
        np.testing.assert_array_equal(model(X), plain(X))


def test_modes_of_nnx_reach_policied_modules():
    model = jmp.with_policy(nnx.Sequential(nnx.Dropout(0.5, rngs=rngs())), BF16_INSIDE)
    model.eval()
    assert is_bfloat16(model(X))


@pytest.mark.exhaustive
def test_array_references_as_values_of_variables():
    with nnx.var_defaults(ref=True):
        model = jmp.with_policy(Net(rngs=rngs()), BF16_INSIDE)
        assert model(X).dtype == jnp.float32
    assert model.scale.read == "bfloat16"
