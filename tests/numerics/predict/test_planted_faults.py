"""Small models in which one thing goes wrong in half precision, or two, or nothing: `predict` names it and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.numerics import collect, predict

BATCH, WIDTH, TERMS = 32, 16, 100_000
POLICY = "params=float32,compute=float16,output=float32"


def compute_block(params, h):
    return h + 0.5 * jnp.tanh(h @ params["up"]) @ params["down"]


def gain(params, h):
    gain = jax.lax.stop_gradient(params["size"]) * 1e5
    return h + 0.5 * jnp.tanh(h @ (params["up"] * gain) / gain) @ params["down"]


def attenuate(params, h):
    small = 2.0**-16 / jax.lax.stop_gradient(params["size"])
    return h + small * (jnp.tanh(h @ params["up"]) @ params["down"])


def amplify_gradient(params, h):
    return h + 0.5 * jnp.tanh((h @ (params["up"] * 2.0**-9)) * 2.0**9) @ params["down"]


def attend(params, h):
    large = jax.lax.stop_gradient(params["size"]) * 1e3
    logits = (h * large) @ (h * large).T
    return h + 0.5 * jax.nn.softmax(logits) @ (h @ params["down"])


def normalize(params, h):
    small = h @ (params["up"] * 2.0**-24)
    centered = small - jnp.mean(small, -1, keepdims=True)
    variance = jnp.mean(centered**2, -1, keepdims=True)
    return h + 0.5 * (centered * jax.lax.rsqrt(variance + 1e-20)) @ params["down"]


def add_up(params, h):
    total = jnp.ones((1, TERMS)) @ params["terms"][:, None]
    return h + 0.5 * jnp.tanh(h @ params["up"] * total / 1e5) @ params["down"]


KINDS = {  # the planted block, how many, the loss scale that is asked about, and whether another is all that it needs
    "gain": (gain, 1, None, False),
    "attenuation": (attenuate, 1, None, True),
    "backward overflow": (amplify_gradient, 1, 2.0**17, True),
    "large logits": (attend, 1, None, False),
    "tiny variance": (normalize, 1, None, False),
    "long sum": (add_up, 1, None, False),
    "two gains": (gain, 2, None, False),
    "none": (compute_block, 0, None, False),
}


def make_model(plant, count, seed):
    """A loss of parameters by block and a batch, its arguments, and the planted blocks."""
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(3, 6))
    where = rng.choice(depth, count, replace=False)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {}
    for i in range(depth):
        params[f"block_{i}"] = {name: draw(WIDTH, WIDTH) / np.sqrt(WIDTH) for name in ("up", "down")}
        params[f"block_{i}"]["size"] = jnp.float32(2 ** rng.uniform(0, 3))
        if plant is add_up and i in where:
            params[f"block_{i}"]["terms"] = jnp.asarray(rng.uniform(1, 2, size=TERMS), jnp.float32)

    def loss(params, batch):
        h, target = batch
        for i in range(depth):
            with jax.named_scope(f"block_{i}"):
                h = (plant if i in where else compute_block)(params[f"block_{i}"], h)
        return jnp.mean((h - target) ** 2)

    return loss, (params, (draw(BATCH, WIDTH), draw(BATCH, WIDTH))), {f"block_{i}" for i in where}


def find_error(grads, expected):
    """The largest relative error of the gradient of a block; infinite where one is not finite."""
    found = 0.0
    for path, own in expected.items():
        pairs = zip(jax.tree.leaves(grads[path]), jax.tree.leaves(own), strict=True)
        wide = [(np.asarray(mine, np.float64), np.asarray(true, np.float64)) for mine, true in pairs]
        error = sum(((mine - true) ** 2).sum() for mine, true in wide)
        size = sum((true**2).sum() for _, true in wide)
        found = max(found, float(np.sqrt(error / size)) if np.isfinite(error) else np.inf)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_planted_scopes_are_named_and_no_others_and_what_is_predicted_happens(kind, seed):
    plant, count, loss_scale, is_cured = KINDS[kind]
    loss, args, planted = make_model(plant, count, seed)
    (_, grads), stats = jax.jit(collect(jax.value_and_grad(loss), where="all"))(*args)
    prediction = predict(stats, POLICY, loss_scale)

    def error_under(policy, scale):
        fun = jmp.value_and_grad(jmp.autocast(loss, policy), loss_scale=jmp.StaticLossScale(scale or 1.0))
        return find_error(jax.jit(fun)(*args)[1], grads)

    assert {reason.path for reason in prediction.reasons} == planted
    assert (not error_under(prediction.policy, loss_scale) <= 0.1) == bool(planted)
    assert error_under(prediction.policy_map, prediction.loss_scale) < 0.03
    assert set(prediction.culprits) == (set() if is_cured else planted)
    assert set(prediction.ranking[: len(planted)]) == planted
