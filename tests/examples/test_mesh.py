"""The mesh of a run: what `--mesh` says, what fits it, and what lies where."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp
from examples.gpt import GPTConfig, UserError, sample_batch
from examples.gpt._data import sample_rows
from examples.gpt._gpt import TrainerConfig
from examples.gpt._mesh import MeshShape
from examples.gpt._sharding import find_spec, make_batch, place_state, shard_channels, shard_rows, shard_state
from examples.gpt._trainer import make_trainer


@pytest.mark.parametrize(
    "shape", [MeshShape(), MeshShape(data=2), MeshShape(fsdp=4, tensor=2), MeshShape(data=3, fsdp=2, tensor=2)], ids=str
)
def test_shapes_are_spelt_as_they_are_read(shape):
    assert MeshShape.parse(str(shape)) == shape
    assert MeshShape.parse(str(shape).replace("=", " = ")) == shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,model=2", r"--mesh data=2,model=2: there is no axis 'model'\. Known are 'data', 'fsdp', 'tensor'\."),
        ("date=2", r"there is no axis 'date'\. Did you mean 'data'\?"),
        ("fsdp=2,fsdp=2", r"--mesh fsdp=2,fsdp=2: fsdp is there twice, for example: data=2,fsdp=2"),
        ("fsdp", r"--mesh fsdp: fsdp needs a number of devices, got '', for example: fsdp=2"),
        ("fsdp=0", r"fsdp needs a number of devices, got '0', for example: fsdp=2"),
    ],
)
def test_a_mesh_that_is_none_is_an_error(text, message):
    with pytest.raises(UserError, match=message):
        MeshShape.parse(text)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MeshShape(data=3), "--mesh: data [*] fsdp = 3 does not divide the 16 windows of a batch; 2 would"),
        (MeshShape(data=4, fsdp=8), "--mesh: data [*] fsdp = 32 does not divide the 16 windows of a batch; 16 would"),
        (MeshShape(data=10**15), r"data [*] fsdp = 1000000000000000 does not divide .*; 16 would"),  # and that at once
        (MeshShape(tensor=3), "--mesh: tensor = 3 does not divide the 4 heads of the model; 2 would"),
    ],
    ids=str,
)
def test_an_axis_that_does_not_divide_is_an_error(shape, message):
    with pytest.raises(UserError, match=message):
        shape.check_sizes(GPTConfig(), 16)


def test_the_width_and_the_vocabulary_must_divide_too():
    with pytest.raises(UserError, match="fsdp = 16 does not divide the 24 channels of the model; 12 would"):
        MeshShape(fsdp=16).check_sizes(GPTConfig(width=24), 16)
    with pytest.raises(UserError, match="tensor = 4 does not divide the 250 tokens of the vocabulary; 2 would"):
        MeshShape(tensor=4).check_sizes(GPTConfig(vocabulary=250), 16)


def test_a_mesh_larger_than_the_machine_says_how_to_get_devices():
    found = jax.device_count()
    hint = rf"JAX_NUM_CPU_DEVICES={2 * found}" if jax.default_backend() == "cpu" else rf"--mesh data={found}"
    said = f"--mesh data={2 * found} needs {2 * found} devices, and JAX finds {found}"
    with pytest.raises(UserError, match=rf"{said}.*{hint}"):
        MeshShape(data=2 * found).make_mesh()


@pytest.mark.parametrize(("shape", "found"), [(MeshShape(data=2), 8), (MeshShape(data=16), 8)], ids=str)
def test_several_processes_must_all_have_their_part(shape, found, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: found)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    message = rf"--mesh {shape} needs {shape.size} devices, and the 4 processes have 8 in all"
    with pytest.raises(UserError, match=message):
        shape.make_mesh()


def test_each_part_of_a_batch_is_drawn_where_it_is_needed():
    data, drawn = np.arange(200, dtype=np.uint8), []
    wishes = {"seed": 0, "step": 3, "batch_size": 8, "context": 4}

    def draw(rows: slice) -> np.ndarray:
        drawn.append(range(8)[rows])
        return sample_rows(data, rows, **wishes)

    mesh = make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
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
    mesh = make_mesh((1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
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


@pytest.mark.sample(1)
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (jmp.get_policy("float32"), None),
        (jmp.get_policy(REDUCED), np.dtype("float32")),
        (jmp.PolicyMap({"embed": "float32"}, REDUCED), np.dtype("float32")),
        (jmp.PolicyMap({"embed": "float32"}), None),
    ],
    ids=["float32", "reduce", "map", "map without default"],
)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_gradients_are_reduced_as_the_policy_says(api, policy, dtype, monkeypatch):
    def reach(*args, reduce_dtype, **kwargs):
        raise Reached(reduce_dtype)

    trainer = make_trainer(api, TrainerConfig(policy, tiny.MODEL, loss_scale=jmp.NoOpLossScale()))
    monkeypatch.setattr(jmp if api == "linen" else jmp.nnx, "value_and_grad", reach)
    with pytest.raises(Reached) as reached:
        trainer.step(np.zeros((2, 17), np.uint8))
    assert reached.value.args == (dtype,)
