"""The gradient of float8 state is its next value: of true gradients, and the largest of all uses of a layer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from float8_problem import STATE, assert_same, batch_of, compiled, joined, loss_fn, stacked, state_after, variables_of
from jax import lax

import jmp_policy as jmp

# A layer outside of jit reads and writes its state through these functions alone.
from jmp_policy._base._float8_state import read_leaf, write_leaf

FIRST, SECOND = batch_of(1), batch_of(2)
VARIABLES = variables_of()
SCALE = jmp.StaticLossScale(2.0**10)
BOTH = stacked(FIRST, SECOND)
ZEROS = jax.tree.map(jnp.zeros_like, VARIABLES[STATE]["idle"])


@compiled
def gradient(scale, batch=FIRST):
    return jmp.grad(loss_fn, loss_scale=scale)(VARIABLES, batch)


@pytest.fixture(scope="module")
def unscaled():
    grads = gradient(jmp.NoOpLossScale())
    assert_same({**grads[STATE], "idle": VARIABLES[STATE]["idle"]}, state_after(VARIABLES, FIRST))
    return grads


@pytest.mark.slow
@pytest.mark.parametrize("scale", [SCALE, jmp.DynamicLossScale(2.0**15)])
def test_gradients_and_state_are_those_without_a_loss_scale_and_an_infinite_amax_never_enters(unscaled, scale):
    assert_same(gradient(scale), unscaled)
    assert_same(unscaled[STATE]["idle"], ZEROS)
    grads = gradient(scale, FIRST | {"count": FIRST["count"].at[0, 0].set(jnp.inf)})
    assert jmp.all_finite(grads[STATE])
    assert not jmp.all_finite(grads["params"]["used"])


@pytest.mark.slow
def test_a_loss_scale_that_is_no_power_of_two_is_exact_within_rounding_and_leaves_the_forward_pass_alone(unscaled):
    ours, expected = (grads[STATE]["used"] for grads in (gradient(jmp.DynamicLossScale(1000.0)), unscaled))
    for name in ours:
        np.testing.assert_allclose(ours[name], expected[name], rtol=3e-7 if name.startswith("output_grad") else 0)


def reused(v):
    return loss_fn(v, FIRST) + loss_fn(v, SECOND)


TWICE = {
    "two calls, each rematerialized": lambda v: sum(jax.checkpoint(loss_fn)(v, batch) for batch in (FIRST, SECOND)),
    "a scan that is rematerialized": lambda v: lax.scan(
        jax.checkpoint(lambda total, batch: (total + loss_fn(v, batch), None)), 0.0, BOTH
    )[0],
    "a vmap": lambda v: jnp.sum(jax.vmap(lambda batch: loss_fn(v, batch))(BOTH)),
    "a branch": lambda v: lax.cond(jnp.sum(FIRST["x"]) < jnp.inf, reused, lambda v: 0.0, v),
}


@pytest.mark.parametrize(
    "way", ["a vmap", *(pytest.param(way, marks=pytest.mark.slow) for way in TWICE if way != "a vmap")]
)
def test_state_of_a_layer_that_is_used_twice_is_that_of_one_big_batch(way):
    grads = compiled(jmp.grad(TWICE[way], loss_scale=SCALE))(VARIABLES)
    assert_same(grads[STATE], state_after(VARIABLES, joined(FIRST, SECOND)) | {"idle": ZEROS})


def _use(next_value):
    use = jax.custom_vjp(lambda leaf: jnp.sum(read_leaf(leaf)))
    use.defvjp(lambda leaf: (use(leaf), leaf), lambda leaf, _: (write_leaf(jnp.full(leaf.shape, next_value), leaf),))
    return lambda v: use(v["fp8"]["input_scale"])


@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), SCALE], ids=["grad", "grad of a scaled loss"])
def test_a_layer_used_twice_outside_of_jit_is_an_error_that_says_so(scale):
    twice = lambda v: _use(3.0)(v) + _use(5.0)(v)
    with pytest.raises(ValueError, match=r"used twice outside of jax\.jit.*For example: loss, grads = jax\.jit"):
        jmp.grad(twice, loss_scale=scale)({"fp8": ZEROS})


def test_minimize_takes_a_layer_that_is_used_twice_outside_of_jit_too():
    twice = lambda v: _use(3.0)(v) + _use(5.0)(v)
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.StaticLossScale(8.0))
    variables, _, _ = jmp.optim.minimize(twice, tx)({"fp8": ZEROS}, tx.init({"fp8": ZEROS}))
    assert_same(variables["fp8"], ZEROS | {"input_scale": jnp.full_like(ZEROS["input_scale"], 5.0)})


def test_a_branch_for_each_example_is_an_error_that_says_so():
    branch = lambda v, i: lax.cond(i < 1, lambda v: loss_fn(v, FIRST), lambda v: 0.0, v)
    loss = lambda v: jnp.sum(jax.vmap(branch, (None, 0))(v, jnp.arange(2)))
    with pytest.raises(ValueError, match=r"a branch that jax\.vmap selects per example.*For example: jax\.lax\.map"):
        jax.eval_shape(jmp.grad(loss, loss_scale=jmp.NoOpLossScale()), VARIABLES)
    with pytest.raises(KeyError, match="missing"):  # any other key error is the user's own
        jmp.grad(lambda v: v["missing"], loss_scale=jmp.NoOpLossScale())(VARIABLES)


def test_only_state_that_is_differentiated_is_combined_by_max():
    seen = []

    def loss(v, other):
        seen.extend([v[STATE]["used"]["input_scale"].dtype, other[STATE]["used"]["input_scale"].dtype])
        return loss_fn(v, FIRST)

    jax.eval_shape(lambda v: jmp.grad(loss, loss_scale=jmp.NoOpLossScale())(v, v), VARIABLES)
    assert [dtype == jnp.float32 for dtype in seen] == [False, True]


@pytest.mark.slow
def test_the_members_of_an_ensemble_have_a_state_each():
    variables = stacked(VARIABLES, variables_of(seed=5))
    grad = lambda loss: jmp.grad(loss, loss_scale=jmp.NoOpLossScale())
    over_batches = lambda v, batch: jnp.sum(jax.vmap(loss_fn, (None, 0))(v, stacked(batch)))
    of_each = jax.vmap(grad(over_batches))
    of_all = grad(lambda v, batches: jnp.sum(jax.vmap(loss_fn)(v, batches)))
    inside, outside = compiled(lambda v: (of_each(v, BOTH), of_all(v, BOTH)))(variables)
    for i, batch in enumerate((FIRST, SECOND)):
        member = jax.tree.map(lambda x, i=i: x[i], variables)
        expected = state_after(member, batch) | {"idle": ZEROS}
        for grads in (inside, outside):
            assert_same(jax.tree.map(lambda x, i=i: x[i], grads[STATE]), expected)


class Model(NamedTuple):
    params: Any
    memory: Any


NAMES = ("idle", "used")
PLACES = {
    "in fields and lists": (lambda v: Model(v["params"], [v[STATE][name] for name in NAMES]),
                            lambda t: {"params": t.params, STATE: dict(zip(NAMES, t.memory, strict=True))}),
    "among parameters": (lambda v: {name: {"w": v["params"][name], **v[STATE][name]} for name in v[STATE]},
                         lambda t: {"params": {n: t[n]["w"] for n in t},
                                    STATE: {n: {k: x for k, x in t[n].items() if k != "w"} for n in t}}),
    "flattened to slashes": (functools.partial(flatten_dict, sep="/"), functools.partial(unflatten_dict, sep="/")),
}  # fmt: skip
"""Trees that users keep state in, and back to variables."""
PLACES_SLOW = ["in fields and lists", *(pytest.param(p, marks=pytest.mark.slow) for p in [*PLACES][1:])]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_state_is_known_wherever_it_stands(unscaled, place):
    place, back = PLACES[place]
    grads = compiled(jmp.grad(lambda tree: loss_fn(back(tree), FIRST), loss_scale=SCALE))(place(VARIABLES))
    assert_same(back(grads), unscaled)


@pytest.mark.parametrize("place", PLACES_SLOW)
def test_a_step_overwrites_state_wherever_it_stands(place):
    tx, (place, back) = optax.sgd(0.1), PLACES[place]
    grads = {"params": VARIABLES["params"], STATE: variables_of(seed=9)[STATE]}
    with jax.numpy_dtype_promotion("standard"):
        params, _ = compiled(lambda p: jmp.optim.step(tx, place(grads), tx.init(p), p))(place(VARIABLES))
    assert_same(back(params)[STATE], grads[STATE])
    assert not jnp.array_equal(back(params)["params"]["used"], VARIABLES["params"]["used"])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES_SLOW)
def test_microbatches_and_devices_combine_state_by_max_wherever_it_stands(place):
    place, back = PLACES[place]
    other = variables_of(seed=9)
    expected = jax.tree.map(jnp.maximum, VARIABLES[STATE], other[STATE])
    assert_same(back(jmp.optim.accumulate(place(VARIABLES), place(other)))[STATE], expected)
    mean = jax.vmap(lambda g: jmp.sharding.pmean(g, "d"), axis_name="d", out_axes=None)(
        place(stacked(VARIABLES, other))
    )
    assert_same(back(mean)[STATE], expected)


@pytest.mark.parametrize(
    "tree",
    [{"input_amax_history": jnp.ones(4)}, {"w": jnp.ones(2), "fp8": {"a.kernel_amax_history": jnp.ones(4)}}],
    ids=["alone", "under a dotted name"],
)
def test_part_of_a_state_is_refused(tree):
    where = r"\[.*_amax_history'\] has the name of a float8 layer's amax history, .*[Ff]or example: params = \{'w'"
    with pytest.raises(ValueError, match=where):
        jmp.grad(lambda tree: 0.0, loss_scale=SCALE)(tree)
