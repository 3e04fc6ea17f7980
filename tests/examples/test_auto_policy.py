"""`train --policy auto`: steps in float32 decide what half precision may have, and the run says so."""

import jax
import jax.numpy as jnp
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import TrainerConfig, train
from examples.gpt._auto_policy import predict_policy, print_decision
from examples.gpt._run_folder import RunConfig, RunFolder

pytestmark = pytest.mark.usefixtures("standard_promotion")


def predict_of(loss_fn):
    observed = jmp.numerics.collect(loss_fn, where="all")
    return jmp.numerics.predict(observed(jnp.full((4, 4), 300.0))[1], "mixed_float16")


def test_a_decision_names_what_stays_in_float32_and_why():
    def square(x):
        with jax.named_scope("energy"):
            return jnp.sum(jnp.log1p((x @ x) * x))

    console = tiny.silent_console()
    print_decision(predict_of(square), console)
    text = tiny.text_of(console)
    assert "20 steps in float32 were measured" in text
    assert "float32 for `energy` overflows in the forward pass" in text


def test_a_clean_model_needs_no_float32():
    console = tiny.silent_console()
    print_decision(predict_of(lambda x: jnp.sum(x / 300 @ x)), console)
    assert "No module needs float32." in tiny.text_of(console)


def test_no_batches_are_an_error():
    with pytest.raises(ValueError, match=r"^There are no batches: predict_policy needs at least one, for example"):
        predict_policy("linen", TrainerConfig(jmp.get_policy("mixed_float16"), tiny.MODEL), [])


def test_a_configuration_with_a_map_survives_json(tmp_path):
    policy = jmp.get_policy("mixed_float16")
    rules = jmp.PolicyMap({"blocks/0": "float32"}, policy)
    config = RunConfig("nnx", policy, 3, (), "00ff", tiny.MODEL, 4, 1e-3, 10, 7, policy_map=rules, first_scale=512.0)
    RunFolder(tmp_path).write_config(config)
    assert RunFolder(tmp_path).read_config() == config
    assert float(config.make_loss_scale().loss_scale) == 512.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_run_decides_and_a_resumed_one_keeps_the_decision(folder, api):
    console = tiny.silent_console()
    train(tiny.options(folder, policy="auto", api=api, steps=2), console)
    assert "20 steps in float32 were measured" in tiny.text_of(console)
    before = RunFolder(folder / "run").read_config()
    assert before.policy_map is not None
    train(tiny.options(folder, policy="auto", api=api, steps=3, resume=True), tiny.silent_console())
    assert RunFolder(folder / "run").read_config().policy_map == before.policy_map
