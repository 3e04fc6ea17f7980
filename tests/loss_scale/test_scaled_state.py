"""Finding the loss scale in whatever holds it, and its figures for a logger."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.loss_scale._scaled_state import find_scaled_state, has_scaled_state
from jmp_policy.optim import LossScaledState

SCALE = jmp.DynamicLossScale(8.0, counter=3)
STATE = LossScaledState({"mu": jnp.ones(2)}, SCALE, jnp.array(True), jnp.int32(4), jnp.int32(1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    params: dict
    opt_state: tuple


HOLDERS = [
    STATE,
    (None, [STATE]),
    {"opt": STATE, "step": 3},
    TrainState({"w": jnp.ones(2)}, (STATE, ())),
]


@pytest.mark.parametrize("state", [SCALE, [SCALE, None], *HOLDERS], ids=lambda s: type(s).__name__)
def test_the_one_loss_scale_is_found_anywhere(state):
    assert jmp.get_loss_scale(state) == SCALE or jax.tree.leaves(jmp.get_loss_scale(state)) == jax.tree.leaves(SCALE)


@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), jmp.StaticLossScale(2.0)])
def test_a_scale_without_leaves_is_found_too(scale):
    assert jmp.get_loss_scale({"opt": (scale,)}) == scale


def test_it_is_found_in_a_state_of_shapes_and_inside_jit():
    assert jmp.get_loss_scale(jax.eval_shape(lambda: STATE)).loss_scale.shape == ()
    assert float(jax.jit(lambda state: jmp.get_loss_scale(state).loss_scale)(STATE)) == 8.0


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"w": jnp.ones(2)},
            r"^Expected a state that holds exactly one loss scale, got dict with 0\. Pass the loss scale it",
        ),
        (
            (STATE, STATE),
            r"^Expected a state that holds exactly one loss scale, got tuple with 2\. .*optim\.loss_scaled",
        ),
    ],
)
def test_none_or_several_are_an_error(state, text):
    with pytest.raises(ValueError, match=text):
        jmp.get_loss_scale(state)
    with pytest.raises(ValueError, match=text):
        jmp.metrics(state)
    with pytest.raises(
        ValueError, match=r"^Expected a state that holds exactly one LossScaledState, got \w+ with [02]\. "
    ):
        find_scaled_state(state)


@pytest.mark.parametrize("state", HOLDERS, ids=lambda s: type(s).__name__)
def test_metrics_are_a_flat_dictionary_of_scalars(state):
    figures = jmp.metrics(state)
    assert {name: (str(x.dtype), x.shape) for name, x in figures.items()} == {
        "loss_scale": ("float32", ()),
        "steps_since_growth": ("int32", ()),
        "grads_finite": ("bool", ()),
        "skipped_steps": ("int32", ()),
        "consecutive_skips": ("int32", ()),
    }
    assert [float(x) for x in figures.values()] == [8, 3, 1, 4, 1]


@pytest.mark.parametrize(("scale", "figures"), [(SCALE, [8, 3]), (jmp.StaticLossScale(2.0), [2, 0])], ids=repr)
def test_metrics_of_a_scale_alone_are_its_own(scale, figures):
    assert [float(x) for x in jmp.metrics(scale).values()] == figures
    assert not has_scaled_state(scale)


def test_metrics_have_the_same_shape_whatever_the_scale():
    static = jmp.metrics(jmp.StaticLossScale(2.0))
    assert {name: x.dtype for name, x in static.items()} == {"loss_scale": np.float32, "steps_since_growth": np.int32}
    assert jax.tree.structure(static) == jax.tree.structure(jmp.metrics(SCALE))


def test_metrics_may_be_returned_from_jit():
    assert float(jax.jit(jmp.metrics)(STATE)["skipped_steps"]) == 4


@pytest.mark.parametrize("take", [jmp.metrics, jax.jit(jmp.metrics), lambda state: {} | jmp.metrics(state)])
def test_items_of_metrics_are_numbers_of_python_which_json_writes(take):
    read = {name: x.item() for name, x in jax.device_get(take(STATE)).items()}
    assert json.loads(json.dumps(read)) == read == {
        "loss_scale": 8.0, "steps_since_growth": 3, "grads_finite": True, "skipped_steps": 4, "consecutive_skips": 1
    }  # fmt: skip
