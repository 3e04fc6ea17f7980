"""Training nnx models in float8: the numbers of the operations, and state that no optimizer touches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from float8_nnx import DELAYED, SCALE, Net, X, assert_same, gradients, linear, mean_square, state_of, waves
from programs import program_text

import jmp_policy as jmp
from jmp_policy.quant import dot_general

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

FORMAT = "float8/4(min_size=0)"
OVERWRITE = "_overwrite_with_gradient"
BAD = X.at[0, 0].set(jnp.inf)
ANY = nnx.Any(nnx.Param, jmp.nnx.Float8State)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers, and averages by them
        yield


def by_hand(variables, x):
    for name in ("hidden", "head"):
        params, state = variables[name], variables[name][OVERWRITE]
        x, kernel, bias = (leaf.astype(jnp.bfloat16) for leaf in (x, params["kernel"], params["bias"]))
        x = dot_general(x, kernel, (((1,), (0,)), ((), ())), quantization=FORMAT, state=state)
        x = x + jnp.reshape(bias, (1, -1))
        x = nnx.relu(x) if name == "hidden" else x
    return x


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, kernel_init=waves, name="hidden")(x))
        return nn.Dense(16, kernel_init=waves, name="head")(x)


def test_a_stack_is_the_program_of_its_operations_and_of_linen():
    graphdef, state = nnx.split(jmp.with_policy(Net(), DELAYED))
    linen = jmp.with_policy(LinenNet(), DELAYED)

    def of_nnx(variables, x):
        merged = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(merged, variables)
        return nnx.merge(graphdef, merged)(x)

    def of_linen(variables, x):
        split = {"params": {}, OVERWRITE: {}}
        for name, leaves in variables.items():
            split["params"][name] = {leaf: leaves[leaf] for leaf in ("kernel", "bias")}
            split[OVERWRITE][name] = leaves[OVERWRITE]
        return linen.apply(split, x)

    def program(apply):
        def loss_fn(variables, x):
            out = apply(variables, x)
            return mean_square(lambda _: out), out

        differentiate = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=SCALE)
        return program_text(jax.jit(differentiate).lower(nnx.to_pure_dict(state), X))

    assert "f8E4M3FN" in program(by_hand)
    assert program(of_nnx) == program(by_hand)
    assert program(of_linen) == program(by_hand)


def largest_of(x):
    return float(jnp.max(jnp.abs(x)).astype(jnp.bfloat16))


def trained(tx, wrt=nnx.Param, loss_scale=None, **options):
    """A layer and its optimizer, after two steps, and the function that makes another one."""
    model = jmp.with_policy(linear(), DELAYED)
    optimizer = jmp.nnx.Optimizer(model, tx, wrt=wrt, **options)

    @nnx.jit(**options)
    def step(model, optimizer, x):
        grads = jmp.nnx.grad(mean_square, loss_scale=loss_scale or optimizer, **options)(model, x)
        optimizer.update(model, grads)

    for factor in (1, 3):
        step(model, optimizer, factor * X)
    return model, optimizer, step


@pytest.fixture(scope="module")
def unscaled():
    """The state after two steps without a loss scale."""
    with jax.numpy_dtype_promotion("standard"):
        return state_of(trained(optax.sgd(0.1), loss_scale=jmp.NoOpLossScale())[0])


SGD = optax.sgd(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(1e6), optax.add_decayed_weights(0.0), SGD)
SCALED = {
    "static": {"tx": jmp.optim.loss_scaled(SGD, jmp.StaticLossScale(2.0**10))},
    "dynamic": {"tx": jmp.optim.loss_scaled(SGD, jmp.DynamicLossScale(2.0**10))},
    "no scale but a check": {"tx": jmp.optim.skip_nonfinite(SGD)},
    "plain optax": {"tx": CLIPPED, "loss_scale": jmp.StaticLossScale(2.0**10)},
    "plain optax, and state among the parameters": {"tx": SGD, "wrt": ANY, "loss_scale": jmp.NoOpLossScale()},
    "state among the parameters": {"tx": jmp.optim.loss_scaled(CLIPPED, SCALE), "wrt": ANY},
    "modules as trees": {"tx": jmp.optim.loss_scaled(SGD, SCALE), "graph": False},
}


@pytest.mark.parametrize("name", SCALED)
def test_the_state_is_the_same_whatever_the_loss_scale_and_the_optimizer(name, unscaled):
    model, *_ = trained(**SCALED[name])
    assert_same(state_of(model), unscaled)


def test_clipping_and_decay_see_the_gradients_of_parameters_alone(unscaled):
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.add_decayed_weights(0.5), SGD)
    models = [trained(tx, wrt=wrt, loss_scale=SCALE)[0] for wrt in (nnx.Param, ANY)]
    np.testing.assert_array_equal(*(model.kernel[...] for model in models))
    assert_same(*map(state_of, models))
    history = f"{OVERWRITE}/input_amax_history"
    np.testing.assert_array_equal(state_of(models[0])[history], unscaled[history])


@pytest.mark.parametrize("wrt", [nnx.Param, ANY])
def test_a_skipped_step_keeps_every_bit_of_the_state(wrt):
    tx = jmp.optim.loss_scaled(optax.adam(0.1), jmp.DynamicLossScale(2.0**10))
    model, optimizer, step = trained(tx, wrt)
    before = state_of(model)
    step(model, optimizer, BAD)
    assert jmp.metrics(optimizer)["skipped_steps"] == 1
    assert_same(state_of(model), before)
    step(model, optimizer, X)
    assert all(np.isfinite(leaf).all() for leaf in state_of(model).values())
    amax = largest_of(X)
    assert sorted(state_of(model)[f"{OVERWRITE}/input_amax_history"]) == [0, amax, amax, largest_of(3 * X)]


def test_microbatches_leave_the_largest_magnitude_of_all_and_not_of_the_last():
    model = jmp.with_policy(linear(), DELAYED)
    multi = jmp.nnx.Optimizer(model, optax.MultiSteps(SGD, 3), wrt=nnx.Param)
    batches = jnp.stack([2 * X, 3 * X, X / 2])

    @nnx.jit
    def accumulated(model):
        total = None
        for x in batches:
            grads = jmp.nnx.grad(mean_square, loss_scale=SCALE)(model, x)
            total = grads if total is None else jmp.optim.accumulate(total, grads)
        return total

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, jmp.nnx.grad(mean_square, loss_scale=SCALE)(model, x))

    total = state_of(accumulated(model))
    for x in batches:
        step(model, multi, x)
    of_gradients = {name for name in total if "output_grad" in name}  # which depend on the scales of the microbatch
    assert_same(*({name: states[name] for name in total.keys() - of_gradients} for states in (state_of(model), total)))
    np.testing.assert_array_equal(total[f"{OVERWRITE}/input_amax_history"], [largest_of(3 * X), 0, 0, 0])


def test_minimize_takes_the_state_of_a_model():
    graphdef, state = nnx.split(jmp.with_policy(linear(), DELAYED))
    tx = jmp.optim.loss_scaled(optax.adam(0.1), SCALE)
    loss_fn = lambda state: mean_square(nnx.merge(graphdef, state))
    new, *_ = jax.jit(jmp.optim.minimize(loss_fn, tx))(state, tx.init(state))
    assert_same(state_of(new), state_of(jax.jit(jmp.grad(loss_fn, loss_scale=SCALE))(state)))
    assert state_of(new)[f"{OVERWRITE}/input_amax_history"][0] > 0


def test_the_optimizer_of_flax_leaves_the_state_as_it_is():
    model = jmp.with_policy(linear(), DELAYED)
    before, kernel = state_of(model), model.kernel[...]
    nnx.Optimizer(model, SGD, wrt=nnx.Param).update(model, gradients(model))
    assert_same(state_of(model), before)
    assert (model.kernel[...] != kernel).any()


def test_a_layer_used_twice_outside_of_jit_is_an_error_that_says_what_to_do():
    model = jmp.with_policy(linear(), DELAYED)
    twice = lambda model: mean_square(lambda x: model(x) + model(2 * x))
    with pytest.raises(ValueError, match=r"used twice outside of jax\.jit"):
        jmp.nnx.grad(twice, loss_scale=SCALE)(model)
    assert_same(state_of(model), state_of(jmp.with_policy(linear(), DELAYED)))
