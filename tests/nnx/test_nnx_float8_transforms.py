"""Float8 state under the transforms of nnx and JAX: combined by max, for each layer its own, and as without them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from float8_nnx import DELAYED, SCALE, Net, X, assert_same, gradients, linear, mean_square, state_of, waves
from jax.sharding import AxisType, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp

BATCHES = jnp.stack([X, 3 * X])
AMAX = "_overwrite_with_gradient/{}_amax_history"


def policied(module=None):
    return jmp.with_policy(linear() if module is None else module, DELAYED)


def of_stack(function):
    """What it makes of three layers in one, whose kernels have other magnitudes."""
    graphdef, state = nnx.split(function(linear()))
    factors = {"kernel": jnp.float32([1, 2, 4])}
    scaled = lambda path, leaf: jnp.einsum("s,...->s...", factors.get(path[0].key, jnp.ones(3)), leaf)
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(scaled, state))


def stacked(attach_first):
    """Three layers in one, with a policy before they were put together, or after."""
    return of_stack(policied) if attach_first else policied(of_stack(lambda layer: layer))


def layer(stack, i):
    graphdef, state = nnx.split(stack)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[i], state))


def forward(layer, x):
    return jnp.tanh(layer(x)).astype(x.dtype)


def scanned(layers, step=forward):
    return mean_square(lambda x: nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x))


def one_by_one(layers):
    x = X
    for one in layers:
        x = forward(one, x)
    return mean_square(lambda _: x)


@pytest.mark.exhaustive
def test_layers_of_a_scan_have_a_state_each_with_and_without_remat():
    layers = [layer(stacked(True), i) for i in range(3)]
    grads = nnx.jit(jmp.nnx.grad(lambda *layers: one_by_one(layers), argnums=(0, 1, 2), loss_scale=SCALE))(*layers)
    expected = [state_of(grad) for grad in grads]
    assert len({float(states[AMAX.format("kernel")][0]) for states in expected}) == 3
    found = nnx.jit(jmp.nnx.grad(scanned, loss_scale=SCALE))(stacked(True))
    rematerialized = jmp.nnx.grad(lambda layers: scanned(layers, nnx.remat(forward)), loss_scale=SCALE)
    for grads in (found, nnx.jit(rematerialized)(stacked(False))):
        for name, states in state_of(grads).items():
            np.testing.assert_array_equal(states, np.stack([one[name] for one in expected]), err_msg=name)


@pytest.mark.slow
def test_members_of_an_ensemble_have_a_state_each():
    members = lambda stack: mean_square(lambda x: nnx.vmap(lambda one, x: one(x), in_axes=(0, None))(stack, x))
    states = state_of(nnx.jit(jmp.nnx.grad(members, loss_scale=SCALE))(stacked(False)))
    assert states[AMAX.format("kernel")].shape == (3, 4)
    largest = np.asarray(jnp.max(jnp.abs(stacked(False).kernel[...]), (1, 2)).astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(states[AMAX.format("kernel")][:, 0], largest)
    assert (np.diff(states[AMAX.format("output_grad")][:, 0]) > 0).all()


def largest_of(x):
    return float(jnp.max(jnp.abs(x)).astype(jnp.bfloat16))


REUSED = {  # losses in which one layer is called more than once, with the inputs it sees
    "loop": lambda model: mean_square(lambda x: model(x) + model(3 * x)),
    "scan": lambda model: mean_square(lambda xs: nnx.scan(call, in_axes=(None, 0), out_axes=0)(model, xs), BATCHES),
    "vmap": lambda model: mean_square(lambda xs: nnx.vmap(call, in_axes=(None, 0))(model, xs), BATCHES),
    "remat": lambda model: mean_square(lambda x: nnx.remat(call)(model, x) + nnx.remat(call)(model, 3 * x)),
    "jit": lambda model: mean_square(lambda x: nnx.jit(call)(model, x) + nnx.jit(call)(model, 3 * x)),
}


def call(model, x):
    return model(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", REUSED)
def test_calls_of_one_layer_leave_the_largest_magnitude_and_not_the_sum_or_the_last(name):
    states = state_of(nnx.jit(jmp.nnx.grad(REUSED[name], loss_scale=SCALE))(policied()))
    np.testing.assert_array_equal(states[AMAX.format("input")], [largest_of(3 * X), 0, 0, 0])
    np.testing.assert_array_equal(states[AMAX.format("kernel")], [largest_of(linear().kernel[...]), 0, 0, 0])
    np.testing.assert_array_equal(states["_overwrite_with_gradient/kernel_scale"], [1])


@pytest.mark.slow
def test_a_layer_in_the_branch_not_taken_keeps_its_state():
    model = policied(nnx.Sequential(linear(), linear()))
    optimizer = jmp.nnx.Optimizer(model, optax.set_to_zero(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, which):
        branches = [lambda model, x, i=i: model.layers[i](x) for i in range(2)]
        loss_fn = lambda model: mean_square(lambda x: nnx.cond(which, *branches, model, x))
        optimizer.update(model, jmp.nnx.grad(loss_fn, loss_scale=SCALE)(model))

    before = state_of(model)
    step(model, optimizer, True)
    between = state_of(model)
    step(model, optimizer, False)
    after = state_of(model)
    for name in before:
        was_changed = [(between[name] != before[name]).any(), (after[name] != between[name]).any()]
        ran_first = name.startswith("layers/0")
        assert was_changed == [ran_first, not ran_first] or (was_changed == [False, False] and "scale" in name)


@pytest.mark.slow
def test_several_models_and_auxiliary_data_are_differentiated_together():
    together = lambda first, second: (mean_square(lambda x: second(nnx.relu(first(x)))), 1)
    first, second = policied(linear(16, 32)), policied(linear(32, 16))
    differentiate = jmp.nnx.value_and_grad(together, (0, 1), has_aux=True, loss_scale=SCALE)
    (_, aux), grads = nnx.jit(differentiate)(first, second)
    assert aux == 1
    expected = state_of(gradients(policied(Net())))
    assert_same(state_of(nnx.State({"hidden": grads[0], "head": grads[1]})), expected)


def of_states(differentiate, **options):
    """Gradients by a function of the state of a model, which is merged inside."""

    def gradients(model):
        graphdef, state = nnx.split(model)
        return differentiate(lambda state: mean_square(nnx.merge(graphdef, state)), loss_scale=SCALE, **options)(state)

    return gradients


def of_numbers(model):
    state = nnx.state(model)

    def loss_fn(numbers):
        nnx.replace_by_pure_dict(state, numbers)
        return mean_square(nnx.merge(nnx.graphdef(model), state))

    grads = jmp.grad(loss_fn, loss_scale=SCALE)(nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, grads)
    return state


WAYS = {
    "filter": jmp.nnx.grad(mean_square, nnx.DiffState(0, nnx.Any(nnx.Param, jmp.nnx.Float8State)), loss_scale=SCALE),
    "graph=False": jmp.nnx.grad(mean_square, graph=False, loss_scale=SCALE),
    "graph_updates=False": jmp.nnx.grad(mean_square, graph_updates=False, loss_scale=SCALE),
    "module as a tree": jmp.grad(mean_square, loss_scale=SCALE),
    "state": of_states(jmp.grad),
    "state, by nnx": of_states(jmp.nnx.grad),
    "state, by nnx with graph=False": of_states(jmp.nnx.grad, graph=False),
    "numbers": of_numbers,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WAYS)
def test_all_ways_to_differentiate_are_one_program(name):
    graphdef, state = nnx.split(policied(Net()))

    def program(differentiate):
        def of_state(state):
            grads = differentiate(nnx.merge(graphdef, state, copy=True))
            return [nnx.to_pure_dict(nnx.state(grads, kind)) for kind in (nnx.Param, jmp.nnx.Float8State)]

        return jax.jit(of_state).lower(state).as_text()

    assert program(WAYS[name]) == program(jmp.nnx.grad(mean_square, loss_scale=SCALE))


@pytest.mark.parametrize(
    ("differentiate", "error"),
    [
        (lambda: nnx.grad(mean_square), "float8 state that scales it is not"),
        (lambda: jmp.nnx.grad(mean_square, nnx.DiffState(0, nnx.Param), loss_scale=SCALE), "that scales it is not"),
        (
            lambda: nnx.grad(mean_square, argnums=nnx.DiffState(0, nnx.Any(nnx.Param, jmp.nnx.Float8State))),
            "differentiated by JAX or Flax alone: several uses of it would be added",
        ),
    ],
    ids=["gradients of Flax", "a filter without the state", "gradients of Flax by the state too"],
)
def test_float8_with_half_of_a_step_in_nnx_is_an_error(differentiate, error):
    with pytest.raises(ValueError, match=rf"^The weight of the Linear of shape .*{error}.*jmp\.nnx\.value_and_grad\("):
        nnx.eval_shape(differentiate(), policied())


def test_an_optimizer_of_flax_as_loss_scale_of_a_float8_model_is_an_error():
    model, tx = policied(), jmp.optim.skip_nonfinite(optax.sgd(0.1))
    grads = lambda model, optimizer: jmp.nnx.grad(mean_square, loss_scale=optimizer)(model)
    with pytest.raises(ValueError, match=r"/input_amax_history', which a flax\.nnx\.Optimizer does not update"):
        nnx.eval_shape(grads, model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    # The update of `skip_nonfinite` overwrites state that it sees.
    wrt = nnx.Any(nnx.Param, jmp.nnx.Float8State)
    assert state_of(nnx.eval_shape(grads, model, nnx.Optimizer(model, tx, wrt=wrt)))
    assert state_of(nnx.eval_shape(grads, model, jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)))


@pytest.mark.exhaustive
def test_devices_agree_on_the_largest_magnitude_of_the_batch():
    graphdef, state = nnx.split(policied(Net()))
    batch = jnp.concatenate([X, 2 * X, 3 * X, X])

    def on_devices(state, x):
        loss_fn = lambda model: jax.lax.pmean(mean_square(model, x), "devices")
        return jmp.nnx.grad(loss_fn, loss_scale=SCALE)(nnx.merge(graphdef, state))

    with jax.set_mesh(make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))):
        split = PartitionSpec("devices")
        found = jax.jit(jax.shard_map(on_devices, in_specs=(PartitionSpec(), split), out_specs=PartitionSpec()))
        states = state_of(found(state, batch))
    assert_same(states, state_of(nnx.jit(jmp.nnx.grad(mean_square, loss_scale=SCALE))(policied(Net()), batch)))


BRIDGED = {
    "policy inside": lambda module: nnx.bridge.ToNNX(jmp.with_policy(module, DELAYED), rngs=nnx.Rngs(0)),
    "policy outside": lambda module: policied(nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BRIDGED)
def test_a_linen_model_in_an_nnx_one_learns_its_scales(name):
    model = nnx.bridge.lazy_init(BRIDGED[name](nn.Dense(16, kernel_init=waves)), X)
    optimizer = jmp.nnx.Optimizer(model, jmp.optim.loss_scaled(optax.set_to_zero(), SCALE), wrt=nnx.Param)
    optimizer.update(model, nnx.jit(jmp.nnx.grad(mean_square, loss_scale=SCALE))(model))
    expected = state_of(gradients(policied()))
    assert_same({f"_overwrite_with_gradient/{name}": leaf for name, leaf in state_of(model).items()}, expected)


@pytest.mark.slow
def test_an_nnx_model_in_a_linen_one_learns_its_scales():
    model = nnx.bridge.to_linen(jmp.with_policy(nnx.Linear, DELAYED), 16, 16)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert variables.keys() == {"params", "_overwrite_with_gradient"}
    numbers = {"kernel": linear().kernel[...], "bias": jnp.zeros(16)}
    state = {"_overwrite_with_gradient": jmp.quant.float8_state("float8/4(min_size=0)")}
    loss_fn = lambda variables: mean_square(lambda x: model.apply(variables, x))
    of_variables = jax.jit(jmp.grad(loss_fn, loss_scale=SCALE))
    grads = of_variables({"params": numbers, "_overwrite_with_gradient": state})
    expected = state_of(gradients(policied()))
    found = grads["_overwrite_with_gradient"]["_overwrite_with_gradient"]
    assert_same({f"_overwrite_with_gradient/{name}": np.asarray(leaf) for name, leaf in found.items()}, expected)
