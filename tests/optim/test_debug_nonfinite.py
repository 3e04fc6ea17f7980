"""With origin, the state of `loss_scaled` says which step was skipped last, and why; all else stays as it is."""

import dataclasses
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optimizer_registry import WAYS, bits, by_step, grads_of, params_of, types

import jmp_policy as jmp
from jmp_policy.numerics import NonfiniteOrigin
from jmp_policy.numerics._nonfinite._origin import FOUND, INFINITE, NAN
from jmp_policy.numerics._nonfinite._remedies import Words, write_words
from jmp_policy.optim import LossScaledState, NonfiniteOriginState

INNER = optax.adamw(1e-2)
SCALE = jmp.DynamicLossScale(2.0**10)
PLAIN = jmp.optim.loss_scaled(INNER, SCALE)
CARRYING = jmp.optim.loss_scaled(INNER, SCALE, debug_nonfinite=True)


def origin_of(path, direction="backward", kind=INFINITE, primitive="mul", operands=()):
    """What `first_nonfinite` finds of a product in the module at `path`."""
    words = Words(primitive, "/a/train.py:41", "loss", "x * 3000", path, direction, "float16")
    empty = NonfiniteOrigin.empty()
    ranges = empty.ranges
    for index, pair in enumerate(operands):
        ranges = ranges.at[0, index].set(jnp.asarray(pair, jnp.float32).view(jnp.int32))
    texts, kinds = empty.texts.at[0].set(write_words(words)), empty.kinds.at[0].set(kind)
    return empty._replace(status=jnp.int32(FOUND), texts=texts, kinds=kinds, ranges=ranges)


def take_steps(tx, bad, way=by_step, found=None):
    """Runs a jitted step for each number that is to stand among the gradients; `None` is a good one."""
    step = jax.jit(lambda grads, state, params, origin: way(tx, grads, state, params, origin=origin))
    params, state = params_of(), tx.init(params_of())
    for seed, number in enumerate(bad):
        one = NonfiniteOrigin.empty() if number is None else found or origin_of(f"block_{seed + 1}")
        params, state = step(grads_of(seed, number), state, params, one)
    return params, state


INF = float("inf")
STEPS = (None, INF, None, INF, None)


@pytest.mark.slow
def test_without_origins_a_state_has_the_structure_that_it_always_had():
    state = PLAIN.init(params_of())
    assert type(state) is LossScaledState
    names = ("inner_state", "loss_scale", "grads_finite", "skipped_steps", "consecutive_skips")
    assert state._fields == names == NonfiniteOriginState._fields[:5]
    assert isinstance(CARRYING.init(params_of()), LossScaledState)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_last_skipped_step_is_known_and_a_good_one_changes_nothing_of_it(way):
    _, state = take_steps(CARRYING, STEPS, WAYS[way])
    assert (int(state.steps), int(state.nonfinite_step), int(state.skipped_steps)) == (5, 4, 2)
    assert state.origin.path == "block_4"
    assert bits(state.origin) == bits(origin_of("block_4"))
    assert type(state) is NonfiniteOriginState


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_all_else_of_the_state_have_the_bits_of_a_run_without(way):
    params, state = take_steps(CARRYING, STEPS, WAYS[way])
    step = jax.jit(lambda *args: WAYS[way](PLAIN, *args))
    expected, plain = params_of(), PLAIN.init(params_of())
    for seed, number in enumerate(STEPS):
        expected, plain = step(grads_of(seed, number), plain, expected)
    assert bits((params, state[:5])) == bits((expected, tuple(plain)))


def test_a_step_costs_a_select_and_not_one_more_pass_over_the_parameters():
    def cost(tx, **extra):
        params = {"w": jnp.ones((256, 256))}
        step = jax.jit(lambda grads, state, params: by_step(tx, grads, state, params, **extra))
        return step.lower(params, tx.init(params), params).compile().cost_analysis()["bytes accessed"]

    carried = sum(x.nbytes for x in jax.tree.leaves(NonfiniteOrigin.empty()))
    assert cost(CARRYING, origin=NonfiniteOrigin.empty()) <= cost(PLAIN) + 8 * carried
    assert carried < 2048


