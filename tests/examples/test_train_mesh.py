"""Runs on a mesh in one process: the numbers of one device, resumed where they were, on this mesh or another."""

import jax
import numpy as np
import pytest
import tiny
from meshes import find_devices

import jmp_policy as jmp
from examples.gpt.devices import find_spec, make_batch, make_mesh, place_state
from examples.gpt.model import TrainerConfig, make_trainer

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # Flax's norms and optax's Adam promote by themselves
    pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices"),
]
WINDOWS = np.random.default_rng(0).integers(97, 101, (8, tiny.MODEL.context + 1)).astype(np.uint8)


@pytest.mark.usefixtures("table")
def test_a_run_goes_on_bit_exactly_on_its_mesh(folder):
    text = tiny.run(folder, mesh="data=2,tensor=2", out=folder / "straight")
    assert "mesh    data=2,tensor=2; processes: 1" in text
    tiny.run(folder, mesh="data=2,tensor=2", steps=3)
    text = tiny.run(folder, resume=True, steps=6)
    assert "mesh    data=2,tensor=2" in text  # as it was begun
    before, after = tiny.read_records(folder / "straight"), tiny.read_records(folder / "run")
    assert [record for record in after if "loss" in record] == [record for record in before if "loss" in record]
    assert after[-1] == before[-1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("table")
def test_a_run_goes_on_on_another_mesh(folder):
    tiny.run(folder, out=folder / "straight")
    tiny.run(folder, steps=3)
    tiny.run(folder, steps=4, resume=True, mesh="data=2,fsdp=1")
    assert "mesh    fsdp=2,tensor=2" in tiny.run(folder, steps=6, resume=True, mesh="fsdp=2,tensor=2")
    losses = [tiny.read_records(folder / name)[-1]["validation_loss"] for name in ("run", "straight")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


MESHES = ["data=2,fsdp=2", "fsdp=2,tensor=2"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_gpt_on_a_mesh_learns_as_on_one_device(api, mesh, capfd):
    config = TrainerConfig(jmp.Policy("float32", "float32", "float32"), tiny.MODEL)
    alone = make_trainer(api, config)
    expected = [float(alone.step(WINDOWS)) for _ in range(3)]
    devices = make_mesh(mesh, tiny.MODEL, len(WINDOWS))
    assert list(devices.devices.flat) == find_devices(4)
    trainer = make_trainer(api, config)
    trainer.state = place_state(trainer.state, devices)
    windows = make_batch(WINDOWS.__getitem__, WINDOWS.shape, devices)
    with jax.set_mesh(devices):
        losses = [float(trainer.step(windows)) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state):
        there = jax.sharding.NamedSharding(devices, find_spec(path))
        assert leaf.sharding.is_equivalent_to(there, leaf.ndim), jax.tree_util.keystr(path)
