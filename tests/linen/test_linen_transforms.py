"""A policy outside, on and inside every lifted transform is the program by hand."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from linen_transforms import CLASSES, FUNCTIONS, Block, Outer

import jmp_policy as jmp

POLICY = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
CASTS = (POLICY.compute_dtype, POLICY.output_dtype)
RULES = jmp.PolicyMap({"block": POLICY}, "float32")
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def lowered(model, differentiate=True):
    """A program that initializes a model, calls it and differentiates it: the shapes it returns, and its text."""

    def program(rngs, x):
        variables = model.init(rngs, x)

        def loss(params, x):
            mutable = ["counters", "intermediates"]
            out, updated = model.apply(variables | {"params": params}, x, rngs=rngs, mutable=mutable)
            return jnp.sum(out.astype(jnp.float32) ** 2), (out, updated)

        run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True) if differentiate else loss
        return variables, run(variables["params"], x)

    lowered = jax.jit(program).lower(RNGS, X)
    return lowered.out_info, lowered.as_text()


def assert_is_the_program_by_hand(by_hand, *, differentiate=True, **models):
    expected = lowered(by_hand, differentiate)
    for name, model in models.items():
        shapes, text = lowered(model, differentiate)
        assert shapes == expected[0], name  # the tree of the parameters among them, its names and its dtypes
        assert text == expected[1], name


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
