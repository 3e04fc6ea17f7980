"""Finding the loss scale in whatever holds it, and its figures for a logger."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.optim import LossScaledState

SCALE = jmp.DynamicLossScale(8.0, counter=3)
STATE = LossScaledState({"mu": jnp.ones(2)}, SCALE, jnp.array(True), jnp.int32(4), jnp.int32(1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    params: dict
    opt_state: tuple


HOLDERS = [STATE, (None, [STATE]), {"opt": STATE, "step": 3}, TrainState({"w": jnp.ones(2)}, (STATE, ()))]
STATIC = jmp.StaticLossScale(2.0)


@pytest.mark.parametrize("state", [SCALE, [SCALE, None], *HOLDERS], ids=lambda s: type(s).__name__)
def test_the_one_loss_scale_is_found_anywhere(state):
    assert jmp.get_loss_scale(state) == SCALE
    assert jmp.get_loss_scale({"opt": (STATIC,)}) == STATIC


def test_it_is_found_in_a_state_of_shapes_and_inside_jit():
    assert jmp.get_loss_scale(jax.eval_shape(lambda: STATE)).loss_scale.shape == ()
    assert float(jax.jit(lambda state: jmp.get_loss_scale(state).loss_scale)(STATE)) == 8.0


@pytest.mark.parametrize("find", [jmp.get_loss_scale, jmp.metrics, jmp.optim.raise_if_stuck])
@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"w": jnp.ones(2)}, r"got dict with 0\. (Pass the loss scale it|For example)"),
        ((STATE, STATE), r"got tuple with 2\. .*optim\.loss_scaled"),
    ],
)
def test_none_or_several_are_an_error(state, text, find):
    with pytest.raises(
        ValueError, match=r"^Expected a state that holds exactly one (loss scale|LossScaledState), " + text
    ):
        find(state)


@pytest.mark.parametrize("take", [jmp.metrics, jax.jit(jmp.metrics)], ids=["eager", "jit"])
@pytest.mark.parametrize("state", HOLDERS[1:], ids=lambda s: type(s).__name__)
def test_metrics_are_a_flat_dictionary_of_scalars_that_json_writes(state, take):
    found = take(state)
    assert {name: (str(x.dtype), x.shape) for name, x in found.items()} == {
        "loss_scale": ("float32", ()), "steps_since_growth": ("int32", ()), "grads_finite": ("bool", ()),
        "skipped_steps": ("int32", ()), "consecutive_skips": ("int32", ()),
    }  # fmt: skip
    read = {name: x.item() for name, x in jax.device_get(found).items()}
    assert json.loads(json.dumps(read)) == read == {
        "loss_scale": 8.0, "steps_since_growth": 3, "grads_finite": True, "skipped_steps": 4, "consecutive_skips": 1
    }  # fmt: skip


@pytest.mark.parametrize(("scale", "expected"), [(SCALE, [8, 3]), (STATIC, [2, 0])], ids=repr)
def test_metrics_of_a_scale_alone_are_its_own(scale, expected):
    found = jmp.metrics(scale)
    assert {name: x.dtype for name, x in found.items()} == {"loss_scale": np.float32, "steps_since_growth": np.int32}
    assert [float(x) for x in found.values()] == expected