@pytest.mark.exhaustive
def test_a_state_goes_through_scan_vmap_and_donation():
    params, found = {"w": jnp.ones(2)}, origin_of("block")
    batches = {"w": jnp.array([[1.0, 1.0], [INF, 1.0], [1.0, 1.0]])}

    def run(params, state):
        def body(carry, grads):
            return by_step(CARRYING, grads, *carry[::-1], origin=found), None

        return jax.lax.scan(body, (params, state), batches)[0]

    _, state = jax.jit(run, donate_argnums=(0, 1))({"w": jnp.ones(2)}, CARRYING.init(params))
    assert (int(state.steps), int(state.nonfinite_step), state.origin.path) == (3, 2, "block")
    many = jax.vmap(lambda grads: by_step(CARRYING, grads, CARRYING.init(params), params, origin=found))
    _, states = many(batches)
    assert states.nonfinite_step.tolist() == [0, 1, 0]
    assert jax.tree.map(lambda x: x[1], states).origin.path == "block"


@pytest.mark.slow
def test_the_second_step_compiles_nothing_again():
    traces = []

    @jax.jit
    def step(grads, state, params):
        traces.append(1)
        return by_step(CARRYING, grads, state, params, origin=NonfiniteOrigin.empty())

    params, state = params_of(), CARRYING.init(params_of())
    for seed in range(3):
        params, state = step(grads_of(seed), state, params)
    assert len(traces) == 1
    assert types(state) == types(CARRYING.init(params_of()))


@pytest.mark.sample(1)
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("bad_device", [0, 2])
def test_of_several_devices_the_one_that_found_an_origin_decides(bad_device, averaged):
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), SCALE, axis_name="d", debug_nonfinite=True)
    mesh, found = meshes.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,)), origin_of("block")

    def step(params, state, grads):
        bad = jax.lax.axis_index("d") == bad_device
        one = jax.tree.map(lambda a, b: jnp.where(bad, a, b), found, NonfiniteOrigin.empty())
        grads = {"w": jnp.where(bad, INF, grads)}
        return by_step(tx, jax.lax.pmean(grads, "d") if averaged else grads, state, params, origin=one)

    params, of_params = {"w": jnp.ones(4)}, PartitionSpec() if averaged else PartitionSpec("d")
    specs = of_params, PartitionSpec()
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(*specs, of_params), out_specs=specs)
    _, state = jax.jit(sharded)(params, tx.init(params), jnp.ones(4))
    assert (int(state.nonfinite_step), state.origin.path, state.origin.kind) == (1, "block", "inf")


@pytest.mark.slow
def test_devices_of_jit_share_one_origin():
    mesh = meshes.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    params = jax.device_put({"w": jnp.ones(8)}, sharding)
    step = jax.jit(lambda grads, state, params, one: by_step(CARRYING, grads, state, params, origin=one))
    grads = jax.device_put({"w": jnp.ones(8).at[5].set(INF)}, sharding)
    params, state = step(grads, CARRYING.init(params), params, origin_of("block"))
    assert (int(state.nonfinite_step), state.origin.path) == (1, "block")
    assert params["w"].sharding == sharding


@pytest.mark.slow
def test_microbatches_are_counted():
    tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), SCALE, debug_nonfinite=True)
    _, state = take_steps(tx, STEPS)
    assert (int(state.nonfinite_step), state.origin.path) == (4, "block_4")


def head_loss(params, x):
    """A loss that is infinite where `x` is zero, and auxiliary data that always are."""
    with jax.named_scope("head"):
        return jnp.sum((params["w"].astype(jnp.float16) / x).astype(jnp.float32)), x / 0


INJECTED = optax.inject_hyperparams(lambda rate: jmp.optim.loss_scaled(optax.sgd(rate), SCALE, debug_nonfinite=True))


