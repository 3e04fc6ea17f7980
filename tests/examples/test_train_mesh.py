"""Runs on a mesh in one process: the numbers of one device, resumed where they were, on this mesh or another."""

import jax
import numpy as np
import pytest
import tiny
from meshes import find_devices

import jmp_policy as jmp
from examples.gpt import UserError
from examples.gpt._gpt import TrainerConfig
from examples.gpt._mesh import MeshShape
from examples.gpt._mesh_trainer import MeshTrainer
from examples.gpt._sharding import find_spec, make_batch
from examples.gpt._trainer import make_trainer

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # Flax's norms and optax's Adam promote by themselves
    pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices"),
]
WINDOWS = np.random.default_rng(0).integers(97, 101, (8, tiny.MODEL.context + 1)).astype(np.uint8)


@pytest.mark.usefixtures("table")
def test_a_run_goes_on_bit_exactly_on_its_mesh(folder):
    straight, text = tiny.run(folder, mesh="data=2,tensor=2", out=folder / "straight")
    assert "mesh    data=2,tensor=2; processes: 1" in text
    tiny.run(folder, mesh="data=2,tensor=2", steps=3)
    resumed, text = tiny.run(folder, resume=True, steps=6)
    assert "mesh    data=2,tensor=2" in text  # as it was begun
    assert resumed.validation == straight.validation
    before, after = tiny.read_records(folder / "straight"), tiny.read_records(folder / "run")
    assert [record for record in after if "loss" in record] == [record for record in before if "loss" in record]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("table")
def test_a_run_goes_on_on_another_mesh(folder):
    straight, _ = tiny.run(folder, out=folder / "straight")
    tiny.run(folder, steps=3)
    tiny.run(folder, steps=4, resume=True, mesh="data=2,fsdp=1")
    resumed, text = tiny.run(folder, steps=6, resume=True, mesh="fsdp=2,tensor=2")
    assert "mesh    fsdp=2,tensor=2" in text
    assert resumed.validation == pytest.approx(straight.validation, rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=2,modle=2", "there is no axis 'modle'"),
        ("data=128", "data [*] fsdp = 128 does not divide the 2 windows of a batch; 2 would"),
        ("tensor=64", "tensor = 64 does not divide the 2 heads of the model; 2 would"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_written(folder, mesh, message):
    with pytest.raises(UserError, match=message):
        tiny.run(folder, mesh=mesh)
    assert not (folder / "run").exists()
    tiny.run(folder, steps=1)
    before = (folder / "run" / "config.json").read_bytes()
    with pytest.raises(UserError, match=message):
        tiny.run(folder, mesh=mesh, resume=True)
    assert (folder / "run" / "config.json").read_bytes() == before


MESHES = ["data=2,fsdp=2", "fsdp=2,tensor=2"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_gpt_on_a_mesh_learns_as_on_one_device(api, mesh, capfd):
    config = TrainerConfig(jmp.Policy("float32", "float32", "float32"), tiny.MODEL)
    alone = make_trainer(api, config)
    expected = [float(alone.step(WINDOWS)) for _ in range(3)]
    devices = MeshShape.parse(mesh).make_mesh()
    assert list(devices.devices.flat) == find_devices(4)
    trainer = MeshTrainer(make_trainer(api, config), devices)
    windows = make_batch(WINDOWS.__getitem__, WINDOWS.shape, devices)
    losses = [float(trainer.step(windows)) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.state):
        there = jax.sharding.NamedSharding(devices, find_spec(path))
        assert leaf.sharding.is_equivalent_to(there, leaf.ndim), jax.tree_util.keystr(path)
