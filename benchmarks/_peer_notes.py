"""Notes on the costs of the peers' steps: which need less than ours, and why, where that was measured."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks._peer_problems import LARGE_MLP, SMALL_GPT, SMALL_MLP
from benchmarks._peer_steps import (
    BY_HAND,
    COPIES,
    IF_FINITE,
    KERAS,
    KERAS_UNSCALED,
    MINIMIZE,
    MPX,
    OURS,
    SKIPPING,
)

_ADDED = (
    "The last column has the bytes that a step reads and writes more than one without a scale and without a check, of"
    " the same library if that brings the layers, in multiples of the bytes of the parameters."
)

COST_NOTES = {
    "float16": (
        "By hand: float16 layers, a dynamic loss scale, a check of all gradients and a `lax.cond` around AdamW.",
        "`optax.apply_if_finite` scales no loss, so that small gradients are lost in float16.",
        _ADDED,
        "PyTorch AMP runs on the CPU operation by operation: there is no compiled program whose bytes could be read.",
    ),
    "bfloat16": (
        "By hand: bfloat16 layers and AdamW, with no check. jmp, mixed-precision-for-jax and `optax.apply_if_finite`"
        " check, and are compared with our `skip_nonfinite`; mixed-precision-for-jax always scales the loss as well."
        " Keras does neither, and is compared with our `optim.minimize`.",
        _ADDED,
    ),
}
"""What all steps of a dtype have in common."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The target of a compiled step: the device, the dtype of its computations, and the name and sizes of the model."""

    device: str
    dtype: str
    model: str
    sizes: Any


_MLP, _GPT = (Setting("CPU", "float16", *named) for named in (("MLP", SMALL_MLP), ("GPT", SMALL_GPT)))
_MLP_BFLOAT16 = dataclasses.replace(_MLP, dtype="bfloat16")
_MLP_ON_TPU = Setting("TPU v5e", "float16", "MLP", LARGE_MLP)

_HALF_GRADIENTS = (
    "all of its gradients are half. Ours are float32 where the model reads a parameter in float32, as in a norm, or"
    " casts it at two uses, as the table of the embedding, whose two gradients are summed in float32"
)
_NO_UNSCALING = "it unscales nothing: the step by hand without a scale, with a check, has as many as it"
_OTHER_ADAMW = (
    "its AdamW divides once for each parameter where optax's divides three times: it folds the corrections of both"
    " moments into the learning rate"
)

_REASONS = {
    (_GPT, COPIES, "bytes"): _HALF_GRADIENTS,
    (_GPT, COPIES, "temporaries"): _HALF_GRADIENTS,
    (_MLP, IF_FINITE, "flops"): _NO_UNSCALING,
    (_GPT, IF_FINITE, "flops"): _NO_UNSCALING,
    (_MLP, KERAS, "flops"): f"{_OTHER_ADAMW}. Its scale and check add three for each, and ours four",
    (_MLP_BFLOAT16, KERAS, "flops"): _OTHER_ADAMW,
    (_MLP_ON_TPU, MPX, "bytes"): (
        "XLA copies slices of fewer of its weights into fast memory ahead of their use, and counts those copies: they"
        " are 1.67 times the parameters' bytes, and 2.83 with us; the fusions themselves access 8.85, and 8.35 with us"
    ),
}
"""Why a step has fewer of something than ours, each only where it was measured."""


def compare_with_ours(setting: Setting, ratios: dict[str, dict[str, float]]) -> Iterator[str]:
    """Notes on those who need less than we, and on the peer that needs the fewest bytes.

    Steps that neither scale nor check do less where ours does both, and are left out.

    Args:
      setting: the target of the compiled steps.
      ratios: by contestant, and by metric.
    """
    peers = [name for name in ratios if not name.startswith((BY_HAND, OURS, KERAS_UNSCALED))]
    for name in ratios:
        if name in peers or name in (BY_HAND, COPIES):
            yield from _explain_less(setting, name, ratios)
    if peers:
        best = min(peers, key=lambda name: ratios[name]["bytes"])
        theirs, mine = (f"{ratios[name]['bytes']:.3f}" for name in (best, _choose_ours(setting.dtype, best)))
        mine = "as many" if mine == theirs else mine
        yield f"{setting.model}: of all peers, {best} has the fewest bytes, {theirs}; ours {mine}."


def _explain_less(setting: Setting, name: str, ratios: dict[str, dict[str, float]]) -> Iterator[str]:
    """A note for each figure of a contestant that is below ours."""
    ours = _choose_ours(setting.dtype, name)
    for figure, ratio in ratios[name].items():
        mine = ratios[ours][figure]
        if round(ratio, 3) < round(mine, 3):
            reason = _REASONS.get((setting, name, figure), "we do not know why")
            than = f"{ours.removeprefix(f'{OURS}, ')} ({ratio:.3f}, {mine:.3f})"
            yield f"{setting.model}: {name} has fewer {figure} than {than}: {reason}."


def _choose_ours(dtype: str, name: str) -> str:
    """Returns our row with the same features as another: in bfloat16, all peers but Keras skip non-finite steps."""
    return SKIPPING if dtype == "bfloat16" and not name.startswith((BY_HAND, KERAS)) else MINIMIZE
