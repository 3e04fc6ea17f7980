"""`optim.find_origin` repeats a skipped step on the host, and names the origin of its infinities."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp_policy as jmp

SCALE = jmp.DynamicLossScale(2.0**10)
GOOD, ZERO, HUGE = jnp.float32([2.0, 1.0]), jnp.float32([2.0, 0.0]), jnp.float32([2.5e-36, 1.0])


def loss_fn(params, x):
    with jax.named_scope("head"):
        return jnp.sum(params["w"] / x)


@pytest.mark.slow
@pytest.mark.parametrize("x", [ZERO, HUGE], ids=["zero", "overflow"])
def test_it_finds_what_first_nonfinite_finds_inside_of_the_step(x):
    """The overflow happens at the scale of the skipped step, and not at the smaller one after it."""
    params, tx = {"w": jnp.ones(2)}, jmp.optim.loss_scaled(optax.adam(0.1), SCALE)

    @jax.jit
    def step(params, opt_state, batch):
        differentiate = jmp.numerics.first_nonfinite(jmp.value_and_grad(loss_fn, loss_scale=opt_state))
        (_, grads), origin = differentiate(params, batch)
        return *jmp.optim.step(tx, grads, opt_state, params), origin

    opt_state = tx.init(params)
    for batch in (GOOD, x):
        before = opt_state
        params, opt_state, inside = step(params, opt_state, batch)
    found = jmp.optim.find_origin(loss_fn, tx)(params, before, x)
    assert found.describe().startswith(f"Step 2 was skipped. {inside.describe()}")
    assert str(found).startswith(f"step 2 skipped: {inside}")


def overflow_forward(params):
    return jnp.sum(params.astype(jnp.float16) * 65504).astype(jnp.float32)


def overflow_backward(params):
    """At a scale of 1024 and a factor of 100 the cotangent overflows float16."""
    return jnp.sum((params.astype(jnp.float16) * 100).astype(jnp.float32))


def divide_by_zero_backward(params):
    return jnp.sum(jnp.sqrt(params - 1))


@jax.custom_vjp
def overflow_in_rule(x):
    """The infinity of the backward pass is there at any loss scale."""
    return x


overflow_in_rule.defvjp(lambda x: (x, x), lambda x, g: (g * jnp.exp(100 * x),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "scale", "is_search"),
    [
        (lambda params: jnp.sum(overflow_in_rule(params)), SCALE, False),
        (overflow_backward, SCALE, True),
        (overflow_forward, SCALE, False),
        (divide_by_zero_backward, SCALE, False),
        (overflow_backward, jmp.DynamicLossScale(1024.0, min_loss_scale=1024.0), False),
    ],
)
def test_an_infinity_of_the_backward_pass_is_part_of_the_search_for_a_scale(fun, scale, is_search):
    params, tx = jnp.ones(2), jmp.optim.loss_scaled(optax.sgd(0.1), scale)
    skip = jmp.optim.find_origin(fun, tx)(params, tx.init(params))
    assert skip.is_search is is_search
    normal = "; the loss scale was too high, which is normal at the start"
    assert str(skip).endswith(normal) is is_search


@pytest.mark.slow
def test_nan_of_the_forward_pass_is_found_though_the_gradient_does_not_read_it():
    def sigmoid_loss(params, x):
        with jax.named_scope("sigmoid"):
            exponential = jnp.exp(x * params["w"])
            loss = jnp.mean(exponential / (1 + exponential))
        return loss, {}

    params, x = {"w": jnp.ones(2)}, jnp.float32([200.0, 1.0])
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), SCALE)
    found = jmp.optim.find_origin(sigmoid_loss, tx, has_aux=True)(params, tx.init(params), x).origin
    assert (found.primitive, found.direction, found.cause.primitive) == ("div", "forward", "exp")


def test_an_nnx_model_with_dropout_and_running_statistics_is_differentiated_by_its_parameters():
    model = nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    find = jmp.optim.find_origin(lambda model, x: jnp.sum(jnp.log(model(x))), jmp.optim.skip_nonfinite(optax.sgd(0.1)))
    skip = find(model, SCALE, jnp.zeros((4, 2)))
    assert (skip.origin.primitive, skip.origin.direction) == ("log", "forward")
    assert jax.tree.all(jax.tree.map(lambda old, new: bool((old == new).all()), before, nnx.state(model)))
    model.layers[0].scale[...] = model.layers[0].scale[...].at[0].set(jnp.nan)
    skip = find(model, SCALE, jnp.ones((4, 2)))
    assert skip.bad_params == {"layers/0/scale": (1, 2)}
    assert {each.path for each in skip.parameters} >= {"layers/0/scale", "layers/0/bias"}
    assert "not finite themselves: layers/0/scale (1 of 2). No step repairs them" in skip.describe()


@pytest.mark.slow
def test_arguments_that_are_no_arrays_are_passed_on_and_another_scale_traces_nothing():
    traces = []

    def with_aux(params, x, *, inverted, name):
        traces.append(1)
        return loss_fn(params, x if inverted else 1 / x), {"name": jnp.zeros(len(name))}

    find = jmp.optim.find_origin(with_aux, jmp.optim.skip_nonfinite(optax.sgd(0.1)), has_aux=True)
    params = {"w": jnp.ones(2)}
    assert find(params, jmp.NoOpLossScale(), GOOD, inverted=False, name="a") is None
    assert find(params, jmp.NoOpLossScale(), x=ZERO, inverted=True, name="a").origin.path == "head"
    assert find(params, jmp.DynamicLossScale(2.0), x=GOOD, inverted=True, name="a") is None
    first = len(traces)
    nan = GOOD.at[0].set(jnp.nan)
    skip = find(params, jmp.DynamicLossScale(4.0), x=nan, inverted=True, name="a")
    assert (skip.origin.argument, skip.origin.kind) == ("x", "nan")
    assert find(params, jmp.DynamicLossScale(8.0), x=nan, inverted=True, name="a").parameters == skip.parameters
    assert len(traces) == first


@pytest.mark.slow
def test_parameters_with_bad_gradients_are_named_also_frozen_ones():
    """A frozen parameter skipped every step, and only the operation was named."""
    inner = optax.partition(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, {"w": "train", "frozen": "freeze"}
    )
    find = jmp.optim.find_origin(
        lambda p: jnp.sum(p["w"]) + jnp.sum(jnp.sqrt(p["frozen"])), jmp.optim.skip_nonfinite(inner)
    )
    skip = find({"w": jnp.ones(3), "frozen": jnp.float32([0.0, 1.0])}, jmp.NoOpLossScale())
    assert (skip.bad_params, skip.parameters) == ({}, (jmp.optim.BadGradient("frozen", 1, 2, frozen=True),))
    assert "of the backward pass: frozen (1 of 2, frozen). A frozen one skips the step too: put jax" in skip.describe()


def _layers_of(count):
    return {f"layer{i}": {"b": jnp.zeros(2), "w": jnp.eye(2)} for i in range(count)}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_bad_gradients_are_in_the_order_of_the_backward_pass(wrap):
    """The loss overflows at the top, and the gradients of all layers below are not finite."""

    @wrap
    def deep_loss(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.sum(jnp.sqrt(x - x))

    tx = jmp.optim.loss_scaled(optax.sgd(0.1), SCALE)
    params = _layers_of(7)
    skip = jmp.optim.find_origin(deep_loss, tx)(params, tx.init(params), GOOD[None])
    assert [each.path[:6] for each in skip.parameters] == [f"layer{i}" for i in range(6, -1, -1) for _ in "bw"]
    assert {each.path for each in skip.parameters[:2]} == {"layer6/w", "layer6/b"}
    assert "in the order of the backward pass: layer6/b (2 of 2), layer6/w (4 of 4)," in skip.describe()
    assert "layer4/b (2 of 2) and 9 more." in skip.describe()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "why"),
    [("gradients", "its gradients were"), ("updates", "its update was not finite: .* Or its gradients were")],
)
def test_a_run_that_skips_finite_gradients_is_told_of_another_scale(check, why):
    tx, params = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale(1.0), check=check), {"w": jnp.ones(2)}
    find, state = jmp.optim.find_origin(loss_fn, tx), tx.init(params)
    assert find(params, state, GOOD) is None
    with pytest.warns(
        UserWarning, match=rf"scale 1\.0 of the state, whose last 9 steps were.*skipped too, {why}.*loss_scale=op"
    ):
        assert find(params, state._replace(consecutive_skips=jnp.int32(9)), GOOD) is None


def _stacked(tx):
    """The arguments of three models at once."""
    return {"w": jnp.ones((3, 2))}, jax.vmap(tx.init)({"w": jnp.ones((3, 2))})


def _deleted(tx, place):
    """Parameters and state, one of which was donated."""
    params = {"w": jnp.ones(2)}
    arguments = params, tx.init(params)
    for leaf in jax.tree.leaves(arguments[place]):
        leaf.delete()
    return arguments


DONATED = r"were donated to a step, which deleted .*before = jax\.device_get\(jmp_policy\.get_loss_scale\(opt_state\)\)"
VMAPPED = r"of several models: its scalars have the shape \(3,\).*lambda x: x\[0\].*; find\("
SKIP, SCALED = jmp.optim.skip_nonfinite(optax.sgd(0.1)), jmp.optim.loss_scaled(optax.sgd(0.1), SCALE)


@pytest.mark.parametrize(
    ("tx", "arguments", "text"),
    [
        (SKIP, _stacked, VMAPPED),
        (SCALED, _stacked, VMAPPED),
        (SCALED, lambda tx: _deleted(tx, 0), DONATED),  # it was JAX's "Array has been deleted"
        (SCALED, lambda tx: _deleted(tx, 1), DONATED),
        (SKIP, lambda tx: ({"w": jnp.ones(2)}, optax.adam(0.1).init({"w": jnp.ones(2)})), "loss scale"),
    ],
    ids=["vmapped", "vmapped scale", "donated parameters", "donated state", "no scale"],
)
def test_arguments_of_another_kind_are_errors_that_say_what_to_do(tx, arguments, text):
    with pytest.raises(ValueError, match=text):
        jmp.optim.find_origin(loss_fn, tx)(*arguments(tx), GOOD)


def test_it_takes_an_optimizer_and_runs_on_the_host():
    with pytest.raises(TypeError, match="optax"):
        jmp.optim.find_origin(loss_fn, optax.adam)
    find = jmp.optim.find_origin(loss_fn, SKIP)
    with pytest.raises(TypeError, match=r"runs on the host, and got tracers.*find\(params, old_state, batch\)"):
        jax.eval_shape(lambda x: find({"w": x}, SCALE, x), GOOD)
