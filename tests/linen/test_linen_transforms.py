"""A policy outside, on and inside every lifted transform is the program by hand."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from linen_transforms import CLASSES, FUNCTIONS, Block, Outer, call

import jmp_policy as jmp

POLICY = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
CASTS = (POLICY.compute_dtype, POLICY.output_dtype)
RULES = jmp.PolicyMap({"block": POLICY}, "float32")
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


@functools.partial(jax.jit, static_argnums=(0, 1))
def program(model, differentiate, rngs, x):
    """Initializes a model, calls it and differentiates it; one jitted function for all models and policies."""
    variables = model.init(rngs, x)

    def loss(params, x):
        mutable = ["counters", "intermediates"]
        out, updated = model.apply(variables | {"params": params}, x, rngs=rngs, mutable=mutable)
        return jnp.sum(out.astype(jnp.float32) ** 2), (out, updated)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True) if differentiate else loss
    return variables, run(variables["params"], x)


def assert_is_the_program_by_hand(by_hand, *, differentiate=True, **models):
    expected = program.lower(by_hand, differentiate, RNGS, X)
    for name, model in models.items():
        ours = program.lower(model, differentiate, RNGS, X)
        assert ours.out_info == expected.out_info, name  # the tree of the parameters, its names and its dtypes
        assert ours.as_text() == expected.as_text(), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CLASSES)
def test_lifted_class_is_the_program_by_hand(name):
    lift, compute = CLASSES[name], POLICY.compute_dtype
    assert_is_the_program_by_hand(
        Outer(lift, dtype=compute, casts=CASTS),
        outside=jmp.with_policy(Outer(lift), POLICY),
        on_the_lifted_class=Outer(lambda kind: jmp.with_policy(lift(kind), POLICY)),
        on_the_body=Outer(lift, kind=jmp.with_policy(Block, POLICY)),
    )
    assert_is_the_program_by_hand(
        Outer(lift, dtype=compute, casts_inside=CASTS), by_rule=jmp.with_policy(Outer(lift), RULES)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_lifted_function_is_the_program_by_hand(name):
    use, compute, differentiate = FUNCTIONS[name], POLICY.compute_dtype, name != "while_loop"
    assert_is_the_program_by_hand(
        Outer(use=use, dtype=compute, casts=CASTS),
        differentiate=differentiate,
        outside=jmp.with_policy(Outer(use=use), POLICY),
    )
    assert_is_the_program_by_hand(
        Outer(use=use, dtype=compute, casts_inside=CASTS),
        differentiate=differentiate,
        by_rule=jmp.with_policy(Outer(use=use), RULES),
        on_the_body=Outer(use=use, kind=jmp.with_policy(Block, POLICY)),
    )


class TestCarry:
    """The carry of a scan has one dtype, that of the output where the policy is on the body."""

    def test_scan_of_a_policied_class_casts_outside_of_the_scan(self):
        model = Outer(CLASSES["scan"], kind=jmp.with_policy(Block, "mixed_bfloat16"))
        assert jax.eval_shape(model.init_with_output, RNGS, X)[0].dtype == jnp.bfloat16

    @pytest.mark.parametrize(
        "model",
        [
            Outer(use=lambda block, x: _scanned(block, x), kind=jmp.with_policy(Block, "mixed_bfloat16")),
            jmp.with_policy(Outer(CLASSES["scan"]), jmp.PolicyMap({"block": "mixed_bfloat16"}, "float32")),
        ],
        ids=["policied module in a scanned function", "rule for a scanned module"],
    )
    def test_boundary_inside_of_a_scan_needs_the_carrys_dtype_as_its_output_dtype(self, model):
        with pytest.raises(TypeError, match=r"carry.* has type float32\[2,4\] .* has type bfloat16\[2,4\]"):
            jax.eval_shape(lambda x: model.apply(model.init(RNGS, x), x, rngs=RNGS), X)


def _scanned(block, x):
    """The block as an author would scan it who does not think of dtypes."""
    lifted = {"variable_broadcast": ["params", "counters"], "split_rngs": {"params": False, "dropout": True}}
    return nn.scan(lambda block, x, _: block(x), length=2, **lifted)(block, x, None)[0]


@jax.custom_vjp
def _signed(x):
    return x * 2


_signed.defvjp(lambda x: (x * 2, x), lambda x, g: (g * jnp.sign(x),))

JITTED, CHECKPOINTED = nn.jit(Block), nn.remat(Block)
LIFTED_ONCE = {
    "jitted class": Outer(lambda kind: JITTED),
    "remat class": Outer(lambda kind: CHECKPOINTED),
    "jitted function": Outer(use=FUNCTIONS["jit"]),
    "lifted custom_vjp": Outer(use=FUNCTIONS["custom_vjp"]),
    "custom_vjp": Outer(use=lambda block, x: _signed(call(block, x))),
}
"""Models whose programs and rules JAX and Flax remember from call to call."""


class TestPoliciesApart:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", LIFTED_ONCE)
    def test_each_computes_by_its_own_in_turn(self, name):
        model = LIFTED_ONCE[name]
        for spec in ("float16", "bfloat16", "float32", "float16"):
            by_hand = model.clone(dtype=spec, casts=(spec, None))
            assert_is_the_program_by_hand(by_hand, in_turn=jmp.with_policy(model, f"p=f32,c={spec},o=none"))

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("name", LIFTED_ONCE)
    def test_threads_at_work_at_once_do_not_see_each_others_policies(self, name):
        models = [jmp.with_policy(LIFTED_ONCE[name], spec) for spec in ("mixed_float16", "mixed_bfloat16")] * 4
        together = threading.Barrier(len(models))

        def dtype(model):
            together.wait()
            return jax.eval_shape(model.init_with_output, RNGS, X)[0].dtype

        with ThreadPoolExecutor(len(models)) as threads:
            assert list(threads.map(dtype, models)) == [jnp.float16, jnp.bfloat16] * 4
