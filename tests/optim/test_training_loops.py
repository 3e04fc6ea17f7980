"""Training loops as people write them, in float16, train as by hand in float32 without scaling, and skip overflows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_registry import bits, by_step, by_update, types

import jmp_policy as jmp
from jmp_policy.optim import LossScaledState

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

# Adam does not see the scale of its gradients, so a wrong one would not show; an eps far above them lets it.
ADAMW = optax.adamw(0.1, eps=1.0, weight_decay=0.01)
SCALE = jmp.DynamicLossScale(2.0**10, period=2)
BAD = {1: np.inf, 4: np.nan}  # the steps that overflow, between four good ones


class Loop(NamedTuple):
    """A loop, `(carry, batch) -> carry` from `init()`, and the same by hand in float32, with nothing but optax."""

    init: Callable[[], Any]
    train_step: Callable[[Any, Any], Any]
    reference_init: Callable[[], Any]
    reference_step: Callable[[Any, Any], Any]


def linear(params, x):
    return x @ params["w"] + params["b"]


half_linear = jmp.with_policy(linear, "params=float32,compute=float16,output=float32")


def loss_fn(model, params, batch):
    return jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)


def _params():
    return {"w": jnp.array([[0.5, -1.0], [0.25, 2.0], [-0.75, 0.0]]), "b": jnp.array([0.125, -0.0])}


def _one_optimizer(inner, params=_params, wrap=jmp.optim.loss_scaled, way=by_step, loss=loss_fn):
    """A loss, an optimizer and a step of it for every batch."""
    tx = wrap(inner, SCALE)
    differentiated = lambda params: getattr(params, "fast", params)

    def train_step(carry, batch):
        params, state = carry
        grads = jmp.grad(lambda p: loss(half_linear, p, batch), loss_scale=state)(differentiated(params))
        return way(tx, grads, state, params)

    def reference_step(carry, batch):
        params, state = carry
        grads = jax.grad(lambda p: loss(linear, p, batch))(differentiated(params))
        return by_update(inner, grads, state, params)

    init = lambda tx: lambda: (params(), tx.init(params()))
    return Loop(init(tx), train_step, init(inner), reference_step)


def _with_injected_rate():
    scaled = optax.inject_hyperparams(lambda learning_rate: jmp.optim.loss_scaled(optax.sgd(learning_rate), SCALE))
    return _one_optimizer(optax.sgd(0.1), wrap=lambda inner, scale: scaled(0.1))


def _accumulated_in_a_scan():
    """Gradients of two microbatches added in float32, and one decision for their mean."""
    tx = jmp.optim.loss_scaled(ADAMW, SCALE)

    def train_step(carry, batch):
        params, state = carry

        def microbatch(total, part):
            grads = jmp.grad(lambda p: loss_fn(half_linear, p, part), loss_scale=state)(params)
            return jax.tree.map(jnp.add, total, grads), None

        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        total, _ = jax.lax.scan(microbatch, jax.tree.map(jnp.zeros_like, params), parts)
        return jmp.optim.step(tx, jax.tree.map(lambda g: g / 2, total), state, params)

    return _one_optimizer(ADAMW)._replace(train_step=train_step)


def _size(params):
    return jnp.sum(params["w"] ** 2)


def _several_losses():
    """Two losses with a scale each, one of which does not look at the data."""
    tx = jmp.optim.skip_nonfinite(ADAMW)
    init = lambda: (_params(), tx.init(_params()), {"fit": SCALE, "size": jmp.DynamicLossScale(2.0**4)})

    def train_step(carry, batch):
        params, state, scales = carry
        losses = {"fit": lambda p: loss_fn(half_linear, p, batch), "size": _size}
        grads = {name: jmp.grad(losses[name], loss_scale=scales[name])(params) for name in losses}
        scales = {name: scale.adjust(jmp.all_finite(grads[name])) for name, scale in scales.items()}
        params, state = jmp.optim.step(tx, jax.tree.map(jnp.add, *grads.values()), state, params)
        return params, state, scales

    alone = _one_optimizer(ADAMW, loss=lambda *args: loss_fn(*args) + _size(args[1]))
    return alone._replace(init=init, train_step=train_step)


def _several_optimizers(batch_of=lambda batch: (batch, batch)):
    """Two models on one scale, each of which looks at the other, like those of a GAN; `batch_of` gives both a batch."""
    tx = jmp.optim.skip_nonfinite(ADAMW)
    init = lambda tx: ((_params(), _params()), (tx.init(_params()), tx.init(_params())))
    loss = lambda model, mine, other, batch: loss_fn(model, mine, batch) + jnp.mean(other["w"] * mine["w"])

    def train_step(carry, batch):
        (first, second), (first_state, second_state), scale = carry
        of_first, of_second = batch_of(batch)
        grads = jmp.grad(lambda p: loss(half_linear, p, second, of_first), loss_scale=scale)(first)
        first, first_state = jmp.optim.step(tx, grads, first_state, first)
        grads = jmp.grad(lambda p: loss(half_linear, p, first, of_second), loss_scale=scale)(second)
        second, second_state = jmp.optim.step(tx, grads, second_state, second)
        scale = scale.adjust(first_state.grads_finite & second_state.grads_finite)
        return (first, second), (first_state, second_state), scale

    def reference_step(carry, batch):
        (first, second), (first_state, second_state) = carry
        grads = jax.grad(lambda p: loss(linear, p, second, batch))(first)
        first, first_state = by_update(ADAMW, grads, first_state, first)
        grads = jax.grad(lambda p: loss(linear, p, first, batch))(second)
        second, second_state = by_update(ADAMW, grads, second_state, second)
        return (first, second), (first_state, second_state)

    return Loop(lambda: (*init(tx), SCALE), train_step, lambda: init(ADAMW), reference_step)


def _complex_loss(model, params, batch):
    real = {"w": params["w"], "b": params["b"]}
    return loss_fn(model, real, batch) + jnp.mean(jnp.abs(batch["x"] @ params["z"] - 1j) ** 2)


LOOPS: dict[str, Callable[[], Loop]] = {
    "adamw": lambda: _one_optimizer(ADAMW),
    "accumulated by MultiSteps": lambda: _one_optimizer(optax.MultiSteps(ADAMW, 2), way=by_update),
    "accumulated in a scan": _accumulated_in_a_scan,
    "several losses, a scale each": _several_losses,
    "several optimizers on one scale": _several_optimizers,
    "loss_scaled inside of inject_hyperparams": _with_injected_rate,
    "frozen by MaskedNode": lambda: _one_optimizer(ADAMW, lambda: _params() | {"frozen": optax.MaskedNode()}),
    "complex": lambda: _one_optimizer(
        ADAMW, lambda: _params() | {"z": jnp.array([1j, -0.5j, 0.25])}, loss=_complex_loss
    ),
    "lookahead": lambda: _one_optimizer(
        optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5),
        lambda: optax.LookaheadParams.init_synced(_params()),
    ),
}


def _batches():
    rng = np.random.default_rng(20261121)
    x, y = rng.normal(size=(6, 4, 3)), rng.normal(size=(6, 4, 2))
    for step, number in BAD.items():
        x[step, 1, 2] = number  # in one microbatch of two
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}


def _kept(carry):
    """All that a skipped step must not change: everything but loss scales and the counters beside them."""

    def without_scale(node):
        if isinstance(node, jmp.LossScale):
            return None
        if isinstance(node, LossScaledState):
            return node.inner_state
        if isinstance(getattr(node, "inner_state", None), LossScaledState):  # inject_hyperparams, whose count is unread
            return node.hyperparams, node.inner_state.inner_state
        return node

    return jax.tree.map(without_scale, carry, is_leaf=lambda node: without_scale(node) is not node)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_by_hand_in_float32_and_a_bad_step_changes_nothing_but_scales_and_counters(name):
    loop, batches = LOOPS[name](), _batches()

    def body(carry, batch):
        carry = loop.train_step(carry, batch)
        return carry, _kept(carry)

    carry, history = jax.jit(lambda *args: jax.lax.scan(body, *args))(loop.init(), batches)
    assert types(carry) == types(loop.init())

    def check_bad_steps_are_counted(node):
        assert not isinstance(node, LossScaledState) or int(node.skipped_steps) == len(BAD)
        return isinstance(node, LossScaledState)

    assert any(map(check_bad_steps_are_counted, jax.tree.leaves(carry, is_leaf=check_bad_steps_are_counted)))
    at = lambda step: bits(jax.tree.map(lambda x: x[step], history))
    for step in BAD:
        assert at(step) == at(step - 1)
    assert at(2) != at(1)

    good = jax.tree.map(lambda x: x[np.array([i for i in range(6) if i not in BAD])], batches)
    by_hand = jax.jit(lambda *args: jax.lax.scan(lambda c, batch: (loop.reference_step(c, batch), None), *args)[0])
    start, got, expected = loop.init()[0], carry[0], by_hand(loop.reference_init(), good)[0]
    # Numbers of about one, of which each step adds at most 0.4 that float16 rounded a few times, by 2^-11 each.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), got, expected)
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), start, expected))) > 0.05


def _one_batch(step):
    return jax.tree.map(lambda x: x[step], _batches())


def test_of_several_losses_only_the_scale_of_the_bad_one_is_lowered():
    loop = _several_losses()
    _, _, scales = jax.jit(loop.train_step)(loop.init(), _one_batch(1))
    moved = {name: (float(scale.loss_scale), int(scale.counter)) for name, scale in scales.items()}
    assert moved == {"fit": (2.0**9, 0), "size": (2.0**4, 1)}


def test_of_several_optimizers_only_the_bad_one_skips_and_the_scale_is_lowered_once():
    loop, good, bad = _several_optimizers(lambda both: both), _one_batch(0), _one_batch(1)
    train_step, start = jax.jit(loop.train_step), loop.init()
    for skips in ([0, 1], [1, 0], [1, 1]):
        params, states, scale = train_step(start, [(good, bad)[skip] for skip in skips])
        kept = [bits(new) == bits(old) for new, old in zip(params, start[0], strict=True)]
        assert kept == [bool(skip) for skip in skips]
        assert [int(state.skipped_steps) for state in states] == skips
        assert float(scale.loss_scale) == 2.0**9
