"""`loss_scaled` goes outermost: what can be told of another nesting is an error that shows the right one."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizer_registry import grads_of, params_of

import jmp_policy as jmp

SCALED = jmp.optim.loss_scaled(optax.sgd(1e-2), jmp.DynamicLossScale())
CLIP = optax.clip_by_global_norm(1.0)


def _labels(params):
    return {name: "matrix" if name == "w" else "vector" for name in params}


# The wrong nesting, and what the error must say in place of it.
NEVER = {
    "apply_if_finite": (optax.apply_if_finite(SCALED, 3), "ApplyIfFiniteState", "adamw"),
    "lookahead": (optax.lookahead(SCALED, 5, 0.5), "LookaheadState", "lookahead"),
    "mechanize": (optax.contrib.mechanize(SCALED), "MechanicState", "contrib.mechanize"),
    "MultiSteps": (optax.MultiSteps(SCALED, 2), "MultiStepsState", "MultiSteps"),
    "sam": (optax.contrib.sam(SCALED, optax.sgd(1e-2)), "SAMState", "contrib.sam"),
    "schedule_free": (optax.contrib.schedule_free(SCALED, 1e-2), "ScheduleFreeState", "contrib.schedule_free"),
    "chain in MultiSteps": (optax.MultiSteps(optax.chain(CLIP, SCALED), 2), "MultiStepsState", "MultiSteps"),
}
NOT_IN_A_STEP = {
    "after clip": (optax.chain(CLIP, SCALED), "tuple", "chain"),
    "before weight decay": (optax.chain(SCALED, optax.add_decayed_weights(1e-4)), "tuple", "chain"),
    "conditionally_mask": (
        optax.conditionally_mask(SCALED, lambda step: step > 2), "ConditionallyMaskState", "conditionally_mask",
    ),
    "conditionally_transform": (
        optax.conditionally_transform(SCALED, lambda step: step > 2), "ConditionallyTransformState",
        "conditionally_transform",
    ),
    "masked": (optax.masked(SCALED, {"w": True, "b": False, "frozen": None}), "MaskedState", "masked"),
    "partition": (optax.partition({"matrix": SCALED, "vector": CLIP}, _labels), "PartitionState", "partition"),
    "injected schedule": (
        optax.inject_hyperparams(lambda rate: jmp.optim.loss_scaled(optax.sgd(rate), jmp.DynamicLossScale()))(
            optax.constant_schedule(0.1)
        ),
        "InjectStatefulHyperparamsState",
        "inject_hyperparams",
    ),
    "injected numbers around a chain": (
        optax.inject_hyperparams(lambda rate: optax.chain(optax.scale(rate), SCALED))(1.0), "tuple", "chain",
    ),
}  # fmt: skip

NAMED = optax.named_chain(("clip", CLIP), ("scaled", SCALED))
if type(NAMED.init({})) is not dict:  # as until optax 0.2.5, which a loop's own container of states is too
    NOT_IN_A_STEP["named_chain"] = NAMED, "OrderedDict", "named_chain"


def _error(state, nesting):
    return pytest.raises(
        ValueError,
        match=r"^loss_scaled and skip_nonfinite go outermost, but one is inside of a transformation with the state "
        rf"{state}, which advances when they skip a step\. For example: loss_scaled\(optax\.{nesting}\(",
    )


def _shown(error):
    """The transformation that an error shows."""
    names = {
        "loss_scaled": jmp.optim.loss_scaled, "optax": optax, "policy": jmp.get_policy("mixed_float16"),
        "labels": _labels, "mask": {"w": True, "b": False, "frozen": None}, "schedule": optax.constant_schedule(0.1),
        "should_transform_fn": lambda step: step > 2, "adv_optimizer": optax.sgd(1e-2),
    }  # fmt: skip
    return eval(str(error.value).partition("For example: ")[2].removesuffix("."), names)


def _init(tx):
    return jax.eval_shape(tx.init, params_of())


@pytest.mark.parametrize("name", NEVER | NOT_IN_A_STEP)
def test_a_step_of_another_nesting_is_an_error_that_shows_one_that_works(name):
    tx, state, nesting = (NEVER | NOT_IN_A_STEP)[name]
    with _error(state, nesting) as error:
        jmp.optim.step(tx, grads_of(0), _init(tx), params_of())
    if name in NEVER:  # also of gradients
        with _error(state, nesting):
            jmp.grad(lambda w: w**2, loss_scale={"opt_state": _init(tx)})
    else:  # what may be a container of states, as the states of several optimizers are
        assert isinstance(jmp.get_loss_scale(_init(tx)), jmp.DynamicLossScale)
        both = {
            "generator": SCALED.init(params_of()),
            "critic": optax.MultiSteps(optax.adam(1e-2), 2).init(params_of()),
        }
        assert int(jmp.metrics(both)["skipped_steps"]) == 0
    right = _shown(error)
    params = optax.LookaheadParams.init_synced(params_of()) if nesting == "lookahead" else params_of()
    step = lambda grads, state, params: jmp.optim.step(right, grads, state, params)
    _, state = jax.eval_shape(step, grads_of(0), jax.eval_shape(right.init, params), params)
    assert isinstance(jmp.get_loss_scale(state), jmp.DynamicLossScale)


@pytest.mark.slow
def test_minimize_scales_the_loss_for_an_injected_loss_scaled():
    """It takes two functions there, and the gradients of a loss that was not scaled would be lost in silence."""
    tx = optax.inject_hyperparams(lambda rate: jmp.optim.loss_scaled(optax.sgd(rate), jmp.DynamicLossScale()))(1.0)
    loss_fn = lambda w: jnp.sum(w.astype(jnp.float16).astype(jnp.float32)) * 1e-8
    params, state, _ = jmp.optim.minimize(loss_fn, tx)(jnp.zeros(2), tx.init(jnp.zeros(2)))
    assert params.tolist() == pytest.approx([-1e-8, -1e-8], rel=1e-3)
    assert bool(state.inner_state.grads_finite)