@pytest.mark.slow
@pytest.mark.parametrize("tx", [CARRYING, INJECTED(0.1)], ids=["outermost", "injected"])
def test_minimize_finds_the_origin_itself_in_loss_and_gradients(tx):
    params = {"w": jnp.ones(2)}
    state, train_step = tx.init(params), jax.jit(jmp.optim.minimize(head_loss, tx, has_aux=True))
    for x in ([1.0, 2.0], [1.0, 0.0], [1.0, 2.0]):
        params, state, _, _ = train_step(params, state, jnp.float16(x))
    skip = jmp.optim.last_skip(state)
    assert (skip.step, skip.origin.path, skip.origin.primitive) == (2, "head", "div")
    assert skip.origin.source.endswith(f"test_debug_nonfinite.py:{LINE}")
    assert (skip.origin.direction, skip.origin.dtype) == ("forward", "float16")


LINE = head_loss.__code__.co_firstlineno + 3


@pytest.mark.exhaustive
def test_first_nonfinite_looks_at_the_results_that_it_is_told_to():
    grad_fn = jax.value_and_grad(head_loss, has_aux=True)
    params, x = {"w": jnp.ones(2)}, jnp.float16([1.0, 2.0])
    (_, grads), none = jax.jit(jmp.numerics.first_nonfinite(grad_fn, of=lambda out: out[1]))(params, x)
    _, some = jax.jit(jmp.numerics.first_nonfinite(grad_fn))(params, x)
    assert (none.found, some.found, grads["w"].tolist()) == (False, True, [1.0, 0.5])


SAVERS = {
    "pickle": lambda fresh, state: pickle.loads(pickle.dumps(state)),
    "flax": lambda fresh, state: flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state)),
    "replace": lambda fresh, state: fresh._replace(**state._asdict()),
}


@pytest.mark.slow
@pytest.mark.parametrize("saver", SAVERS)
def test_a_saved_state_comes_back(saver):
    _, state = take_steps(CARRYING, STEPS)
    restored = SAVERS[saver](CARRYING.init(params_of()), state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert float(restored.loss_scale.loss_scale) == float(state.loss_scale.loss_scale)
    assert str(jmp.optim.last_skip(restored)).startswith("step 4 skipped: inf in `block_4`")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of orbax
def test_orbax_brings_it_back(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    _, state = take_steps(CARRYING, STEPS)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", CARRYING.init(params_of()))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


@pytest.mark.slow
def test_a_state_is_converted_from_without_to_with_and_back():
    _, plain = take_steps(CARRYING, STEPS)
    plain = LossScaledState(*plain[:5])
    carrying = jmp.convert_state(plain, CARRYING.init(params_of()))
    assert (int(carrying.skipped_steps), int(carrying.nonfinite_step), carrying.origin.found) == (2, 0, False)
    abstract = jmp.convert_state(plain, jax.eval_shape(CARRYING.init, params_of()))
    assert bits(abstract.origin) == bits(NonfiniteOrigin.empty())
    assert bits(jmp.convert_state(carrying, PLAIN.init(params_of()))) == bits(plain)


def test_metrics_have_the_number_of_the_step():
    _, state = take_steps(CARRYING, STEPS)
    assert jax.device_get(jmp.metrics(state))["nonfinite_step"] == 4
    assert jmp.metrics(state)["nonfinite_step"].dtype == np.int32
    assert "nonfinite_step" not in jmp.metrics(PLAIN.init(params_of()))


def test_last_skip_names_the_step_and_its_origin():
    assert jmp.optim.last_skip(CARRYING.init(params_of())) is None
    _, state = take_steps(CARRYING, STEPS)
    skip = jmp.optim.last_skip({"opt_state": (state,)})
    line = "step 4 skipped: inf in `block_4`, train.py:41, `x * 3000`, backward"
    assert str(skip) == f"{line}; the loss scale was too high, which is normal at the start"
    assert str(dataclasses.replace(skip, is_search=False)) == line
    assert skip.describe().startswith("Step 4 was skipped. An infinity was made by mul (float16) in the backward pass")


def test_an_origin_that_is_not_in_the_gradient_is_sought_behind_it():
    _, state = take_steps(CARRYING, [INF], found=NonfiniteOrigin.empty())
    why = "everything that first_nonfinite saw was finite, so the gradients became infinite after it"
    assert str(jmp.optim.last_skip(state)) == f"step 1 skipped: {why}"
    assert jmp.optim.last_skip(state).describe() == f"Step 1 was skipped: {why}."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "scale", "is_search"),
    [
        (origin_of("block"), SCALE, True),
        (origin_of("block", "forward"), SCALE, False),
        (origin_of("block", kind=NAN), SCALE, False),
        (origin_of("block", primitive="div", operands=[(1, 1), (0, 2)]), SCALE, False),
        (origin_of("block", primitive="div", operands=[(1, 1), (1, 2)]), SCALE, True),
        (origin_of("block"), jmp.DynamicLossScale(2.0), False),
        (origin_of("block"), jmp.StaticLossScale(8.0), False),
        (NonfiniteOrigin.empty(), SCALE, False),
    ],
)
def test_an_infinity_of_the_backward_pass_is_part_of_the_search_for_a_scale(found, scale, is_search):
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), scale, debug_nonfinite=True)
    _, state = take_steps(tx, [INF], found=found)
    assert jmp.optim.last_skip(state).is_search is is_search


