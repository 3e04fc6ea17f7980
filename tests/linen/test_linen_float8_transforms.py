"""The state of float8 layers in linen's transforms: of each use the largest magnitude, of each copy its own."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from float8_linen import DELAYED, OVERWRITE, X
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp

POLICY = "float8/4(min_size=0)_from_float32"  # whose sums do not depend on what XLA fuses
SHARED, STACKED = {"params": None, OVERWRITE: None}, {"params": 0, OVERWRITE: 0}
UNSCALED = jmp.StaticLossScale(1.0)


def call(layer, x):
    return nn.relu(layer(x))


def both(layer, x):
    return call(layer, call(layer, x))


def _scan(layer, x):
    step = lambda layer, x, _: (call(layer, x), None)
    shared = {"variable_broadcast": ["params", OVERWRITE], "split_rngs": {"params": False}, "length": 2}
    return nn.scan(step, **shared)(layer, x, None)[0]


class Net(nn.Module):
    """A layer that is used twice, or through a transform."""

    use: Any = both
    lift: Any = lambda kind: kind

    @nn.compact
    def __call__(self, x):
        layer = self.lift(nn.Dense)(16, name="layer")
        return (both if self.is_initializing() else self.use)(layer, x)


class Unrolled(nn.Module):
    """A layer for each use."""

    @nn.compact
    def __call__(self, x):
        return call(nn.Dense(16, name="second"), call(nn.Dense(16, name="first"), x))


class Stacked(nn.Module):
    """The same, scanned over."""

    axes: Any

    @nn.compact
    def __call__(self, x):
        step = lambda layer, x, _: (call(layer, x), None)
        over_layers = nn.scan(step, variable_axes=self.axes, split_rngs={"params": True}, length=2)
        return over_layers(nn.Dense(16, name="layer"), x, None)[0]


class Mapped(nn.Module):
    """A layer, or one for each of two batches."""

    axes: Any

    @nn.compact
    def __call__(self, x):
        own = self.axes["params"] == 0
        over_batches = nn.vmap(nn.Dense, variable_axes=self.axes, split_rngs={"params": own}, axis_size=2)
        return over_batches(16, name="layer")(x)


class Around(nn.Module):
    """A module without a policy around one that has one."""

    @nn.compact
    def __call__(self, x):
        return both(jmp.with_policy(nn.Dense(16, name="layer"), POLICY), x)


USES = {
    "no transform": Net(),
    "jit": Net(lift=nn.jit),
    "remat": Net(lift=nn.remat),
    "jit of a function": Net(nn.jit(both)),
    "remat of a function": Net(nn.remat(both)),
    "scan": Net(_scan),
    "scan of remat": Net(nn.remat(_scan)),
    "cond": Net(lambda layer, x: nn.cond(True, both, lambda layer, x: x, layer, x)),
    "switch": Net(lambda layer, x: nn.switch(1, [lambda layer, x: x, both], layer, x)),
}

DENSE = jax.jit(nn.Dense(16).init)(jax.random.key(0), X)["params"]
STATE = jmp.quant.float8_state("float8/4(min_size=0)")
VARIABLES = {"params": {"layer": DENSE}, OVERWRITE: {"layer": STATE}}


def _loss(module, variables, x):
    return jnp.sum(jnp.square(module.apply(variables, x)))


def _state(loss_fn, variables):
    return jmp.grad(loss_fn, loss_scale=UNSCALED)(variables)[OVERWRITE]


def _state_of(module, variables, x=X):
    return _state(functools.partial(_loss, jmp.with_policy(module, POLICY), x=x), variables)


def _stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


def assert_same(state, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state, expected)


@pytest.fixture(scope="module")
def states():
    """The state after one step, of all that is compared here: compiled at once."""
    of_two = {"params": {"first": DENSE, "second": DENSE}, OVERWRITE: {"first": STATE, "second": STATE}}
    own, batches = _stacked(VARIABLES), jnp.stack([X, 3 * X])
    shared = {**VARIABLES, "params": own["params"]}
    model = jmp.with_policy(Net(), POLICY)
    bound = lambda variables: jnp.sum(jnp.square(model.bind(variables)(X)))
    mutable = lambda variables: jnp.sum(jnp.square(model.apply(variables, X, mutable=True)[0]))
    two_calls = lambda variables: _loss(model, variables, X) + _loss(model, variables, 3 * X)

    def all_states():
        found = {name: _state_of(module, VARIABLES)["layer"] for name, module in USES.items()}
        found |= {"plain grad": jax.grad(functools.partial(_loss, model, x=X))(VARIABLES)[OVERWRITE]["layer"]}
        losses = {"bound": bound, "mutable": mutable, "two calls": two_calls}
        losses |= {"around": functools.partial(_loss, Around(), x=X)}
        found |= {name: _state(loss, VARIABLES)["layer"] for name, loss in losses.items()}
        found |= {"other call": _state_of(Net(), VARIABLES, 3 * X)["layer"]}
        found |= {"unrolled": _state_of(Unrolled(), of_two), "stacked": _state_of(Stacked(STACKED), own)["layer"]}
        shared_state = {**STACKED, OVERWRITE: None}
        mapped = [("own", STACKED, own), ("shared", SHARED, VARIABLES), ("shared state", shared_state, shared)]
        for name, axes, variables in mapped:
            found[name] = _state_of(Mapped(axes), variables, batches)["layer"]
        return found

    return jax.jit(all_states)()


def _max(*states):
    return jax.tree.map(lambda *leaves: np.max(leaves, axis=0), *states)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*USES, "plain grad", "bound", "mutable", "around"])
def test_state_of_a_layer_used_twice_is_the_maximum_over_its_uses(states, name):
    unrolled = states["unrolled"]
    assert_same(states[name], _max(unrolled["first"], unrolled["second"]))
    assert unrolled["first"]["input_amax_history"][0] == np.abs(X).max()


@pytest.mark.slow
def test_state_after_two_calls_of_the_model_in_one_loss_is_the_maximum(states):
    assert_same(states["two calls"], _max(states["no transform"], states["other call"]))


@pytest.mark.slow
def test_layers_that_are_scanned_over_have_a_state_each(states):
    unrolled = states["unrolled"]
    assert_same(states["stacked"], jax.tree.map(lambda *x: np.stack(x), unrolled["first"], unrolled["second"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "shared state"])
def test_layer_that_is_mapped_over_batches_has_one_state_or_one_each(states, name):
    own = states["own"]
    assert own["input_amax_history"][:, 0].tolist() == [np.abs(X).max(), np.abs(3 * X).max()]
    newest = {key: leaf.max(0) for key, leaf in own.items()}
    assert_same(states[name], newest)


@pytest.mark.slow
def test_branch_that_did_not_run_keeps_its_state():
    class Branches(nn.Module):
        @nn.compact
        def __call__(self, x):
            first, second = nn.Dense(16, name="first"), nn.Dense(16, name="second")
            if self.is_initializing():
                return first(x) + second(x)
            return nn.cond(x[0, 0] < 9, lambda a, b, x: a(x), lambda a, b, x: b(x), first, second, x)

    variables = {"params": dict.fromkeys(("first", "second"), DENSE)}
    variables[OVERWRITE] = dict.fromkeys(("first", "second"), jax.tree.map(lambda leaf: leaf + 0.5, STATE))
    model = jmp.with_policy(Branches(), POLICY)

    @jax.jit
    def step(variables):
        grads = jmp.grad(functools.partial(_loss, model, x=X), loss_scale=UNSCALED)(variables)
        return jmp.optim.step(optax.sgd(1.0), grads, optax.sgd(1.0).init(variables), variables)[0][OVERWRITE]

    state = step(variables)
    assert_same(state["second"], variables[OVERWRITE]["second"])
    assert state["first"]["input_amax_history"][0] == np.abs(X).max()


@pytest.mark.parametrize("module", [Stacked({"params": 0}), Mapped({"params": 0})])
def test_transform_that_does_not_hand_the_state_on_is_named(module):
    model = jmp.with_policy(module, DELAYED)
    x = X if isinstance(module, Stacked) else jnp.stack([X, X])
    message = (
        "The layer 'layer' scales by an amax history ('float8/4(min_size=0)') and finds none: its variables have no "
        "collection '_overwrite_with_gradient', or it is inside of a transform that does not pass it on. "
        "For example: variables = model.init(key, x) | {'params': params}; or nn.scan(Layer, variable_axes="
        "{'params': 0, '_overwrite_with_gradient': 0}, ...); or the policy 'float8(recipe=current)_from_mixed_bfloat16'"
        ", which has no state."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(lambda: model.apply(model.init(jax.random.key(0), x), x))


@pytest.mark.slow
def test_what_a_model_returns_of_its_state_is_float32():
    model = jmp.with_policy(Net(), POLICY)
    _, mutable = jax.eval_shape(functools.partial(model.apply, mutable=True), VARIABLES, X)
    _, initial = jax.eval_shape(model.init_with_output, jax.random.key(0), X)
    lazy = jax.eval_shape(lambda: model.lazy_init(jax.random.key(0), jax.ShapeDtypeStruct(X.shape, X.dtype)))
    expected = jax.eval_shape(lambda: VARIABLES)
    assert mutable == initial == lazy == expected


def test_what_a_model_returns_of_its_state_has_no_derivative():
    model = jmp.with_policy(Net(), POLICY)

    def pulled_back(variables):  # as Flax's tables count the operations of a backward pass
        out, pull_back = jax.vjp(functools.partial(model.apply, mutable=True), variables, X)
        return pull_back(out)[0]

    assert jax.eval_shape(pulled_back, VARIABLES) == jax.eval_shape(lambda: VARIABLES)


def test_tables_and_captures_of_flax_have_the_state_beside_the_parameters():
    model = jmp.with_policy(Net(), POLICY)
    assert "output_grad_amax_history" in model.tabulate(jax.random.key(0), X, console_kwargs={"width": 200})
    captured = jax.eval_shape(functools.partial(model.apply, capture_intermediates=True), VARIABLES, X)[1]
    assert [leaf.dtype for leaf in jax.tree.leaves(captured)] == [jnp.float32] * 3


@pytest.mark.exhaustive
def test_state_of_a_sharded_batch_is_that_of_one_device():
    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    x = jnp.concatenate([X, 5 * X, -2 * X, X])
    rows = PartitionSpec("devices")
    model = jmp.with_policy(Net(), POLICY)
    gradient = lambda loss: jmp.grad(loss, loss_scale=UNSCALED)
    loss = lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))
    of_all = lambda variables, x: jax.lax.pmean(loss(variables, x), "devices")
    options = {"mesh": mesh, "in_specs": (PartitionSpec(), rows), "out_specs": PartitionSpec()}
    local = lambda variables, x: jmp.sharding.pmean(gradient(loss)(variables, x), "devices")

    one = jax.jit(gradient(loss))(VARIABLES, x)[OVERWRITE]["layer"]
    sharded = jax.jit(gradient(loss))(VARIABLES, jax.device_put(x, NamedSharding(mesh, rows)))
    mapped = jax.jit(jax.shard_map(gradient(of_all), **options))(VARIABLES, x)
    averaged = jax.jit(jax.shard_map(local, **options, check_vma=False))(VARIABLES, x)[OVERWRITE]["layer"]
    assert_same(sharded[OVERWRITE]["layer"], one)
    assert_same(mapped[OVERWRITE]["layer"], one)
    # The loss of one device is the mean over a fourth of the batch, so that its gradients are four times as large.
    assert_same(averaged.pop("output_grad_amax_history"), 4 * one.pop("output_grad_amax_history"))
    assert_same(averaged, one)
