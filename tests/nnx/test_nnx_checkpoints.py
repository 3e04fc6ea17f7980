"""Checkpoints of nnx models and of their training restore under any other policy."""

import functools

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_registry import PAIRS, STORED, assert_cast, filled
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp


class Net(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.body(x))))


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def drawn(policy):
    """A model whose parameters are drawn under the policy."""
    return jmp.with_policy(Net, policy)(nnx.Rngs(0))


def given(policy):
    """A model that was there before the policy."""
    return jmp.with_policy(jmp.nnx.cast_params(Net(nnx.Rngs(0)), policy), policy)


@functools.cache
def abstract_training(name, scaled_as):
    """A model in the dtypes of one policy and an optimizer with the kind of loss scale of another, split."""

    def training():
        model = drawn(STORED[name].policy)
        tx = jmp.optim.loss_scaled(optax.adam(1e-3), STORED[scaled_as].policy.loss_scale())
        return model, jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)

    return nnx.split(nnx.eval_shape(training))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state saved under each policy, and the folder that they lie in."""
    folder = tmp_path_factory.mktemp("checkpoints")
    states = {name: filled(abstract_training(name, scaled_as=name)[1]) for name in STORED}
    with ocp.StandardCheckpointer() as checkpointer:
        for name, state in states.items():
            checkpointer.save(folder / name, state)
    return folder, states


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def dtypes(*trees):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(trees)}


def assert_stored_as(params, stored):
    assert dtypes(params["body"], params["norm"]) == {stored.body}
    assert dtypes(params["head"]) == {stored.head}


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "restoring"), PAIRS)
def test_training_saved_under_one_policy_is_restored_in_the_dtypes_of_another(saved, saving, restoring):
    folder, states = saved
    graph, target = abstract_training(restoring, scaled_as=saving)
    state = restore(folder / saving, target)
    assert_cast(state, states[saving])
    model, optimizer = nnx.merge(graph, state)
    assert jmp.policy_of(model) is STORED[restoring].policy
    moments = optimizer.opt_state.inner_state[0]
    for params in (nnx.state(model, nnx.Param), moments.mu, moments.nu):
        assert_stored_as(params, STORED[restoring])
    assert dtypes(nnx.state(model, nnx.BatchStat)) == {"float32"}
    assert dtypes(jmp.get_loss_scale(optimizer)) <= {"float32", "int32"}


@pytest.mark.slow
@pytest.mark.parametrize("build", [drawn, given])
def test_a_model_without_a_policy_and_one_with_it_have_the_same_checkpoint(tmp_path, build):
    plain = filled(nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0)))))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", nnx.to_pure_dict(plain))
    graph, target = nnx.split(nnx.eval_shape(lambda: build("bfloat16")))
    nnx.replace_by_pure_dict(target, restore(tmp_path / "0", nnx.to_pure_dict(target)))
    model = nnx.merge(graph, target)
    assert_stored_as(nnx.state(model, nnx.Param), STORED["bfloat16"])
    assert_cast(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(plain))


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "restoring"), [("float32", "float16"), ("float16", "bfloat16")])
def test_training_goes_on_under_a_policy_with_another_kind_of_loss_scale(saved, saving, restoring):
    """The target has the kind that was saved; the new policy's then takes its place."""
    folder, _ = saved
    graph, target = abstract_training(restoring, scaled_as=saving)
    model, optimizer = nnx.merge(graph, restore(folder / saving, target))
    new_scale = jax.tree.map(nnx.OptArray, STORED[restoring].policy.loss_scale())
    optimizer.opt_state = optimizer.opt_state._replace(loss_scale=new_scale)
    before = dtypes(nnx.state((model, optimizer)))

    @nnx.jit
    def step(model, optimizer, value):
        grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, value), nnx.state(model, nnx.Param))
        optimizer.update(model, grads)

    steps = []
    for value in (1.0, jnp.inf):
        step(model, optimizer, value)
        steps.append(int(optimizer.step[...]))
    assert steps == [2, 2]  # one was saved, one taken and one skipped
    assert dtypes(nnx.state((model, optimizer))) == before
    expected = STORED[restoring].policy.loss_scale().adjust(jnp.array(False))
    assert str(jmp.get_loss_scale(optimizer)) == str(expected)


@pytest.mark.slow
def test_shards_are_restored_in_another_dtype_onto_the_devices_of_the_target(saved):
    folder, states = saved
    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    columns, everywhere = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in [(None, "devices"), ()])
    _, target = abstract_training("bfloat16", scaled_as="float32")
    shardings = jax.tree.map(lambda leaf: columns if leaf.ndim == 2 else everywhere, target)
    state = restore(folder / "float32", jax.tree.map(lambda leaf, s: leaf.update(sharding=s), target, shardings))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    assert {shard.data.shape for shard in state[0].body.kernel[...].addressable_shards} == {(4, 2)}
    assert_cast(state, states["float32"])


@pytest.mark.slow
def test_the_policy_of_a_model_is_saved_beside_its_state_and_read_back(tmp_path):
    policy = jmp.PolicyMap({"head": "float32", nnx.BatchNorm: "p=f32,c=f32,o=bf16"}, "bfloat16")
    model = nnx.eval_shape(lambda: drawn(policy))
    state = filled(nnx.state(model))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        config = jmp.policy_of(model).get_config()
        args = ocp.args.Composite(policy=ocp.args.JsonSave(config), state=ocp.args.StandardSave(state))
        checkpointer.save(tmp_path / "0", args)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(tmp_path / "0", ocp.args.Composite(policy=ocp.args.JsonRestore()))
        found = jmp.get_policy(read.policy)
        graph, target = nnx.split(nnx.eval_shape(lambda: drawn(found)))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        model = nnx.merge(graph, checkpointer.restore(tmp_path / "0", args).state)
    assert jmp.policy_of(model) is policy
    assert dtypes(nnx.state(model)) == dtypes(state)
    assert_cast(nnx.state(model), state)
