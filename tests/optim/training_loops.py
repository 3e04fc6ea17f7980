"""Training loops as people write them, in float16, and each by hand in float32 without scaling: a law holds for all."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optimizer_registry import by_step, by_update

import jmp_policy as jmp


class Loop(NamedTuple):
    """A training loop.

    Attributes:
      init: makes what the loop carries from step to step.
      train_step: `(carry, batch) -> carry`, in float16 with loss scaling.
      reference_init: as `init`, of the loop by hand.
      reference_step: as `train_step`, in float32 with nothing but JAX and optax, which gets good batches only.
      params_of: the parameters in what the loop carries, in either.
    """

    init: Callable[[], Any]
    train_step: Callable[[Any, Any], Any]
    reference_init: Callable[[], Any]
    reference_step: Callable[[Any, Any], Any]
    params_of: Callable[[Any], Any] = lambda carry: carry[0]


# Adam does not see the scale of its gradients, so a wrong one would not show; an eps far above them lets it.
ADAMW = optax.adamw(0.1, eps=1.0, weight_decay=0.01)
SCALE = jmp.DynamicLossScale(2.0**10, period=2)
MICROBATCHES = 2


def linear(params, x):
    return x @ params["w"] + params["b"]


half_linear = jmp.with_policy(linear, "params=float32,compute=float16,output=float32")


def loss_fn(model, params, batch):
    return jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)


def _params():
    return {"w": jnp.array([[0.5, -1.0], [0.25, 2.0], [-0.75, 0.0]]), "b": jnp.array([0.125, -0.0])}


def _labels(params):
    return {name: "matrix" if name == "w" else "vector" for name in params}


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


def _split(batch):
    return jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)


def _accumulated_in_a_scan():
    """Gradients of microbatches added in float32, and one decision for their mean."""
    tx = jmp.optim.loss_scaled(ADAMW, SCALE)

    def train_step(carry, batch):
        params, state = carry

        def microbatch(total, part):
            grads = jmp.grad(lambda p: loss_fn(half_linear, p, part), loss_scale=state)(params)
            return jax.tree.map(jnp.add, total, grads), None

        total, _ = jax.lax.scan(microbatch, optax.tree.zeros_like(params, dtype=jnp.float32), _split(batch))
        return jmp.optim.step(tx, jax.tree.map(lambda g: g / MICROBATCHES, total), state, params)

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

    return _one_optimizer(ADAMW, loss=lambda *args: loss_fn(*args) + _size(args[1]))._replace(
        init=init, train_step=train_step
    )


def several_optimizers(batch_of=lambda batch: (batch, batch)):
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


def _with_integers():
    """Parameters that no optimizer may change, not even by weight decay, and whose gradients are `float0`."""
    tx = jmp.optim.loss_scaled(ADAMW, SCALE)
    with_integers = lambda: _params() | {"vocabulary": jnp.arange(5, 8)}

    def train_step(carry, batch):
        params, state = carry
        loss = lambda p: loss_fn(half_linear, p, batch)
        grads = jmp.grad(loss, loss_scale=state, allow_int=True)(params)
        return jmp.optim.step(tx, grads, state, params)

    def reference_step(carry, batch):
        params, state = carry
        floats = {name: params[name] for name in ("w", "b")}
        floats, state = by_update(ADAMW, jax.grad(lambda p: loss_fn(linear, p, batch))(floats), state, floats)
        return params | floats, state

    init = lambda: (with_integers(), tx.init(with_integers()))
    return Loop(init, train_step, lambda: (with_integers(), ADAMW.init(_params())), reference_step)


def _complex_loss(model, params, batch):
    real = {"w": params["w"], "b": params["b"]}
    return loss_fn(model, real, batch) + jnp.mean(jnp.abs(batch["x"] @ params["z"] - 1j) ** 2)


def _synced(params):
    return optax.LookaheadParams.init_synced(params)


LOOPS: dict[str, Callable[[], Loop]] = {
    "adamw": lambda: _one_optimizer(ADAMW),
    "accumulated by MultiSteps": lambda: _one_optimizer(optax.MultiSteps(ADAMW, 2)),
    "accumulated by MultiSteps, update and apply": lambda: _one_optimizer(optax.MultiSteps(ADAMW, 2), way=by_update),
    "accumulated in a scan": _accumulated_in_a_scan,
    "clipped": lambda: _one_optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1, eps=1.0))),
    "clipped, update and apply": lambda: _one_optimizer(
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)), way=by_update
    ),
    "scheduled": lambda: _one_optimizer(optax.sgd(optax.linear_schedule(0.1, 0.0, 4))),
    "several losses, a scale each": _several_losses,
    "several optimizers on one scale": several_optimizers,
    "partition": lambda: _one_optimizer(optax.partition({"matrix": ADAMW, "vector": optax.sgd(0.1)}, _labels)),
    "inject_hyperparams": lambda: _one_optimizer(
        optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 4)), way=by_update
    ),
    "loss_scaled inside of inject_hyperparams": _with_injected_rate,
    "frozen by None": lambda: _one_optimizer(ADAMW, lambda: _params() | {"frozen": None}),
    "frozen by MaskedNode": lambda: _one_optimizer(ADAMW, lambda: _params() | {"frozen": optax.MaskedNode()}),
    "frozen by optax.freeze": lambda: _one_optimizer(
        optax.chain(optax.masked(ADAMW, {"w": True, "b": False}), optax.freeze({"w": False, "b": True}))
    ),
    "frozen by selective_transform": lambda: _one_optimizer(
        optax.selective_transform(ADAMW, freeze_mask={"w": False, "b": True}), way=by_update
    ),
    "complex": lambda: _one_optimizer(
        ADAMW, lambda: _params() | {"z": jnp.array([1 + 1j, -0.5j, 0.25 + 0j])}, loss=_complex_loss
    ),
    "integers": _with_integers,
    "lookahead": lambda: _one_optimizer(
        optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5), lambda: _synced(_params())
    ),
    "schedule_free": lambda: _one_optimizer(optax.contrib.schedule_free(optax.sgd(0.1), 0.1)),
}
