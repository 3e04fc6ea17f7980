"""Checkpoints of linen models and of their training restore under any other policy."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_registry import PAIRS, STORED, assert_cast, filled
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp

X = jnp.ones((2, 4))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="body")(x)
        x = nn.BatchNorm(use_running_average=True, name="norm")(x)
        return nn.Dense(4, name="head")(x)


class State(jmp.linen.TrainState):
    batch_stats: dict


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def abstract_variables(policy):
    return jax.eval_shape(jmp.with_policy(Net(), policy).init, jax.random.key(0), X)


@functools.cache  # a train state holds its optimizer, and is of the same structure only with the same one
def optimizer(name):
    return jmp.optim.loss_scaled(optax.adam(1e-3), STORED[name].policy.loss_scale())


def abstract_state(name, scaled_as):
    """A train state in the dtypes of one policy, with the kind of loss scale of another."""
    tx = optimizer(scaled_as)
    return jax.eval_shape(lambda v: State.create(apply_fn=None, tx=tx, **v), abstract_variables(STORED[name].policy))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state saved under each policy, and the folder that they lie in."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with ocp.StandardCheckpointer() as checkpointer, jax.numpy_dtype_promotion("standard"):
        states = {name: filled(abstract_state(name, scaled_as=name)) for name in STORED}
        for name, state in states.items():
            checkpointer.save(folder / name, state)
    return folder, states


def restore(path, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def dtypes(*trees):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(trees)}


def assert_stored_as(restored, stored):
    moments = restored.opt_state.inner_state[0]
    for params in (restored.params, moments.mu, moments.nu):
        assert dtypes(params["body"], params["norm"]) == {stored.body}
        assert dtypes(params["head"]) == {stored.head}
    assert dtypes(restored.batch_stats) == {"float32"}
    assert dtypes(restored.opt_state.loss_scale) <= {"float32", "int32"}


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "restoring"), PAIRS)
def test_training_saved_under_one_policy_is_restored_in_the_dtypes_of_another(saved, saving, restoring):
    folder, states = saved
    restored = restore(folder / saving, abstract_state(restoring, scaled_as=saving))
    assert_stored_as(restored, STORED[restoring])
    assert_cast(restored, states[saving])


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "restoring"), PAIRS)
def test_bytes_of_flax_serialization_are_cast_to_the_dtypes_of_another_policy(saved, saving, restoring):
    _, states = saved
    target = abstract_state(restoring, scaled_as=saving)
    restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(states[saving]))  # in the old dtypes
    restored = optax.tree.cast_like(jax.device_put(restored), target)
    assert_stored_as(restored, STORED[restoring])
    assert_cast(restored, states[saving])


@pytest.mark.slow
@pytest.mark.parametrize("restoring", ["float32", "mixed_bfloat16", "bfloat16", "float16"])
def test_parameters_restored_without_a_target_are_cast_to_the_param_dtype(saved, restoring):
    folder, states = saved
    params = STORED[restoring].policy.cast_to_param(restore(folder / "map")["params"])
    assert dtypes(params) == {STORED[restoring].body}
    assert_cast(params, states["map"].params)


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "restoring"), [("float32", "float16"), ("float16", "bfloat16")])
def test_training_goes_on_under_a_policy_with_another_kind_of_loss_scale(saved, saving, restoring):
    """The target has the kind that was saved; the new policy's then takes its place."""
    folder, _ = saved
    new_scale = STORED[restoring].policy.loss_scale()
    state = restore(folder / saving, abstract_state(restoring, scaled_as=saving))
    state = state.replace(opt_state=state.opt_state._replace(loss_scale=new_scale))
    after = jax.jit(lambda state: state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params)))(state)
    assert int(after.step) == int(state.step) + 1
    assert dtypes(after) == dtypes(state)
    assert type(jmp.get_loss_scale(after)) is type(new_scale)


@pytest.mark.slow
def test_shards_are_restored_in_another_dtype_onto_the_devices_of_the_target(saved, tmp_path):
    """Saved by rows over four devices, and restored by columns."""
    _, states = saved
    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in [("devices",), (None, "devices")])
    kernel = jax.device_put(states["float32"].params["body"]["kernel"], rows)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", {"kernel": kernel})
    abstract = abstract_variables("bfloat16")["params"]["body"]["kernel"]
    restored = restore(tmp_path / "0", {"kernel": abstract.update(sharding=columns)})["kernel"]
    assert restored.sharding == columns
    assert {shard.data.shape for shard in restored.addressable_shards} == {(4, 2)}
    assert restored.dtype == jnp.bfloat16
    assert_cast(restored, kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        jmp.Policy("float32", "bfloat16", None, precision="highest"),
        jmp.PolicyMap({"head": "float32", nn.BatchNorm: "p=f32,c=f32,o=bf16"}, "bfloat16"),
    ],
)
def test_the_policy_of_a_model_is_saved_beside_its_variables_and_read_back(tmp_path, policy):
    config = jmp.policy_of(jmp.with_policy(Net(), policy)).get_config()
    variables = filled(abstract_variables(policy))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(policy=ocp.args.JsonSave(config), variables=ocp.args.StandardSave(variables))
        checkpointer.save(tmp_path / "0", args)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(tmp_path / "0", ocp.args.Composite(policy=ocp.args.JsonRestore()))
        found = jmp.get_policy(read.policy)
        target = ocp.args.StandardRestore(abstract_variables(found))
        restored = checkpointer.restore(tmp_path / "0", ocp.args.Composite(variables=target)).variables
    assert found == policy
    jax.tree.map(np.testing.assert_array_equal, restored, variables)
