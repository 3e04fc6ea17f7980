"""What is wrong with what `tune` is given is an error that says so, before anything runs where it can be known."""

import itertools
import re

import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from tuned_net import ARGS, HALF, net

import jmp_policy as jmp


def check(error, message, *args, **options):
    with pytest.raises(error, match=re.escape(message)):
        jmp.tune(*args, **{"tolerance": 0.02, **options})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("mixed_float61", "'float61' is not half precision in policy 'mixed_float61'."),
        ("float32", "Nothing to tune: the policy 'float32' computes in float32. For example: tune(loss_fn, "),
        ("infer", "Nothing to tune: the policy 'infer' has no compute dtype."),
        (
            jmp.PolicyMap({"a": "float32"}, "float16"),
            "tune takes one policy and finds the map, got PolicyMap(",
        ),
        ("int8_from_float32", "The policy 'int8_from_float32' quantizes the weights of modules, but "),
    ],
)
def test_policies_that_cannot_be_tuned(policy, message):
    check(ValueError, message, net, ARGS, policy)


@pytest.mark.parametrize("tolerance", [0, -1, float("nan"), float("inf"), "0.1", True, None])
def test_tolerances(tolerance):
    check(ValueError, f"above 0, got {tolerance!r}. For example: tune(", net, ARGS, HALF, tolerance=tolerance)


@pytest.mark.parametrize("budget", [0, -3, 1.5, "many", True])
def test_budgets(budget):
    check(ValueError, f"at least 1, got {budget!r}. For example: budget=20.", net, ARGS, HALF, budget=budget)


@pytest.mark.parametrize("target", [3, "net", nn.Dense])
def test_targets(target):
    check(TypeError, "tune takes a function or a Flax module, got ", target, ARGS, HALF)


def test_arguments_that_are_no_tuple():
    check(TypeError, "tune takes a tuple of arguments, got ", net, ARGS[0], HALF)


@pytest.mark.slow
def test_a_function_that_is_not_finite_in_float32():
    check(ValueError, "log returns nan or infinity in float32, so nothing", jnp.log, (-jnp.ones(3),), HALF)


@pytest.mark.slow
def test_a_metric_that_is_nan_in_float32():
    check(
        ValueError,
        "returns nan or infinity in float32",
        net,
        ARGS,
        HALF,
        metric=lambda net, *args: float("nan"),
    )


@pytest.mark.slow
def test_a_metric_that_is_nan_in_half_is_out_of_tolerance():
    def measure(net, *args):
        out = net(*args)
        return float(jnp.mean(out)) if jnp.isfinite(out).all() else float("nan")

    assert jmp.tune(net, ARGS, HALF, tolerance=0.1, metric=measure).scopes == ("c",)


def test_a_model_without_a_layer_that_would_be_quantized():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    message = (
        "The policy 'int8_from_float32' would not quantize any layer of Linear: explain(with_policy(model, policy), x)"
    )
    check(ValueError, message, model, ARGS[:1], "int8_from_float32")


def test_a_metric_without_numbers():
    check(ValueError, "<lambda> returns no floating-point values to compare", net, ARGS, HALF, metric=lambda *_: "good")


def test_float32_that_does_not_agree_with_itself():
    noise = itertools.count()
    check(
        ValueError,
        "in float32 differ by 0.0909, more than the tolerance of 0.02, so maps cannot be compared.",
        net,
        ARGS,
        HALF,
        metric=lambda net, *args: 11.0 + next(noise),
    )


def test_what_the_function_raises_says_which_map_was_tried():
    calls = itertools.count()

    def metric(net, *args):
        if next(calls) == 3:
            raise RuntimeError("out of memory")
        return net(*args)

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        jmp.tune(net, ARGS, HALF, tolerance=0.02, metric=metric)
    assert caught.value.__notes__[0].startswith("Raised while tune tried PolicyMap({")
