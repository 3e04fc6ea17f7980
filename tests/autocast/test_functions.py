"""jax.nn and the losses of optax under autocast: no less exact than what torch.autocast does, and no less finite."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp
from jmp_policy.autocast import autocast

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

HALF = ["bfloat16", "float16"]
ROWS, WIDTH, CLASSES = 16, 32, 8


def plain(name: str, **kwargs: Any) -> Callable:
    return lambda hidden, given: getattr(jax.nn, name)(hidden, **kwargs)


def attention(hidden: Any, given: Any) -> Any:
    heads = hidden.reshape(1, ROWS, 2, CLASSES // 2)
    return jax.nn.dot_product_attention(heads, heads, heads)


ACTIVATIONS: dict[str, Callable] = {
    **{name: plain(name) for name in (
        "celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "identity",
        "leaky_relu", "log_sigmoid", "log_softmax", "logmeanexp", "logsumexp", "mish", "relu", "relu6", "selu",
        "sigmoid", "silu", "soft_sign", "softmax", "softplus", "sparse_plus", "sparse_sigmoid", "squareplus",
        "standardize", "swish", "tanh")},
    "gelu of erf": plain("gelu", approximate=False),
    "log1mexp": lambda hidden, given: jax.nn.log1mexp(jnp.abs(hidden) + 0.125),
    "dot_product_attention": attention,
}  # fmt: skip

WITHOUT_ACTIVATION = {"one_hot", "scaled_matmul", "scaled_dot_general", "get_scaled_dot_general_config"}
"""Of integers, or in low precision already."""


def losses_of(given_name: str) -> Callable:
    return lambda name: lambda hidden, given: getattr(optax.losses, name)(hidden, given[given_name])


regression, classification, distribution, binary = map(losses_of, ("targets", "labels", "probabilities", "truth"))


def ctc(hidden: Any, given: Any) -> Any:
    logits, labels = hidden.reshape(2, ROWS // 2, CLASSES), given["labels"][:4].reshape(2, 2) % (CLASSES - 1) + 1
    return optax.losses.ctc_loss(logits, jnp.zeros_like(logits[..., 0]), labels, jnp.zeros_like(logits[:, :2, 0]))


LOSSES: dict[str, Callable] = {
    **{name: regression(name) for name in (
        "cosine_distance", "cosine_similarity", "huber_loss", "l2_loss", "log_cosh", "squared_error")},
    **{name: classification(name) for name in (
        "multiclass_hinge_loss", "multiclass_perceptron_loss", "multiclass_sparsemax_loss",
        "softmax_cross_entropy_with_integer_labels")},
    **{name: distribution(name) for name in (
        "softmax_cross_entropy", "safe_softmax_cross_entropy", "poly_loss_cross_entropy", "ranking_softmax_loss")},
    **{name: binary(name) for name in (
        "binary_dice_loss", "sigmoid_binary_cross_entropy", "sigmoid_focal_loss")},
    "hinge_loss": lambda hidden, given: optax.losses.hinge_loss(hidden, 2 * given["truth"] - 1),
    "perceptron_loss": lambda hidden, given: optax.losses.perceptron_loss(hidden, 2 * given["truth"] - 1),
    "sparsemax_loss": lambda hidden, given: optax.losses.sparsemax_loss(hidden, given["truth"]),
    "dice_loss": lambda hidden, given: optax.losses.dice_loss(hidden, given["probabilities"]),
    "multiclass_generalized_dice_loss": distribution("multiclass_generalized_dice_loss"),
    "kl_divergence": lambda hidden, given: optax.losses.kl_divergence(
        jax.nn.log_softmax(hidden), given["probabilities"]),
    "generalized_kl_divergence": lambda hidden, given: optax.losses.generalized_kl_divergence(
        jax.nn.log_softmax(hidden), given["probabilities"]),
    "kl_divergence_with_log_targets": lambda hidden, given: optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(hidden), jnp.log(given["probabilities"])),
    "ctc_loss": ctc,
    "ntxent": lambda hidden, given: optax.losses.ntxent(hidden, given["labels"]),
    "triplet_margin_loss": lambda hidden, given: optax.losses.triplet_margin_loss(
        hidden, hidden[::-1], given["targets"]),
    "make_fenchel_young_loss": lambda hidden, given: optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)(
        hidden, given["probabilities"]),
    "smooth_labels": lambda hidden, given: optax.losses.smooth_labels(jax.nn.softmax(hidden), 0.1),
}  # fmt: skip

WITHOUT_LOSS = {"ctc_loss_with_forward_probs", "convex_kl_divergence"}
"""What ctc_loss calls, and a deprecated name."""

FUNCTIONS = ACTIVATIONS | LOSSES

IN_FLOAT32_BY_TORCH = set(LOSSES) | {
    "softmax", "log_softmax", "logsumexp", "logmeanexp", "softplus", "standardize", "log_sigmoid", "log1mexp",
    "squareplus",
}  # fmt: skip
"""The float32 list of torch.autocast as functions of JAX: softmax, norms, losses, exp, log, pow and their like."""


class Batch(NamedTuple):
    """What a function is called with: `inputs @ weights` is its hidden layer."""

    inputs: Any
    weights: Any
    given: dict[str, Any]


def ordinary(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    given = {
        "targets": rng.normal(size=(ROWS, CLASSES)),
        "probabilities": rng.dirichlet(np.ones(CLASSES), ROWS) + 0.01,
        "truth": (rng.random((ROWS, CLASSES)) < 0.5).astype(np.float64),
        "labels": rng.integers(0, CLASSES, ROWS),
    }
    weights = rng.normal(size=(WIDTH, CLASSES)) * 2 / np.sqrt(WIDTH)
    return Batch(rng.normal(size=(ROWS, WIDTH)), weights, given)


def extreme(largest: float) -> Batch:
    """A hidden layer of any numbers from 1e-4 to `largest`, of both signs: rows of small ones, and of large ones."""
    rng = np.random.default_rng(0)
    size = np.sort(10 ** rng.uniform(-4, np.log10(largest), WIDTH * CLASSES)).reshape(WIDTH, CLASSES)
    weights = np.where(rng.random((WIDTH, CLASSES)) < 0.5, size, -size)[::2]
    return Batch(np.eye(ROWS, WIDTH), np.concatenate([weights, weights]), ordinary(0).given)


def in_float32(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x.astype(np.float32 if x.dtype == np.float64 else np.int32), batch)


def plainly(name: str, inputs: Any, weights: Any, given: Any) -> Any:
    return FUNCTIONS[name](inputs @ weights, given)


def as_torch(name: str, dtype: str, inputs: Any, weights: Any, given: Any) -> Any:
    """A product in half precision, then float32 for what torch.autocast has in float32, and half for the others."""
    hidden = inputs.astype(dtype) @ weights.astype(dtype)
    if name == "dot_product_attention":  # whose own matmul JAX asks for in a precision that this CPU has not
        return attention_by_hand(hidden).astype(np.float32)
    if name in IN_FLOAT32_BY_TORCH:
        hidden = hidden.astype(np.float32)
    return FUNCTIONS[name](hidden, given).astype(np.float32)


def attention_by_hand(hidden: Any) -> Any:
    heads = hidden.reshape(ROWS, 2, CLASSES // 2)
    logits = jnp.einsum("tnh,snh->nts", heads, heads) / np.asarray(2, hidden.dtype)
    weights = jax.nn.softmax(logits.astype(np.float32)).astype(hidden.dtype)
    return jnp.einsum("nts,snh->tnh", weights, heads)[None]


def with_gradient(function: Callable, batch: Batch) -> tuple[Any, Any]:
    """The value of a function, and the gradient of its weights for some cotangent of it."""
    value, pullback = jax.vjp(lambda weights: function(batch.inputs, weights, batch.given), batch.weights)
    cotangent = jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
    return value, pullback(cotangent)[0]


FASTER_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
AS_WRITTEN = {"xla_allow_excess_precision": False}
"""Or XLA leaves out a rounding here and there, of one program and not of the other."""


def compiled(program: Callable) -> Callable:
    return jax.jit(program, compiler_options=AS_WRITTEN | FASTER_TO_COMPILE)


@functools.cache
def pair(dtype: str) -> Callable:
    """Every function under autocast, and as torch has it; in one program, because most are the same twice."""
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=none")

    def run(batch: Batch) -> dict[str, Any]:
        ours = {name: autocast(functools.partial(plainly, name), policy) for name in FUNCTIONS}
        torch = {name: functools.partial(as_torch, name, dtype) for name in FUNCTIONS}
        return {name: [with_gradient(each[name], batch) for each in (ours, torch)] for name in FUNCTIONS}

    return compiled(run)


@functools.cache
def exact() -> Callable:
    return compiled(lambda batch: {n: with_gradient(functools.partial(plainly, n), batch) for n in FUNCTIONS})


@functools.cache
def results(dtype: str, largest: float | None = None) -> list[tuple[Any, Any]]:
    """What autocast and torch make of ordinary batches, or of an extreme one, and what float64 does."""
    batches = [ordinary(seed) for seed in range(3)] if largest is None else [extreme(largest)]
    with jax.numpy_dtype_promotion("standard"):
        found = [jax.tree.map(np.asarray, pair(dtype)(in_float32(batch))) for batch in batches]
        with jax.enable_x64(True):
            true = [jax.tree.map(np.asarray, exact()(batch)) for batch in batches]
    return list(zip(found, true, strict=True))


def error(got: Any, expected: Any) -> float:
    """The mean error, relative to the mean of the values."""
    return float(np.mean(np.abs(got - expected)) / np.mean(np.abs(expected)))


@pytest.mark.parametrize("dtype", HALF)
def test_errors_against_float64_are_at_most_one_and_a_half_of_those_of_torch(dtype):
    found, worse = results(dtype), {}
    for name in FUNCTIONS:
        for part in (0, 1):  # value and gradient
            errors = [[error(half[name][i][part], true[name][part]) for half, true in found] for i in (0, 1)]
            ours, torch = map(np.mean, errors)
            if not ours <= 1.5 * torch:
                worse[name, part] = (ours, torch)
    assert worse == {}


REACH = {("gelu", "float16", "gradient"): 2.0**7}
"""The derivative of its cube overflows float16 beyond 147, by hand as well. The cube in float32 would not, and costs
3.5 % of the bytes of a GPT's step."""

FINITE = sorted(set(FUNCTIONS) - {"dot_product_attention"})  # whose second product is too large itself


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("part", ["value", "gradient"])
def test_what_half_precision_can_hold_is_finite(part, dtype):
    i = ["value", "gradient"].index(part)
    for name in FINITE:
        [(half, true)] = results(dtype, REACH.get((name, dtype, part), 2.0**15))
        got, expected = half[name][0][i], true[name][i]
        fits = np.abs(expected) < float(jnp.finfo(dtype).max) / 2
        assert fits.any(), name
        assert np.isfinite(got[fits]).all(), name


def public(module: Any) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))}


def test_every_function_of_jax_nn_is_measured():
    assert public(jax.nn) - set(ACTIVATIONS) == WITHOUT_ACTIVATION


def test_every_loss_of_optax_is_measured():
    assert public(optax.losses) - set(LOSSES) == WITHOUT_LOSS
