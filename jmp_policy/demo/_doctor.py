"""The policy that follows from what a device is good at."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax

from ._device_rates import MATMULS, REFERENCE, MatmulRate, measure_matmuls, measure_perceptron

HALF_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A policy, as `get_policy` reads it, and why."""

    policy: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was measured on a device, and what follows.

    Attributes:
      device: the device in words.
      matmuls: the rates of matrix products.
      perceptron_seconds: the time of a perceptron's forward and backward pass, by compute dtype.
      recommendation: the policy to train with.
    """

    device: str
    matmuls: list[MatmulRate]
    perceptron_seconds: dict[str, float]
    recommendation: Recommendation


def diagnose(*, half_only: bool = False) -> Diagnosis:
    """Measures the default device.

    Args:
      half_only: measure only what the recommendation depends on.
    """
    kinds = [kind for kind in MATMULS if not half_only or kind.name in (REFERENCE, *HALF_DTYPES)]
    matmuls, perceptron = measure_matmuls(kinds), measure_perceptron()
    return Diagnosis(describe_device(), matmuls, perceptron, recommend_policy(matmuls, perceptron))


def recommend_policy(matmuls: Iterable[MatmulRate], perceptron_seconds: Mapping[str, float]) -> Recommendation:
    """Chooses the policy to train with.

    bfloat16 goes before float16 where the device has both: it has the range of float32, so it needs no loss scale
    and no step is ever skipped.

    >>> half = [MatmulRate(kind, 1.0, 8.0) for kind in MATMULS if kind.name in HALF_DTYPES]
    >>> recommend_policy(half, {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}).policy
    'mixed_bfloat16'
    """
    by_name = {rate.kind.name: rate for rate in matmuls}
    for name in HALF_DTYPES:
        if by_name[name].native:
            return Recommendation(f"mixed_{name}", _reason_for_half(name, by_name[name].speedup))
    times = ", ".join(
        f"{name} takes {perceptron_seconds[name] / perceptron_seconds['float32']:.2f} times as long as float32"
        for name in HALF_DTYPES
    )
    slower = all(perceptron_seconds[name] > perceptron_seconds["float32"] for name in HALF_DTYPES)
    return Recommendation(
        "float32",
        f"half precision {'is slower' if slower else 'gains nothing'} here: this device has no units for it, and "
        f"converts it to float32 and back (forward and backward of a perceptron: {times})",
    )


def describe_device() -> str:
    """The default device in words."""
    device = jax.devices()[0]
    count = jax.device_count()
    kind = "" if device.device_kind == device.platform else f" {device.device_kind}"
    return f"{device.platform}{kind}" + (f", {count} devices" if count > 1 else "")


def _reason_for_half(name: str, speedup: float) -> str:
    if name == "bfloat16":
        range_of_it = "it has the range of float32, so that it needs no loss scale"
    else:
        range_of_it = "its small range is what the dynamic loss scale is for"
    return f"{name} matmuls are native here, at {speedup:.1f} times the rate of float32, and {range_of_it}"
