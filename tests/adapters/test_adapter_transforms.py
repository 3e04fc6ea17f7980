"""A policy outside of every transform of linen and nnx, on what it lifts, or inside, is the program by hand."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import linen_transforms as linen
import nnx_transforms
import pytest
from flax import linen as nn, nnx
from flax_apis import BF16_INSIDE, X

import jmp_policy as jmp

POLICY = jmp.get_policy(BF16_INSIDE)
COMPUTE, CASTS = POLICY.compute_dtype, (POLICY.compute_dtype, POLICY.output_dtype)
RULES = jmp.PolicyMap({"block": POLICY}, "float32")
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
QUICK_CLASSES, QUICK_FUNCTIONS, QUICK_USES = ["jit", "scan"], ["cond", "custom_vjp"], ["jit", "vmap and split_rngs"]


def parametrize_by_name(registry, quick):
    cases = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in registry]
    return pytest.mark.parametrize("name", cases)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_linen(model, differentiate, rngs, x):
    """Initializes a model, calls it and differentiates it; one jitted function for all models and policies."""
    variables = model.init(rngs, x)

    def loss(params, x):
        mutable = ["counters", "intermediates"]
        out, updated = model.apply(variables | {"params": params}, x, rngs=rngs, mutable=mutable)
        return jnp.sum(out.astype(jnp.float32) ** 2), (out, updated)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True) if differentiate else loss
    return variables, run(variables["params"], x)


def lower_linen(model, differentiate=True):
    return run_linen.lower(model, differentiate, RNGS, X)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_nnx(graphdef, differentiate, state, x):
    """Calls a model and differentiates it; one jitted function for all models and policies."""
    model = nnx.merge(graphdef, state)

    def loss(model, x):
        out = model(x)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    out = (nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True) if differentiate else loss)(model, x)
    return nnx.to_pure_dict(nnx.state(model)), out


def lower_nnx(model, differentiate=True):
    return run_nnx.lower(nnx.graphdef(model), differentiate, nnx.state(model), X)


def assert_is_the_program_by_hand(lower, by_hand, **models):
    expected = lower(by_hand)
    for name, model in models.items():
        ours = lower(model)
        assert ours.out_info == expected.out_info, name  # the tree of the parameters, its names and its dtypes
        assert ours.as_text() == expected.as_text(), name


@pytest.mark.slow
@parametrize_by_name(linen.CLASSES, QUICK_CLASSES)
def test_lifted_class_of_linen_is_the_program_by_hand(name):
    lift, outer = linen.CLASSES[name], linen.Outer
    assert_is_the_program_by_hand(
        lower_linen,
        outer(lift, dtype=COMPUTE, casts=CASTS),
        outside=jmp.with_policy(outer(lift), POLICY),
        on_the_lifted_class=outer(lambda kind: jmp.with_policy(lift(kind), POLICY)),
        on_the_body=outer(lift, kind=jmp.with_policy(linen.Block, POLICY)),
    )
    by_hand, by_rule = outer(lift, dtype=COMPUTE, casts_inside=CASTS), jmp.with_policy(outer(lift), RULES)
    assert_is_the_program_by_hand(lower_linen, by_hand, by_rule=by_rule)


@pytest.mark.slow
@parametrize_by_name(linen.FUNCTIONS, QUICK_FUNCTIONS)
def test_lifted_function_of_linen_is_the_program_by_hand(name):
    outer = functools.partial(linen.Outer, use=linen.FUNCTIONS[name])
    lower = functools.partial(lower_linen, differentiate=name != "while_loop")
    by_hand, outside = outer(dtype=COMPUTE, casts=CASTS), jmp.with_policy(outer(), POLICY)
    assert_is_the_program_by_hand(lower, by_hand, outside=outside)
    assert_is_the_program_by_hand(
        lower,
        outer(dtype=COMPUTE, casts_inside=CASTS),
        by_rule=jmp.with_policy(outer(), RULES),
        on_the_body=outer(kind=jmp.with_policy(linen.Block, POLICY)),
    )


@pytest.mark.slow
@parametrize_by_name(nnx_transforms.USES, QUICK_USES)
def test_transform_of_nnx_is_the_program_by_hand(name):
    use, outer = nnx_transforms.USES[name], nnx_transforms.Outer

    def make(kind=nnx_transforms.Block, **by_hand):
        """A block, or a stack of two, in the way that a transform takes it."""
        make_one = lambda rngs: kind(changes=use.changes, rngs=rngs, **by_hand)
        return nnx.vmap(make_one)(nnx.Rngs(0).split(2)) if use.stack else make_one(nnx.Rngs(0))

    block, lower = make(), functools.partial(lower_nnx, differentiate=use.differentiable)
    by_hand, around = outer(make(dtype=COMPUTE), use.call, CASTS), jmp.with_policy(outer(block, use.call), POLICY)
    assert_is_the_program_by_hand(lower, by_hand, around=around)
    assert_is_the_program_by_hand(
        lower,
        outer(make(dtype=COMPUTE, casts=CASTS), use.call),
        by_rule=jmp.with_policy(outer(block, use.call), RULES),
        on_the_block=outer(jmp.with_policy(block, POLICY), use.call),
        on_its_class=outer(make(jmp.with_policy(nnx_transforms.Block, POLICY)), use.call),
    )


class TestCarryOfLinen:
    """The carry of a scan has one dtype, that of the output where the policy is on the body."""

    def test_scan_of_a_policied_class_casts_outside_of_the_scan(self):
        model = linen.Outer(linen.CLASSES["scan"], kind=jmp.with_policy(linen.Block, "mixed_bfloat16"))
        assert jax.eval_shape(model.init_with_output, RNGS, X)[0].dtype == jnp.bfloat16

    @pytest.mark.parametrize(
        "model",
        [
            linen.Outer(
                use=lambda block, x: scan_plainly(block, x), kind=jmp.with_policy(linen.Block, "mixed_bfloat16")
            ),
            jmp.with_policy(linen.Outer(linen.CLASSES["scan"]), jmp.PolicyMap({"block": "mixed_bfloat16"}, "float32")),
        ],
        ids=["policied module in a scanned function", "rule for a scanned module"],
    )
    def test_boundary_inside_of_a_scan_needs_the_carrys_dtype_as_its_output_dtype(self, model):
        with pytest.raises(TypeError, match=r"carry.* has type float32\[2,4\] .* has type bfloat16\[2,4\]"):
            jax.eval_shape(lambda x: model.apply(model.init(RNGS, x), x, rngs=RNGS), X)


def scan_plainly(block, x):
    """The block as an author would scan it who does not think of dtypes."""
    lifted = {"variable_broadcast": ["params", "counters"], "split_rngs": {"params": False, "dropout": True}}
    return nn.scan(lambda block, x, _: block(x), length=2, **lifted)(block, x, None)[0]


@jax.custom_vjp
def double(x):
    return x * 2


double.defvjp(lambda x: (x * 2, x), lambda x, g: (g * jnp.sign(x),))
JITTED = nn.jit(linen.Block)
LIFTED_ONCE = {
    "jitted class": linen.Outer(lambda kind: JITTED),
    "jitted function": linen.Outer(use=linen.FUNCTIONS["jit"]),
    "lifted custom_vjp": linen.Outer(use=linen.FUNCTIONS["custom_vjp"]),
    "custom_vjp": linen.Outer(use=lambda block, x: double(linen.call(block, x))),
}
"""Models of linen whose programs and rules JAX and Flax remember from call to call."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LIFTED_ONCE)
def test_each_policy_computes_by_its_own_in_turn(name):
    model = LIFTED_ONCE[name]
    for spec in ("float16", "bfloat16", "float32", "float16"):
        by_hand = model.clone(dtype=spec, casts=(spec, None))
        assert_is_the_program_by_hand(lower_linen, by_hand, in_turn=jmp.with_policy(model, f"p=f32,c={spec},o=none"))


def test_threads_at_work_at_once_do_not_see_each_others_policies():
    specs = ["mixed_float16", "mixed_bfloat16"] * 4
    models = [jmp.with_policy(LIFTED_ONCE["jitted class"], spec) for spec in specs]
    together = threading.Barrier(len(models))

    def find_dtype(model):
        together.wait()
        return jax.eval_shape(model.init_with_output, RNGS, X)[0].dtype

    with ThreadPoolExecutor(len(models)) as threads:
        assert list(threads.map(find_dtype, models)) == [jnp.float16, jnp.bfloat16] * 4
