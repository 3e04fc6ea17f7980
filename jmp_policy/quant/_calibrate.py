"""Calibration: where to clip the inputs of the layers of a model, from data."""

import functools
from collections.abc import Iterable
from typing import Any

from .._base import PyTree, warn_user
from ..modules import Method, find_adapter
from ._calibration import Calibration
from ._numbers import Clip, check_clip


def calibrate(
    model: Any,
    batches: Iterable[Any],
    *,
    variables: PyTree = None,
    method: Method = None,
    clip: Clip = "mse",
    **kwargs: Any,
) -> dict[str, float]:
    """Runs a model on some data, and chooses the magnitude to clip the inputs of each layer to.

    It is for integers: in formats of blocks an outlier spoils its own block alone, and nothing is clipped. Under a
    policy such as `"int8_from_mixed_bfloat16"` a layer quantizes each row of its inputs by the largest
    magnitude in it. Where that is an outlier the others lose most of their 8 bits; `quantize` with what is returned
    here clips it. The model runs as it will be served, by the policy it has, and one operation after the other, so
    that the layers of a scan are seen as well: they share a magnitude.

    Args:
      model: a linen module or an nnx model, with a policy that quantizes inputs to integers. It stays as it is.
      batches: what to call it with, one after the other: a tuple of positional arguments, or the only one.
      variables: of a linen module; `None`, if it is bound.
      method: what to call instead of the module itself, as for `explain`.
      clip: how the magnitude is chosen: a percentile in (0, 100] of all magnitudes, to less than 1 % of it; `"mse"`,
        the one of the least mean square error of the inputs as they are rounded, which is next to the largest where
        rows have a few thousand numbers or fewer; `"absmax"`, the largest that was seen.
      **kwargs: other arguments of each call; of `apply`, for linen.

    Returns:
      By module path, the magnitude, for `quantize(..., input_clips=...)`. Left out are layers whose inputs are not
      quantized to integers or were all zero, and layers without a weight of their own, such as a head that is tied to a
      table.

    Raises:
      TypeError: `model` is not a Flax module.
      ValueError: no layer quantizes its inputs to integers; they are not finite; `batches` is empty; or `clip` is not
        valid.

    Warns:
      UserWarning: layers' inputs have no numbers, because they run inside of `vmap` or `remat`.

    Source: Wu et al., Integer Quantization for Deep Learning Inference, 2020, section 3.3 (max, entropy and percentile
    calibration).

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.with_policy(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "int8_from_float32")
    >>> clips = jmp.quant.calibrate(model, [jnp.linspace(-3, 2, 64)[None]], clip="absmax")
    >>> clips, jmp.quant.quantize(model, "int8_from_float32", input_clips=clips).kernel[...].input_clip
    ({'': 3.0}, Array(3., dtype=float32))
    """
    check_clip(clip)
    adapter = None if isinstance(model, type) else find_adapter(model)
    if adapter is None:
        raise TypeError(
            f"calibrate takes a Flax module, got {model!r}. "
            "For example: calibrate(with_policy(Net(), 'int8_from_float32'), batches, variables=variables)."
        )
    bound, calibration, count = adapter.bind(model, variables), Calibration(), 0
    for batch in batches:
        count += 1
        inputs = batch if isinstance(batch, tuple) else (batch,)
        calibration.run(functools.partial(adapter.run, bound, inputs, method, kwargs, calibration.hook))
    _check(calibration, count)
    weights = adapter.find_weights(bound)
    clips = {path: layer.clip(clip) for path, layer in calibration.layers.items() if path in weights}
    return {path: magnitude for path, magnitude in clips.items() if magnitude > 0}


def _check(calibration: Calibration, count: int) -> None:
    if count == 0:
        raise ValueError("calibrate was given no batches. For example: calibrate(model, [x], variables=variables).")
    if calibration.unseen:
        named = ", ".join(map(repr, calibration.unseen))
        message = f"calibrate saw no numbers enter {named}, inside of vmap or remat: these inputs are not clipped"
        warn_user(message)
    elif not calibration.layers:
        raise ValueError(
            "No layer that was called quantizes its inputs to integers. Give the model a policy under which they do. "
            "For example: with_policy(model, 'int8_from_float32')."
        )
