"""Small models in which one thing goes wrong in half precision, or two, or nothing: made from a seed."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_policy as jmp
from jmp_policy.numerics import Prediction, collect, predict

Params = dict[str, jax.Array]
Plant = Callable[[Params, jax.Array], jax.Array]

BATCH, WIDTH, TERMS = 32, 16, 100_000


@dataclasses.dataclass(frozen=True)
class PlantedModel:
    """A model with a planted fault.

    Attributes:
      kind: the planted fault.
      loss: the loss of parameters and a batch, in float32.
      args: the parameters, by block, and the batch.
      planted: the scopes that lose numbers in float16, at the scale that is asked about.
      loss_scale: that scale; `None` for 1.
      is_cured: whether another loss scale is all that it needs.
    """

    kind: str
    loss: Callable[..., jax.Array]
    args: tuple[Any, ...]
    planted: frozenset[str]
    loss_scale: float | None = None
    is_cured: bool = False


def make_model(seed: int) -> PlantedModel:
    """The model of a seed; eight kinds take turns."""
    rng = np.random.default_rng(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    depth = int(rng.integers(3, 6))
    plant, count, loss_scale, is_cured = KINDS[kind]
    where = sorted(rng.choice(depth, count, replace=False).tolist())
    size = float(2 ** rng.uniform(0, 3))
    params = {f"block_{i}": _make_params(rng, kind if i in where else "", size) for i in range(depth)}
    x = jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)

    def loss(params: dict[str, Params], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        h, target = batch
        for i in range(depth):
            with jax.named_scope(f"block_{i}"):
                h = (plant if i in where else _compute_block)(params[f"block_{i}"], h)
        return jnp.mean((h - target) ** 2)

    planted = frozenset(f"block_{i}" for i in where)
    return PlantedModel(kind, loss, (params, (x, y)), planted, loss_scale, is_cured)


def _make_params(rng: np.random.Generator, kind: str, size: float) -> Params:
    draw = lambda *shape, scale=1.0: jnp.asarray(rng.normal(size=shape) * scale / np.sqrt(shape[0]), jnp.float32)
    params = {"up": draw(WIDTH, WIDTH), "down": draw(WIDTH, WIDTH), "size": jnp.float32(size)}
    if kind == "backward overflow":
        params["up"] = params["up"] * 2.0**-9
    if kind == "tiny variance":
        params["up"] = params["up"] * 2.0**-24
    if kind == "long sum":
        params["terms"] = jnp.asarray(rng.uniform(1, 2, size=TERMS), jnp.float32)
    return params


def _compute_block(params: Params, h: jax.Array) -> jax.Array:
    return h + 0.5 * jnp.tanh(h @ params["up"]) @ params["down"]


def _gain(params: Params, h: jax.Array) -> jax.Array:
    gain = jax.lax.stop_gradient(params["size"]) * 1e5
    return h + 0.5 * jnp.tanh(h @ (params["up"] * gain) / gain) @ params["down"]


def _attenuate(params: Params, h: jax.Array) -> jax.Array:
    small = 2.0**-16 / jax.lax.stop_gradient(params["size"])
    return h + small * (jnp.tanh(h @ params["up"]) @ params["down"])


def _amplify_gradient(params: Params, h: jax.Array) -> jax.Array:
    return h + 0.5 * jnp.tanh((h @ params["up"]) * 2.0**9) @ params["down"]


def _attend(params: Params, h: jax.Array) -> jax.Array:
    large = jax.lax.stop_gradient(params["size"]) * 1e3
    logits = (h * large) @ (h * large).T
    return h + 0.5 * jax.nn.softmax(logits) @ (h @ params["down"])


def _normalize(params: Params, h: jax.Array) -> jax.Array:
    small = h @ params["up"]
    centered = small - jnp.mean(small, -1, keepdims=True)
    variance = jnp.mean(centered**2, -1, keepdims=True)
    return h + 0.5 * (centered * jax.lax.rsqrt(variance + 1e-20)) @ params["down"]


def _add_up(params: Params, h: jax.Array) -> jax.Array:
    total = jnp.ones((1, TERMS)) @ params["terms"][:, None]
    return h + 0.5 * jnp.tanh(h @ params["up"] * total / 1e5) @ params["down"]


KINDS: dict[str, tuple[Plant, int, float | None, bool]] = {
    "gain": (_gain, 1, None, False),
    "attenuation": (_attenuate, 1, None, True),
    "backward overflow": (_amplify_gradient, 1, 2.0**17, True),
    "large logits": (_attend, 1, None, False),
    "tiny variance": (_normalize, 1, None, False),
    "long sum": (_add_up, 1, None, False),
    "two gains": (_gain, 2, None, False),
    "none": (_compute_block, 0, None, False),
}
"""By kind: the block that is planted, how many, the loss scale that is asked about, and whether one cures it."""


POLICY = "params=float32,compute=float16,output=float32"
MOST_ERROR = 0.1
"""The relative error of the gradient of a block from which on it is lost."""


class Outcome(NamedTuple):
    """The outcome for one model.

    Attributes:
      model: the model.
      prediction: the `Prediction`.
      half_error: the largest relative error of the gradient of a block in float16, at the scale that was asked about.
      repaired_error: the same under the predicted map, at the predicted scale.
    """

    model: PlantedModel
    prediction: Prediction
    half_error: float
    repaired_error: float

    @property
    def named(self) -> frozenset[str]:
        """The scopes that a reason names."""
        return frozenset(reason.path for reason in self.prediction.reasons)


def try_model(model: PlantedModel) -> Outcome:
    """Predicts what float16 does to a model, and does it."""
    (_, grads), stats = jax.jit(collect(jax.value_and_grad(model.loss), where="all"))(*model.args)
    prediction = predict(stats, POLICY, model.loss_scale)
    half = _differentiate(model, prediction.policy, model.loss_scale or 1.0)
    repaired = _differentiate(model, prediction.policy_map, prediction.loss_scale or 1.0)
    return Outcome(model, prediction, _find_error(half, grads), _find_error(repaired, grads))


def _differentiate(model: PlantedModel, policy: jmp.Policy | jmp.PolicyMap, scale: float) -> dict[str, jax.Array]:
    loss_scale = jmp.StaticLossScale(scale)
    fun = jmp.value_and_grad(jmp.autocast(model.loss, policy), loss_scale=loss_scale)
    return jax.jit(fun)(*model.args)[1]


def _find_error(grads: dict[str, jax.Array], expected: dict[str, jax.Array]) -> float:
    """The largest relative error of a block; infinite where a gradient is not finite."""
    found = 0.0
    for path, own in expected.items():
        pairs = zip(jax.tree.leaves(grads[path]), jax.tree.leaves(own), strict=True)
        wide = [(np.asarray(mine, np.float64), np.asarray(true, np.float64)) for mine, true in pairs]
        error = sum(((mine - true) ** 2).sum() for mine, true in wide)
        size = sum((true**2).sum() for _, true in wide)
        found = max(found, float(np.sqrt(error / size)) if np.isfinite(error) else np.inf)
    return found