def test_check_names_the_origin_and_what_helps_as_soon_as_no_smaller_scale_can():
    forward = origin_of("block", "forward")
    _, state = take_steps(CARRYING, [INF] * 3, found=forward)
    message = (
        r"the last 3 steps were skipped \(3 in all\).*The loss scale is 128\.0, which is not to blame, so the model.*"
        r"Step 3 was skipped\. An infinity was made by mul \(float16\) in the forward pass, `block`, /a/train\.py:41 "
        r"\(loss\): `x \* 3000`\..*PolicyMap"
    )
    with pytest.raises(FloatingPointError, match=message):
        jmp.optim.raise_if_stuck(state, patience=3)
    jmp.optim.raise_if_stuck(state, patience=4)
    _, searching = take_steps(CARRYING, [INF] * 3)
    jmp.optim.raise_if_stuck(searching, patience=3)


def test_last_skip_wants_a_state_with_origins():
    with pytest.raises(ValueError, match=r"^LossScaledState does not record why .*loss_scaled\(.*debug_nonfinite=True"):
        jmp.optim.last_skip(PLAIN.init(params_of()))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_its_origin_is_an_error(way):
    params = params_of()
    with pytest.raises(TypeError, match=r"records the origin .*, and got none\. Compose jmp_policy\.numerics"):
        WAYS[way](CARRYING, grads_of(0), CARRYING.init(params), params)
    with pytest.raises(TypeError, match=r"and got .*5.*first_nonfinite\(grad_fn\)\(params, batch\)"):
        WAYS[way](CARRYING, grads_of(0), CARRYING.init(params), params, origin=5)


@pytest.mark.parametrize("tx", [PLAIN, optax.adamw(1e-2)])
def test_an_origin_that_nothing_records_is_an_error(tx):
    params = params_of()
    with pytest.raises(ValueError, match=r"but its state, a (LossScaledState|tuple), does not record it\. .*te=True"):
        by_step(tx, grads_of(0), tx.init(params), params, origin=NonfiniteOrigin.empty())


@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_was_made_without_is_to_be_converted(way):
    params = params_of()
    with pytest.raises(TypeError, match=r"was made without\. Convert it: opt_state = jmp_policy\.convert_state\(opt"):
        WAYS[way](CARRYING, grads_of(0), PLAIN.init(params), params, origin=NonfiniteOrigin.empty())


@pytest.mark.slow
def test_an_extra_argument_of_that_name_that_is_none_reaches_the_optimizer():
    seen = []

    def update(updates, state, params=None, *, origin):
        seen.append(origin)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = jmp.optim.skip_nonfinite(inner)
    params = params_of()
    by_step(tx, grads_of(0), tx.init(params), params, origin="of the data")
    assert set(seen) == {"of the data"}
