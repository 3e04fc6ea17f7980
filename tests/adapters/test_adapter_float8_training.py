"""Training in float8 in both APIs: state is that of the true gradients, the maximum over the uses of its layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from quantized_apis import APIS, DENSE, OVERWRITE, X, waves

import jmp_policy as jmp
from jmp_policy import quant
from jmp_policy.optim import loss_scaled, skip_nonfinite

pytestmark = pytest.mark.slow

POLICY = "float8/4(min_size=0)_from_float32"  # whose sums do not depend on what XLA fuses
FORMAT = "float8/4(min_size=0)"
COTANGENT = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
BATCHES = jnp.stack([X, 5 * X, 2 * X, 3 * X])
PARAMS = {"kernel": waves(None, (16, 16), jnp.float32), "bias": jnp.zeros(16)}
STATE = quant.float8_state(FORMAT)
UNSCALED = jmp.StaticLossScale(1.0)
ANY = nnx.Any(nnx.Param, jmp.nnx.Float8State)
LINEN = jmp.with_policy(nn.Dense(16, name="layer"), POLICY)
VARIABLES = {"params": PARAMS, OVERWRITE: STATE}


def make_nnx():
    return jmp.with_policy(DENSE.nnx(nnx.Rngs(0)), POLICY)


def loss_of(call, x):
    """A loss whose gradient by the output does not depend on that, but on the batch."""
    return jnp.sum(call(x) * COTANGENT * x)


def linen_loss(variables, x):
    return loss_of(functools.partial(LINEN.apply, variables), x)


def nnx_loss(model, x):
    return loss_of(model, x)


def dense(params, state, x):
    product = quant.dot_general(x, params["kernel"], (((1,), (0,)), ((), ())), quantization=FORMAT, state=state)
    return product + params["bias"]


def of_model(variables):
    """The parameters and the state of an nnx model or of linen variables."""
    if isinstance(variables, dict):
        return variables
    return {"params": APIS["nnx"].params(variables), OVERWRITE: APIS["nnx"].state(variables)}


def by_hand(tx):
    """Optax on the parameters alone; the state is what the gradients say."""

    def step(carry, x):
        variables, opt_state = carry
        loss_fn = lambda v: loss_of(functools.partial(dense, v["params"], v[OVERWRITE]), x)
        grads = jax.grad(loss_fn)(variables)
        updates, opt_state = tx.update(grads["params"], opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        return ({"params": params, OVERWRITE: grads[OVERWRITE]}, opt_state), None

    return lambda batches: jax.lax.scan(step, (VARIABLES, tx.init(PARAMS)), batches)[0][0]


def by_steps(tx, loss_scale=None):
    def step(carry, x):
        variables, opt_state = carry
        grads = jmp.grad(linen_loss, loss_scale=loss_scale or opt_state)(variables, x)
        return jmp.optim.step(tx, grads, opt_state, variables), None

    return lambda batches: jax.lax.scan(step, (VARIABLES, tx.init(VARIABLES)), batches)[0][0]


def by_optimizer(tx, loss_scale=None, wrt=nnx.Param, **options):
    def run(batches):
        model = make_nnx()
        graphdef, state = nnx.split((model, jmp.nnx.Optimizer(model, tx, wrt=wrt, **options)))

        def step(state, x):
            model, optimizer = nnx.merge(graphdef, state)
            grads = jmp.nnx.grad(nnx_loss, loss_scale=loss_scale or optimizer, **options)(model, x)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), None

        return of_model(jax.lax.scan(step, state, batches)[0][0])

    return run


TX = optax.chain(optax.clip_by_global_norm(1e-1), optax.add_decayed_weights(0.5), optax.sgd(0.1))
SCALED = loss_scaled(TX, jmp.StaticLossScale(2.0**10))
RUNS = {
    "linen: no scale": by_steps(TX, UNSCALED),
    "linen: a static scale": by_steps(SCALED),
    "nnx: a check of its own": by_optimizer(skip_nonfinite(TX)),
    "nnx: state among the parameters": by_optimizer(TX, jmp.NoOpLossScale(), wrt=ANY),
    "nnx: a scale and state among the parameters": by_optimizer(SCALED, wrt=ANY),
    "nnx: modules as trees": by_optimizer(SCALED, graph=False),
}


def assert_same(found, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@pytest.fixture(scope="module")
def runs():
    """The variables after four steps, by each way of stepping: compiled at once."""
    every = RUNS | {"by hand": by_hand(TX)}
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        return jax.jit(lambda batches: {name: run(batches) for name, run in every.items()})(BATCHES)


@pytest.mark.parametrize("name", RUNS)
def test_no_optimizer_touches_the_state_or_counts_it_among_the_gradients(runs, name):
    assert_same(runs[name], runs["by hand"])


def test_history_holds_the_largest_magnitude_of_each_step(runs):
    seen, gradients = (np.abs(x).max((1, 2)) for x in (BATCHES, COTANGENT * BATCHES))
    state = runs["by hand"][OVERWRITE]
    assert state["input_amax_history"].tolist() == [seen[3], *seen[:3]]
    np.testing.assert_allclose(state["output_grad_amax_history"], [gradients[3], *gradients[:3]], rtol=1e-6)


def call(layer, x):
    return nn.relu(layer(x))


def twice(layer, x):
    return call(layer, call(layer, x))


def linen_scan(layer, x):
    options = {"variable_broadcast": ["params", OVERWRITE], "split_rngs": {"params": False}, "length": 2}
    return nn.scan(lambda layer, x, _: (call(layer, x), None), **options)(layer, x, None)[0]


def nnx_scan(layer, x):
    return nnx.scan(lambda layer, x: call(layer, x), length=2, in_axes=(None, nnx.Carry), out_axes=nnx.Carry)(layer, x)


class Twice(nn.Module):
    """A layer that is used twice, or through a transform."""

    use: object = twice
    lift: object = lambda kind: kind

    @nn.compact
    def __call__(self, x):
        return self.use(self.lift(nn.Dense)(16, name="layer"), x)


class Around(nn.Module):
    """A module without a policy around one that has one."""

    @nn.compact
    def __call__(self, x):
        return twice(jmp.with_policy(nn.Dense(16, name="layer"), POLICY), x)


def of_linen(module, apply=lambda module, variables, x: module.apply(variables, x)):
    """The state of the layer after one step."""
    module = jmp.with_policy(module, POLICY) if not isinstance(module, Around) else module

    def state(x=X):
        variables = {"params": {"layer": PARAMS}, OVERWRITE: {"layer": STATE}}
        loss_fn = lambda variables: jnp.sum(jnp.square(apply(module, variables, x)))
        return jmp.grad(loss_fn, loss_scale=UNSCALED)(variables)[OVERWRITE]["layer"]

    return state


def of_nnx(use, differentiate=jmp.nnx.grad, **options):
    def state(x=X):
        grads = differentiate(lambda m: jnp.sum(jnp.square(use(m, x))), loss_scale=UNSCALED, **options)(make_nnx())
        return APIS["nnx"].state(nnx.state(grads))

    return state


USES = {
    "linen: a loop": of_linen(Twice()),
    "linen: jit": of_linen(Twice(lift=nn.jit)),
    "linen: remat": of_linen(Twice(lift=nn.remat)),
    "linen: jit of a function": of_linen(Twice(nn.jit(twice))),
    "linen: scan": of_linen(Twice(linen_scan)),
    "linen: scan of remat": of_linen(Twice(nn.remat(linen_scan))),
    "linen: cond": of_linen(Twice(lambda layer, x: nn.cond(True, twice, lambda layer, x: x, layer, x))),
    "linen: switch": of_linen(Twice(lambda layer, x: nn.switch(1, [lambda layer, x: x, twice], layer, x))),
    "linen: bound": of_linen(Twice(), lambda module, variables, x: module.bind(variables)(x)),
    "linen: mutable": of_linen(Twice(), lambda module, variables, x: module.apply(variables, x, mutable=True)[0]),
    "linen: a policy inside": of_linen(Around()),
    "nnx: a loop": of_nnx(twice),
    "nnx: jit": of_nnx(lambda layer, x: nnx.jit(call)(layer, nnx.jit(call)(layer, x))),
    "nnx: remat": of_nnx(nnx.remat(twice)),
    "nnx: scan": of_nnx(nnx_scan),
    "nnx: cond": of_nnx(lambda layer, x: nnx.cond(True, twice, lambda layer, x: x, layer, x)),
    "nnx: switch": of_nnx(lambda layer, x: nnx.switch(1, [lambda layer, x: x, twice], layer, x)),
    "nnx: modules as trees": of_nnx(twice, graph=False),
    "nnx: without updates of the graph": of_nnx(twice, graph_updates=False),
    "nnx: jmp.grad of a module": of_nnx(twice, jmp.grad),
}


def state_by_hand(x=X):
    """The state of each of the two uses."""

    def loss_fn(states):
        hidden = nn.relu(dense(PARAMS, states[0], x))
        return jnp.sum(jnp.square(nn.relu(dense(PARAMS, states[1], hidden))))

    return jax.grad(loss_fn)([STATE, STATE])


@pytest.fixture(scope="module")
def states():
    """The state after one step, of all that is compared here: compiled at once."""
    return jax.jit(lambda: {name: state() for name, state in USES.items()} | {"by hand": state_by_hand()})()


@pytest.mark.parametrize("name", USES)
def test_state_of_a_layer_used_twice_is_the_maximum_over_its_uses(states, name):
    assert_same(states[name], jax.tree.map(np.maximum, *states["by hand"]))
    assert states["by hand"][0]["input_amax_history"][0] == np.abs(X).max()


def linen_layers(axes, x):
    """The state of layers that are scanned over, each on the output of the one before."""

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, x):
            over_layers = nn.scan(lambda layer, x, _: (call(layer, x), None), variable_axes=axes, length=2)
            return over_layers(nn.Dense(16, name="layer"), x, None)[0]

    model = jmp.with_policy(Stacked(), POLICY)
    variables = stacked({"params": {"layer": PARAMS}, OVERWRITE: {"layer": STATE}})
    loss_fn = lambda variables: jnp.sum(jnp.square(model.apply(variables, x)))
    return jmp.grad(loss_fn, loss_scale=UNSCALED)(variables)[OVERWRITE]["layer"]


def nnx_layers(x, attach_first, step=call):
    graphdef, state = nnx.split(make_nnx() if attach_first else DENSE.nnx(nnx.Rngs(0)))
    model = nnx.merge(graphdef, stacked(state))
    model = model if attach_first else jmp.with_policy(model, POLICY)
    run = nnx.scan(lambda layer, x: step(layer, x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    grads = jmp.nnx.grad(lambda model: jnp.sum(jnp.square(run(model, x))), loss_scale=UNSCALED)(model)
    return APIS["nnx"].state(grads)


def stacked(tree):
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


LAYERS_OF_A_SCAN = {
    "linen": lambda: linen_layers({"params": 0, OVERWRITE: 0}, X),
    "nnx": lambda: nnx_layers(X, attach_first=True),
    "nnx with the policy last": lambda: nnx_layers(X, attach_first=False),
    "nnx with remat": lambda: nnx_layers(X, attach_first=True, step=nnx.remat(call)),
}


@pytest.mark.parametrize("name", LAYERS_OF_A_SCAN)
def test_layers_that_are_scanned_over_have_a_state_each(states, name):
    assert_same(jax.jit(LAYERS_OF_A_SCAN[name])(), jax.tree.map(lambda *x: np.stack(x), *states["by hand"]))


def linen_mapped(params, state):
    axes = {"params": params, OVERWRITE: state}

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.vmap(nn.Dense, variable_axes=axes, split_rngs={"params": False}, axis_size=2)(16, name="layer")(x)

    model = jmp.with_policy(Mapped(), POLICY)
    variables = {"params": {"layer": PARAMS if params is None else stacked(PARAMS)}}
    variables[OVERWRITE] = {"layer": STATE if state is None else stacked(STATE)}
    loss_fn = lambda variables: jnp.sum(jnp.square(model.apply(variables, BATCHES[:2])))
    return jmp.grad(loss_fn, loss_scale=UNSCALED)(variables)[OVERWRITE]["layer"]


def nnx_mapped(axis):
    graphdef, state = nnx.split(make_nnx())
    model = nnx.merge(graphdef, state if axis is None else stacked(state))
    run = nnx.vmap(lambda layer, x: layer(x), in_axes=(axis, 0))
    loss_fn = lambda model: jnp.sum(jnp.square(run(model, BATCHES[:2])))
    return APIS["nnx"].state(jmp.nnx.grad(loss_fn, loss_scale=UNSCALED)(model))


def test_a_layer_that_is_mapped_over_batches_has_one_state_or_one_each():
    @jax.jit
    def found():
        own = {"linen": linen_mapped(0, 0), "nnx": nnx_mapped(0)}
        return own, {"linen": linen_mapped(None, None), "of layers": linen_mapped(0, None), "nnx": nnx_mapped(None)}

    own, shared = found()
    for state in own.values():
        assert state["input_amax_history"][:, 0].tolist() == [np.abs(X).max(), np.abs(5 * X).max()]
    for name, state in shared.items():
        assert_same(state, {key: leaf.max(0) for key, leaf in own["nnx" if name == "nnx" else "linen"].items()})
