"""Checkpoints of models and of their training restore under any other policy, in both APIs."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_registry import STORED, assert_cast, filled
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp

pytestmark = pytest.mark.slow

PAIRS = [
    ("float32", "bfloat16"), ("mixed_bfloat16", "float16"), ("bfloat16", "map"), ("map", "mixed_bfloat16"),
    ("float16", "float32"),
]  # fmt: skip
API_PAIRS = [(api, *pair) for pair in PAIRS for api in ("linen", "nnx")]
KEPT = jmp.PolicyMap({"head": "float32", nn.BatchNorm: "p=f32,c=f32,o=bf16"}, "bfloat16")
MAPPED = jmp.PolicyMap({"head": "float32", nnx.BatchNorm: "p=f32,c=f32,o=bf16"}, "bfloat16")


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="body")(x)
        x = nn.BatchNorm(use_running_average=True, name="norm")(x)
        return nn.Dense(4, name="head")(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.body, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.norm(self.body(x))))


class State(jmp.linen.TrainState):
    batch_stats: dict


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache  # a train state holds its optimizer, and is of the same structure only with the same one
def optimizer(name):
    return jmp.optim.loss_scaled(optax.adam(1e-3), STORED[name].policy.loss_scale())


def make_variables(policy):
    return jmp.with_policy(LinenNet(), policy).init(jax.random.key(0), jnp.ones((2, 4)))


def drawn(policy):
    """A model of nnx whose parameters are drawn under the policy."""
    return jmp.with_policy(NnxNet, policy)(nnx.Rngs(0))


def given(policy):
    """A model that was there before the policy."""
    return jmp.with_policy(jmp.nnx.cast_params(NnxNet(nnx.Rngs(0)), policy), policy)


@functools.cache
def abstract_training(api, name, scaled_as):
    """The graph and the state of a training in the dtypes of one policy, with the kind of loss scale of another."""
    if api == "linen":
        make = lambda: State.create(apply_fn=None, tx=optimizer(scaled_as), **make_variables(STORED[name].policy))
        return None, jax.eval_shape(make)

    def training():
        model = drawn(STORED[name].policy)
        return model, jmp.nnx.Optimizer(model, optimizer(scaled_as), wrt=nnx.Param)

    return nnx.split(nnx.eval_shape(training))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state saved under each policy, and the folder that they lie in."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with ocp.StandardCheckpointer() as checkpointer, jax.numpy_dtype_promotion("standard"):
        names = [(api, name) for api in ("linen", "nnx") for name in STORED]
        states = {(api, name): filled(abstract_training(api, name, scaled_as=name)[1]) for api, name in names}
        for (api, name), state in states.items():
            checkpointer.save(folder / f"{api} {name}", state)
    return folder, states


def restore(path, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def dtypes(*trees):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(trees)}


def assert_stored_as(trees, stored):
    for params in trees:
        assert dtypes(params["body"], params["norm"]) == {stored.body}
        assert dtypes(params["head"]) == {stored.head}


def assert_training_stored_as(graph, state, stored):
    if graph is None:
        params, stats, scaled = state.params, state.batch_stats, state.opt_state
    else:
        model, holder = nnx.merge(graph, state)
        assert jmp.policy_of(model) is stored.policy
        params, stats, scaled = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat), holder.opt_state
    moments = scaled.inner_state[0]
    assert_stored_as((params, moments.mu, moments.nu), stored)
    assert dtypes(stats) == {"float32"}
    assert dtypes(scaled.loss_scale) <= {"float32", "int32"}


@pytest.mark.parametrize(("api", "saving", "restoring"), API_PAIRS)
def test_training_saved_under_one_policy_is_restored_in_the_dtypes_of_another(saved, api, saving, restoring):
    folder, states = saved
    graph, target = abstract_training(api, restoring, scaled_as=saving)
    restored = restore(folder / f"{api} {saving}", target)
    assert_training_stored_as(graph, restored, STORED[restoring])
    assert_cast(restored, states[api, saving])


@pytest.mark.parametrize(("saving", "restoring"), PAIRS)
def test_bytes_of_flax_serialization_are_cast_to_the_dtypes_of_another_policy(saved, saving, restoring):
    state, target = saved[1]["linen", saving], abstract_training("linen", restoring, scaled_as=saving)[1]
    restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(state))  # in the old dtypes
    restored = optax.tree.cast_like(jax.device_put(restored), target)
    assert_training_stored_as(None, restored, STORED[restoring])
    assert_cast(restored, state)


@pytest.mark.parametrize("restoring", ["mixed_bfloat16", "float16"])
def test_parameters_restored_without_a_target_are_cast_to_the_param_dtype(saved, restoring):
    folder, states = saved
    params = STORED[restoring].policy.cast_to_param(restore(folder / "linen map")["params"])
    assert dtypes(params) == {STORED[restoring].body}
    assert_cast(params, states["linen", "map"].params)


@pytest.mark.parametrize("build", [drawn, given])
def test_a_model_without_a_policy_and_one_with_it_have_the_same_checkpoint(tmp_path, build):
    plain = filled(nnx.state(nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0)))))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", nnx.to_pure_dict(plain))
    target = nnx.state(nnx.eval_shape(lambda: build("bfloat16")))
    nnx.replace_by_pure_dict(target, restore(tmp_path / "0", nnx.to_pure_dict(target)))
    assert_stored_as([nnx.filter_state(target, nnx.Param)], STORED["bfloat16"])
    assert_cast(nnx.to_pure_dict(target), nnx.to_pure_dict(plain))


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize(("saving", "restoring"), [("float32", "float16"), ("float16", "bfloat16")])
def test_training_goes_on_under_a_policy_with_another_kind_of_loss_scale(saved, api, saving, restoring):
    """The target has the kind that was saved; the new policy's then takes its place."""
    graph, target = abstract_training(api, restoring, scaled_as=saving)
    state, new_scale = restore(saved[0] / f"{api} {saving}", target), STORED[restoring].policy.loss_scale()
    full = lambda params, value: jax.tree.map(lambda leaf: jnp.full_like(leaf, value), params)
    if api == "linen":
        state = state.replace(opt_state=state.opt_state._replace(loss_scale=new_scale))
        step = jax.jit(lambda state, value: state.apply_gradients(grads=full(state.params, value)))
        good = step(state, 1.0)
        bad = step(good, jnp.inf)
        assert dtypes(bad) == dtypes(state)
        steps, after = [int(good.step), int(bad.step)], bad
    else:
        model, after = nnx.merge(graph, state)
        after.opt_state = after.opt_state._replace(loss_scale=jax.tree.map(nnx.OptArray, new_scale))
        step = nnx.jit(lambda model, holder, value: holder.update(model, full(nnx.state(model, nnx.Param), value)))
        steps = []
        for value in (1.0, jnp.inf):
            step(model, after, value)
            steps.append(int(after.step[...]))
    assert steps == [2, 2]  # one was saved, one taken and one skipped
    assert str(jmp.get_loss_scale(after)) == str(new_scale.adjust(jnp.array(False)))


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_shards_are_restored_in_another_dtype_onto_the_devices_of_the_target(saved, api):
    folder, states = saved
    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    columns, everywhere = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in [(None, "devices"), ()])
    target = abstract_training(api, "bfloat16", scaled_as="float32")[1]
    shardings = jax.tree.map(lambda leaf: columns if leaf.ndim == 2 else everywhere, target)
    state = restore(folder / f"{api} float32", jax.tree.map(lambda leaf, s: leaf.update(sharding=s), target, shardings))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    kernel = next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4, 8))
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 2)}
    assert kernel.dtype == jnp.bfloat16
    assert_cast(state, states[api, "float32"])


@pytest.mark.parametrize(
    ("api", "policy"),
    [("linen", jmp.Policy("float32", "bfloat16", None, precision="highest")), ("linen", KEPT), ("nnx", MAPPED)],
)
def test_the_policy_of_a_model_is_saved_beside_its_variables_and_read_back(tmp_path, api, policy):
    if api == "linen":
        make_target = lambda policy: jax.eval_shape(lambda: make_variables(policy))
        model = jmp.with_policy(LinenNet(), policy)
    else:
        make_target = lambda policy: nnx.state(nnx.eval_shape(lambda: drawn(policy)))
        model = nnx.eval_shape(lambda: drawn(policy))
    state = filled(make_target(policy))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        config = jmp.policy_of(model).get_config()
        args = ocp.args.Composite(policy=ocp.args.JsonSave(config), state=ocp.args.StandardSave(state))
        checkpointer.save(tmp_path / "0", args)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        read = checkpointer.restore(tmp_path / "0", ocp.args.Composite(policy=ocp.args.JsonRestore()))
        found = jmp.get_policy(read.policy)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(make_target(found)))
        restored = checkpointer.restore(tmp_path / "0", args).state
    assert found == policy
    assert dtypes(restored) == dtypes(state)
    assert_cast(restored, state)
