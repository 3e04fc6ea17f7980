"""AWQ: scales the inputs of a weight so that rounding spares those with large activations."""

import functools
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import PyTree
from ..modules import Method
from ..policy import Int4, Int8
from ._layer_by_layer import quantize_layer_by_layer
from ._matrix import Calibration, InputStatistics, Rounded, measure_error
from ._numbers import Clip, choose_bounds, quantize_asymmetric

_SMALLEST = np.float32(1e-4)  # of the magnitude of an input, as a share of the largest


def awq(
    model: Any,
    batches: Iterable[Any],
    *,
    variables: PyTree = None,
    method: Method = None,
    grid_size: int = 20,
    clip: Clip = "absmax",
    input_clips: Mapping[str, Any] | None = None,
    stacked: Collection[str] = (),
    file: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Quantizes the weights of a trained model like `quantize`, scaled for the inputs that some data gives to them.

    A matrix is multiplied by a scale per input, rounded to nearest, and divided by the scale again. Inputs with larger
    scales get smaller errors. The scale of an input `x` is `mean(abs(x)) ** power`. AWQ tries powers from 0, which is
    `quantize`, to 1, and chooses the one for which the outputs of the matrix change least.

    The reciprocals of the scales are stored with the weight, as its `input_scale`. They take 4 bytes per input and one
    more multiplication where the weight is dequantized. Norms and other layers stay as they are, and matrices with the
    same inputs, such as a query and a key, have scales of their own.

    The model runs as for `gptq`. `int8` weights and embedding tables are rounded to nearest.

    Args:
      model: a linen module or an nnx model, with a policy in `int4`. It is not changed.
      batches: inputs of the calls: a tuple of positional arguments, or a single argument. 128 sequences are usual.
      variables: of a linen module; `None` if it is bound.
      method: the method to call, as for `explain`.
      grid_size: number of powers to try, from 0 to 1.
      clip: as for `quantize`.
      input_clips: as for `quantize`.
      stacked: as for `quantize`.
      file: as for `gptq`.
      progress: as for `gptq`.
      **kwargs: further arguments of each call; for linen, of `apply`.

    Returns:
      What `quantize` returns: variables, or an nnx model.

    Raises:
      TypeError: `model` is not a Flax module.
      ValueError: the model has no policy that stores integers; `batches` is empty; inputs are not finite; no input of a
        weight could be read; the file belongs to another call; or an argument is not valid, as for `quantize`.

    Warns:
      UserWarning: some weights are rounded to nearest, as for `gptq`.

    Source: Lin et al., AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration, MLSys
    2024, section 3.2.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(1), (256, 64)).at[:, :4].multiply(50)
    >>> error = lambda quantized: float(jnp.linalg.norm(quantized(x) - model(x)))
    >>> policy = "int4/64_from_float32"
    >>> calibrated = jmp.quant.awq(jmp.with_policy(model, policy), [x])
    >>> calibrated.kernel[...], error(calibrated) < 0.7 * error(jmp.quant.quantize(model, policy))
    (QuantizedArray(int4/64, shape=(64, 64), dtype=float32), True)
    """
    if not isinstance(grid_size, int) or grid_size < 2:
        raise ValueError(f"grid_size is a number of powers from 2, got {grid_size!r}. For example: grid_size=20.")

    def round_groups(weights: jax.Array, statistics: InputStatistics, format: Int4 | Int8, block: int) -> Rounded:
        return round_with_input_scales(weights, statistics, block, clip, grid_size)

    calibration = Calibration("awq", round_groups, {"grid_size": grid_size, "clip": clip}, scales_inputs=True)
    options = {"clip": clip, "input_clips": input_clips, "stacked": stacked}
    return quantize_layer_by_layer(calibration, model, batches, variables, method, kwargs, options, file, progress)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def round_with_input_scales(
    weights: jax.Array, statistics: InputStatistics, block: int, clip: Clip, grid_size: int
) -> Rounded:
    """Rounds weights to int4 with the scales of inputs that change the outputs least.

    Args:
      weights: float32 `(groups, inputs, inner, channels)`, as for `Calibration.round_groups`.
      statistics: of the inputs.
      block: the number of elements of an output channel that share a scale, in stored order.
      clip: as for `quantize_array`.
      grid_size: as for `awq`.
    """
    groups, channels = len(weights), weights.shape[-1]
    magnitude = statistics.magnitude.sum(0)  # groups of a convolution share the scales

    def attempt(power: jax.Array) -> tuple[jax.Array, Rounded]:
        scales = compute_scales(magnitude, power)
        blocks = (weights * scales[:, None, None]).reshape(groups, -1, block, channels)
        made = quantize_asymmetric(blocks, *choose_bounds(blocks, (2,), clip))
        assert made.zero_point is not None
        numbers = (made.values.astype(jnp.float32) - made.zero_point.astype(jnp.float32)) * made.scale
        change = numbers.reshape(weights.shape) * (1 / scales)[:, None, None] - weights
        error = measure_error(change, statistics.hessian)
        values = made.values.reshape(weights.shape)
        return error, Rounded(values, made.scale[:, :, 0], made.zero_point[:, :, 0], 1 / scales)

    powers = jnp.linspace(0, 1, grid_size, dtype=jnp.float32)
    errors = lax.map(lambda power: attempt(power)[0], powers)  # `vmap` would copy the weight for each power
    return attempt(powers[jnp.argmin(errors)])[1]


def compute_scales(magnitude: jax.Array, power: jax.Array) -> jax.Array:
    """Returns scales of inputs whose smallest and largest are reciprocals of each other."""
    largest = magnitude.max()
    shares = jnp.maximum(magnitude / jnp.where(largest > 0, largest, 1), _SMALLEST)
    scales = shares**power
    return scales / jnp.sqrt(scales.max() * scales.min())
