"""Several devices and processes: what `--mesh` says, what fits it, what lies where, and what processes agree on."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from meshes import make_mesh as make_test_mesh

import jmp_policy as jmp
from examples.gpt import UserError, devices
from examples.gpt.data import sample_batch
from examples.gpt.devices import (
    AXES,
    agree,
    find_spec,
    make_batch,
    make_mesh,
    parse_mesh,
    place_state,
    run_locally,
    shard_channels,
    shard_rows,
    shard_state,
)
from examples.gpt.model import GPTConfig, TrainerConfig, make_trainer


@pytest.mark.parametrize("text", ["data=2,fsdp=3", " data = 2 , fsdp = 3 ", "fsdp=3,data=2,tensor=1"])
def test_a_mesh_is_sizes_of_axes(text):
    assert parse_mesh(text) == {"data": 2, "fsdp": 3, "tensor": 1}


@pytest.mark.parametrize("text", ["data=2,model=2", "fsdp=2,fsdp=2", "fsdp", "fsdp=0", "fsdp=two", ""])
def test_a_mesh_that_is_none_is_an_error(text):
    with pytest.raises(UserError, match=f"--mesh {text}: expected sizes of the axes data, fsdp, tensor, for example: "):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("data=3", GPTConfig(), "data [*] fsdp = 3 does not divide the 16 windows of a batch"),
        ("fsdp=16", GPTConfig(width=24), "fsdp = 16 does not divide the 24 channels of the model"),
        ("tensor=3", GPTConfig(), "tensor = 3 does not divide the 4 heads of the model"),
        ("tensor=4", GPTConfig(vocabulary=250), "tensor = 4 does not divide the 250 tokens of the vocabulary"),
    ],
)
def test_an_axis_that_does_not_divide_is_an_error(text, model, message):
    with pytest.raises(UserError, match=f"--mesh {text}: {message}"):
        make_mesh(text, model, 16)


@pytest.mark.parametrize(("text", "found", "processes"), [("data=16", 8, 1), ("data=2", 8, 4), ("data=16", 8, 4)])
def test_a_mesh_of_too_many_devices_or_without_some_process_says_what_fits(text, found, processes, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: found)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    message = rf"--mesh {text} needs \d+ devices, and there are 8 in {processes} .*--mesh data=8.*JAX_NUM_CPU_DEVICES"
    with pytest.raises(UserError, match=message):
        make_mesh(text, GPTConfig(), 16)


def test_local_processes_share_the_devices_equally():
    with pytest.raises(UserError, match="--mesh data=3 has 3 devices, which 2 processes cannot share equally"):
        run_locally([], 2, "data=3")


def test_one_process_agrees_with_itself():
    assert agree(lambda: 3) == 3
    assert devices.is_first()
    with pytest.raises(ZeroDivisionError):
        agree(lambda: 1 // 0)


@pytest.fixture
def of_three(monkeypatch):
    """Stands for process 1 of three, where process 2 has failed, too."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(devices.multihost_utils, "process_allgather", lambda mine: np.array([False, mine, True]))


@pytest.mark.usefixtures("of_three")
def test_the_first_process_that_failed_tells_why():
    with pytest.raises(ZeroDivisionError):
        agree(lambda: 1 // 0)
    with pytest.raises(devices.ToldElsewhere, match="process 2 prints what is wrong"):
        agree(lambda: 3)


def test_each_part_of_a_batch_is_drawn_where_it_is_needed():
    data, drawn = np.arange(200, dtype=np.uint8), []
    wishes = {"seed": 0, "step": 3, "batch_size": 8, "context": 4}

    def draw(rows: slice) -> np.ndarray:
        drawn.append(range(8)[rows])
        return sample_batch(data, rows, **wishes)

    mesh = make_test_mesh((2, 1, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    batch = make_batch(draw, (8, 5), mesh)
    assert set(drawn) == {range(0, 4), range(4, 8)}
    np.testing.assert_array_equal(batch, sample_batch(data, **wishes))


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    spec: P


CASES = [
    Case("embed.embedding", (8, 4), P("tensor", "fsdp")),
    Case("mu.blocks.0.expand.bias", (8,), P("tensor")),
    Case("blocks_0.attention_norm.scale", (4,), P()),
    Case("qkv.kernel_amax_history", (4,), P()),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_state_lies_by_its_names(case):
    mesh = make_test_mesh((1, 2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    tree = {case.name: np.ones(case.shape)}
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(tree)
    assert find_spec(path) == case.spec
    placed = place_state(tree, mesh)[case.name]
    assert placed.sharding == jax.sharding.NamedSharding(mesh, case.spec)
    np.testing.assert_array_equal(placed, tree[case.name])


def test_without_a_mesh_nothing_is_constrained():
    x = jax.numpy.ones((2, 3, 4))
    assert shard_rows(x) is x
    assert shard_channels(x) is x
    tree = {"embed.embedding": x}
    assert shard_state(tree) is tree


class Reached(Exception):
    """Ends a step where its gradients would be taken."""


REDUCED = "params=float32,compute=bfloat16,output=bfloat16,reduce=float32"


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("api", "policy", "dtype"),
    [
        ("nnx", jmp.PolicyMap({"embed": "float32"}, REDUCED), np.dtype("float32")),
        ("linen", jmp.get_policy(REDUCED), np.dtype("float32")),
        ("linen", jmp.PolicyMap({"embed": "float32"}), None),
    ],
    ids=["nnx", "linen", "map without default"],
)
def test_gradients_are_reduced_as_the_policy_says(api, policy, dtype, monkeypatch):
    def reach(*args, reduce_dtype, **kwargs):
        raise Reached(reduce_dtype)

    trainer = make_trainer(api, TrainerConfig(policy, tiny.MODEL, loss_scale=jmp.NoOpLossScale()))
    monkeypatch.setattr(jmp if api == "linen" else jmp.nnx, "value_and_grad", reach)
    with pytest.raises(Reached) as reached:
        trainer.step(np.zeros((2, 17), np.uint8))
    assert reached.value.args == (dtype,)
